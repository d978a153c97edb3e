"""Events on a resource: what happened, for people; never more than a few a minute of the same."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import RecordEvent, ResourceView
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE
from heteroinfer_operator.kube.server import NAMESPACE_ENDS, NOT_FOUND, ApiError, ApiServer

logger = logging.getLogger(__name__)

WINDOW_S: Final = 600.0
"""The same event within this time is counted in the first one's series."""
SERIES_UPDATE_S: Final = 60.0
"""A series is written at most so often."""
MOST_REMEMBERED: Final = 2000
ENDING_S: Final = 30.0
"""A namespace that is being deleted is not asked for again within this time; one of its name may come."""
MESSAGE_CHARACTERS: Final = 1024
"""Limit of `note` (`k8s.io/kubernetes/pkg/apis/core/validation/events.go`)."""

_Same = tuple[str, str, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    name: str
    first_s: float
    written_s: float
    count: int


class EventRecorder:
    """Writes events on resources; identical ones become one with a count.

    An event that cannot be written is logged and dropped: it is for people, and must not stop
    the work that it tells of. Into a namespace that is being deleted none is written: nobody will read it.

    Args:
        server: where to write.
        reporter: name of this operator's instance.
        clock: seconds that never go back.
    """

    def __init__(
        self, server: ApiServer, *, reporter: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._reporter = reporter
        self._clock = clock
        self._seen: OrderedDict[_Same, _Series] = OrderedDict()
        self._ending: dict[str, float] = {}
        """By namespace that is being deleted: when that was said."""

    async def record(self, resource: ResourceView, event: RecordEvent) -> None:
        """Tells people; the same again within WINDOW_S only counts."""
        same = (resource.uid, event.reason, event.message, event.warning)
        now = self._clock()
        if self._is_ending(resource.key.namespace, now):
            return
        series = self._seen.pop(same, None)
        try:
            if series is None or now - series.first_s > WINDOW_S:
                series = await self._create(resource, event, now)
            else:
                series = await self._count(resource, replace(series, count=series.count + 1), now)
        except ApiError as error:
            if NAMESPACE_ENDS in error.causes:
                self._ending[resource.key.namespace] = now
                return
            logger.warning("%s: event %s not recorded: %s", resource.key, event.reason, error.message)
            series = series if error.status != NOT_FOUND else None
        if series is not None:
            self._seen[same] = series
        while len(self._seen) > MOST_REMEMBERED:
            self._seen.popitem(last=False)

    def _is_ending(self, namespace: str, now: float) -> bool:
        self._ending = {name: said for name, said in self._ending.items() if now - said < ENDING_S}
        return namespace in self._ending

    async def _create(self, resource: ResourceView, event: RecordEvent, now: float) -> _Series:
        stored = await self._server.create(
            EVENT.path(resource.key.namespace), self._build_event(resource, event, datetime.now(UTC))
        )
        return _Series(name=stored["metadata"]["name"], first_s=now, written_s=now, count=1)

    async def _count(self, resource: ResourceView, series: _Series, now: float) -> _Series:
        if now - series.written_s < SERIES_UPDATE_S:
            return series
        path = EVENT.path(resource.key.namespace, series.name)
        seen = {"count": series.count, "lastObservedTime": _micro_time(datetime.now(UTC))}
        await self._server.merge(path, {"series": seen})
        return replace(series, written_s=now)

    def _build_event(self, resource: ResourceView, event: RecordEvent, now: datetime) -> dict[str, Any]:
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


def _micro_time(when: datetime) -> str:
    """Returns a time as Kubernetes' MicroTime wants it."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
