"""Records Kubernetes events on resources, with a limit per resource and minute."""

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import RecordEvent, ResourceView
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE
from heteroinfer_operator.kube.server import NAMESPACE_ENDS, NOT_FOUND, ApiError, ApiServer, RequestLane

logger = logging.getLogger(__name__)

WINDOW_S: Final = 600.0
"""An identical event within this time increments the count of the stored event."""
SERIES_UPDATE_S: Final = 60.0
"""Shortest time between two writes of the count."""
MAX_REMEMBERED_EVENTS: Final = 2000
"""At most this many stored events are remembered, to count their repetitions."""
NAMESPACE_ENDING_S: Final = 30.0
"""How long no events are written into a namespace that was being deleted.

Later, a new namespace may have this name.
"""
MESSAGE_CHARACTERS: Final = 1024
"""Kubernetes' limit of `note` (`k8s.io/kubernetes/pkg/apis/core/validation/events.go`)."""

AT_ONCE: Final = 4
"""At most this many events are written at the same time."""
MAX_WAITING_EVENTS: Final = 1000
"""At most this many events wait for the API server."""
MAX_EVENTS_PER_MINUTE: Final = 10
"""At most this many new events of one resource are recorded in a minute."""
MINUTE_S: Final = 60.0
FLUSH_S: Final = 0.5
"""How long a stopping process waits for unwritten events."""

_EventIdentity = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """A stored event and the number of its repetitions.

    Attributes:
        name: name of the Event object.
        first_s: time of the first event.
        written_s: time at which the count was last written.
    """

    name: str
    first_s: float
    written_s: float
    count: int


