"""A firewall between the pods of the node, which no NetworkPolicy shows."""

import contextlib
from collections.abc import Iterator

from tests.cluster import processes
from tests.cluster.node import NodeCluster

TABLE = "heteroinfer_fault"


@contextlib.contextmanager
def drops(cluster: NodeCluster, *matches: str) -> Iterator[None]:
    """Drops forwarded packets that match an nftables expression, also those of established connections.

    The rules come before every other chain. Kubelets reach the pods of their node as before.
    """
    rules = "\n".join(f"{match} drop" for match in matches)
    chain = f"type filter hook forward priority -100; policy accept;\n{rules}"
    nft = [*cluster.namespaces.prefix, "nft", "-f", "-"]
    processes.run(nft, stdin=f"table inet {TABLE} {{\nchain forward {{\n{chain}\n}}\n}}\n")
    try:
        yield
    finally:
        processes.run(nft, stdin=f"delete table inet {TABLE}\n")
