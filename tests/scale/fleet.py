"""Many resources on a real control plane, and what the operator makes of them."""

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
"""Controllers look at all Services and budgets of a namespace for each of its pods: teams have their own."""
PODS_PER_RESOURCE = 4
KINDS = (HETERO_INFERENCE, POD, SERVICE, NETWORK_POLICY, CONFIG_MAP)
_CREATES_AT_ONCE = 8
_PAGE = 500


def build_resource(number: int) -> dict[str, Any]:
    """Returns a resource of one group: a GPU pod and three CPU pods; its namespace is one of NAMESPACES."""
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
    """Returns what an inspect pod says of the resources' model."""
    return json.dumps(PROFILE)


async def create_resources(server: ApiServer, count: int) -> None:
    """Creates all resources, some at a time."""
    limit = asyncio.Semaphore(_CREATES_AT_ONCE)

    async def create(number: int) -> None:
        async with limit:
            await server.create(HETERO_INFERENCE.path(_namespace(number)), build_resource(number))

    await asyncio.gather(*(create(number) for number in range(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object, as far as it tells whether it was touched."""

    kind: str
    name: str
    uid: str
    version: str
    created: datetime
    ready: bool


async def list_stored(server: ApiServer, kinds: Iterable[Kind] = KINDS) -> dict[str, Stored]:
    """Returns everything there is of resources, of some kinds, by uid."""
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
    """Returns how many groups serve, as the operator's own metric says."""
    status, text = await process.http("/metrics")
    assert status == 200, text
    wanted = f'{metric_names.OPERATOR_GROUPS}{{phase="Ready"}} '
    return next(
        (int(float(line.removeprefix(wanted))) for line in text.splitlines() if line.startswith(wanted)), 0
    )
