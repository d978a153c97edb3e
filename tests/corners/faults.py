"""Defines the faults. Each happens to a resource of a lane, and is reverted if it would stay."""

import asyncio
import copy
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.kube.paths import CLAIM, CONFIG_MAP, HETERO_INFERENCE, POD, SERVICE, Kind
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError
from tests.corners.lane import LOOK_S, Finding, Lane
from tests.corners.truth import Seen, Verdict, find_false_conditions, judge
from tests.integration.operator.running_operator import end_pod, end_rank

QUOTA = Kind(name="ResourceQuota", api_version="v1", plural="resourcequotas")
REFUSED = 429
TRIES = 10
REACTS_S = 20.0
"""Seconds from a fault until the status shows it, on a machine that runs a dozen resources at the same
time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a resource.

    Attributes:
        name: its name in the report.
        act: makes the fault happen, and checks the status in the meantime.
        ends: whether it ends the epoch of a serving group.
    """

    name: str
    act: Callable[[Lane, Seen], Awaitable[None]]
    ends: bool = False


def some_pod(lane: Lane, seen: Seen) -> str:
    return lane.chance.choice(sorted(seen.pods))


async def delete_pod(lane: Lane, seen: Seen, *, name: str = "", grace_s: int | None = None) -> None:
    """Deletes a pod of the resource, if there is one."""
    if seen.pods:
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        path = POD.path(lane.namespace, name or some_pod(lane, seen))
        await suppressing(NOT_FOUND, lane.server.delete(path, options))


async def delete_by_force(lane: Lane, seen: Seen) -> None:
    await delete_pod(lane, seen, grace_s=0)


async def delete_all_pods(lane: Lane, seen: Seen) -> None:
    for name in seen.pods:
        await delete_pod(lane, seen, name=name)


