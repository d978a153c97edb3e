"""Explains why pods wait for a scheduler, a claim or a volume.

For a pod without a node, the scheduler reports only that a claim is unbound, or reports nothing while the
claim waits for the pod. The provisioner reports the reason in an event of the claim. If a volume cannot be
mounted, for example because a ConfigMap is missing, the pod's status contains only ContainerCreating. The
kubelet reports the reason in an event of the pod. If no scheduler looks at a pod, no event reports a reason.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.printable import printable
from heteroinfer_operator.api import When, parse_status
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceView, Waiting
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import CLAIM, EVENT, GANG_CHILDREN, POD
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord, label_key
from heteroinfer_operator.manifests.mounted_files import FIELDS_OF_VOLUMES
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.stored_fields import as_object, as_objects, as_text, as_texts

logger = logging.getLogger(__name__)

SILENT_S: Final = 1.0
"""How long a pod may wait before this module looks for the reason.

A pod without a node and without a message of the scheduler may wait for a claim. A pod with a node but
without a container may wait for a volume.
"""
AGAIN_S: Final = 20.0
"""Longest interval of requests about a claim or a pod while a pod waits.

The first interval is SILENT_S, and each interval is twice as long as the interval before. So users read the
reason soon, and many pods that wait for long cause few requests.
"""
NOT_LOOKED_S: Final = 5.0
"""How long a pod may wait for the first look of a scheduler.

After each look, kube-scheduler writes a node or the condition PodScheduled. Measured with kube-scheduler 1.35
on two cores: 5 to 27 ms after the creation (60 pods). The rest is for busy machines, hundreds of other new
pods and a scheduler that restarts.
"""
_NOT_LOOKED: Final = "no scheduler has looked at the pod"
_SELECTED_NODE: Final = "volume.kubernetes.io/selected-node"
"""Annotation with which a scheduler tells the provisioner the node of a claim's pod."""
_WAITS_FOR_POD: Final = "WaitForFirstConsumer"
"""Reason of the event about a claim that waits for a scheduler's look at its pod."""
_NATIVE_GANGS: Final = frozenset({Gang.NATIVE, Gang.NATIVE_ALPHA2, Gang.NATIVE_BETA})
_MAX_EVENTS: Final = 50
_MAX_NOTE: Final = 400
"""Maximum number of characters that are quoted from an event."""
_NAMES_CLAIM: Final = re.compile("persistentvolumeclaim", re.IGNORECASE)
_BOUND: Final = "Bound"
_NOT_MOUNTED: Final = frozenset({"FailedMount", "FailedAttachVolume"})
"""Reasons of the events about volumes, from the kubelet and the attach controller."""
_MISSING_OBJECT: Final = re.compile('(configmap|secret) "([^"]+)" not found')
_MISSING_KEY: Final = re.compile('volume "([^"]+)" : .*?non-existent (?:config|secret) key: ([^ ,;]+)')
"""Text of the kubelet (volume/configmap and volume/secret), which leaves out the object's name."""
_SUMMARY: Final = "Unable to attach or mount volumes"
"""Text of the kubelet's event about all volumes of a pod (kubelet/volumemanager/volume_manager.go).

This event does not contain the cause.
"""
_CREATING: Final = frozenset({"ContainerCreating", "PodInitializing"})
_KIND_NAMES: Final = {"configmap": "ConfigMap", "secret": "Secret"}


_PodOrClaim = tuple[str, str]
"""Kind and name of a claim or a pod."""
_Group = tuple[str, str, str]
"""Index and epoch of a group, and the name of its scheduler."""


