"""Decides whether a pod must fetch or inspect the model; the status stores the model's profile. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.codec import SAME_VERSION
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.model_fetch import CONFIRMED_S, CacheCleanup, FetchedModel, FetchProgress, is_commit
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import (
    MAX_PROFILE_LENGTH,
    GroupStatus,
    HeteroInferenceSpec,
    ModelPhase,
    ModelStatus,
    is_reason,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import next_count
from heteroinfer_operator.cluster import CreateObject, DeleteObject, PodView, RecordEvent, Waiting
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.model_pods import build_model_pod, model_pod_name
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.nodes.demand import exclude_nodes
from heteroinfer_operator.reconcile.epoch_end import OOM_KILLED, describe_exit
from heteroinfer_operator.reconcile.image_models import ImageNodes
from heteroinfer_operator.reconcile.lost_labels import find_lost
from heteroinfer_operator.reconcile.node_loss import NodeLoss
from heteroinfer_operator.reconcile.startup import describe_wait, is_container_blocked

COMPONENTS: Final = frozenset({names.COMPONENT_INSPECT, names.COMPONENT_FETCH})
_MODEL_POD_ENDED: Final = "ModelPodEnded"
_PROFILE_READ: Final = "ProfileRead"
_FIRST_RETRY_S: Final = 30.0
"""Wait after the first failed model pod. Each further failure doubles the wait."""
_MAX_RETRY_S: Final = 300.0
_PROGRESS_EVERY_S: Final = 5.0
_CHECK_CLEANUP_EVERY_S: Final = 2.0
"""Seconds between checks whether a fetch pod may still remove commits."""
_NUM_PROGRESS_STEPS: Final = 100
"""Number of steps in which the status shows the progress of a fetch. Each step is a write of the status."""
_STOP_GRACE_S: Final = 2
_MAX_CACHED_PROFILES: Final = 1024
"""Number of parsed profiles to cache between reconciles."""
_IMAGE_REASONS: Final = frozenset({"ErrImagePull", "ImagePullBackOff"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """Input of a decision about the model.

    Attributes:
        progress: progress that the fetch pod reports now, or None.
        unreadable_since: time of the last failure of a group to read the model, or None.
        cleanup: commits that a new fetch must keep in its cache; None if it may remove no commit.
        image_nodes: nodes that can mount the model's image, and nodes that cannot.
        blocking_pod: pod that may now remove a commit that the resource begins to use, or None.
    """

    spec: HeteroInferenceSpec
    owner: Owner
    source: ModelSource
    images: WorkerImages
    resources: PodResources
    pod_security: PodSecurity = PodSecurity()  # noqa: RUF009 - frozen
    node_loss: NodeLoss
    progress: FetchProgress | None
    unreadable_since: datetime | None
    now: datetime
    cleanup: CacheCleanup | None = None
    image_nodes: ImageNodes = ImageNodes()  # noqa: RUF009 - frozen
    blocking_pod: PodView | None = None

    @property
    def uri(self) -> str:
        """URI of the model."""
        return self.spec.model.uri

    @property
    def fetches(self) -> bool:
        """Whether the model comes from a hub."""
        return self.source.fetch is not None

    @property
    def phase(self) -> ModelPhase:
        """Phase of the model while its pod runs."""
        return ModelPhase.DOWNLOADING if self.fetches else ModelPhase.INSPECTING


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDecision:
    """State of the model, and the actions by which a pod fetches or inspects the model.

    Attributes:
        is_ready: status of the condition ModelReady: True, False, or None (Unknown) while a model pod works.
        lost_labels_message: the labels that the model pod has lost, and the fix, or "".
    """

    status: ModelStatus
    is_ready: bool | None
    reason: str
    message: str = ""
    profile: ModelProfile | None = None
    creates: tuple[CreateObject, ...] = ()
    deletes: tuple[DeleteObject, ...] = ()
    events: tuple[RecordEvent, ...] = ()
    look_again_s: float | None = None
    lost_labels_message: str = ""


def unreadable_since(groups: Sequence[GroupStatus]) -> datetime | None:
    """Returns the time at which a group last ended because it could not read its model, or None."""
    last_failures = [group.failures[-1] for group in groups if group.failures]
    times = [each.time for each in last_failures if each.reason == FailureReason.MODEL_NOT_READABLE]
    return max(times, default=None)


def decide_model(context: ModelContext, status: ModelStatus | None, pods: Sequence[PodView]) -> ModelDecision:
    """Returns the decision about the model of this spec.

    Without a stored profile, a pod fetches or inspects the model. Pods of other models are always deleted.

    Args:
        status: last written status, perhaps of another model.
        pods: pods that fetch or inspect a model of the resource.
    """
    model_key = identity.model_key(context.spec)
    last_status = ModelStatus(key=model_key)
    if status is not None and _is_status_of_model(status, model_key):
        last_status = status
    pod_name = model_pod_name(context.spec, context.owner)
    other_pods = [pod for pod in pods if pod.name != pod_name]
    if context.blocking_pod is not None:
        return _decide_during_cleanup(last_status, context.blocking_pod, _build_deletes(context, other_pods))
    profile = _read_stored_profile(context, last_status)
    if profile is not None:
        return ModelDecision(
            status=last_status,
            is_ready=True,
            reason=_PROFILE_READ,
            message=_describe_profile(profile),
            profile=profile,
            deletes=_build_deletes(context, pods),
        )
    if context.spec.suspend:
        return ModelDecision(
            status=last_status, is_ready=None, reason="Suspended", deletes=_build_deletes(context, pods)
        )
    if any(not pod.ended for pod in other_pods):
        context = replace(context, progress=None)  # the progress may belong to another model
    pod = next((pod for pod in pods if pod.name == pod_name), None)
    decision = (
        _create_model_pod(context, last_status)
        if pod is None
        else _check_model_pod(context, last_status, pod)
    )
    return replace(decision, deletes=(*decision.deletes, *_build_deletes(context, other_pods)))


def _decide_during_cleanup(
    stored: ModelStatus, pod: PodView, deletes: tuple[DeleteObject, ...]
) -> ModelDecision:
    """Returns the decision while a fetch pod may remove a commit that the resource begins to use.

    Args:
        stored: status of the resource's current model, not of an earlier one.
        pod: the fetch pod, which may belong to another resource.
    """
    return ModelDecision(
        status=stored,
        is_ready=None,
        reason="CacheCleaning",
        message=f"waiting at most {CONFIRMED_S:.0f} s, because pod {pod.name} may now remove old "
        "commits from a claim that this resource mounts",
        deletes=deletes,
        look_again_s=_CHECK_CLEANUP_EVERY_S,
    )


def _is_status_of_model(status: ModelStatus, key: str) -> bool:
    """Reports whether a status belongs to the model with this key.

    The commit becomes part of a path, so a status with a damaged commit is rejected.
    """
    return status.key == key and (status.commit is None or is_commit(status.commit))


def _read_stored_profile(context: ModelContext, stored: ModelStatus) -> ModelProfile | None:
    """Returns the stored profile of the model, or None if a pod must inspect the model (again).

    The profile is outdated if a group failed to read the model after the profile was made.
    """
    since = context.unreadable_since
    is_outdated = since is not None and (stored.checked_time is None or stored.checked_time < since)
    if stored.profile is None or is_outdated:
        return None
    try:
        return _parse_profile(stored.profile)
    except ContractError:  # another version wrote it: inspect the model again
        return None


@lru_cache(maxsize=_MAX_CACHED_PROFILES)
def _parse_profile(text: str) -> ModelProfile:
    return ModelProfile.from_json(text)


def _create_model_pod(context: ModelContext, stored: ModelStatus) -> ModelDecision:
    """Returns the decision that creates the pod that fetches or inspects the model."""
    # The first inspection resolved the revision to a commit; later inspections use the same commit.
    source = context.source.with_revision(stored.commit)
    manifest = build_model_pod(
        context.spec,
        context.owner,
        source,
        context.images,
        context.resources,
        context.cleanup,
        security=context.pod_security,
    )
    if context.image_nodes.unable:
        pod_spec, nodes = manifest["spec"], context.image_nodes
        pod_spec["affinity"] = exclude_nodes(pod_spec.get("affinity", {}), nodes.unable, nodes.able)
    return replace(_decide_in_progress(context, stored, ""), creates=(CreateObject(manifest=manifest),))


def _check_model_pod(context: ModelContext, stored: ModelStatus, pod: PodView) -> ModelDecision:
    """Returns the decision about the model while its pod exists.

    The checks are in this order: the end of the pod's container, a pod that must be deleted, an end of the
    pod for another reason, a blocked container, and a pod that waits or works.
    """
    if pod.termination is not None and not pod.deleting:  # a pod in deletion has stopped early
        return _decide_ended(context, stored, pod)
    look_again_s = context.node_loss.next_check_s([pod])
    if pod.deleting or context.node_loss.is_silent(pod):
        decision = _decide_in_progress(context, stored, f"pod {pod.name} is being deleted")
        return replace(
            decision, deletes=context.node_loss.build_deletes([pod], grace_s=0), look_again_s=look_again_s
        )
    if pod.ended:  # without a termination: for example, the node rejected or evicted the pod
        cause = ": ".join(part for part in (pod.disrupted or pod.reason, pod.message) if part)
        return _decide_failed(
            context, stored, pod, _MODEL_POD_ENDED, f"pod {pod.name} ended: {cause or pod.phase}"
        )
    if pod.waiting is not None and is_container_blocked(pod):
        return _decide_blocked(context, stored, pod, pod.waiting)
    wait_message = describe_wait(pod) if pod.unschedulable or (pod.waiting and not pod.started) else ""
    damaged_pod, loss_message = find_lost(context.owner, [pod]) or (None, "")
    stored = stored.changed(damaged_pod=damaged_pod)
    decision = replace(
        _decide_in_progress(context, stored, "; ".join(filter(None, (wait_message, loss_message)))),
        lost_labels_message=loss_message,
    )
    if context.fetches and pod.started:
        look_again_s = min(look_again_s or _PROGRESS_EVERY_S, _PROGRESS_EVERY_S)
    return replace(decision, look_again_s=look_again_s)


def _decide_in_progress(context: ModelContext, stored: ModelStatus, wait_message: str) -> ModelDecision:
    """Returns the decision while a pod fetches or inspects the model, or will soon do so.

    After a failure, ModelReady stays False with the reason of the failure, until the pod has more bytes than
    before. Without a failure, ModelReady is Unknown, and its message shows the progress.
    """
    status, progress = _with_running_phase(context, stored), context.progress
    if progress is not None and progress.total_bytes:
        done_bytes = _round_to_steps(progress)
        if done_bytes > (stored.bytes_done or 0):
            status = status.changed(failures=None, reason=None, message=None)
        status = status.changed(bytes_done=done_bytes, bytes_total=progress.total_bytes)
    if status.reason is not None:
        return ModelDecision(
            status=status, is_ready=False, reason=status.reason, message=status.message or ""
        )
    message = f"{'fetching' if context.fetches else 'reading'} {context.uri}{_describe_progress(status)}"
    for detail in (wait_message, progress.message if progress is not None else ""):
        if detail:
            message += f": {detail}"
    reason = "Fetching" if context.fetches else "Inspecting"
    return ModelDecision(status=status, is_ready=None, reason=reason, message=message)


def _with_running_phase(context: ModelContext, stored: ModelStatus) -> ModelStatus:
    """Returns the status of a model that a pod fetches or inspects again."""
    return stored.changed(phase=context.phase, profile=None, checked_time=None)


def _round_to_steps(progress: FetchProgress) -> int:
    """Rounds the finished bytes down to whole steps of the total.

    So the status changes at most _NUM_PROGRESS_STEPS times in one fetch.
    """
    finished_steps = min(
        progress.done_bytes * _NUM_PROGRESS_STEPS // progress.total_bytes, _NUM_PROGRESS_STEPS
    )
    # -(-a // b) rounds up. If the bytes were rounded down, they would count as an earlier step.
    return -(-finished_steps * progress.total_bytes // _NUM_PROGRESS_STEPS)


def _describe_progress(status: ModelStatus) -> str:
    """Returns the progress of a fetch in percent as the end of a message, or ""."""
    if not status.bytes_total:
        return ""
    percent = 100 * (status.bytes_done or 0) // status.bytes_total
    return f": {percent} % of {format_bytes(status.bytes_total)}"


def _decide_blocked(
    context: ModelContext, stored: ModelStatus, pod: PodView, waiting: Waiting
) -> ModelDecision:
    """Returns the decision while the kubelet cannot create the pod's container and tries again."""
    reason, message = waiting
    if reason in _IMAGE_REASONS:
        # The kubelet alternates between these reasons. A single reason avoids repeated writes of the status.
        image = context.images.image_for(context.spec, Device.CPU)
        reason, message = (
            "ImagePullBackOff",
            f"its image cannot be pulled ({image}). See the events of the pod",
        )
    elif not is_reason(reason):
        reason, message = "ModelPodWaits", str(waiting)
    return ModelDecision(
        status=_with_running_phase(context, stored),
        is_ready=False,
        reason=reason,
        message=f"pod {pod.name} cannot start: {message or reason}"[:MAX_TEXT],
    )


