"""The port between decisions and the world: what is observed, and which actions exist.

Pure: values and a Protocol. The package `kube` implements the port on Kubernetes, `local` on
this machine's processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, NamedTuple, Protocol, TypeAlias

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_operator.api.resource import ResourceKey as ResourceKey  # noqa: PLC0414 - part of the port's face
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.demand import Manifest as Manifest  # noqa: PLC0414 - part of the port's face
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.priorities import PriorityClassView

OVER_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Of a pod none of whose containers runs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceView:
    """A HeteroInference as it is stored.

    Attributes:
        generation: counts changes of the spec.
        resource_version: what a status write is conditioned on.
        finalizers: who must clean up before it goes.
        spec: as stored, not yet parsed.
        status: as stored, not yet parsed; empty at first.
        status_managers: field managers that have written the status.
        finalizer_managers: field managers that set the finalizer of earlier versions.
    """

    key: ResourceKey
    uid: str
    generation: int
    resource_version: str
    finalizers: tuple[str, ...]
    deleting: bool
    spec: Manifest
    status: Manifest
    status_managers: frozenset[str] = frozenset()
    finalizer_managers: frozenset[str] = frozenset()

    def without_fields(self) -> "ResourceView":
        """Returns it without spec and status, for what outlives a decision: parsed they take 15 KB."""
        return replace(self, spec={}, status={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTermination:
    """How a container ended.

    Attributes:
        exit_code: 137 after SIGKILL, as Kubernetes counts.
        reason: Kubernetes' own, such as `OOMKilled`.
    """

    exit_code: int
    reason: str = ""
    message: str = ""


class Waiting(NamedTuple):
    """Why a container does not run yet, as its kubelet reports it: `ImagePullBackOff` and words."""

    reason: str
    message: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of a resource, trimmed to what decisions read.

    Attributes:
        uid: its identity; deletions name it.
        labels: the contract's labels.
        lost_labels: those of them that are not stored as they should be, and how; None for one that the
            pod should not have.
        created: creation time; of a pod that has ended, by the clock of this process.
        gone_by: when a pod that is being deleted has used up its grace period, or None; by the clock
            of this process, as is the time of a reconcile.
        started: whether its worker container runs or ran: before, no rank of it can have spoken.
        phase: Pending, Running, Succeeded or Failed.
        reason: the pod's own, such as `Evicted`.
        finalizers: who must let it go before it goes; none of them is ours.
        disrupted: why it is taken away by no fault of its own (eviction, drain, preemption, a
            lost node, Kueue), or "".
        unschedulable: why it is not placed, or "".
        termination: how its worker container ended, or None while it has not.
        key_secret: name of the Secret with its group's key, or "" for a pod without one.
        images: that the workers of its epoch were asked to run; "" where it does not say so.
        still_running: containers of others, such as a mesh's sidecar, that run on though the worker's has
            ended: until they end, so does not the pod.
        lost_owner: whether somebody took off its ownerReference to the HeteroInference.
        unknown: why nothing is known of it now, or "": it may run or be gone, so it does not serve.
        defaulted: requests and limits that a LimitRange gave its worker container, or "".
    """

    name: str
    uid: str
    labels: Mapping[str, str]
    created: datetime
    deleting: bool = False
    gone_by: datetime | None = None
    finalizers: tuple[str, ...] = ()
    started: bool = False
    phase: str = "Pending"
    reason: str = ""
    message: str = ""
    ready: bool = False
    disrupted: str = ""
    node: str = ""
    unschedulable: str = ""
    waiting: Waiting | None = None
    termination: ContainerTermination | None = None
    key_secret: str = ""
    images: str = ""
    still_running: tuple[str, ...] = ()
    lost_labels: Mapping[str, str | None] = field(default_factory=dict)
    lost_owner: bool = False
    unknown: str = ""
    defaulted: str = ""

    @property
    def ended(self) -> bool:
        """Returns whether it will never serve again."""
        return self.deleting or self.termination is not None or self.phase in OVER_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another resource, with the ConfigMaps that keep its plans and revisions."""

    resource: ResourceView
    objects: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceObservation:
    """All that one reconcile decides on.

    Attributes:
        pods: all its pods, of every group and epoch, inspect pods too.
        objects: its other children as stored (Service, NetworkPolicy, ConfigMap).
        nodes: of the cluster; None where nodes may not be read.
        promised: what pods of ours that have no node yet, of any resource, will take of the nodes.
        priority_classes: of the cluster; None where they may not be read.
        unknown_gangs: API versions of gang schedulers that are served, and that the operator does not know.
        groups: by group index: what a running leader says of its group now.
        silences: by group index and epoch: for how many seconds no connection to its leader, which answered
            before, has succeeded.
        pods_unwatched: whether the API server failed to show the pods when it was last asked.
        fetch: what the pod that fetches the model says now, or None.
        refusals: what of the resource was refused when it was last tried.
        admitted: revisions of which objects were tried and would be taken; None where nobody refuses any.
        connecting_s: by group index and epoch: how long this process has seen its ranks connect, in seconds.
        unmade: names of pods that were to be made, and that have never existed: nobody asked the API server
            for them yet, or it has not answered.
        unasked: those of them that the API server was not asked for.
        kept_in: the `podSelector` of each policy of others in the namespace that allows its pods only some
            egress; None while they are not known.
        neighbours: other resources that name the claim of its model's cache; None if nobody asked for them.
    """

    resource: ResourceView
    pods: tuple[PodView, ...] = ()
    objects: tuple[Manifest, ...] = ()
    nodes: tuple[NodeView, ...] | None = None
    promised: tuple[PodDemand, ...] = ()
    priority_classes: tuple[PriorityClassView, ...] | None = None
    gangs: frozenset[Gang] = frozenset()
    unknown_gangs: tuple[str, ...] = ()
    groups: Mapping[int, GroupReport] = field(default_factory=dict)
    silences: Mapping[tuple[int, int], float] = field(default_factory=dict)
    pods_unwatched: bool = False
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    fetch: FetchProgress | None = None
    refusals: tuple["Refusal", ...] = ()
    admitted: frozenset[str] | None = None
    connecting_s: Mapping[tuple[int, int], float] = field(default_factory=dict)
    unmade: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()
    kept_in: tuple[Manifest, ...] | None = ()
    neighbours: tuple[Neighbour, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An object of the resource that cannot be written as things are: somebody else must act, or time pass.

    Attributes:
        kind: as in `kind`; of the resource itself for its status and finalizer.
        reason: CamelCase: ObjectRefused, NameTaken, NameHeld, ChangedByOthers, DeletedByOthers,
            MadeByOthers or NotAnswered.
        message: who refuses what, in the API server's words.
        scopes: of the action.
        tries: how often in a row.
        blocks: whether what needs the object waits for it; not for one that is there, and not as written.
    """

    kind: str
    name: str
    reason: str
    message: str
    scopes: frozenset[str] = frozenset()
    tries: int = 1
    retry_at: datetime
    blocks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateObject:
    """Create it; if one of that name exists, observe again.

    Attributes:
        may_exist: an object of that name is as good: its name says what it holds.
        scopes: what it is part of, such as a group: while it cannot be made, nothing later of the same
            scope is.
    """

    manifest: Manifest
    may_exist: bool = False
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TryObjects:
    """Find out whether objects of a revision would be taken, and make none of them.

    Only what is said of the objects themselves is a refusal: not a quota, a name that is taken, or a webhook
    that fails. It is NotAnswered while the API server has said nothing.

    Attributes:
        revision: hash.
    """

    revision: str
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyObject:
    """Make the stored object say what the manifest says (server-side apply).

    Attributes:
        scopes: as of CreateObject.
    """

    manifest: Manifest
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteObject:
    """Delete exactly this object; one that is gone already is no error.

    Attributes:
        kind: as in `kind`.
        api_version: as in `apiVersion`, for kinds that share their name with others; "" for the rest.
        uid: its identity: one of the same name and another uid is left alone.
        grace_s: for pods: seconds to end by themselves; None takes the pod's own.
        after_status: whether what it takes away must be in the status first, such as why an epoch ended.
    """

    kind: str
    name: str
    uid: str
    api_version: str = ""
    grace_s: int | None = None
    after_status: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """Replace the status. After a conflict the operator makes no child and observes all again.

    Attributes:
        status: the whole new status, which the schema takes.
        resource_version: of the resource that the decision was made on.
        defect: what the schema would have refused and was left out, "" for nothing: a defect of the operator.
    """

    status: Manifest
    resource_version: str
    defect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFinalizer:
    """Remove the finalizer that earlier versions set: a resource without an operator could never go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Tell people what happened, on the resource.

    Attributes:
        reason: CamelCase.
        message: one line.
    """

    reason: str
    message: str
    warning: bool = False


Write: TypeAlias = CreateObject | TryObjects | ApplyObject | DeleteObject | PatchStatus | RemoveFinalizer
Action: TypeAlias = Write | RecordEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one reconcile wants done.

    Attributes:
        actions: in this order; what one that fails keeps from being done is in `refusals.Acting`.
        look_again_s: seconds until the next look without any change; None waits for one.
        connecting: group index and epoch of groups whose ranks connect.
    """

    actions: tuple[Action, ...] = ()
    look_again_s: float | None = None
    connecting: frozenset[tuple[int, int]] = frozenset()


class ConflictError(Exception):
    """The world changed since it was observed: observe again."""


class Cluster(Protocol):
    """What a reconcile needs of the world."""

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        """Returns what is known of a resource and its children, or None if it is gone."""
        ...

    async def run(self, observation: ResourceObservation, actions: Sequence[Action]) -> float | None:
        """Runs actions in order, on the resource of the observation.

        Returns:
            Seconds until something that was refused may be tried again, or None.

        Raises:
            ConflictError: an action met another state than the decision was made on;
                what depends on it was not run.
        """
        ...