async def evict_pod(lane: Lane, seen: Seen) -> None:
    """Evicts a pod of the resource. Tries again while its budget refuses the eviction."""
    if seen.pods:
        name = some_pod(lane, seen)
        metadata = {"name": name, "namespace": lane.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        for _ in range(TRIES):
            try:
                await lane.server.create(POD.path(lane.namespace, name, "eviction"), body)
            except ApiError as error:
                if error.status == NOT_FOUND:
                    return
                if error.status != REFUSED:  # a budget whose controller has not counted the pods yet
                    raise
                await asyncio.sleep(1.0)
            else:
                return


async def end_a_rank(lane: Lane, seen: Seen) -> None:
    if seen.pods:
        name = some_pod(lane, seen)
        index = int(name.rpartition("-")[2])
        await suppressing(NOT_FOUND, end_rank(lane.server, lane.namespace, name, index=index))


async def end_with_nonsense(lane: Lane, seen: Seen) -> None:
    """Ends a pod with a termination message that no supervisor of ours writes."""
    if seen.pods:
        nonsense = [
            "",
            "{",
            '{"reason": "RankExited", "message": "", "pod": 900, "rank": 9999, "exit_code": 300}',
            '{"reason": 7}',
            "[1]",
            "é" * 2000,
        ]
        message = lane.chance.choice(nonsense)
        name = some_pod(lane, seen)
        await suppressing(
            NOT_FOUND, end_pod(lane.server, lane.namespace, name, exit_code=255, message=message)
        )


def draw_lost_label(lane: Lane, seen: Seen) -> tuple[str, str, str | None]:
    """Chooses a pod, one of its labels, and a new value. None removes the label."""
    labels = [
        names.LABEL_GROUP,
        names.LABEL_EPOCH,
        names.LABEL_POD_INDEX,
        names.LABEL_RESOURCE,
        names.LABEL_LEADER,
    ]
    return some_pod(lane, seen), lane.chance.choice(labels), lane.chance.choice([None, "x", "7"])


async def damage_labels_of_a_pod(lane: Lane, seen: Seen) -> None:
    """Removes a label of a pod, or changes its value, until a condition reports this."""
    if not seen.pods:
        return
    name, label, value = draw_lost_label(lane, seen)
    made = seen.pods[name]["metadata"]["labels"].get(label)
    path = POD.path(lane.namespace, name)
    await suppressing(NOT_FOUND, lane.server.merge(path, {"metadata": {"labels": {label: value}}}))
    selects = label not in {names.LABEL_EPOCH, names.LABEL_POD_INDEX} and value != made
    if selects and judge(seen)[0] is Verdict.SERVES:
        await lane.wait(f"the missing {label} of {name} is reported", seen.name, _lost_a_label, REACTS_S)
    await suppressing(NOT_FOUND, lane.server.merge(path, {"metadata": {"labels": {label: made}}}))


def _lost_a_label(now: Seen) -> bool:
    return now.condition("Stalled").get("reason") == "PodLabelLost"


async def delete_child(lane: Lane, seen: Seen) -> None:
    # A claim has data of the user. If deleted, it would stay until the last pod no longer uses it.
    found = [child for child in await lane.children(seen.name) if child[0] is not CLAIM]
    if found:
        kind, stored = lane.chance.choice(found)
        path = kind.path(lane.namespace, stored["metadata"]["name"])
        await suppressing(NOT_FOUND, lane.server.delete(path, {}))


async def damage_labels_of_a_child(lane: Lane, seen: Seen) -> None:
    found = await lane.children(seen.name)
    if found:
        kind, stored = lane.chance.choice(found)
        labels = dict.fromkeys(stored["metadata"].get("labels", {}), None)
        path = kind.path(lane.namespace, stored["metadata"]["name"])
        await suppressing(NOT_FOUND, lane.server.merge(path, {"metadata": {"labels": labels}}))


async def damage_a_selector(lane: Lane, seen: Seen) -> None:
    """Adds a key to a Service's selector, so that it selects no pod. The operator must remove the key."""
    services = [stored for kind, stored in await lane.children(seen.name) if kind is SERVICE]
    if not services:
        return
    name = lane.chance.choice(services)["metadata"]["name"]
    path = SERVICE.path(lane.namespace, name)
    await suppressing(NOT_FOUND, lane.server.merge(path, {"spec": {"selector": {"team": "red"}}}))
    until = time.monotonic() + REACTS_S
    while time.monotonic() < until:
        await lane.look(seen.name)
        try:
            if "team" not in (await lane.server.get(path))["spec"].get("selector", {}):
                return
        except ApiError as error:
            if error.status == NOT_FOUND:
                return
            raise
        await asyncio.sleep(LOOK_S)
    raise Finding(f"Service {name} keeps a foreign key in its selector")


async def lose_config_maps(lane: Lane, seen: Seen, *, unknown: bool = False) -> None:
    """Deletes the ConfigMaps of plans and revisions, or adds an unknown field to them. Then deletes a pod."""
    for kind, stored in await lane.children(seen.name):
        if kind is not CONFIG_MAP:
            continue
        path = kind.path(lane.namespace, stored["metadata"]["name"])
        await suppressing(NOT_FOUND, lane.server.delete(path, {}))
        if unknown:
            data = {key: _with_field(text) for key, text in stored.get("data", {}).items()}
            kept = ("name", "namespace", "labels", "ownerReferences", "annotations")
            metadata = {key: stored["metadata"][key] for key in kept if key in stored["metadata"]}
            body = {**stored, "metadata": metadata, "data": data}
            await suppressing(CONFLICT, lane.server.create(kind.path(lane.namespace), body))
    await delete_pod(lane, seen)


async def unknown_field_in_config_maps(lane: Lane, seen: Seen) -> None:
    await lose_config_maps(lane, seen, unknown=True)


def _with_field(text: str) -> str:
    value = json.loads(text)
    return json.dumps({**value, "ofALaterVersion": {"new": 1}} if isinstance(value, dict) else value)


async def wipe_status(lane: Lane, seen: Seen) -> None:
    await write_status(lane, seen.name, lambda status: {})


async def wipe_status_and_a_pod(lane: Lane, seen: Seen) -> None:
    await wipe_status(lane, seen)
    await delete_pod(lane, seen)


async def turn_status_back(lane: Lane, seen: Seen) -> None:
    """Writes a status as from a backup: old epochs and no failures."""

    def old(status: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, "epoch": 1, "members": [], "failures": []} for group in status.get("groups", ())]
        return {**status, "groups": groups}

    await write_status(lane, seen.name, old)
    await delete_pod(lane, seen)