def _decide_ended(context: ModelContext, stored: ModelStatus, pod: PodView) -> ModelDecision:
    """Returns the decision after the container of the model pod has ended."""
    ended = pod.termination
    assert ended is not None
    if ended.exit_code == 0:
        try:
            return _decide_profile_read(context, stored, pod, ended.message)
        except ContractError as error:
            reason = FailureReason.MODEL_NOT_READABLE.value
            return _decide_failed(
                context, stored, pod, reason, f"pod {pod.name} returned no valid result: {error}"
            )
    failure = Failure.from_json(ended.message)
    if failure is not None:
        return _decide_failed(context, stored, pod, failure.reason.value, f"{context.uri}: {failure.message}")
    reason = ended.reason if ended.reason == OOM_KILLED else _MODEL_POD_ENDED
    return _decide_failed(context, stored, pod, reason, describe_exit(pod.name, ended))


def _decide_profile_read(
    context: ModelContext, stored: ModelStatus, pod: PodView, result: str
) -> ModelDecision:
    """Returns the decision with the profile in the result of the model pod.

    Args:
        result: JSON text of a FetchedModel if the model comes from a hub, otherwise of a ModelProfile.

    Raises:
        ContractError: the result is not valid, or the profile is too long for the status.
    """
    fetched, profile = _parse_result(context, result)
    size_bytes = fetched.size_bytes if fetched is not None else None
    text = profile.to_json()
    if len(text) > MAX_PROFILE_LENGTH:
        raise ContractError(
            f"the profile of the model's {profile.num_layers} layers has {len(text)} characters, but must "
            f"have at most {MAX_PROFILE_LENGTH}. Use a model with fewer layers"
        )
    status = ModelStatus(
        phase=ModelPhase.READY,
        key=stored.key,
        commit=fetched.commit if fetched is not None else None,
        bytes_done=size_bytes,
        bytes_total=size_bytes,
        # A failure may have caused this check. The check must not seem older than the failure, even if the
        # clock was set back. Otherwise the operator would inspect the model again at every reconcile.
        checked_time=max(context.now, context.unreadable_since or context.now),
        profile=text,
    )
    is_new_commit = fetched is not None and fetched.commit != stored.commit
    event = RecordEvent(
        reason="ModelFetched",
        message=f"{context.uri}: commit {status.commit} ({format_bytes(size_bytes or 0)}) is in the cache",
    )
    return ModelDecision(
        status=status,
        is_ready=True,
        reason=_PROFILE_READ,
        message=_describe_profile(profile),
        profile=profile,
        deletes=_build_deletes(context, [pod]),
        events=(event,) if is_new_commit else (),
    )


