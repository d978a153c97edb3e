"""Tests damaged statuses that the schema accepts, and forged pods, on a real API server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import MAX_EPOCH
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import CONFLICT, ApiError, ApiServer
from heteroinfer_operator.manifests.identity import Owner
from tests.integration.operator.life import (
    Install,
    bring_up,
    condition,
    is_ready,
    nth_epoch,
    serve_epoch,
    status_of,
    stored,
    workers,
)
from tests.integration.operator.running_operator import end_rank, operator, pod, until

_Damage = Callable[[dict[str, Any]], object]


def _failure(**fields: Any) -> dict[str, Any]:
    return {"epoch": 1, "time": "2026-01-01T00:00:00Z", "reason": "RankExited", "message": "m", **fields}


def _group(**fields: Any) -> _Damage:
    return lambda status: status["groups"][0].update(fields)


def _member(name: str) -> _Damage:
    return lambda status: status["groups"][0]["members"][0].update(pod=name)


ENDS: Final[dict[str, _Damage]] = {
    "the largest epoch that a name can have": _group(epoch=MAX_EPOCH),
    "an epoch that no name can have": _group(epoch=2**53),
    **{f"a pod {name!r}": _member(name) for name in ("a b", "", "tiny-0-1-0/exec", "../services/tiny")},
    "no groups": lambda status: status.update(groups=[]),
}
"""Damage that once ended a serving group."""
STOPS: Final[dict[str, _Damage]] = {
    "a time that cannot be UTC": _group(servedTime="9999-12-31T23:59:59-23:59"),
    "counters at their bound": _group(restarts=2**53, rejections=2**53),
    "the zero time of Go": _group(failures=[_failure(time="0001-01-01T00:00:00Z")]),
    "a zone that no day has": _group(failures=[_failure(time="2026-01-01T00:00:00+24:00")]),
    "a time in small letters": _group(failures=[_failure(time="2026-01-01t00:00:00z")]),
    "a reason that no condition can have": _group(failures=[_failure(reason="a \x1b[31mb")]),
    "a model's reason with a blank": lambda status: status["model"].update(reason="a b"),
}
"""Damage that once stopped every reconcile."""


async def damage(server: ApiServer, namespace: str, change: _Damage) -> None:
    """Damages the stored status, while the operator may write it, too."""

    async def written() -> bool:
        """Tries one write. Returns False after a conflict with another writer."""
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        status = json.loads(json.dumps(resource["status"]))
        change(status)
        try:
            await server.update(
                HETERO_INFERENCE.path(namespace, "tiny", "status"), {**resource, "status": status}
            )
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            return False
        return True

    await until("a write of the damaged status", written)


async def uids(server: ApiServer, namespace: str, ordinal: int) -> list[str]:
    found = await stored(server, POD, namespace)
    wanted = await workers(server, namespace, ordinal)
    return sorted(each["metadata"]["uid"] for each in found if each["metadata"]["name"] in wanted)


async def test_a_damaged_status_ends_or_stops_no_group(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log") as process:
        await process.working()
        first = await bring_up(server, namespace)
        before = await uids(server, namespace, 1)
        epoch = (await status_of(server, namespace))["groups"][0]["epoch"]

        async def mended() -> bool:
            groups = (await status_of(server, namespace)).get("groups") or [{}]
            pods = [entry["pod"] for entry in groups[0].get("members", ())]
            return groups[0].get("epoch") == epoch and pods == first

        for label, change in ENDS.items():
            await damage(server, namespace, change)
            await until(f"the status without {label}", mended, details=lambda: process.output)
            assert await uids(server, namespace, 1) == before, label
            assert (await condition(server, namespace, "Available")) == ("True", "Serving"), label
        for change in STOPS.values():
            await damage(server, namespace, change)
        await end_rank(server, namespace, first[1], index=1)

        async def is_down() -> bool:
            return (await condition(server, namespace, "Available"))[0] == "False"

        await until("Available False", is_down, timeout_s=10, details=lambda: process.output)
        await serve_epoch(server, namespace, 2)
        group = (await status_of(server, namespace))["groups"][0]
        assert (group["epoch"], group["restarts"]) == (nth_epoch(namespace, 2), 2**53)
        for change in STOPS.values():
            await damage(server, namespace, change)
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})

        async def is_gone() -> bool:
            listed = await server.get(HETERO_INFERENCE.path(namespace))
            return not listed["items"]

        await until("the end of the resource", is_gone, timeout_s=60, details=lambda: process.output)
        assert "Traceback" not in process.output
        assert "defect of the operator" not in process.output


async def test_a_forged_pod_of_a_huge_epoch_has_no_effect(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, node: str
) -> None:
    async with operator(install().kubeconfig, tmp_path / "log", resync_seconds="1") as process:
        await process.working()
        await bring_up(server, namespace)
        before = await uids(server, namespace, 1)
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        owner = Owner(key=ResourceKey(namespace=namespace, name="tiny"), uid=resource["metadata"]["uid"])
        forged = f"tiny-0-{MAX_EPOCH - 1}-0"
        labels = {"component": names.COMPONENT_WORKER, "group": "0", "epoch": str(MAX_EPOCH - 1)}
        await server.create(POD.path(namespace), pod(owner, forged, **labels))

        async def is_gone() -> bool:
            return forged not in [each["metadata"]["name"] for each in await stored(server, POD, namespace)]

        await until("the end of the forged pod", is_gone, timeout_s=20, details=lambda: process.output)
        assert await uids(server, namespace, 1) == before
        assert await is_ready(server, namespace)
        await end_rank(server, namespace, (await workers(server, namespace, 1))[1], index=1)
        await serve_epoch(server, namespace, 2)
        assert "Traceback" not in process.output
