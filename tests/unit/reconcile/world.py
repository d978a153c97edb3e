"""A cluster as values: applies the actions of decisions, without clock and I/O."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    ContainerTermination,
    CreateObject,
    Decision,
    DeleteObject,
    Manifest,
    PatchStatus,
    PodView,
    RecordEvent,
    Refusal,
    RemoveFinalizer,
    ResourceKey,
    ResourceObservation,
    ResourceView,
    TryObjects,
    Waiting,
    Write,
)
from heteroinfer_operator.kube.kept import RepeatedWrites
from heteroinfer_operator.kube.trim import find_key_secret
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.drift import find_drift
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.reconcile import Options, reconcile
from heteroinfer_operator.reconcile.budget import (
    STATUS_WRITES_WITHIN,
    Budget,
    Spending,
    Window,
    creates_pod,
    max_pods_per_minute,
    wanted_pods,
)
from heteroinfer_operator.reconcile.refusals import (
    CHANGED_BY_OTHERS,
    DELETED_BY_OTHERS,
    MADE_BY_OTHERS,
    NAME_HELD,
    NAME_TAKEN,
    NOT_ANSWERED,
    OBJECT_REFUSED,
    ActionPermits,
    kind_and_name,
    retry_revisions_now,
)
from heteroinfer_operator.seen_time import SeenTime

Objects = dict[tuple[str, str], dict[str, Any]]
"""Stored objects by kind and name."""
OPTIONS = Options(
    addressing=ClusterAddressing(allow_host_paths=True),
    images=WorkerImages(cpu="example.test/worker-cpu:1", gpu="example.test/worker:1"),
    operator_key=b"k" * KEY_BYTES,
    names_come_again=False,
)

PROFILE = ModelProfile(
    architecture="LlamaForCausalLM",
    dtype="float32",
    num_layers=8,
    hidden_size=256,
    num_attention_heads=8,
    num_kv_heads=4,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=2048,
    layer_bytes=(3_000_000,) * 8,
    embedding_bytes=524_288,
    head_bytes=524_288,
    tied_head=False,
)


_GRACE_S = 90
BOUNDS = {
    "pods": (timedelta(minutes=1), 0),
    "status writes": (timedelta(seconds=1), 2),
    "events": (timedelta(minutes=1), 10),
}
"""Limits of a resource's actions by kind: a time and a number; `max_pods_per_minute` limits pods."""


def cpu_pair(**changes: Any) -> dict[str, Any]:
    """Returns the spec of two CPU pods, one rank each."""
    role = {"device": "CPU", "pods": 1, "resources": {"limits": {"cpu": "4", "memory": "8Gi"}}}
    return {
        "model": {"uri": "file:///models/tiny"},
        "parallelism": {"mode": "Pipeline"},
        "roles": [{"name": "first", **role}, {"name": "second", **role}],
        **changes,
    }