class EventRecorder:
    """Writes events on resources in the background. Identical events become one event with a count.

    The count leaves out an event that is recorded while an identical event waits or is being written.

    Events are for users, so no reconcile waits for an event. MAX_EVENTS_PER_MINUTE limits the new events of a
    resource, and MAX_WAITING_EVENTS limits the events that wait for a slow API server. The recorder drops and
    counts events above these limits. It logs and drops an event that it cannot write. It writes no events
    into a namespace that is being deleted.

    Args:
        reporter: name of this operator's instance.
        dropped: called for each dropped event.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        reporter: str,
        dropped: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._reporter = reporter
        self._dropped = dropped
        self._clock = clock
        self._waiting: deque[tuple[ResourceView, RecordEvent]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._being_written: set[_EventIdentity] = set()
        self._recent: dict[str, deque[float]] = {}
        """Times of each resource's new events in the last minute, by uid."""
        self._series: OrderedDict[_EventIdentity, _Series] = OrderedDict()
        self._refused_at: dict[str, float] = {}
        """Time of the API server's refusal, by namespace that is being deleted."""

    def record(self, resource: ResourceView, event: RecordEvent) -> None:
        """Queues an event, or drops the event above a limit.

        An event that is identical to an event within WINDOW_S only increments the count of that event, so
        MAX_EVENTS_PER_MINUTE does not apply.
        """
        identity, now = _identity_of(resource, event), self._clock()
        is_queued = any(_identity_of(*queued) == identity for queued in self._waiting)
        if is_queued or self._is_ending(resource.key.namespace, now):
            return  # expected, so `dropped` is not called
        is_repeated = identity in self._series or identity in self._being_written
        is_queue_full = len(self._waiting) >= MAX_WAITING_EVENTS
        may_queue = not is_queue_full and (is_repeated or self._count_new_event(resource.uid, now))
        if not may_queue:
            logger.debug(
                "%s: dropped event %s (limits: %d waiting events, %d new events of a resource per minute)",
                resource.key,
                event.reason,
                MAX_WAITING_EVENTS,
                MAX_EVENTS_PER_MINUTE,
            )
            self._dropped()
            return
        self._waiting.append((resource.without_fields(), event))
        if len(self._workers) < AT_ONCE:
            task = start_task(self._write_queued(), name="events", failed=_report_error)
            self._workers.add(task)
            task.add_done_callback(self._workers.discard)

    async def flush(self, timeout_s: float = FLUSH_S) -> None:
        """Waits until all events are written, or until the timeout."""
        if self._workers:
            await asyncio.wait(self._workers, timeout=timeout_s)

    async def close(self) -> None:
        """Waits for unwritten events for FLUSH_S, and drops the events that are not written by then."""
        await self.flush()
        for task in self._workers:
            task.cancel()

    def _count_new_event(self, uid: str, now: float) -> bool:
        """Counts a new event of a resource. Returns False if the resource is at its limit.

        Such an event is not counted. Also forgets resources without events in the last minute.
        """
        uids_without_recent = [other for other, times in self._recent.items() if now - times[-1] >= MINUTE_S]
        for other in uids_without_recent:
            del self._recent[other]
        times = self._recent.get(uid, deque())
        while times and now - times[0] >= MINUTE_S:
            times.popleft()
        if len(times) >= MAX_EVENTS_PER_MINUTE:
            return False
        times.append(now)
        self._recent[uid] = times
        return True

    async def _write_queued(self) -> None:
        """Writes events until the queue is empty.

        Skips an event while another worker writes an identical event. No count contains a skipped event, as
        in `record`, which skips an event that is identical to a queued event.
        """
        while self._waiting:
            resource, event = self._waiting.popleft()
            identity = _identity_of(resource, event)
            if identity in self._being_written:
                continue
            self._being_written.add(identity)
            try:
                await self._write(resource, event, identity)
            finally:
                self._being_written.discard(identity)

    async def _write(self, resource: ResourceView, event: RecordEvent, identity: _EventIdentity) -> None:
        """Writes a queued event: as a new event, or as a higher count of an identical event.

        Logs and drops an event that cannot be written.
        """
        now = self._clock()
        if self._is_ending(resource.key.namespace, now):
            return
        series = self._series.pop(identity, None)
        try:
            if series is None or now - series.first_s > WINDOW_S:
                series = await self._create(resource, event, now)
            else:
                series = await self._update_series(resource, replace(series, count=series.count + 1), now)
        except HeteroInferError as error:  # an ApiError, or a lost Lease
            is_namespace_ending = isinstance(error, ApiError) and NAMESPACE_ENDS in error.causes
            if is_namespace_ending:  # expected, so without a log line
                self._refused_at[resource.key.namespace] = now
                return
            logger.warning("%s: the event %s was not recorded: %s", resource.key, event.reason, error.message)
            self._dropped()
            is_stored_event_gone = isinstance(error, ApiError) and error.status == NOT_FOUND
            if is_stored_event_gone:  # the next identical event is a new event
                series = None
        if series is not None:
            self._series[identity] = series  # at the end of the order, as the newest
        while len(self._series) > MAX_REMEMBERED_EVENTS:
            self._series.popitem(last=False)

    def _is_ending(self, namespace: str, now: float) -> bool:
        """Reports whether a namespace was being deleted less than NAMESPACE_ENDING_S ago.

        Forgets namespaces that were being deleted earlier.
        """
        self._refused_at = {
            name: refused_at
            for name, refused_at in self._refused_at.items()
            if now - refused_at < NAMESPACE_ENDING_S
        }
        return namespace in self._refused_at

    async def _create(self, resource: ResourceView, event: RecordEvent, now: float) -> _Series:
        """Creates a new event in the cluster."""
        path = EVENT.path(resource.key.namespace)
        body = self._build_event(resource, event, datetime.now(UTC))
        stored = await self._server.create(path, body, lane=RequestLane.EVENT)
        return _Series(name=stored["metadata"]["name"], first_s=now, written_s=now, count=1)

    async def _update_series(self, resource: ResourceView, series: _Series, now: float) -> _Series:
        """Writes the count of a repeated event, unless it was written less than SERIES_UPDATE_S ago.

        Returns the series, with `written_s` as its last write.
        """
        if now - series.written_s < SERIES_UPDATE_S:
            return series
        path = EVENT.path(resource.key.namespace, series.name)
        new_series = {"count": series.count, "lastObservedTime": _micro_time(datetime.now(UTC))}
        await self._server.merge(path, {"series": new_series}, lane=RequestLane.EVENT)
        return replace(series, written_s=now)

    def _build_event(self, resource: ResourceView, event: RecordEvent, now: datetime) -> dict[str, Any]:
        """Builds the Event object."""
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {
                "generateName": f"{resource.key.name[:200]}-",
                "namespace": resource.key.namespace,
                "labels": {names.LABEL_RESOURCE: resource.key.name},
            },
            "eventTime": _micro_time(now),
            "reportingController": names.MANAGER,
            "reportingInstance": self._reporter[:128],
            "action": "Reconcile",
            "reason": event.reason,
            "note": printable(event.message)[:MESSAGE_CHARACTERS],
            "type": "Warning" if event.warning else "Normal",
            "regarding": {
                "apiVersion": HETERO_INFERENCE.api_version,
                "kind": HETERO_INFERENCE.name,
                "namespace": resource.key.namespace,
                "name": resource.key.name,
                "uid": resource.uid,
                "resourceVersion": resource.resource_version,
            },
        }


def _identity_of(resource: ResourceView, event: RecordEvent) -> _EventIdentity:
    """Returns the values that are equal for identical events."""
    return resource.uid, event.reason, event.message, event.warning


def _report_error(error: BaseException) -> None:
    """Logs the error that ended the writing task. The next event starts a new task."""
    logger.error(
        "event writer: stopped until the next event, because of a defect of the operator. Report it, with "
        "this log",
        exc_info=error,
    )


def _micro_time(when: datetime) -> str:
    """Formats a time as Kubernetes' MicroTime."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