def _parse_result(context: ModelContext, result: str) -> tuple[FetchedModel | None, ModelProfile]:
    """Parses the result of the model pod: the downloaded model (None without a download), and the profile.

    Raises:
        ContractError: the result is not valid. The message contains a fix.
    """
    try:
        if context.fetches:
            fetched = FetchedModel.from_json(result)
            return fetched, fetched.profile
        return None, ModelProfile.from_json(result)
    except ContractError as error:
        if SAME_VERSION in str(error):
            raise
        raise ContractError(f"{error}. {SAME_VERSION}") from error


def _decide_failed(
    context: ModelContext, stored: ModelStatus, pod: PodView, reason: str, message: str
) -> ModelDecision:
    """Returns the decision after the model pod has failed.

    The pod stays, so that users can read its log, until the next attempt is due. Then the pod is deleted,
    and the failure is counted.
    """
    failures = stored.failures or 0
    # The exponent is limited, because a large power would overflow.
    retry_after_s = min(_FIRST_RETRY_S * 2.0 ** min(failures, 16), _MAX_RETRY_S)
    wait_s = retry_after_s - (context.now - pod.created).total_seconds()  # from the start of the attempt
    is_retry_due = wait_s <= 0
    return ModelDecision(
        status=stored.changed(
            phase=ModelPhase.FAILED,
            profile=None,
            checked_time=None,
            reason=reason[:64],
            message=message[:MAX_TEXT],
            failures=(next_count(failures) if is_retry_due else failures) or None,
        ),
        is_ready=False,
        reason=reason,
        message=message,
        deletes=_build_deletes(context, [pod]) if is_retry_due else (),
        look_again_s=None if is_retry_due else wait_s,
    )


def _build_deletes(context: ModelContext, pods: Sequence[PodView]) -> tuple[DeleteObject, ...]:
    """Returns the deletes of these model pods.

    A pod that has ended is deleted only after the status is written, because the pod has the result.
    """
    ended_pods = [pod for pod in pods if pod.termination is not None]
    running = [pod for pod in pods if pod.termination is None]
    # The grace period is short, because a fetch needs no time to clean up: fetched files stay in the cache.
    return (
        *context.node_loss.build_deletes(ended_pods, grace_s=0, after_status=True),
        *context.node_loss.build_deletes(running, grace_s=_STOP_GRACE_S),
    )


def _describe_profile(profile: ModelProfile) -> str:
    """Describes a model in one line: architecture, layers, size and dtype."""
    size = f"{format_bytes(profile.total_bytes)} of {profile.dtype}"
    return f"{profile.architecture}, {profile.num_layers} layers, {size}"
