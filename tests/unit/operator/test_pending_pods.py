"""If a volume cannot be mounted, the status names the missing object from the kubelet's event."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceView, Waiting
from heteroinfer_operator.kube.pending_pods import AGAIN_S, SILENT_S, PendingPods
from heteroinfer_operator.kube.trim import PodRecord

KEY = ResourceKey(namespace="default", name="demo")
RESOURCE = ResourceView(
    key=KEY, uid="u", generation=1, resource_version="1", finalizers=(), deleting=False, spec={}, status={}
)
CREATING = Waiting("ContainerCreating")


def pod(name: str, *, role: str = "cpu", waiting: Waiting | None = CREATING) -> PodRecord:
    view = PodView(
        name=name,
        uid=name,
        labels={names.LABEL_ROLE: role},
        created=datetime(2026, 1, 1, tzinfo=UTC),
        node="node",
        waiting=waiting,
    )
    return PodRecord(view=view, key=KEY, owner_uid="u", ip="", health_port=0)


def event(second: int, reason: str, note: str) -> dict[str, Any]:
    when = f"2026-01-01T00:00:{second:02d}Z"
    failed = {"type": "Warning", "reportingController": "kubelet", "deprecatedLastTimestamp": when}
    return {**failed, "metadata": {"creationTimestamp": when}, "reason": reason, "note": note}


MISSING = event(2, "FailedMount", 'MountVolume.SetUp failed for volume "files" : configmap "a" not found')
TIMED_OUT = event(3, "FailedMount", "Unable to attach or mount volumes: unmounted volumes=[files]")
PULLING = event(4, "Pulling", "Pulling image x")
SCHEDULING = event(2, "FailedScheduling", "0/2 nodes") | {"eventTime": "2026-01-01T00:00:02.291886Z"}


class Server:
    """Returns the same events for each pod and records requests."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = events
        self.asked: list[str] = []

    async def get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(query["fieldSelector"])
        return {"items": list(self.events)}


class Look:
    """Calls `explain` at times that the test chooses."""

    def __init__(self, server: Server) -> None:
        self.now_s = 0.0
        self.woken: list[ResourceKey] = []
        self.pending = PendingPods(server, wake=self.woken.append, clock=lambda: self.now_s)  # type: ignore[arg-type]

    async def at(self, now_s: float, *pods: PodRecord) -> list[Waiting | None]:
        self.now_s = now_s
        self.pending.explain(RESOURCE, pods)
        for _ in range(5):
            await asyncio.sleep(0)
        return [view.waiting for view in self.pending.explain(RESOURCE, pods)]


NO_CONFIG_KEY = (
    'MountVolume.SetUp failed for volume "ca-bundle" : configmap references non-existent config key: ca.crt'
)
NO_SECRET_KEY = 'MountVolume.SetUp failed for volume "mine" : references non-existent secret key: b'


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((MISSING,), "ConfigMap a does not exist in namespace default. Create this object"),
        ((TIMED_OUT, MISSING), "ConfigMap a does not exist"),
        (
            (event(1, "FailedMount", 'MountVolume.SetUp failed for volume "s" : secret "b" not found'),),
            "Secret b does not exist in namespace default",
        ),
        (
            (
                event(
                    1,
                    "FailedMount",
                    NO_CONFIG_KEY,
                ),
            ),
            "the object that spec.model.caBundle mounts has no key ca.crt. Add the key, or",
        ),
        (
            (event(1, "FailedMount", NO_SECRET_KEY),),
            "the object that volume mine of the role's template mounts has no key b. Add the key",
        ),
        ((TIMED_OUT,), 'kubelet reports FailedMount: "Unable to attach or mount volumes'),
        ((MISSING, event(5, "FailedMount", "no route to the server"), TIMED_OUT), "no route to the server"),
        ((SCHEDULING, MISSING), "ConfigMap a does not exist"),
        ((MISSING, TIMED_OUT, PULLING), ""),
        ((), ""),
    ],
)
async def test_names_the_reason_why_a_volume_is_not_mounted(
    events: tuple[dict[str, Any], ...], words: str
) -> None:
    look = Look(Server(*events))
    assert await look.at(0, pod("p")) == [CREATING], "the pod has just got a node"
    [waiting] = await look.at(SILENT_S, pod("p"))
    assert waiting is not None
    assert (waiting.reason, words in waiting.message) == (("FailedMount" if words else CREATING.reason), True)
    assert look.woken == ([KEY] if words else [])
    assert look.pending.next_check_s(KEY) == SILENT_S


async def test_the_operator_reads_events_of_one_pod_per_role_only_while_the_kubelet_prepares_it() -> None:
    server = Server(MISSING)
    look = Look(server)
    pods = [pod("a"), pod("b"), pod("c", role="gpu")]
    for now_s in (0, SILENT_S, SILENT_S * 1.5, SILENT_S * 2):
        await look.at(now_s, *pods)
    questions = [f"regarding.kind=Pod,regarding.name={name}" for name in ("a", "c")]
    assert server.asked == questions * 2
    started = [replace(each, view=replace(each.view, started=True, waiting=None)) for each in pods]
    assert await look.at(100, *started) == [None] * 3
    assert look.pending.next_check_s(KEY) is None
    pulling = Waiting("ImagePullBackOff", "x")
    assert await look.at(200, pod("a", waiting=pulling)) == [pulling]
    assert server.asked == questions * 2


async def test_the_operator_reads_the_events_of_a_pod_that_waits_for_long_less_and_less_often() -> None:
    server = Server()
    look = Look(server)
    await look.at(0, pod("p"))
    now_s, intervals_s = 0.0, []
    for _ in range(8):
        wait_s = look.pending.next_check_s(KEY)
        assert wait_s is not None
        intervals_s.append(wait_s)
        now_s += wait_s
        await look.at(now_s, pod("p"))
    assert intervals_s == [SILENT_S, SILENT_S, 2, 4, 8, 16, AGAIN_S, AGAIN_S]
    assert len(server.asked) == 8


async def test_a_request_without_an_answer_causes_no_frequent_checks() -> None:
    class Hanging(Server):
        async def get(self, path: str, query: dict[str, Any]) -> dict[str, Any]:
            await asyncio.Event().wait()
            return await super().get(path, query)

    look = Look(Hanging())
    for now_s in (0.0, SILENT_S, 10 * SILENT_S):
        await look.at(now_s, pod("p"))
    assert look.pending.next_check_s(KEY) == SILENT_S
    look.pending.forget(KEY)
