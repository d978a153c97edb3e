"""The interface between decisions and the cluster: observations and actions.

Pure: contains values and a Protocol. The package `kube` implements the interface on Kubernetes, `local` on
processes of this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final, NamedTuple, Protocol, TypeAlias

from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import CacheCleanup, FetchProgress
from heteroinfer_operator.api.resource import ResourceKey as ResourceKey  # noqa: PLC0414 - re-exported
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.demand import Manifest as Manifest  # noqa: PLC0414 - re-exported
from heteroinfer_operator.nodes.demand import PodDemand
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.priorities import PriorityClassView

OVER_PHASES: Final = frozenset({"Succeeded", "Failed"})
"""Phases of a pod whose containers never run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceView:
    """A stored HeteroInference.

    Attributes:
        generation: counts changes of the spec.
        resource_version: version of the resource. A status write succeeds only at this version.
        spec: as stored, not parsed.
        status: as stored, not parsed; empty at first.
        status_managers: field managers that wrote the status.
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
        """Returns a copy for objects that outlive a decision: without spec and status, which take 15 KB."""
        return replace(self, spec={}, status={})


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTermination:
    """The end of a container.

    Attributes:
        exit_code: 137 after SIGKILL, as in Kubernetes.
        reason: Kubernetes' reason, for example `OOMKilled`.
    """

    exit_code: int
    reason: str = ""
    message: str = ""


class Waiting(NamedTuple):
    """Why a container does not run: the kubelet's reason, for example `ImagePullBackOff`, and message."""

    reason: str
    message: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in self if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """The fields of a resource's pod that decisions read.

    Attributes:
        labels: labels of the contract with their right values, also if the stored labels differ.
        lost_labels: labels that are stored wrongly or are missing, with their right values; None for a label
            that the pod must not have.
        created: creation time; for a pod that has ended, by the clock of this process.
        gone_by: end of the grace period of a pod that is being deleted, or None. By the clock of this
            process, like the time of a reconcile.
        started: whether the worker container runs or ran. If not, the pod's ranks have sent nothing yet.
        phase: Pending, Running, Succeeded or Failed.
        reason: reason in the pod's status, for example `Evicted`.
        finalizers: finalizers that block the pod's deletion. The operator sets none.
        disrupted: why the pod is removed through no fault of its own (eviction, drain, preemption, a lost
            node, Kueue), or "".
        unschedulable: why the pod has no node, or "".
        termination: the end of the worker container, or None.
        key_secret: name of the Secret with the group's key; "" for a pod without a key.
        images: worker images of the pod's epoch; "" if the pod does not record images.
        still_running: other containers, such as sidecars of a mesh, that still run after the end of the
            worker container or after the deletion of the pod. The pod ends only when these end.
        lost_owner: whether the pod lost its ownerReference to the HeteroInference.
        unknown: why the pod's state is unknown, or "". Such a pod may run or be gone, so it does not serve.
        defaulted: requests and limits that a LimitRange set for the worker container, or "".
        cleanup: rule by which a fetch pod removes old commits from its cache; None for a pod that removes no
            commit.
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
    cleanup: CacheCleanup | None = None

    @property
    def ended(self) -> bool:
        """Whether the pod will never serve again."""
        return self.deleting or self.termination is not None or self.phase in OVER_PHASES


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUser:
    """Another resource that uses the claim of a model's cache.

    Attributes:
        objects: ConfigMaps of its plans and revisions.
    """

    resource: ResourceView
    objects: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupPod:
    """A fetch pod that may remove commits from a cache now.

    Attributes:
        claims: names of the PersistentVolumeClaims that the pod mounts.
    """

    pod: PodView
    claims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceObservation:
    """The state of the cluster that one reconcile uses.

    Attributes:
        pods: all pods of the resource: of every group and epoch, and pods that fetch or inspect the model.
        objects: other children as stored (Service, NetworkPolicy, ConfigMap).
        nodes: nodes of the cluster; None if the operator may not read nodes.
        reserved: demands of the operator's pods without a node, of all resources.
        priority_classes: priority classes of the cluster; None if the operator may not read them.
        unknown_gangs: served API versions of gang schedulers that the operator does not support.
        groups: report of each running leader, by group index.
        silences: seconds without a successful connection to a leader that answered before, by group index and
            epoch.
        pods_unwatched: whether the last list or watch of the pods failed.
        fetch: progress of the pod that fetches the model, or None.
        refusals: writes of the resource's objects that were refused at the last attempt.
        admitted: revisions whose objects passed a dry run; None if no API server checks objects.
        connecting_s: seconds for which this process has observed a group's ranks connect, by group index and
            epoch.
        never_created: names of pods that the operator decided to create and that no answer and no watch has
            shown yet: their create request was not sent, or has no answer.
        never_requested: names in `never_created` for which no create request was sent.
        never_placed: names of pods that were deleted before they had a node, so they never ran.
        restricted_selectors: `podSelector` of each NetworkPolicy in the namespace that restricts egress and
            that the operator did not create; None while unknown.
        other_cache_users: other resources that use the claim of the model's cache; None if they are unknown,
            or if no decision needs them now.
        cleanup_pods: fetch pods of any resource that may now remove commits from claims that this resource
            mounts without a fetch.
    """

    resource: ResourceView
    pods: tuple[PodView, ...] = ()
    objects: tuple[Manifest, ...] = ()
    nodes: tuple[NodeView, ...] | None = None
    reserved: tuple[PodDemand, ...] = ()
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
    never_created: frozenset[str] = frozenset()
    never_requested: frozenset[str] = frozenset()
    never_placed: frozenset[str] = frozenset()
    restricted_selectors: tuple[Manifest, ...] | None = ()
    other_cache_users: tuple[CacheUser, ...] | None = None
    cleanup_pods: tuple[CleanupPod, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An object of the resource that the operator cannot write now.

    A later attempt may succeed. Otherwise a user or another controller must act.

    Attributes:
        kind: kind of the object; for the status and the finalizer, the kind of the resource.
        reason: a reason that `reconcile.refusals` defines, such as ObjectRefused.
        message: the refused object and the answer of the API server.
        scopes: scopes of the action.
        tries: number of consecutive failed attempts.
        retry_at: time of the next attempt.
        blocks: whether objects of the same scopes wait. False if the object exists but differs from its
            manifest.
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
    """Creates an object. If an object of this name exists, the operator observes again.

    Attributes:
        may_exist: whether the operator accepts an existing object of this name, because the name identifies
            the content.
        scopes: units that need the object, such as a group. If the object cannot be created, later objects
            that only these units need are not created either.
    """

    manifest: Manifest
    may_exist: bool = False
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TryObjects:
    """Checks by a dry run whether the API server accepts the objects of a revision.

    Only errors about the content of the objects count as refusals. A full quota, an existing name or a
    failing webhook does not count. Until the API server has answered, the result is NotAnswered.

    Attributes:
        revision: hash of the revision.
    """

    revision: str
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyObject:
    """Makes the stored object match the manifest (server-side apply).

    Attributes:
        scopes: as in CreateObject.
    """

    manifest: Manifest
    scopes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteObject:
    """Deletes the object with this uid. An object that is already gone is no error.

    Attributes:
        api_version: set for kinds that share their name; "" for all other kinds.
        uid: uid of the object. An object with the same name and another uid is not deleted.
        grace_s: grace period of a pod in seconds; None for the pod's own grace period.
        after_status: whether the status must be written first, because it records facts that the deletion
            removes, such as why an epoch ended.
    """

    kind: str
    name: str
    uid: str
    api_version: str = ""
    grace_s: int | None = None
    after_status: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """Replaces the status. After a conflict the operator writes no child and observes again.

    Attributes:
        status: the whole new status, valid against the schema.
        resource_version: version of the resource that the decision used.
        defect: description of fields that were left out because the schema would refuse them, or "". Such
            fields are a defect of the operator.
    """

    status: Manifest
    resource_version: str
    defect: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFinalizer:
    """Removes the finalizer of earlier versions, which would block the deletion without an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordEvent:
    """Records a Kubernetes event on the resource.

    Attributes:
        reason: in CamelCase.
        message: one line.
    """

    reason: str
    message: str
    warning: bool = False


Write: TypeAlias = CreateObject | TryObjects | ApplyObject | DeleteObject | PatchStatus | RemoveFinalizer
Action: TypeAlias = Write | RecordEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of one reconcile.

    Attributes:
        actions: actions in order. `refusals.ActionPermits` decides which actions a failed action blocks.
        look_again_s: seconds until the next reconcile without a change; None to wait for a change.
        connecting: group index and epoch of groups whose ranks are connecting.
    """

    actions: tuple[Action, ...] = ()
    look_again_s: float | None = None
    connecting: frozenset[tuple[int, int]] = frozenset()


class ConflictError(Exception):
    """The state changed since the observation. Observe again."""


class Cluster(Protocol):
    """Observes resources and runs actions."""

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        """Returns the state of a resource and its children, or None if the resource is gone."""
        ...

    async def run(self, observation: ResourceObservation, actions: Sequence[Action]) -> float | None:
        """Runs actions in order, on the resource of the observation.

        Returns:
            Seconds until a refused action may be tried again, or None.

        Raises:
            ConflictError: an object is in another state than the decision assumed. Actions that depend on
                this object were not run.
        """
        ...
