"""Observes the objects of all groups, and the memory and files of the operator's process."""

import os
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import CHILDREN, HETERO_INFERENCE, POD, SECRET
from heteroinfer_operator.kube.server import ApiServer

OURS = {"labelSelector": names.LABEL_RESOURCE}
WORKERS = {"labelSelector": f"{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"}
GROWTH_MIB = 10.0
"""Growth of the operator that is allowed. One leaked object for each restart would need far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The operator's process at one moment.

    Attributes:
        at_s: seconds since the soak began.
        rss_mib: resident memory.
        files: number of open file descriptors, mostly sockets to the API server and to leaders.
    """

    at_s: float
    rss_mib: float
    files: int


def observe_process(pid: int, *, at_s: float) -> Sample:
    """Returns the present memory and files of a process."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(at_s=at_s, rss_mib=int(found[1]) / 1024, files=files)


def growth_mib(samples: Sequence[Sample]) -> float:
    """Returns the median of the last quarter of the samples minus that of the second quarter, in MiB.

    In the first quarter, caches and the interpreter's pools still grow.
    """
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return statistics.median(s.rss_mib for s in late) - statistics.median(s.rss_mib for s in early)


async def list_of(server: ApiServer, path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the stored objects of a collection."""
    return list((await server.get(path, dict(query)))["items"])


async def observe_ready(server: ApiServer, namespace: str) -> tuple[int, list[str]]:
    """Returns the number of Ready resources, and the messages of the others."""
    resources = await list_of(server, HETERO_INFERENCE.path(namespace), {})
    others = []
    for resource in resources:
        conditions = {c["type"]: c for c in resource.get("status", {}).get("conditions", ())}
        ready = conditions.get("Ready", {"status": "Unknown"})
        whole = ready["status"] == "True" and conditions.get("Degraded", {}).get("status") != "True"
        if not whole:
            others.append(f"{resource['metadata']['name']}: {ready.get('reason')}: {ready.get('message')}")
    return len(resources) - len(others), others


async def count_objects(server: ApiServer, namespace: str) -> Counter[str]:
    """Returns the number of the resources' objects of each kind, without the groups' keys."""
    kinds = (POD, *CHILDREN)
    return Counter({kind.name: len(await list_of(server, kind.path(namespace), OURS)) for kind in kinds})


async def count_keys(server: ApiServer, namespace: str) -> int:
    """Returns the number of groups' keys. The key of a removed group stays as long as its resource."""
    return len(await list_of(server, SECRET.path(namespace), OURS))


def mixed_epochs(pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the groups that have pods of two epochs in the same list, by the pods' names."""
    epochs: dict[str, set[str]] = defaultdict(set)
    for pod in pods:
        resource, group, epoch, _ = pod["metadata"]["name"].rsplit("-", 3)
        epochs[f"{resource}/{group}"].add(epoch)
    return [f"{group}: epochs {sorted(found)}" for group, found in epochs.items() if len(found) > 1]