async def write_status(lane: Lane, name: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replaces the status of a resource. Tries again if another writer has changed it."""
    for _ in range(TRIES):
        stored = await lane.server.get(HETERO_INFERENCE.path(lane.namespace, name))
        body = {**stored, "status": change(copy.deepcopy(stored.get("status") or {}))}
        try:
            await lane.server.update(HETERO_INFERENCE.path(lane.namespace, name, "status"), body)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
        else:
            return
    raise Finding(f"the status changed before each of {TRIES} writes: the operator writes it all the time")


async def change_spec(lane: Lane, name: str, fields: dict[str, Any]) -> None:
    await lane.server.merge(HETERO_INFERENCE.path(lane.namespace, name), {"spec": fields})


async def refuse_spec(lane: Lane, seen: Seen) -> None:
    """Changes the spec so that only the operator refuses it, deletes a pod, and reverts the change."""
    spec = seen.spec
    engine = spec.get("engine", {})
    model = {"uri": "hf://org/model", "cache": None}
    before = {"uri": spec["model"]["uri"], "cache": spec["model"].get("cache")}
    edits: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model": model}, {"model": before}),
        ({"engine": {"args": ["--seed=1"]}}, {"engine": {"args": engine.get("args")}}),
    ]
    edit, back = lane.chance.choice(edits)
    try:
        await change_spec(lane, seen.name, edit)
    except ApiError as error:
        if error.is_refusal:
            return
        raise
    await lane.wait("Stalled", seen.name, _stalled_or_rests, REACTS_S)
    await _live_on(lane, seen, "of a refused spec")
    await change_spec(lane, seen.name, back)


def _stalled_or_rests(now: Seen) -> bool:
    current = now.status.get("observedGeneration") == now.resource["metadata"]["generation"]
    rests = not now.wanted and now.condition("Ready").get("status") == "True"
    return current and (rests or now.condition("Stalled").get("status") == "True")


async def _live_on(lane: Lane, seen: Seen, what: str) -> None:
    """Deletes a pod. The groups that served must serve again, with their own plan."""
    served = bool(seen.serving()) and seen.condition("Available").get("status") == "True"
    now = await lane.look(seen.name)
    if not served or now is None or not now.pods:
        return
    victim = some_pod(lane, now)
    await delete_pod(lane, now, name=victim)
    groups = len(seen.serving())

    def back(again: Seen) -> bool:
        whole = len(again.serving()) >= groups and again.condition("Available").get("status") == "True"
        failed = again.condition("Failed").get("status") == "True"
        return victim not in again.pods and (whole or failed)

    again = await lane.wait(f"the groups {what}, by their own plan", seen.name, back)
    if again.condition("Failed").get("status") != "True" and (lies := find_false_conditions(again)):
        again = await lane.settle(seen.name)
        if lies := find_false_conditions(again):
            raise Finding(f"{what}: {lies}")


async def suspend(lane: Lane, seen: Seen) -> None:
    if seen.spec.get("suspend"):
        return
    await change_spec(lane, seen.name, {"suspend": True})
    await lane.wait("suspended, no pods", seen.name, _at_rest)
    await change_spec(lane, seen.name, {"suspend": None})


async def scale_to_zero(lane: Lane, seen: Seen) -> None:
    await change_spec(lane, seen.name, {"replicas": 0})
    await lane.wait("scaled to zero, no pods", seen.name, _at_rest)
    await change_spec(lane, seen.name, {"replicas": seen.spec.get("replicas")})


def _at_rest(now: Seen) -> bool:
    return not now.wanted and not now.pods and now.condition("Ready").get("status") == "True"


async def scale_up_down_up(lane: Lane, seen: Seen) -> None:
    """Scales up, down and up again. The epochs of a group that returns must be new."""
    replicas = int(seen.spec.get("replicas", 1))
    for wanted in (replicas + 1, replicas, replicas + 1):
        await change_spec(lane, seen.name, {"replicas": wanted})
        await lane.settle(seen.name)
    await change_spec(lane, seen.name, {"replicas": replicas})


async def take_name(lane: Lane, seen: Seen) -> None:
    """Creates a foreign Service with the name of an additional group's Service.

    Then deletes a pod of another group.
    """
    replicas = int(seen.spec.get("replicas", 1))
    name = f"{seen.name}-{replicas}-ranks"
    body = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"ports": [{"port": 80}]},
    }
    await lane.server.create(SERVICE.path(lane.namespace), body)
    await change_spec(lane, seen.name, {"replicas": replicas + 1})
    await _live_on(lane, seen, "beside a refused one")
    now = await lane.settle(seen.name)
    if now.wanted and now.condition("Ready").get("status") == "True":
        raise Finding("Ready is True, but a wanted group has no Service")
    await lane.server.delete(SERVICE.path(lane.namespace, name), {})
    await change_spec(lane, seen.name, {"replicas": replicas})


async def quota(lane: Lane, seen: Seen) -> None:
    """Creates a quota that allows no more pods, and deletes a pod. The status must quote the refusal."""
    body = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    await lane.server.create(QUOTA.path(lane.namespace), body)
    try:
        await delete_pod(lane, seen)
        if seen.pods:
            await lane.wait("the quota's message in the status", seen.name, _tells_of_quota)
    finally:
        await lane.server.delete(QUOTA.path(lane.namespace, "none"), {})


def _tells_of_quota(now: Seen) -> bool:
    failed = now.condition("Failed").get("status") == "True"
    is_reported = any("quota" in condition["message"] for condition in now.status.get("conditions", ()))
    return is_reported or failed


async def recreate(lane: Lane, seen: Seen) -> None:
    """Deletes the resource, and creates it again with the same name immediately after it is gone."""
    path = HETERO_INFERENCE.path(lane.namespace, seen.name)
    await lane.server.delete(path, {})
    await lane.gone(seen.name)
    metadata = {"name": seen.name, "namespace": lane.namespace}
    body = {key: seen.resource[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": metadata}
    await lane.server.create(HETERO_INFERENCE.path(lane.namespace), body)


async def suppressing(status: int, act: Awaitable[object]) -> None:
    """Awaits an action, and ignores its errors with this HTTP status.

    The pod may be gone already, or the object may exist again.
    """
    try:
        await act
    except ApiError as error:
        if error.status != status:
            raise


FAULTS = (
    Fault(name="pod deleted", act=delete_pod, ends=True),
    Fault(name="pod deleted by force", act=delete_by_force, ends=True),
    Fault(name="all pods deleted", act=delete_all_pods, ends=True),
    Fault(name="pod evicted", act=evict_pod, ends=True),
    Fault(name="rank exits", act=end_a_rank, ends=True),
    Fault(name="pod ends with nonsense", act=end_with_nonsense, ends=True),
    Fault(name="labels of a pod damaged", act=damage_labels_of_a_pod),
    Fault(name="child deleted", act=delete_child),
    Fault(name="labels of a child taken", act=damage_labels_of_a_child),
    Fault(name="selector damaged", act=damage_a_selector),
    Fault(name="ConfigMaps lost, pod deleted", act=lose_config_maps, ends=True),
    Fault(name="unknown field in ConfigMaps, pod deleted", act=unknown_field_in_config_maps, ends=True),
    Fault(name="status wiped", act=wipe_status),
    Fault(name="status wiped, pod deleted", act=wipe_status_and_a_pod, ends=True),
    Fault(name="status turned back, pod deleted", act=turn_status_back, ends=True),
    Fault(name="spec refused, pod deleted", act=refuse_spec),
    Fault(name="suspended, resumed", act=suspend),
    Fault(name="scaled to zero and back", act=scale_to_zero),
    Fault(name="scaled up, down, up, down", act=scale_up_down_up),
    Fault(name="name of a child taken, pod deleted", act=take_name),
    Fault(name="quota, pod deleted", act=quota),
    Fault(name="deleted and made again", act=recreate),
)