@dataclass(slots=True)
class _EventRequest:
    """A request for the events about a claim or a pod.

    Attributes:
        at_s: time of the request.
        reason: why the claim is not bound or the pod's volumes are not mounted, or "". Until this request is
            answered, the reason from the previous answer.
        again_s: seconds from this request to the next request.
        has_node: whether a scheduler has chosen a node for the pod of an unbound claim.
    """

    at_s: float
    task: asyncio.Task[None]
    reason: str = ""
    again_s: float = SILENT_S
    has_node: bool = False

    def next_s(self, now_s: float) -> float:
        """Returns the seconds until the next request; at least SILENT_S if this request has no answer.

        The next request is sent only after the answer to this request.
        """
        left_s = self.at_s + self.again_s - now_s
        return left_s if self.task.done() else max(left_s, SILENT_S)


@dataclass(slots=True)
class _WaitingPods:
    """The operator's knowledge about the waiting pods of one resource.

    Attributes:
        uid: uid of the resource, because a new resource may get the same name.
        since_s: time at which this process first saw a pod wait, by the pod's uid and node ("" without a
            node). A pod that gets a node waits anew, for other reasons.
        heard_s: last time at which a scheduler's report about a pod without a node was stored, by group.
        reported: uids of pods about which the stored status reports that no scheduler looks at them. Another
            process of the operator has waited for them, so the report stays.
        requests: last request about each claim and pod.
        next_s: seconds until the next check if no watch shows a change, or None.
    """

    uid: str
    since_s: dict[tuple[str, str], float] = field(default_factory=dict)
    heard_s: dict[_Group, float] = field(default_factory=dict)
    reported: frozenset[str] = frozenset()
    requests: dict[_PodOrClaim, _EventRequest] = field(default_factory=dict)
    next_s: float | None = None

    def provisioning(self) -> frozenset[str]:
        """Returns the unbound claims for whose pods a scheduler has chosen a node."""
        return frozenset(name for (_, name), request in self.requests.items() if request.has_node)

    def count_seconds(self, pods: Iterable[PodRecord], now_s: float) -> dict[str, float]:
        """Returns the seconds for which each of the pods has waited, by the pod's uid; forgets other pods."""
        keys = dict.fromkeys((pod.view.uid, pod.view.node) for pod in pods)
        self.since_s = {key: self.since_s.get(key, now_s) for key in keys}
        return {uid: now_s - since_s for (uid, _), since_s in self.since_s.items()}

    def find_unlooked(
        self,
        pods: Sequence[PodRecord],
        waiting_s: Mapping[str, float],
        provisioning: Collection[str],
        now_s: float,
    ) -> tuple[frozenset[str], float | None]:
        """Returns the uids of pods that no scheduler looks at, and the seconds until the next such pod.

        No scheduler looks at a pod if the scheduler was silent about the pod's group for NOT_LOOKED_S.

        Args:
            waiting_s: seconds for which each pod has waited, by the pod's uid.
            provisioning: claims for whose pods a scheduler has chosen a node, and that are not bound yet.
        """
        heard_groups = _find_heard_groups(pods, provisioning)
        groups = {_group_of(pod) for pod in pods}
        self.heard_s = {group: heard_s for group, heard_s in self.heard_s.items() if group in groups}
        self.heard_s |= dict.fromkeys(heard_groups, now_s)
        unlooked: set[str] = set()
        left_s: list[float] = []
        for pod in filter(_is_silent, pods):
            group = _group_of(pod)
            # If the scheduler has never reported the group, the silence is as long as the pod's wait.
            silent_s = min(waiting_s[pod.view.uid], now_s - self.heard_s.get(group, -float("inf")))
            if silent_s >= NOT_LOOKED_S or pod.view.uid in self.reported:
                unlooked.add(pod.view.uid)
            elif group not in heard_groups:  # for a heard group, another check follows at the end of its wait
                left_s.append(NOT_LOOKED_S - silent_s)
        return frozenset(unlooked), min(left_s, default=None)


