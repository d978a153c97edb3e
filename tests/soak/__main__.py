"""Runs groups for an hour while their pods and the API server fail again and again.

Reports faults at the end.

    python -m tests.soak --seconds 3600 --resources 50 --real [--results FILE] [--seed N]

The API server, controllers, scheduler and operator are real processes; kwok plays the kubelets of nodes. Must
be root. Prints a table, and exits 1 if there is a fault. With --real, there is also a real node with a group
of two real ranks, which are killed now and then.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.images import reference_of
from tests.cluster.running_cluster import Cluster
from tests.corners.site import KEY
from tests.integration.operator.running_operator import operator
from tests.soak.chaos import Chaos
from tests.soak.report import build_table, find_faults
from tests.soak.site import NAMESPACE, build_resources, site
from tests.soak.soak import Pace, Result, Soak


async def soak_on(cluster: Cluster, folder: Path, options: argparse.Namespace) -> Result:
    """Runs a soak on a cluster with nodes, and returns the results."""
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    chance = random.Random(options.seed)
    resources = build_resources(cluster, options.resources)
    result = Result(seconds=options.seconds, resources=len(resources))
    image = reference_of("worker-cpu")
    try:
        cluster.kubectl("create", "secret", "generic", "-n", NAMESPACE, KEY)  # as the chart does
        keys = {"key_secret": KEY, "namespace": NAMESPACE}
        log = folder / "operator.log"
        async with operator(cluster.kubeconfig, log, worker_image_cpu=image, **keys) as process:
            await process.working()
            for resource in resources:
                await server.create(HETERO_INFERENCE.path(NAMESPACE), resource)
            soak = Soak(
                cluster=cluster,
                server=server,
                namespace=NAMESPACE,
                operator=process,
                chaos=Chaos(server=server, namespace=NAMESPACE, chance=chance),
                result=result,
            )
            pace = Pace(
                seconds=options.seconds,
                kill_every_s=options.kill_every,
                away_every_s=options.away_every,
                rank_every_s=options.rank_every,
                strike_every_s=options.strike_every,
            )
            return await soak.run(pace)
    finally:
        await server.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one soak, and returns the exit code."""
    options = _parser().parse_args(arguments)
    print(f"seed {options.seed}: {options.resources} resources for {options.seconds:g} s", flush=True)
    with tempfile.TemporaryDirectory() as folder, site(Path(folder), real=options.real) as cluster:
        result = asyncio.run(soak_on(cluster, Path(folder), options))
        output = (Path(folder) / "operator.log").read_text()
    table, faults = build_table(result), find_faults(result, has_real_ranks=options.real)
    print(table)
    for fault in faults:
        print(f"FAULT: {fault}")
    if options.results:
        options.results.write_text(f"{table}\n")
        options.results.with_suffix(".operator.log").write_text(output)
    return 1 if faults else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    usual = Pace(seconds=3600.0)
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="length of the chaos")
    parser.add_argument("--resources", type=int, default=50)
    parser.add_argument("--real", action="store_true", help="add a real node with a group of real ranks")
    for what, seconds, meaning in (
        ("--kill-every", usual.kill_every_s, "between two pods that go"),
        ("--away-every", usual.away_every_s, "between two ends of the API server"),
        ("--rank-every", usual.rank_every_s, "between two ends of a real rank"),
        ("--strike-every", usual.strike_every_s, "between two strikes at whole resources"),
    ):
        parser.add_argument(
            what, type=float, default=seconds, metavar="SECONDS", help=f"{meaning}, on average"
        )
    parser.add_argument(
        "--seed", type=int, default=random.randrange(1 << 32), help="seed of the random faults"
    )
    parser.add_argument("--results", type=Path, metavar="FILE", help="also write the table here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
