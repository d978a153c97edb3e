"""Runs groups for an hour while their pods and the API server go and come; says whether all is well after it.

    python -m tests.soak --seconds 3600 --resources 50 [--results FILE] [--seed N]

The API server, controllers, scheduler and operator are real processes; kwok says for the kubelets of nodes
that are not there how the pods of the groups fare. Must be root. Prints a table; exits 1 if something is
wrong.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.crd import build_crd
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.cluster import Cluster, start_control_plane_only
from tests.cluster.crds import wait_established
from tests.cluster.kwok import start_kwok
from tests.cluster.volumes import volume_manifests
from tests.integration.operator.support import PROFILE, operator
from tests.soak.chaos import Chaos
from tests.soak.report import build_table, find_faults
from tests.soak.soak import Pace, Result, Soak

NAMESPACE = "soak"
NODES = 8


def build_resource(number: int) -> dict[str, Any]:
    """Returns a HeteroInference: two groups of two pods, or one of three, or one of two."""
    pods, replicas = ((2, 2), (3, 1), (2, 1))[number % 3]
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": f"soak-{number}"},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "engine": {"dtype": "float32", "maxModelLen": 512},
            "replicas": replicas,
            "roles": [{"name": "cpu", "device": "CPU", "pods": pods}],
            # Pods go so often that the default would soon be used up; the back-off is in force all the same.
            "restart": {"maxRestarts": 20, "window": "1m", "backoffMax": "20s"},
            "drainTimeout": "2s",
        },
    }


async def soak_on(cluster: Cluster, folder: Path, options: argparse.Namespace) -> Result:
    """Returns what came of a soak on a cluster with nodes."""
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    chance = random.Random(options.seed)
    result = Result(seconds=options.seconds, resources=options.resources)
    try:
        async with operator(cluster.kubeconfig, folder / "operator.log") as process:
            await process.working()
            for number in range(options.resources):
                await server.create(HETERO_INFERENCE.path(NAMESPACE), build_resource(number))
            soak = Soak(
                cluster=cluster,
                server=server,
                namespace=NAMESPACE,
                operator=process,
                chaos=Chaos(server=server, namespace=NAMESPACE, chance=chance),
                result=result,
            )
            return await soak.run(Pace(seconds=options.seconds, kill_every_s=options.kill_every))
    finally:
        await server.close()


def prepare(cluster: Cluster, folder: Path) -> None:
    """Gives a control plane nodes, the kind of resource, and a namespace with a volume of models."""
    start_kwok(cluster, nodes=NODES, profile=json.dumps(PROFILE))
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(build_crd()))
    wait_established(cluster, f"{names.PLURAL}.{names.API_GROUP}")
    cluster.kubectl("create", "namespace", NAMESPACE)
    # Nobody looks into it: the scheduler wants a volume that is there and bound.
    cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one soak; returns the exit code."""
    options = _parser().parse_args(arguments)
    print(f"seed {options.seed}: {options.resources} resources for {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, start_control_plane_only() as cluster:
        prepare(cluster, Path(folder))
        result = asyncio.run(soak_on(cluster, Path(folder), options))
        said = (Path(folder) / "operator.log").read_text()
    table, faults = build_table(result), find_faults(result)
    print(table)
    for fault in faults:
        print(f"FAULT: {fault}")
    if options.results:
        options.results.write_text(f"{table}\n")
        options.results.with_suffix(".operator.log").write_text(said)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the chaos")
    parser.add_argument("--resources", type=int, default=50)
    parser.add_argument("--kill-every", type=float, default=2.0, metavar="SECONDS", help="on average")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="what happens follows it")
    parser.add_argument("--results", type=Path, metavar="FILE", help="the table goes here too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