class PendingPods:
    """Finds out why pods without a node or a container wait. Use from one event loop.

    Args:
        wake: called with a resource once the reason for one of its claims or pods changes.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        wake: Callable[[ResourceKey], None] = lambda key: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._wake = wake
        self._clock = clock
        self._waiting: dict[ResourceKey, _WaitingPods] = {}

    def explain(self, resource: ResourceView, pods: Sequence[PodRecord]) -> tuple[PodView, ...]:
        """Returns the pods as decisions read them, with the known reasons why they wait.

        Requests the reasons that are unknown or old. The answers wake the resource if a reason changes.
        """
        now_s = self._clock()
        # Pods without a node may wait for a scheduler or a claim, pods without a container for a volume.
        without_node = [
            pod
            for pod in pods
            if _is_silent(pod) or (pod.claims and not pod.view.node and not _has_run(pod.view))
        ]
        without_container = [pod for pod in pods if _is_being_prepared(pod.view)]
        if not without_node and not without_container:
            self.forget(resource.key)
            return tuple(pod.view for pod in pods)
        waiting = self._waiting_pods_of(resource, without_node)
        waiting_s = waiting.count_seconds((*without_node, *without_container), now_s)
        for_claims = [pod for pod in without_node if _may_wait_for_claim(pod, waiting_s[pod.view.uid])]
        for_volumes = _first_of_each_role(
            [pod.view for pod in without_container if waiting_s[pod.view.uid] >= SILENT_S]
        )
        claims = {(CLAIM.name, name) for pod in for_claims for name in pod.claims}
        pods_for_volumes = {(POD.name, pod.name) for pod in for_volumes}
        self._request_reasons(resource, waiting, claims | pods_for_volumes, now_s)
        unlooked, next_unlooked_s = waiting.find_unlooked(pods, waiting_s, waiting.provisioning(), now_s)

        checks_s = [request.next_s(now_s) for request in waiting.requests.values()]
        has_unexplained = without_container or any(not pod.view.unschedulable for pod in without_node)
        if has_unexplained:  # check again once these pods have waited for SILENT_S
            checks_s += [SILENT_S - pod_s for pod_s in waiting_s.values() if pod_s < SILENT_S]
        if next_unlooked_s is not None:
            checks_s.append(next_unlooked_s)
        waiting.next_s = min(checks_s, default=None)

        uids_for_claims = frozenset(pod.view.uid for pod in for_claims)
        return tuple(_with_reasons(resource, pod, waiting, uids_for_claims, unlooked) for pod in pods)

    def _waiting_pods_of(self, resource: ResourceView, without_node: Sequence[PodRecord]) -> _WaitingPods:
        """Returns what is known about a resource's waiting pods; a new object for a new resource."""
        waiting = self._waiting.get(resource.key)
        if waiting is None or waiting.uid != resource.uid:
            self.forget(resource.key)
            reported = _find_reported_pods(resource, without_node)
            waiting = self._waiting[resource.key] = _WaitingPods(resource.uid, reported=reported)
        return waiting

    def next_check_s(self, key: ResourceKey) -> float | None:
        """Returns the seconds until the resource needs another check without an event, or None."""
        waiting = self._waiting.get(key)
        return waiting.next_s if waiting is not None else None

    def forget(self, key: ResourceKey) -> None:
        """Drops the state of a resource that is gone or has no waiting pods, and cancels its requests."""
        if (waiting := self._waiting.pop(key, None)) is not None:
            for request in waiting.requests.values():
                request.task.cancel()

    def _request_reasons(
        self, resource: ResourceView, waiting: _WaitingPods, wanted: set[_PodOrClaim], now_s: float
    ) -> None:
        """Requests the reason why each wanted claim or pod waits; cancels requests about all others.

        Sends no new request while the last request is running or was answered recently.
        """
        for kind_and_name in waiting.requests.keys() - wanted:
            waiting.requests.pop(kind_and_name).task.cancel()
        for kind_and_name in sorted(wanted):
            last = waiting.requests.get(kind_and_name)
            is_due = last is None or (last.task.done() and last.next_s(now_s) <= 0)
            if not is_due:
                continue
            reason = last.reason if last is not None else ""
            has_node = last is not None and last.has_node
            again_s = SILENT_S if last is None else min(2 * last.again_s, AGAIN_S)
            work = self._find_reason(resource, waiting, kind_and_name)
            task = start_task(work, name=" ".join(kind_and_name), failed=_report_error)
            waiting.requests[kind_and_name] = _EventRequest(now_s, task, reason, again_s, has_node)

    async def _find_reason(
        self, resource: ResourceView, waiting: _WaitingPods, kind_and_name: _PodOrClaim
    ) -> None:
        """Finds out why a claim or a pod waits. Wakes the resource if the reason has changed."""
        key, (kind, name) = resource.key, kind_and_name
        has_node = False
        if kind == CLAIM.name:
            reason, has_node = await self._find_claim_reason(resource, name)
        else:
            reason = _find_mount_reason(await self._list_events(key.namespace, kind_and_name), key.namespace)
        request = waiting.requests.get(kind_and_name)
        if request is not None and (request.reason, request.has_node) != (reason, has_node):
            request.reason = reason
            request.has_node = has_node
            request.again_s = SILENT_S  # the next cause, such as a missing key, may follow soon
            self._wake(key)

    async def _find_claim_reason(self, resource: ResourceView, name: str) -> tuple[str, bool]:
        """Returns why a claim is not bound, and whether a scheduler has chosen a node for it.

        The reason is "" if the claim is bound, if it only waits for a scheduler, or if the operator will
        create it. The second value is False for a bound claim.
        """
        namespace = resource.key.namespace
        try:
            claim = await self._server.get_quickly(CLAIM.path(namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return _describe_missing_claim(resource, name), False
            raise
        annotations = as_object(
            as_object(claim.get("metadata"), "metadata").get("annotations"), "annotations"
        )
        if as_text(as_object(claim.get("status"), "status").get("phase"), "phase") == _BOUND:
            return "", False  # a bound claim keeps the annotation, so do not read it
        has_node = _SELECTED_NODE in annotations
        try:
            events = await self._list_events(namespace, (CLAIM.name, name))
        except ApiError as error:
            reported = f"its events cannot be read ({error.answer_message[:100]})"
        else:
            newest = _find_newest(events)
            if newest is not None and newest.get("reason") == _WAITS_FOR_POD and not has_node:
                return "", False
            reported = _quote_event(newest) if newest is not None else ""
        return _describe_unbound_claim(claim, name, reported), has_node

    async def _list_events(self, namespace: str, kind_and_name: _PodOrClaim) -> Sequence[Mapping[str, Any]]:
        """Returns the newest events about a claim or a pod."""
        selector = "regarding.kind={},regarding.name={}".format(*kind_and_name)
        query = {"fieldSelector": selector, "limit": str(_MAX_EVENTS)}
        return as_objects((await self._server.get(EVENT.path(namespace), query)).get("items"), "items")


def _with_reasons(
    resource: ResourceView,
    pod: PodRecord,
    waiting: _WaitingPods,
    uids_for_claims: Collection[str],
    unlooked: Collection[str],
) -> PodView:
    """Returns a pod with the known reasons why it waits.

    Args:
        uids_for_claims: uids of pods that may wait for a claim. All other pods may wait for a volume.
        unlooked: uids of pods that no scheduler looks at. A pod whose claim is being provisioned waits for
            the provisioner instead.
    """
    reasons = {target: request.reason for target, request in waiting.requests.items() if request.reason}
    if pod.view.uid in uids_for_claims:
        view = _with_claim_reason(pod, reasons)
    else:
        view = _with_mount_reason(pod.view, reasons)
    waits_for_provisioner = not waiting.provisioning().isdisjoint(pod.claims)
    is_unlooked = pod.view.uid in unlooked and not waits_for_provisioner
    return _with_silence(resource, pod, view) if is_unlooked else view


def _has_run(pod: PodView) -> bool:
    """Reports whether the pod has run, so that it waits for no claim and no scheduler."""
    return pod.started or pod.ended


def _is_being_prepared(pod: PodView) -> bool:
    """Reports whether the kubelet is preparing the pod: mounting its volumes or pulling its image."""
    has_no_other_reason = pod.waiting is None or pod.waiting.reason in _CREATING
    return bool(pod.node) and not _has_run(pod) and has_no_other_reason


def _first_of_each_role(pods: Sequence[PodView]) -> list[PodView]:
    """Returns the first pod of each role, because pods of a role have the same volumes.

    A pod without a role, such as the fetch pod, counts as its own role.
    """
    # In reverse, so that the first pod of a role replaces the later pods.
    return list({pod.labels.get(names.LABEL_ROLE, pod.name): pod for pod in reversed(pods)}.values())


def _with_mount_reason(pod: PodView, reasons: Mapping[_PodOrClaim, str]) -> PodView:
    """Returns the pod with its failed mount as the reason for waiting, if an event reports a failed mount."""
    reason = reasons.get((POD.name, pod.name))
    if reason is None or not _is_being_prepared(pod):
        return pod
    return replace(pod, waiting=Waiting("FailedMount", reason))


def _find_mount_reason(events: Sequence[Mapping[str, Any]], namespace: str) -> str:
    """Returns why a volume of a pod is not mounted, or "".

    If the newest event is not about a failed mount, the kubelet has mounted the volumes since.
    """
    newest_first = sorted(events, key=_order_of_mounts, reverse=True)
    if not newest_first or not _is_failed_mount(newest_first[0]):
        return ""
    failures = [event for event in newest_first if _is_failed_mount(event)]
    # The kubelet's event about all volumes has no cause, and may be newer than the event with the cause.
    causes = [failure for failure in failures if _SUMMARY not in as_text(failure.get("note"), "note")]
    newest = (causes or failures)[0]
    note = as_text(newest.get("note"), "note")
    if (missing_key := _MISSING_KEY.search(note)) is not None:
        volume, key = (printable(part)[:253] for part in missing_key.groups())
        source = FIELDS_OF_VOLUMES.get(volume, f"volume {volume} of the role's template")
        return f"the ConfigMap or Secret in {source} has no key {key}. Add the key, or correct {source}"
    if (missing_object := _MISSING_OBJECT.search(note)) is not None:
        name = f"{_KIND_NAMES[missing_object[1]]} {printable(missing_object[2])[:253]}"
        fix = "Create this object, or correct its name in the spec"
        return f"{name} does not exist in namespace {namespace}. {fix}"
    return _quote_event(newest)


def _order_of_mounts(event: Mapping[str, Any]) -> tuple[str, bool, str]:
    """Returns the sort key of an event: its second, whether it is about a failed mount, its full time.

    The kubelet's events have no fraction of a second. If an event of the kubelet and an event of the
    scheduler have the same second, the kubelet's event is later: only a pod with a node mounts volumes.
    """
    time_text = _event_time(event)
    second = time_text[: len("2026-01-01T00:00:00")]
    return second, _is_failed_mount(event), time_text


def _is_failed_mount(event: Mapping[str, Any]) -> bool:
    """Reports whether an event is about a failed mount."""
    return as_text(event.get("reason"), "reason") in _NOT_MOUNTED


def _may_wait_for_claim(pod: PodRecord, waiting_s: float) -> bool:
    """Reports whether a pod without a node may wait for a claim.

    The scheduler's message names a claim if the pod waits for one. Without a message, a wait of SILENT_S
    suggests a claim.

    Args:
        waiting_s: seconds since this process first saw the pod without a node.
    """
    scheduler_message = pod.view.unschedulable
    return bool(_NAMES_CLAIM.search(scheduler_message)) if scheduler_message else waiting_s >= SILENT_S


def _with_claim_reason(pod: PodRecord, reasons: Mapping[_PodOrClaim, str]) -> PodView:
    """Returns the pod with the reasons of its unbound claims, followed by the scheduler's message."""
    claim_reasons = [reasons[CLAIM.name, name] for name in pod.claims if (CLAIM.name, name) in reasons]
    if not claim_reasons:
        return pod.view
    return replace(pod.view, unschedulable="; ".join(filter(None, (*claim_reasons, pod.view.unschedulable))))


def _find_newest(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the newest warning, otherwise the newest event; None without events."""
    return max(events, key=lambda event: (event.get("type") == "Warning", _event_time(event)), default=None)


def _quote_event(event: Mapping[str, Any]) -> str:
    """Quotes an event with its reporter and reason."""
    source = as_object(event.get("deprecatedSource"), "deprecatedSource")
    reporter = as_text(event.get("reportingController"), "reportingController") or as_text(
        source.get("component"), "component"
    )
    event_reason, note = (as_text(event.get(part), part) for part in ("reason", "note"))
    quoted = printable(note)[:_MAX_NOTE].strip()
    return f'{printable(reporter)[:100]} reports {printable(event_reason)[:64]}: "{quoted}"'


def _event_time(event: Mapping[str, Any]) -> str:
    """Returns the last time of an event, as text, from whichever field has it.

    The texts sort like the times, except within one second: only some texts have fractions of a second.
    """
    series = as_object(event.get("series"), "series")
    times = (
        series.get("lastObservedTime"),
        event.get("deprecatedLastTimestamp"),
        event.get("eventTime"),
        as_object(event.get("metadata"), "metadata").get("creationTimestamp"),
    )
    return max(as_text(each, "time") for each in times)


def _describe_unbound_claim(claim: Mapping[str, Any], name: str, reported: str) -> str:
    """Describes an unbound claim: its storage, the newest event about the claim, and a fix.

    Args:
        reported: the event, or "".
    """
    spec = as_object(claim.get("spec"), "spec")
    storage_class = as_text(spec.get("storageClassName"), "storageClassName")
    requests = as_object(as_object(spec.get("resources"), "resources").get("requests"), "requests")
    parts = [
        f"storage class {storage_class}" if storage_class else "no storage class",
        *as_texts(spec.get("accessModes"), "accessModes"),
        as_text(requests.get("storage"), "storage"),
    ]
    problem = f"claim {name} ({', '.join(filter(None, parts))}) is not bound"
    is_made_by_operator = label_key(claim) is not None
    fix = (
        "Set spec.model.cache.storageClassName and accessMode to values that the cluster supports"
        if is_made_by_operator
        else f"Fix the claim (kubectl describe pvc {name})"
    )
    return f"{problem}: {reported or 'no event reports the reason'}. {fix}"


def _describe_missing_claim(resource: ResourceView, name: str) -> str:
    """Describes a claim that a user must create; returns "" for a claim that the operator creates."""
    model = as_object(resource.spec.get("model"), "model")
    cache = as_object(model.get("cache"), "cache")
    _, _, path = as_text(model.get("uri"), "uri").partition("pvc://")
    if path.partition("/")[0] == name:
        source = "spec.model.uri"
    elif as_text(cache.get("claimName"), "claimName") == name:
        source = "spec.model.cache.claimName"
    elif _is_claim_of_template(resource, name):
        source = "claimName in the volumes of the role's template"
    else:
        return ""
    return (
        f"claim {printable(name)} does not exist in namespace {resource.key.namespace}. Create it, or "
        f"correct {source}"
    )


def _is_claim_of_template(resource: ResourceView, name: str) -> bool:
    """Reports whether the template of a role mounts a claim."""
    for role in as_objects(resource.spec.get("roles"), "roles"):
        for volume in as_objects(as_object(role.get("template"), "template").get("volumes"), "volumes"):
            claim = as_object(volume.get("persistentVolumeClaim"), "persistentVolumeClaim")
            if claim.get("claimName") == name:
                return True
    return False


def _is_silent(pod: PodRecord) -> bool:
    """Reports whether a pod has no node and no report of a scheduler."""
    view = pod.view
    never_ran = view.phase == "Pending" and not _has_run(view)
    return never_ran and not view.node and not view.unschedulable and not pod.has_scheduling_state


def _group_of(pod: PodRecord) -> _Group:
    """Returns the group of a pod, with the scheduler of the pod."""
    labels = pod.view.labels
    return labels.get(names.LABEL_GROUP, ""), labels.get(names.LABEL_EPOCH, ""), pod.scheduler


def _find_heard_groups(pods: Iterable[PodRecord], provisioning: Collection[str]) -> frozenset[_Group]:
    """Returns the groups whose scheduler is not silent: it has reported a pod, or waits for a provisioner.

    A gang scheduler reports why it has no node for one pod, and nothing about the other pods of the group. A
    scheduler that has chosen a node for a pod's claim reports nothing while the provisioner works.
    """
    return frozenset(
        _group_of(pod)
        for pod in pods
        if not pod.view.node
        and not pod.view.ended
        and (pod.has_scheduling_state or not set(pod.claims).isdisjoint(provisioning))
    )


def _find_reported_pods(resource: ResourceView, pods: Sequence[PodRecord]) -> frozenset[str]:
    """Returns the uids of pods about which the stored status reports that no scheduler looks at them."""
    status = parse_status(resource.status)
    texts = [each.message for each in status.conditions if _NOT_LOOKED in each.message]
    texts += [group.message for group in status.groups if group.message and _NOT_LOOKED in group.message]
    return frozenset(
        pod.view.uid
        for pod in pods
        for text in texts
        if f"pod {pod.view.name} waits: {_NOT_LOOKED}" in text
        or f"pod {pod.view.name} is not placed: {_NOT_LOOKED}" in text
    )


def _with_silence(resource: ResourceView, pod: PodRecord, view: PodView) -> PodView:
    """Returns the pod with the message that no scheduler looks at it, before the reasons of its claims."""
    message = f"{_NOT_LOOKED} (schedulerName {printable(pod.scheduler)[:253]}). {_silence_fix(resource, pod)}"
    return replace(view, unschedulable="; ".join(filter(None, (message, view.unschedulable))))


def _silence_fix(resource: ResourceView, pod: PodRecord) -> str:
    """Returns the likely causes why no scheduler looks at a pod, and what to do."""
    if pod.resource_claims:
        claims = ", ".join(map(printable, pod.resource_claims))[:_MAX_NOTE]
        return (
            f"A possible cause is that {claims} does not exist in namespace {resource.key.namespace}, "
            "because kube-scheduler reports nothing about such pods: create it, or correct resourceClaims of "
            "the role's template. Otherwise, start that scheduler"
        )
    scheduling = as_object(resource.spec.get("scheduling"), "scheduling")
    gang = pod.view.labels.get(names.LABEL_GANG, "")
    if gang not in GANG_CHILDREN or scheduling.get("schedulerName") == pod.scheduler:
        return "Start that scheduler, or set spec.scheduling.schedulerName to a scheduler that runs"
    if scheduling.get("gang", When.AUTO) != When.AUTO:
        return (
            "Start that scheduler, or set spec.scheduling.schedulerName to a scheduler that runs and places "
            "gangs"
        )
    origin = "makes the pods a gang" if Gang(gang) in _NATIVE_GANGS else "chose that scheduler"
    return (
        f"spec.scheduling.gang: Auto {origin} because the cluster serves the API "
        f"{GANG_CHILDREN[Gang(gang)].api_version}. Start that scheduler, or set spec.scheduling.gang: Never"
    )


def _report_error(error: BaseException) -> None:
    """Logs an error that is a defect of the operator. After any other error, the next check tries again."""
    if not isinstance(error, HeteroInferError):
        logger.error(
            "cannot read a claim or events, because of a defect of the operator. Report it, with this log",
            exc_info=error,
        )
