"""The model's profile: read once by a short inspect pod, then kept in the status. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import HeteroInferenceSpec, ModelPhase, ModelStatus
from heteroinfer_operator.cluster import CreateObject, DeleteObject, PodView
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.pod import WorkerImages, build_inspect_pod, inspect_pod_name

_RETRY_S = 30.0
"""After a failed look at the model: the files may have been put right meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDecision:
    """What is known of the model, and what to do to know it.

    Attributes:
        status: its next status.
        profile: its sizes, or None if they are not known yet.
        reason: CamelCase.
        message: for people.
        creates: an inspect pod.
        deletes: inspect pods.
        look_again_s: seconds until the next look, or None.
    """

    status: ModelStatus
    reason: str
    message: str = ""
    profile: ModelProfile | None = None
    creates: tuple[CreateObject, ...] = ()
    deletes: tuple[DeleteObject, ...] = ()
    look_again_s: float | None = None


def decide_model(
    spec: HeteroInferenceSpec,
    owner: Owner,
    status: ModelStatus | None,
    pods: Sequence[PodView],
    *,
    source: ModelSource,
    images: WorkerImages,
    now: datetime,
) -> ModelDecision:
    """Returns what is known of the model of this spec.

    Args:
        spec: what the user asks for.
        owner: the resource.
        status: of the model as last written, or None.
        pods: the inspect pods of the resource.
        source: where pods find the model.
        images: defaults of the operator.
        now: time of the pass.
    """
    key = identity.model_key(spec)
    profile = _kept_profile(status, key)
    if profile is not None and status is not None:
        return ModelDecision(
            status=status,
            reason="ProfileRead",
            profile=profile,
            message=_describe(profile),
            deletes=_deletes(pods),
        )
    name = inspect_pod_name(spec, owner)
    pod = next((pod for pod in pods if pod.name == name), None)
    others = _deletes([pod for pod in pods if pod.name != name])
    if pod is None:
        create = CreateObject(manifest=build_inspect_pod(spec, owner, source, images))
        return ModelDecision(
            status=ModelStatus(phase=ModelPhase.INSPECTING, key=key),
            reason="Inspecting",
            message=f"reading {spec.model.uri}",
            creates=(create,),
            deletes=others,
        )
    if pod.termination is None:
        waits = pod.unschedulable or pod.waiting
        return ModelDecision(
            status=ModelStatus(phase=ModelPhase.INSPECTING, key=key),
            reason="Inspecting",
            message=f"reading {spec.model.uri}" + (f": pod {pod.name} waits: {waits}" if waits else ""),
            deletes=others,
        )
    return _inspected(pod, key, spec.model.uri, now)


def _inspected(pod: PodView, key: str, uri: str, now: datetime) -> ModelDecision:
    assert pod.termination is not None
    if pod.termination.exit_code == 0:
        try:
            profile = ModelProfile.from_json(pod.termination.message)
        except ContractError as error:
            return _unreadable(pod, key, f"{uri}: the inspect pod's answer is not a profile: {error}", now)
        return ModelDecision(
            status=ModelStatus(phase=ModelPhase.READY, key=key, profile=pod.termination.message),
            reason="ProfileRead",
            profile=profile,
            message=_describe(profile),
            deletes=_deletes([pod]),
        )
    failure = Failure.from_json(pod.termination.message)
    message = (
        failure.message
        if failure
        else f"exit code {pod.termination.exit_code} {pod.termination.message[:300]}"
    )
    return _unreadable(pod, key, f"{uri}: {message}", now)


def _unreadable(pod: PodView, key: str, message: str, now: datetime) -> ModelDecision:
    age_s = (now - pod.created).total_seconds()
    again = age_s >= _RETRY_S
    return ModelDecision(
        status=ModelStatus(phase=ModelPhase.FAILED, key=key),
        reason="ModelNotReadable",
        message=message,
        deletes=_deletes([pod]) if again else (),
        look_again_s=None if again else _RETRY_S - age_s,
    )


def _kept_profile(status: ModelStatus | None, key: str) -> ModelProfile | None:
    if status is None or status.key != key or status.profile is None:
        return None
    try:
        return ModelProfile.from_json(status.profile)
    except ContractError:  # written by another version: read the model again
        return None


def _deletes(pods: Sequence[PodView]) -> tuple[DeleteObject, ...]:
    return tuple(
        DeleteObject(kind="Pod", name=pod.name, uid=pod.uid, grace_s=0)
        for pod in pods
        if not pod.deleting and pod.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_INSPECT
    )


def _describe(profile: ModelProfile) -> str:
    size = f"{profile.total_bytes / 2**30:.2f} GiB of {profile.dtype}"
    return f"{profile.architecture}, {profile.num_layers} layers, {size}"
