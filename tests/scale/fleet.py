"""Creates many resources on a real control plane, and lists their objects."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from heteroinfer_contract import metric_names, names
from heteroinfer_operator.kube.paths import (
    CONFIG_MAP,
    HETERO_INFERENCE,
    NETWORK_POLICY,
    POD,
    SERVICE,
    Kind,
)
from heteroinfer_operator.kube.server import ApiServer
from tests.integration.operator.running_operator import PROFILE, OperatorProcess

NAMESPACES = tuple(f"team-{number:02d}" for number in range(20))
"""Number of namespaces. For each pod, controllers check all Services and budgets of its namespace."""
PODS_PER_RESOURCE = 4
KINDS = (HETERO_INFERENCE, POD, SERVICE, NETWORK_POLICY, CONFIG_MAP)
_CREATES_AT_ONCE = 8
_PAGE = 500


def build_resource(number: int) -> dict[str, Any]:
    """Builds a resource of one group: a GPU pod and three CPU pods. Its namespace is one of NAMESPACES."""
    cpu = {"limits": {"cpu": "4", "memory": "8Gi"}}
    return {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": f"model-{number:04d}", "namespace": _namespace(number)},
        "spec": {
            "model": {"uri": "pvc://models/tiny"},
            "engine": {"dtype": "float32", "maxModelLen": 512},
            "parallelism": {"mode": "Pipeline"},
            "roles": [
                {"name": "cpu", "device": "CPU", "pods": 3, "resources": cpu},
                {"name": "gpu", "device": "GPU", "pods": 1, "deviceMemory": "80Gi", "resources": cpu},
            ],
        },
    }


def _namespace(number: int) -> str:
    return NAMESPACES[number % len(NAMESPACES)]


def profile() -> str:
    """Returns the termination message of inspect pods for the resources' model."""
    return json.dumps(PROFILE)


async def create_resources(server: ApiServer, count: int) -> None:
    """Creates all resources, some at the same time."""
    limit = asyncio.Semaphore(_CREATES_AT_ONCE)

    async def create(number: int) -> None:
        async with limit:
            await server.create(HETERO_INFERENCE.path(_namespace(number)), build_resource(number))

    await asyncio.gather(*(create(number) for number in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The part of an object that shows whether it was changed."""

    kind: str
    name: str
    uid: str
    version: str
    created: datetime
    ready: bool


async def list_stored(server: ApiServer, kinds: Iterable[Kind] = KINDS) -> dict[str, Stored]:
    """Lists all objects of some kinds that belong to resources, by uid."""
    found: dict[str, Stored] = {}
    for kind in kinds:
        query: dict[str, str | int] = {"limit": _PAGE}
        if kind is not HETERO_INFERENCE:
            query["labelSelector"] = names.LABEL_RESOURCE
        while True:
            page = await server.get(kind.path(), query)
            for item in page["items"]:
                stored = _stored(kind, item)
                found[stored.uid] = stored
            if not page["metadata"].get("continue"):
                break
            query["continue"] = page["metadata"]["continue"]
    return found


def _stored(kind: Kind, item: dict[str, Any]) -> Stored:
    metadata = item["metadata"]
    conditions = (item.get("status") or {}).get("conditions") or ()
    return Stored(
        kind=kind.name,
        name=metadata["name"],
        uid=metadata["uid"],
        version=metadata["resourceVersion"],
        created=datetime.fromisoformat(metadata["creationTimestamp"]),
        ready=any(c["type"] == "Ready" and c["status"] == "True" for c in conditions),
    )


async def ready_groups(process: OperatorProcess) -> int:
    """Returns the number of serving groups, from the operator's own metric."""
    status, text = await process.http("/metrics")
    assert status == 200, text
    wanted = f'{metric_names.OPERATOR_GROUPS}{{phase="Ready"}} '
    return next(
        (int(float(line.removeprefix(wanted))) for line in text.splitlines() if line.startswith(wanted)), 0
    )