@dataclass(slots=True, kw_only=True)
class World:
    """A resource and its objects.

    Attributes:
        writes: actions of the last reconcile that would write to the API server.
        events: reasons of all events so far.
        recorded: all distinct events so far.
        graces: grace period in seconds of each deleted pod, by name; None for the pod's own.
        refuses: writes that the API server refuses: kind and name pattern, with the message.
        refuses_pods: why no pod may be created now, or "".
        quota_is_full: whether a quota has no room for another pod now.
        unanswered: kinds and name patterns that the API server does not answer now.
        never_created: pods that this process decided to create but that never existed.
        asked: the subset of `never_created` whose creates had no answer.
        never_placed: pods that the process saw vanish without a node.
        holds: names that objects in deletion still have, by kind and name, with the message.
        webhook: changes each stored object other than pods.
        pod_webhook: changes each stored pod.
        strangers: stored pods that the operator does not recognize as its own.
        status_managers: field managers that have written the status.
        pod_taker: whether another controller removes the labels of each pod after its creation.
        rival: changes each written status, as another operator would.
        calm: asserts that the budget never delays pods and the recorder never drops an event.
        budget: recent actions of the resource.
        held_back: kinds of all actions that the budget delayed so far.
        caused: times of the actions by kind: pods, status writes and events.
        meddler: changes stored objects after each reconcile, as another controller would.
        written: recent writes of one generation.
        refusals: refusals of the last attempts.
        admitted: revisions whose objects the API server accepts.
        tried: revision of each dry run.
        silent: whether the API server does not answer dry runs.
        gangs: gang schedulers of the cluster.
        served_too: additional API versions under which the cluster lists objects, by their version.
        look_again_s: seconds until the next check if no event comes.
        restricted_selectors: pod selectors of other egress policies in the namespace; None while unknown.
        passed_s: elapsed time by a clock that is never set; `now` may be set.
        connecting: time for which the operator has seen ranks of groups connect.
    """

    spec: dict[str, Any]
    now: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    status: dict[str, Any] = field(default_factory=dict)
    finalizers: tuple[str, ...] = ()
    deleting: bool = False
    generation: int = 1
    version: int = 1
    pods: dict[str, PodView] = field(default_factory=dict)
    manifests: dict[str, Any] = field(default_factory=dict)
    objects: Objects = field(default_factory=dict)
    nodes: tuple[NodeView, ...] | None = (
        NodeView(
            name="node",
            allocatable={"cpu": 64, "memory": 512 * 2**30, "pods": 100},
            labels=dict(IMAGE_PLATFORM),
        ),
    )
    reports: dict[int, GroupReport] = field(default_factory=dict)
    silences: dict[int, float] = field(default_factory=dict)
    pods_unwatched: bool = False
    fetch: FetchProgress | None = None
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    writes: list[Write] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    recorded: set[RecordEvent] = field(default_factory=set)
    created: list[str] = field(default_factory=list)
    graces: dict[str, int | None] = field(default_factory=dict)
    uids: int = 0
    options: Options = OPTIONS
    refuses: dict[tuple[str, str], str] = field(default_factory=dict)
    refuses_pods: str = ""
    quota_is_full: Callable[[], bool] = lambda: False
    unanswered: set[tuple[str, str]] = field(default_factory=set)
    never_created: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    never_placed: set[str] = field(default_factory=set)
    holds: dict[tuple[str, str], str] = field(default_factory=dict)
    webhook: Callable[[dict[str, Any]], dict[str, Any]] = lambda manifest: manifest
    pod_webhook: Callable[[dict[str, Any]], dict[str, Any]] = lambda manifest: manifest
    strangers: dict[str, dict[str, Any]] = field(default_factory=dict)
    status_managers: frozenset[str] = frozenset({names.MANAGER})
    pod_taker: bool = False
    rival: Callable[[dict[str, Any]], dict[str, Any]] = lambda status: status
    calm: bool = True
    budget: Budget = field(default_factory=Budget)
    held_back: list[str] = field(default_factory=list)
    caused: dict[str, list[datetime]] = field(default_factory=dict)
    meddler: Callable[[Objects], None] = lambda objects: None
    written: tuple[int, RepeatedWrites] = field(default_factory=lambda: (0, RepeatedWrites()))
    refusals: tuple[Refusal, ...] = ()
    admitted: frozenset[str] = frozenset()
    tried: list[str] = field(default_factory=list)
    silent: bool = False
    gangs: frozenset[Gang] = frozenset()
    served_too: Mapping[str, str] = field(default_factory=dict)
    restricted_selectors: tuple[Manifest, ...] | None = ()
    look_again_s: float | None = None
    passed_s: float = 0.0
    connecting: SeenTime[tuple[int, int]] = field(default_factory=SeenTime)

    def observe(self) -> ResourceObservation:
        """Builds the current observation."""
        resource = ResourceView(
            key=ResourceKey(namespace="default", name="demo"),
            uid="uid-demo",
            generation=self.generation,
            resource_version=str(self.version),
            finalizers=self.finalizers,
            deleting=self.deleting,
            spec=self.spec,
            status=self.status,
            status_managers=self.status_managers,
        )
        return ResourceObservation(
            resource=resource,
            pods=tuple(self.pods.values()),
            objects=self._shown_objects(),
            nodes=self.nodes,
            groups=self.reports,
            silences={
                (group.index, group.epoch): self.silences[group.index]
                for group in parse_status(self.status).groups
                if group.index in self.silences
            },
            pods_unwatched=self.pods_unwatched,
            fetch=self.fetch,
            calibrations=self.calibrations,
            refusals=self.refusals,
            admitted=self.admitted,
            gangs=self.gangs,
            connecting_s=self.connecting.add_elapsed(self.passed_s),
            never_created=frozenset(self.never_created),
            never_requested=frozenset(self.never_created - self.asked),
            never_placed=frozenset(self.never_placed),
            restricted_selectors=self.restricted_selectors,
        )

    def _shown_objects(self) -> tuple[dict[str, Any], ...]:
        """Lists the objects as caches do: an object with two served API versions appears twice."""
        stored = [stored for (kind, _), stored in self.objects.items() if kind != "Secret"]
        again = [each for each in stored if each["apiVersion"] in self.served_too]
        return (*stored, *({**each, "apiVersion": self.served_too[each["apiVersion"]]} for each in again))

    def step(self, *, in_real_time: bool = False) -> Decision:
        """Runs one reconcile and its actions.

        Args:
            in_real_time: whether the time since the last status write counts; otherwise it was long ago.
        """
        if not in_real_time:
            self.budget.status_writes = Window(STATUS_WRITES_WITHIN)
            self.caused.pop("status writes", None)
        observation = self.observe()
        decision = reconcile(observation, self.now, self.options)
        self.connecting.set_states(decision.connecting)
        self.writes = []
        self.budget.report = self.held_back.append
        spending = Spending(self.budget, observation.resource, decision.actions, self.now)
        permits = ActionPermits("demo", self.refusals, self.now, spending)
        for action in _as_sent(decision.actions):
            if isinstance(action, RecordEvent):
                self._record(action)
                continue
            self._note_wanted(action)
            if not permits.may_run(action):
                continue
            if refused := self._why_refused(action):
                permits.record_refused(action, *refused)
            else:
                self._do(action, permits)
        self.refusals = tuple(permits.known.values())
        assert not self.calm or "pods" not in self.held_back
        due = [wait for wait in (decision.look_again_s, permits.look_again_s()) if wait is not None]
        self.look_again_s = min(due, default=None)
        self._meddle()
        return decision

    def _record(self, event: RecordEvent) -> None:
        """Records an event; EventRecorder counts a repeated event in the series of the first."""
        if event not in self.recorded:
            self._note_caused(event)
        self.recorded.add(event)
        self.events.append(event.reason)

    def _meddle(self) -> None:
        """Applies the changes of other writers after each reconcile."""
        self.meddler(self.objects)
        if self.pod_taker:
            taken = [name for name, pod in self.pods.items() if not pod.started and not _is_inspect(pod)]
            self.strangers |= {name: self.manifests[name] for name in taken}
            self.pods = {name: pod for name, pod in self.pods.items() if name not in taken}
        wanted = self.rival(self.status) if self.status else self.status
        if wanted != self.status:
            self.status = wanted
            self.version += 1

    def _why_refused(self, action: Write) -> tuple[str, str] | None:
        """Returns reason and message of a refusal, or None."""
        if isinstance(action, TryObjects) and self.silent:
            self.tried.append(action.revision)
            return NOT_ANSWERED, "waiting for the answer"
        if self._is_unanswered(action):
            self.asked.add(kind_and_name(action, "demo")[1])
            return NOT_ANSWERED, "no answer"
        if words := self._refused(action) or self._over_quota(action):
            return OBJECT_REFUSED, words
        if creates_pod(action) and self._is_taken(action):
            return NAME_TAKEN, "a pod of this name has another owner"
        if words := self.holds.get(kind_and_name(action, "demo"), ""):
            return NAME_HELD, words
        return None

    def _do(self, action: Write, permits: ActionPermits) -> None:
        """Runs an action that is not refused."""
        if isinstance(action, TryObjects):
            self.admitted = frozenset({action.revision})
        writes = not self._is_there(action)
        was_there = kind_and_name(action, "demo") in self.objects
        self._run(action)
        self._note_caused(action)
        if words := self._changed(action):
            permits.record_refused(action, CHANGED_BY_OTHERS, words)
        elif writes and self._is_written_again(action):
            reason = CHANGED_BY_OTHERS if was_there else DELETED_BY_OTHERS
            reason = MADE_BY_OTHERS if isinstance(action, DeleteObject | RemoveFinalizer) else reason
            permits.record_refused(action, reason, "somebody undoes it")
        else:
            permits.record_success(action)
        self.writes += [action] if writes else []

    def _note_wanted(self, action: Write) -> None:
        kind, name = kind_and_name(action, "demo")
        if kind != "Pod" or not isinstance(action, CreateObject):
            return
        self.never_created.add(name)
        if not self._is_unanswered(action) and (
            self._refused(action) or self._over_quota(action) or (kind, name) in self.holds
        ):
            self.never_created.discard(name)

    def _is_unanswered(self, action: Write) -> bool:
        kind, name = kind_and_name(action, "demo")
        return any(_is_meant(found, kind, name) for found in self.unanswered)

    def live(self, seconds: float) -> int:
        """Lets time pass and runs each due reconcile; returns the number of reconciles."""
        end, looks = self.now + timedelta(seconds=seconds), 0
        while self.now < end:
            self.step(in_real_time=True)
            looks += 1
            # One reconcile a second is correct: the operator retries a failed status write each second.
            assert looks < 1000 + seconds, f"{looks} looks in {seconds - (end - self.now).total_seconds()} s"
            due_s = seconds if self.look_again_s is None else self.look_again_s
            wait_s = 0.05 if self.writes else max(due_s, 0.05)
            self.advance_time(min(wait_s, (end - self.now).total_seconds()))
        return looks

    def _is_taken(self, action: Write) -> bool:
        """Checks whether a foreign pod has the name of a pod to be created."""
        name = kind_and_name(action, "demo")[1]
        return name in self.strangers or (name in self.pods and self.pods[name].uid.startswith("forged"))

    def _note_caused(self, action: Action) -> None:
        """Records an action, and checks its limit."""
        kinds = {PatchStatus: "status writes", RecordEvent: "events", CreateObject: "pods"}
        kind = kinds.get(type(action))
        if kind is None or (kind == "pods" and not creates_pod(action)):
            return
        within, most = BOUNDS[kind]
        # After a clock step back, earlier times are not comparable.
        moments = [moment for moment in self.caused.get(kind, ()) if self.now >= moment > self.now - within]
        self.caused[kind] = [*moments, self.now]
        if kind == "pods":
            most = max_pods_per_minute(wanted_pods(self.observe().resource))
        if kind != "events" or self.calm:  # EventRecorder drops further events
            assert len(moments) < most, f"{len(moments) + 1} {kind} within {within}"

    def _changed(self, action: Write) -> str:
        """Returns the message about an object that differs from the written one, or ""."""
        if creates_pod(action):
            assert isinstance(action, CreateObject)
            name = action.manifest["metadata"]["name"]
            return f"pod {name} was changed when it was created" if name in self.strangers else ""
        if not isinstance(action, ApplyObject):
            return ""
        stored = self.objects[action.manifest["kind"], action.manifest["metadata"]["name"]]
        return "a webhook changes it" if find_drift(stored, action.manifest) else ""

    def _is_written_again(self, action: Write) -> bool:
        if self.written[0] != self.generation:
            self.written = self.generation, RepeatedWrites()
        if isinstance(action, RemoveFinalizer):
            return self.written[1].count_write(names.KIND, names.FINALIZER, None, self.now)
        if isinstance(action, DeleteObject) and action.kind != "Pod":
            return self.written[1].count_write(action.kind, action.name, None, self.now)
        if not isinstance(action, ApplyObject | CreateObject) or action.manifest["kind"] in {"Pod", "Secret"}:
            return False
        kind, name = action.manifest["kind"], action.manifest["metadata"]["name"]
        return self.written[1].count_write(kind, name, action.manifest, self.now)

    def _refused(self, action: Write) -> str:
        """Returns the message of a refused action, or ""."""
        if isinstance(action, TryObjects):
            self.tried.append(action.revision)
            tried = (self._refused(CreateObject(manifest=manifest)) for manifest in action.manifests)
            return next(filter(None, tried), "")
        kind, name = kind_and_name(action, "demo")
        refused = [words for found, words in self.refuses.items() if _is_meant(found, kind, name)]
        if kind == "Pod" and isinstance(action, CreateObject):
            refused.append(self.refuses_pods)
        return next(filter(None, refused), "")

    def _over_quota(self, action: Write) -> str:
        """Returns the message of a quota that refuses a pod, or ""; a dry run does not check quotas."""
        full = creates_pod(action) and self.quota_is_full()
        return "exceeded quota: q, requested: pods=1, used: pods=9, limited: pods=9" if full else ""

    def idle_actions(self) -> list[Action]:
        """Returns the actions of a reconcile without any change; none in a world at rest."""
        permits = ActionPermits("demo", self.refusals, self.now)
        decided = reconcile(self.observe(), self.now, self.options).actions
        return [
            action
            for action in decided
            if isinstance(action, RecordEvent) or (not self._is_there(action) and permits.may_run(action))
        ]

    def _is_there(self, action: Write) -> bool:
        """Checks whether an action would create an existing object, which has no effect."""
        return (
            isinstance(action, CreateObject)
            and action.may_exist
            and kind_and_name(action, "demo") in self.objects
        )

    def settle(self, reconciles: int = 10) -> None:
        """Runs reconciles until one writes nothing."""
        for _ in range(reconciles):
            self.step()
            if not self.writes:
                return
        raise AssertionError(f"still writing after {reconciles} reconciles: {self.writes}")

    def serve(self) -> None:
        """Runs a new resource to Ready; all pods behave well."""
        self.settle()
        self.answer_inspection()
        self.settle()
        self.all_ready()
        self.settle()

    def answer_inspection(self, message: str = PROFILE.to_json(), exit_code: int = 0) -> None:
        """Ends every inspect pod with this result."""
        ended = ContainerTermination(exit_code=exit_code, message=message)
        self._change(lambda pod: replace(pod, termination=ended) if _is_inspect(pod) else pod)

    def all_ready(self) -> None:
        """Makes every running worker pod ready."""
        self.all_started()
        self._change(lambda pod: replace(pod, ready=not pod.ended))

    def all_started(self) -> None:
        """Starts every worker pod that has not ended."""

        def start(pod: PodView) -> PodView:
            if pod.ended and not pod.started:
                return pod
            return replace(pod, phase="Running", started=True, node=pod.node or "node")

        self._change(start)

    def end_pod(self, name: str, *, exit_code: int = 70, message: str = "", reason: str = "") -> None:
        """Ends the worker container of a pod."""
        ended = ContainerTermination(exit_code=exit_code, message=message, reason=reason)
        self.pods[name] = replace(
            self.pods[name], termination=ended, started=True, ready=False, phase="Failed"
        )

    def delete_pod(self, name: str) -> None:
        """Deletes a pod as a user would; it exists until `reap`."""
        gone_by = self.now + timedelta(seconds=_GRACE_S)
        self.pods[name] = replace(self.pods[name], deleting=True, gone_by=gone_by)

    def vanish(self, name: str) -> None:
        """Deletes a pod without a node as a user would: it is gone immediately."""
        assert not self.pods[name].node
        del self.pods[name]
        self.never_placed.add(name)

    def relabel(self, name: str, **labels: str | None) -> None:
        """Writes or removes labels of a pod (None); `pod_index` stands for heteroinfer.dev/pod-index."""
        changed = {f"{names.API_GROUP}/{key.replace('_', '-')}": value for key, value in labels.items()}
        merged = {**self.pods[name].labels, **changed}
        kept = {key: value for key, value in merged.items() if value is not None}
        self.pods[name] = replace(self.pods[name], labels=kept)

    def put_labels_back(self) -> None:
        """Restores the labels that every pod was created with, and removes all others."""
        self._change(lambda pod: replace(pod, labels=self.manifests[pod.name]["metadata"]["labels"]))

    def message(self, kind: str) -> str:
        """Returns the message of a condition."""
        return next(str(c.get("message", "")) for c in self.status["conditions"] if c["type"] == kind)

    def reap(self) -> None:
        """Removes pods in deletion."""
        self.pods = {n: pod for n, pod in self.pods.items() if not pod.deleting or pod.finalizers}

    def advance_time(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += timedelta(seconds=seconds)
        self.passed_s += seconds

    def set_clock(self, seconds: float) -> None:
        """Sets the clock forward or back without passing time."""
        self.now += timedelta(seconds=seconds)

    def change_spec(self, **changes: Any) -> None:
        """Changes the spec as a user would."""
        self.spec = {**self.spec, **changes}
        self.generation += 1
        self.version += 1
        self.refusals = retry_revisions_now(self.refusals, self.now)

    def restart_operator(self) -> None:
        """Clears the operator's memory."""
        self.refusals, self.admitted, self.written = (), frozenset(), (0, RepeatedWrites())
        self.budget, self.caused = Budget(), {}
        self.connecting = SeenTime()
        self.never_created, self.never_placed = set(), set()

    def condition(self, kind: str) -> tuple[str, str]:
        """Returns status and reason of a condition."""
        found = next(c for c in self.status["conditions"] if c["type"] == kind)
        return found["status"], found["reason"]

    def workers(self) -> list[str]:
        """Returns the names of worker pods."""
        return sorted(name for name, pod in self.pods.items() if not _is_inspect(pod))

    def _change(self, change: Callable[[PodView], PodView]) -> None:
        self.pods = {name: change(pod) for name, pod in self.pods.items()}

    def _run(self, action: Write) -> None:
        match action:
            case RemoveFinalizer():
                # A reconcile updates the version with its own writes.
                self.finalizers = tuple(name for name in self.finalizers if name != names.FINALIZER)
            case PatchStatus(status=status, resource_version=version):
                assert version == str(self.version), "the status is based on an older resource"
                self.status = dict(status)
                self.version += 1
            case CreateObject() if self._is_there(action):
                pass
            case CreateObject(manifest=manifest) | ApplyObject(manifest=manifest):
                self._store(dict(manifest))
            case DeleteObject(kind="Pod", name=name, uid=uid, grace_s=grace_s):
                self.graces[name] = grace_s
                if name in self.pods and self.pods[name].uid == uid:
                    if grace_s == 0 and not self.pods[name].finalizers:
                        del self.pods[name]
                    else:
                        self.delete_pod(name)
            case DeleteObject(kind=kind, name=name):
                self.objects.pop((kind, name), None)

    def _store(self, manifest: dict[str, Any]) -> None:
        self.uids += 1
        name = manifest["metadata"]["name"]
        if manifest["kind"] != "Pod":
            manifest = self.webhook(manifest)
            metadata = {**manifest["metadata"], "uid": f"uid-{self.uids}"}
            self.objects[manifest["kind"], name] = {**manifest, "metadata": metadata}
            return
        assert name not in self.pods, f"pod {name} exists"
        self.never_created.discard(name)
        self.never_placed.discard(name)
        self.created.append(name)
        stored = self.pod_webhook(manifest)
        if not _is_ours(stored, manifest):
            self.strangers[name] = stored
            return
        self.manifests[name] = manifest
        self.pods[name] = PodView(
            name=name,
            uid=f"uid-{self.uids}",
            labels=stored["metadata"]["labels"],
            created=self.now,
            key_secret=find_key_secret(manifest),
            images=manifest["metadata"].get("annotations", {}).get(names.ANNOTATION_IMAGES, ""),
        )


def _as_sent(actions: Sequence[Action]) -> list[Action]:
    """Orders actions like their requests: the first pod of each group precedes all others."""
    pods = [action for action in actions if creates_pod(action)]
    scopes = [action.scopes if isinstance(action, CreateObject) else frozenset() for action in pods]
    firsts = [pod for index, pod in enumerate(pods) if scopes[index] not in scopes[:index]]
    in_order = iter([*firsts, *(pod for pod in pods if pod not in firsts)])
    return [next(in_order) if creates_pod(action) else action for action in actions]


def _is_ours(pod: Mapping[str, Any], sent: Mapping[str, Any]) -> bool:
    """Checks whether the operator recognizes a stored pod as its own."""
    owners = pod["metadata"].get("ownerReferences") or ()
    is_owned = any(owner.get("controller") and owner["uid"] == "uid-demo" for owner in owners)
    own = sent["metadata"]["labels"][names.LABEL_RESOURCE]
    return is_owned and (pod["metadata"].get("labels") or {}).get(names.LABEL_RESOURCE) == own


def _is_inspect(pod: PodView) -> bool:
    return "-inspect-" in pod.name or "-fetch-" in pod.name  # independent of its labels


def _is_meant(found: tuple[str, str], kind: str, name: str) -> bool:
    return found[0] == kind and fnmatchcase(name, found[1])


def waits(text: str) -> Waiting | None:
    """Builds a kubelet's report of a waiting container from `Reason: words`; None for ""."""
    reason, _, message = text.partition(": ")
    return Waiting(reason, message) if text else None
