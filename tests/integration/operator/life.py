"""Brings the resource `tiny` through its life under the operator. The tests play the kubelet."""

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import (
    CONFIG_MAP,
    HETERO_INFERENCE,
    NETWORK_POLICY,
    POD,
    SERVICE,
    Kind,
)
from heteroinfer_operator.kube.server import ApiServer
from tests.integration.operator.conftest import Installation
from tests.integration.operator.running_operator import PROFILE, create_resource, end_pod, run_pod, until

Install = Callable[..., Installation]
CHILDREN = (POD, SERVICE, NETWORK_POLICY, CONFIG_MAP)


async def stored(server: ApiServer, kind: Kind, namespace: str) -> list[dict[str, Any]]:
    listed = await server.get(kind.path(namespace), {"labelSelector": names.LABEL_RESOURCE})
    return list(listed["items"])


async def status_of(server: ApiServer, namespace: str) -> dict[str, Any]:
    resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
    return dict(resource.get("status") or {})


async def condition(server: ApiServer, namespace: str, kind: str) -> tuple[str, str]:
    for found in (await status_of(server, namespace)).get("conditions", ()):
        if found["type"] == kind:
            return found["status"], found["reason"]
    return "", ""


async def versions(server: ApiServer, namespace: str) -> dict[str, str]:
    """Returns the resourceVersion of the resource and all its children."""
    listed = [await stored(server, kind, namespace) for kind in CHILDREN]
    listed.append((await server.get(HETERO_INFERENCE.path(namespace)))["items"])
    return {o["metadata"]["uid"]: o["metadata"]["resourceVersion"] for objects in listed for o in objects}


_EPOCHS: dict[str, set[int]] = defaultdict(set)
"""Epochs of `tiny` whose pods `workers` has seen, by namespace."""


def nth_epoch(namespace: str, ordinal: int) -> int:
    """Returns the number of the nth epoch, counted from 1; 0 before `workers` has seen its pods."""
    seen = sorted(_EPOCHS[namespace])
    return seen[ordinal - 1] if len(seen) >= ordinal else 0


def pod_of(namespace: str, ordinal: int, index: int) -> str:
    """Returns the name of a pod of the nth epoch."""
    return f"tiny-0-{nth_epoch(namespace, ordinal)}-{index}"


async def workers(server: ApiServer, namespace: str, ordinal: int) -> list[str]:
    """Returns the names of the living worker pods of the nth epoch.

    Also records the epochs of all worker pods, for `nth_epoch`.
    """
    found = [
        pod["metadata"]
        for pod in await stored(server, POD, namespace)
        if pod["metadata"]["labels"].get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER
        and "deletionTimestamp" not in pod["metadata"]
    ]
    _EPOCHS[namespace].update(int(each["labels"][names.LABEL_EPOCH]) for each in found)
    wanted = str(nth_epoch(namespace, ordinal))
    return sorted(each["name"] for each in found if each["labels"][names.LABEL_EPOCH] == wanted)


async def bind(server: ApiServer, namespace: str, pod: str, node: str) -> None:
    """Binds a pod to a node, as the scheduler would: its deletion then waits for a kubelet."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    await server.create(POD.path(namespace, pod, "binding"), body)


async def serve_epoch(server: ApiServer, namespace: str, ordinal: int) -> list[str]:
    """Runs the pods of an epoch. Waits until the resource is Ready, and returns the pods' names."""

    async def both() -> list[str]:
        found = await workers(server, namespace, ordinal)
        return found if len(found) == 2 else []

    pods: list[str] = await until(f"two pods of epoch {ordinal}", both, timeout_s=30)
    for pod in pods:
        await run_pod(server, namespace, pod)
    await until("Ready", lambda: is_ready(server, namespace))
    return pods


async def is_ready(server: ApiServer, namespace: str) -> bool:
    return (await condition(server, namespace, "Ready"))[0] == "True"


async def bring_up(server: ApiServer, namespace: str) -> list[str]:
    """Creates a resource, waits until it serves, and returns its pods."""
    await create_resource(server, namespace)

    async def inspect_pod() -> str:
        pods = [p["metadata"]["name"] for p in await stored(server, POD, namespace)]
        return next((name for name in pods if "-inspect-" in name), "")

    inspect = await until("the inspect pod", inspect_pod)
    await end_pod(server, namespace, inspect, exit_code=0, message=json.dumps(PROFILE))
    return await serve_epoch(server, namespace, 1)


COLLECTED_S = 120.0
"""Garbage collection deletes children; it needs up to 50 s to learn of a new CRD."""


async def nothing_left(server: ApiServer, namespace: str) -> bool:
    listed = [await stored(server, kind, namespace) for kind in CHILDREN]
    resources = (await server.get(HETERO_INFERENCE.path(namespace)))["items"]
    return not resources and not any(listed)
