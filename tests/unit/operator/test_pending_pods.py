"""The status names why a pod has no node, and the missing object of a volume that cannot be mounted."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceView, Waiting
from heteroinfer_operator.kube.pending_pods import AGAIN_S, NOT_LOOKED_S, SILENT_S, PendingPods
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.nodes.node_assignment import Gang

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
            "the ConfigMap or Secret in spec.model.caBundle has no key ca.crt. Add the key, or",
        ),
        (
            (event(1, "FailedMount", NO_SECRET_KEY),),
            "the ConfigMap or Secret in volume mine of the role's template has no key b. Add the key",
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


CLAIM_NAME = "models"
SCHEDULER = "default-scheduler"


def unplaced(name: str = "p", *, uid: str = "", **fields: Any) -> PodRecord:
    """Returns a pod without a node; `fields` are of the record, `labels` and `unschedulable` of its view."""
    labels = {names.LABEL_GROUP: "0", names.LABEL_EPOCH: "1", **fields.pop("labels", {})}
    unschedulable = fields.pop("unschedulable", "")
    record = pod(name, waiting=None)
    view = replace(record.view, uid=uid or name, node="", labels=labels, unschedulable=unschedulable)
    return replace(
        record, view=view, **{"scheduler": SCHEDULER, "has_scheduling_state": bool(unschedulable), **fields}
    )


def resource(status: dict[str, Any] | None = None, **spec: Any) -> ResourceView:
    return replace(RESOURCE, spec=spec, status=status or {})


class ClaimServer(Server):
    """Also returns a claim, or that it does not exist."""

    def __init__(self, claim: dict[str, Any] | None, *events: dict[str, Any]) -> None:
        super().__init__(*events)
        self.claim = claim

    async def get_quickly(self, path: str) -> dict[str, Any]:
        if self.claim is None:
            raise ApiError("not found", status=NOT_FOUND)
        return self.claim


class Reasons(Look):
    """Returns why each pod has no node."""

    def __init__(self, server: Server | None = None, view: ResourceView = RESOURCE) -> None:
        super().__init__(server or Server())
        self.view = view

    async def why(self, now_s: float, *pods: PodRecord) -> list[str]:
        self.now_s = now_s
        self.pending.explain(self.view, pods)
        for _ in range(5):
            await asyncio.sleep(0)
        return [each.unschedulable for each in self.pending.explain(self.view, pods)]


NOT_LOOKED = f"no scheduler has looked at the pod (schedulerName {SCHEDULER}). "
START = "Start that scheduler, or set spec.scheduling.schedulerName to a scheduler that runs"


async def test_a_pod_without_a_scheduler_has_a_reason_that_stays_the_same() -> None:
    look = Reasons()
    assert await look.why(0, unplaced()) == [""]
    assert look.pending.next_check_s(KEY) == SILENT_S
    assert await look.why(SILENT_S, unplaced()) == [""]
    assert look.pending.next_check_s(KEY) == NOT_LOOKED_S - SILENT_S
    for now_s in (NOT_LOOKED_S, NOT_LOOKED_S + 1, 1000):
        assert await look.why(now_s, unplaced()) == [NOT_LOOKED + START]
        assert look.pending.next_check_s(KEY) is None
    assert await look.why(1001, unplaced(unschedulable="0/2 nodes")) == ["0/2 nodes"]


@pytest.mark.parametrize(
    ("changed", "view"),
    [
        ({"has_scheduling_state": True}, {}),
        ({}, {"node": "n"}),
        ({}, {"started": True}),
        ({}, {"phase": "Unknown"}),
        ({}, {"deleting": True}),
    ],
)
async def test_a_pod_that_a_scheduler_has_looked_at_or_that_ran_has_no_such_reason(
    changed: dict[str, Any], view: dict[str, Any]
) -> None:
    record = unplaced(**changed)
    record = replace(record, view=replace(record.view, **view))
    look = Reasons()
    assert await look.why(0, record) == [""]
    assert await look.why(100, record) == [""]


@pytest.mark.parametrize(
    ("gang", "scheduler", "scheduling", "fix"),
    [
        (
            Gang.COSCHEDULING,
            "scheduler-plugins-scheduler",
            {},
            "API scheduling.x-k8s.io/v1alpha1. Start that scheduler, or set spec.scheduling.gang: Never",
        ),
        (Gang.VOLCANO, "volcano", {"gang": "Auto"}, "API scheduling.volcano.sh/v1beta1. Start that"),
        (
            Gang.NATIVE,
            SCHEDULER,
            {},
            "Auto makes the pods a gang because the cluster serves the API scheduling",
        ),
        (Gang.VOLCANO, "volcano", {"gang": "Always"}, "to a scheduler that runs and places gangs"),
        (Gang.VOLCANO, "mine", {"schedulerName": "mine"}, START),
        (Gang.KUEUE, SCHEDULER, {}, START),
        (None, "nope", {"schedulerName": "nope"}, START),
    ],
)
async def test_the_fix_depends_on_the_origin_of_the_scheduler(
    gang: Gang | None, scheduler: str, scheduling: dict[str, Any], fix: str
) -> None:
    labels = {names.LABEL_GANG: gang.value} if gang else {}
    look = Reasons(view=resource(scheduling=scheduling))
    record = unplaced(labels=labels, scheduler=scheduler)
    await look.why(0, record)
    (reason,) = await look.why(NOT_LOOKED_S, record)
    assert reason.startswith(f"no scheduler has looked at the pod (schedulerName {scheduler}). ")
    assert fix in reason


async def test_a_resource_claim_is_named_as_a_possible_cause() -> None:
    look = Reasons()
    record = unplaced(resource_claims=("resource claim nic", "resource claim template t"))
    await look.why(0, record)
    (reason,) = await look.why(NOT_LOOKED_S, record)
    assert reason.startswith(
        f"{NOT_LOOKED}A possible cause is that resource claim nic, resource claim template t does not exist "
        "in namespace default"
    )


async def test_a_pod_of_a_gang_waits_silently_while_the_scheduler_reports_another_pod() -> None:
    look = Reasons()
    first, second = unplaced("p0"), unplaced("p1", unschedulable="0/2 nodes")
    await look.why(0, first, second)
    assert await look.why(100, first, second) == ["", "0/2 nodes"]
    assert look.pending.next_check_s(KEY) is None, "a watch shows the end of the report"
    placed = replace(second, view=replace(second.view, node="n", unschedulable="", started=True))
    assert await look.why(101, first, placed) == ["", ""]
    assert look.pending.next_check_s(KEY) == NOT_LOOKED_S - 1
    assert await look.why(100 + NOT_LOOKED_S, first, placed) == [NOT_LOOKED + START, ""]


@pytest.mark.parametrize("place", ["condition", "group"])
async def test_a_new_process_keeps_the_reason_of_the_process_before(place: str) -> None:
    text = f"pod p is not placed: {NOT_LOOKED}"
    condition = {
        "type": "CapacityAvailable",
        "status": "False",
        "reason": "Unschedulable",
        "message": text,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    group = {"index": 0, "epoch": 1, "phase": "Starting", "message": text}
    status = {"conditions": [condition]} if place == "condition" else {"groups": [group]}
    look = Reasons(view=resource(status))
    assert await look.why(0, unplaced("p"), unplaced("p2")) == [NOT_LOOKED + START, ""]
    assert await look.why(1, unplaced("p", uid="new")) == [""], "a new pod of this name"


def claim(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"annotations": annotations}, "spec": {}, "status": {"phase": "Pending"}}


CHOSEN = {"volume.kubernetes.io/selected-node": "n"}


@pytest.mark.parametrize(
    ("stored", "reason", "early", "late"),
    [
        (claim(), "WaitForFirstConsumer", "", NOT_LOOKED + START),
        (claim(**CHOSEN), "Provisioning", "claim models", "claim models"),
        (claim(), "ProvisioningFailed", "claim models", NOT_LOOKED + START + "; claim models"),
        ({**claim(**CHOSEN), "status": {"phase": "Bound"}}, "Provisioning", "", NOT_LOOKED + START),
    ],
)
async def test_a_pod_whose_volume_is_being_provisioned_has_a_scheduler(
    stored: dict[str, Any], reason: str, early: str, late: str
) -> None:
    look = Reasons(ClaimServer(stored, event(1, reason, "x")))
    record = unplaced(claims=(CLAIM_NAME,))
    await look.why(0, record)
    for now_s, expected in ((SILENT_S, early), (NOT_LOOKED_S, late), (NOT_LOOKED_S + 50, late)):
        (found,) = await look.why(now_s, record)
        assert found.startswith(expected)
        assert bool(found) == bool(expected)


MOUNTS = [{"template": {"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": CLAIM_NAME}}]}}]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"model": {"uri": "pvc://models/a"}}, "spec.model.uri"),
        ({"model": {"uri": "pvc://models"}}, "spec.model.uri"),
        ({"model": {"uri": "hf://a/b", "cache": {"claimName": "models"}}}, "spec.model.cache.claimName"),
        ({"model": {"uri": "hf://a/b"}, "roles": MOUNTS}, "claimName in the volumes of the role's template"),
        ({"model": {"uri": "hf://a/b", "cache": {"size": "1Gi"}}}, ""),
    ],
)
async def test_a_missing_claim_is_named_with_its_field(spec: dict[str, Any], field: str) -> None:
    said = '0/2 nodes are available: persistentvolumeclaim "models" not found. not found'
    record = unplaced(claims=(CLAIM_NAME,), unschedulable=said)
    look = Reasons(ClaimServer(None), resource(**spec))
    (reason,) = await look.why(0, record)
    fix = f"claim models does not exist in namespace default. Create it, or correct {field}; "
    assert reason == (fix if field else "") + said
