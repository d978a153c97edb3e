"""Pods that run on without the label by which they are watched: to a watch they are gone."""

import asyncio
from collections.abc import Collection
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import RecordEvent, ResourceView
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord

LOOK_AGAIN_S: Final = 1.0
"""No watch tells how such a pod fares."""


async def find_unlabelled(
    server: ApiServer, resource: ResourceView, known: Collection[PodRecord], *, before: Collection[str]
) -> list[PodRecord]:
    """Returns the pods of a resource that no watch shows any more, though they are there and its own.

    Asked for are those alone that the status has and the caches lack: none, but while an epoch ends.

    Args:
        server: asked.
        resource: that owns them.
        known: what the watches show.
        before: names of those that were found last: they are looked at until they are gone.

    Raises:
        ApiError: the API server did not answer, or refused.
    """
    seen = {pod.view.name for pod in known}
    groups = parse_status(resource.status).groups
    kept = {rank.pod for group in groups for rank in group.members}
    found = await asyncio.gather(*(_find(server, resource, name) for name in sorted({*kept, *before} - seen)))
    return [pod for pod in found if pod is not None]


async def _find(server: ApiServer, resource: ResourceView, name: str) -> PodRecord | None:
    try:
        stored = await server.get(POD.path(resource.key.namespace, name))
    except ApiError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    if trim.owner_uid(stored) != resource.uid or trim.label_key(stored) == resource.key:
        return None  # somebody else's, or one that the watch is about to show
    return trim.pod_record(stored, key=resource.key)


def describe_unlabelled(pod: PodRecord) -> RecordEvent:
    """Returns the event for people: the operator may not change pods."""
    label = f"{names.LABEL_RESOURCE}={pod.key.name}"
    message = (
        f"pod {pod.view.name} has lost its label {label}: it runs on, but no Service or NetworkPolicy "
        f"selects it; put it back: kubectl label pod {pod.view.name} --overwrite {label}"
    )
    return RecordEvent(reason="PodLabelLost", message=message, warning=True)
