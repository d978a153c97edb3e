"""Records the objects that this version of the operator stores, for the upgrade tests of later versions.

Run in the tree of a version that is about to be released:

    python -m tests.integration.upgrade.record tests/integration/upgrade/versions/NAME

tests/unit/reconcile/handover.py records its modules.

The program installs the chart on a control plane, waits until the operator has made resources.yaml Ready, and
writes the chart's package and every object. There is no node, so the program plays the kubelet. One group
fails once, so that the record has failures and a second epoch.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.kube.paths import CONFIG_MAP, HETERO_INFERENCE, NETWORK_POLICY, POD, SERVICE, Kind
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster, start_control_plane_only
from tests.integration.operator.running_operator import PROFILE, end_pod, operator, run_pod, until

NAMESPACE = "recorded"
RESOURCES = Path(__file__).parent / "resources.yaml"
OBJECTS = "objects.json"
CHILDREN = (SERVICE, NETWORK_POLICY, CONFIG_MAP, POD)


async def listed(server: ApiServer, kind: Kind) -> list[dict[str, Any]]:
    """Returns our objects of a kind, complete as for `kubectl apply`."""
    query = {} if kind is HETERO_INFERENCE else {"labelSelector": names.LABEL_RESOURCE}
    items = (await server.get(kind.path(NAMESPACE), query))["items"]
    return [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in items]


async def play_kubelet(server: ApiServer) -> bool:
    """Makes every new pod run, or end with the profile. Returns whether every group is Ready."""
    for pod in await listed(server, POD):
        metadata, status = pod["metadata"], pod.get("status", {})
        if status.get("phase") != "Pending" or "deletionTimestamp" in metadata:
            continue
        if metadata["labels"][names.LABEL_COMPONENT] == names.COMPONENT_WORKER:
            await run_pod(server, NAMESPACE, metadata["name"])
        else:
            await end_pod(server, NAMESPACE, metadata["name"], exit_code=0, message=json.dumps(PROFILE))
    groups = [
        g for r in await listed(server, HETERO_INFERENCE) for g in r.get("status", {}).get("groups", ())
    ]
    wanted = [document["spec"].get("replicas", 1) for document in yaml.safe_load_all(RESOURCES.read_text())]
    return len(groups) == sum(wanted) and all(group["phase"] == "Ready" for group in groups)


async def record(cluster: Cluster, folder: Path, log: Path) -> None:
    """Runs the operator until all resources are Ready, ends one epoch, and writes all objects."""
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    settings = {"watch_namespaces": NAMESPACE, "resync_seconds": "1"}
    try:
        async with operator(cluster.kubeconfig, log, **settings) as process:
            await process.working()
            for document in yaml.safe_load_all(RESOURCES.read_text()):
                await server.create(HETERO_INFERENCE.path(NAMESPACE), document)
            await until("every group is Ready", lambda: play_kubelet(server), 120, lambda: process.output)
            failure = Failure(
                reason=FailureReason.RANK_EXITED, message="rank 1 was killed", pod=1, rank=1, exit_code=-9
            )
            await end_pod(server, NAMESPACE, "pair-1-1-1", exit_code=70, message=failure.to_json())

            async def second_epoch() -> bool:
                (pair,) = [
                    r for r in await listed(server, HETERO_INFERENCE) if r["metadata"]["name"] == "pair"
                ]
                return await play_kubelet(server) and pair["status"]["groups"][1]["epoch"] > 1

            await until("the second epoch", second_epoch, 60, lambda: process.output)
            await process.stop()
        found = [item for kind in (HETERO_INFERENCE, *CHILDREN) for item in await listed(server, kind)]
    finally:
        await server.close()
    for item in found:
        del item["metadata"]["managedFields"]
    lines = ",\n".join(json.dumps(item, sort_keys=True) for item in found)
    (folder / OBJECTS).write_text(f"[\n{lines}\n]\n")


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with start_control_plane_only() as cluster, tempfile.TemporaryDirectory() as scratch:
        chart = str(REPOSITORY / "charts" / "heteroinfer")
        cluster.helm("package", chart, "--destination", str(folder))
        cluster.helm("install", "heteroinfer", chart, "--set", "replicas=0", "-f", str(LEAST_VALUES))
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("wait", "-n", NAMESPACE, "--for=create", "serviceaccount/default", "--timeout=20s")
        asyncio.run(record(cluster, folder, Path(scratch) / "log"))


if __name__ == "__main__":
    main(sys.argv[1:])
