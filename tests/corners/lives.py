"""Runs one random resource: creates it, applies a fault when its state is stable, and deletes it."""

import asyncio
import copy
import json
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiError, ApiServer
from tests.corners.faults import FAULTS, Fault
from tests.corners.lane import Finding, Lane
from tests.corners.truth import Seen, Verdict, find_false_conditions, judge
from tests.integration.crd.strategies import changed, resources

MAX_REPLICAS = 3
"""More groups would only take longer."""


@dataclass(slots=True)
class Result:
    """The outcomes of all resources.

    Attributes:
        refused: number of resources that the API server refused.
        lives: number of resources by fault, and by their state before and after it.
        noticed_s: seconds from the end of a pod until Available or Ready was False, if all groups served.
        findings: violated invariants, with resource and fault.
    """

    refused: int = 0
    lives: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    noticed_s: list[float] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def draw_bodies(count: int, *, number: int) -> list[dict[str, Any]]:
    """Draws random resources from the seed `number`. Most are valid, and some have one change."""
    drawn: list[dict[str, Any]] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(resources(), resources(), changed()))
    def collect(body: dict[str, Any]) -> None:
        drawn.append(copy.deepcopy(body))

    collect()
    return drawn


def named(body: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Gives a resource its own name, and limits its groups to what the machine can run."""
    spec = dict(body["spec"]) if isinstance(body.get("spec"), dict) else body.get("spec")
    if isinstance(spec, dict) and isinstance(spec.get("replicas"), int):
        spec["replicas"] = min(spec["replicas"], MAX_REPLICAS)
    if isinstance(spec, dict):
        spec.pop("operatorClass", None)  # no operator would handle it
    return {**body, "metadata": {"name": f"life-{number}"}, "spec": spec}


async def run_lives(
    server: ApiServer,
    lanes: list[Lane],
    bodies: list[dict[str, Any]],
    *,
    reported: Callable[[Result], None],
) -> Result:
    """Runs every resource, as many at the same time as there are lanes."""
    result = Result()
    left: Iterator[tuple[int, dict[str, Any]]] = iter(enumerate(bodies))
    # Each fault is used equally often, whichever lane is free.
    order = random.Random(lanes[0].chance.random())
    faults = [fault for _ in range(len(bodies) // len(FAULTS) + 1) for fault in FAULTS]
    order.shuffle(faults)

    async def run_lane(lane: Lane) -> None:
        for number, body in left:
            await _live(lane, named(body, number), faults, result)
            reported(result)

    await asyncio.gather(*(run_lane(lane) for lane in lanes))
    return result


async def _live(lane: Lane, body: dict[str, Any], faults: list[Fault], result: Result) -> None:
    """Runs one resource to its end. Each error becomes a finding."""
    path = HETERO_INFERENCE.path(lane.namespace)
    try:
        await lane.server.create(path, body, {"fieldValidation": "Strict"})
    except ApiError as error:
        if not error.is_refusal:
            raise
        result.refused += 1
        return
    name, fault = body["metadata"]["name"], faults.pop()
    try:
        await _strike(lane, name, fault, result)
        await lane.server.delete(HETERO_INFERENCE.path(lane.namespace, name), {})
        await lane.gone(name)
    except Exception as error:
        # The only catch of all exceptions: each becomes a finding, and the other resources continue.
        trace = "" if isinstance(error, Finding) else traceback.format_exc(limit=-4)
        result.findings.append(f"{name}, {fault.name}: {error}\n{json.dumps(body)}\n{trace}")
        await _clean(lane, name, result)


async def _clean(lane: Lane, name: str, result: Result) -> None:
    """Empties the lane for the next resource, whatever a finding has left."""
    lane.ran.clear()
    for kind in ("resourcequotas", "services"):
        for item in (await lane.server.get(f"/api/v1/namespaces/{lane.namespace}/{kind}"))["items"]:
            await lane.server.delete(
                f"/api/v1/namespaces/{lane.namespace}/{kind}/{item['metadata']['name']}", {}
            )
    try:
        await lane.server.delete(HETERO_INFERENCE.path(lane.namespace, name), {})
        await lane.gone(name)
    except (Finding, ApiError) as error:
        result.findings.append(f"{name}, deleted after its finding: {error}")


async def _strike(lane: Lane, name: str, fault: Fault, result: Result) -> None:
    """Applies a fault to a stable resource, which must reach the same state again.

    A resource that has used up its restarts is also accepted.
    """
    before = await lane.settle(name)
    check(before, "before any fault")
    verdict, reason = judge(before)
    at = time.monotonic()
    await fault.act(lane, before)
    if fault.ends and verdict is Verdict.SERVES and before.wanted:
        await lane.wait("Ready is False after the end of a pod", name, lambda now: _ended(now, before), 20.0)
        result.noticed_s.append(time.monotonic() - at)

    def back(now: Seen) -> bool:
        return judge(now)[0] is verdict or judge(now)[1].endswith("RestartsUsedUp")

    await lane.wait(f"{verdict} ({reason}) again, after: {fault.name}", name, back)
    after = await lane.settle(name)
    check(after, f"after: {fault.name}")
    if judge(after)[0] is not verdict and not judge(after)[1].endswith("RestartsUsedUp"):
        raise Finding(f"before: {verdict}, {reason}; after: {judge(after)}")
    result.lives[fault.name, reason, judge(after)[1]] += 1


def _ended(now: Seen, before: Seen) -> bool:
    """Returns whether the status shows the end of an epoch: by a condition, or by the next epoch's number."""
    epochs = {group["index"]: group["epoch"] for group in before.groups}
    newer = any(group["epoch"] != epochs.get(group["index"]) for group in now.groups)
    return newer or now.condition("Ready").get("status") != "True"


def check(seen: Seen, when: str) -> None:
    """Raises Finding if the status is false."""
    if lies := find_false_conditions(seen):
        raise Finding(f"{when}: {lies}; {seen.status.get('conditions')}")
