"""Pods that run on without the label by which they are watched: to a watch they are gone."""

import asyncio
from collections.abc import Sequence
from typing import Final

from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import ResourceKey, ResourceView
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.identity import Owner, find_place

LOOK_AGAIN_S: Final = 1.0
"""No watch tells how such a pod fares."""


class UnlabelledPods:
    """Pods of a resource that no watch shows any more, though they are there and its own.

    Args:
        server: asked.
    """

    def __init__(self, server: ApiServer) -> None:
        self._server = server
        self._there: dict[ResourceKey, frozenset[str]] = {}
        self._gone: dict[ResourceKey, frozenset[str]] = {}
        """Names that the API server has said to be nobody's: it is not asked for them again."""

    async def find(self, resource: ResourceView, known: Sequence[PodRecord]) -> list[PodRecord]:
        """Returns such pods of a resource.

        Asked for are those alone that the status has and the caches lack, once each, and those that were
        met or found before, until they are gone.

        Args:
            resource: that owns them.
            known: what the watches show.

        Raises:
            ApiError: the API server did not answer, or refused.
        """
        key, seen = resource.key, {pod.view.name for pod in known}
        owner = Owner(key=key, uid=resource.uid)
        said = {rank.pod for group in parse_status(resource.status).groups for rank in group.members}
        # Somebody may have written other texts: a path of the API server, say.
        said = {name for name in said if find_place(owner, name) is not None}
        there = self._there.get(key, frozenset()) - seen
        gone = (self._gone.get(key, frozenset()) & said) - seen - there
        asked = sorted((said - seen - gone) | there)
        found = await asyncio.gather(*(self._ask(resource, name) for name in asked))
        gone |= {name for name, pod in zip(asked, found, strict=True) if pod is None}
        self._keep(self._gone, key, gone & said)
        pods = [pod for pod in found if isinstance(pod, PodRecord)]
        self._keep(self._there, key, frozenset(pod.view.name for pod in pods))
        return pods

    async def _ask(self, resource: ResourceView, name: str) -> PodRecord | bool | None:
        """Returns such a pod; None if there is none of ours, True for one that a watch is about to show."""
        try:
            stored = await self._server.get(POD.path(resource.key.namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        if trim.owner_uid(stored) != resource.uid:
            return None
        return trim.label_key(stored) == resource.key or trim.pod_record(stored, key=resource.key)

    def note_met(self, key: ResourceKey, name: str) -> None:
        """Takes in that such a pod was come upon otherwise."""
        self._keep(self._there, key, self._there.get(key, frozenset()) | {name})

    def are_there(self, key: ResourceKey) -> bool:
        """Returns whether a resource has such pods, as last looked."""
        return key in self._there

    def forget(self, key: ResourceKey) -> None:
        """Takes in that a resource is gone."""
        self._keep(self._there, key, frozenset())
        self._keep(self._gone, key, frozenset())

    @staticmethod
    def _keep(kept: dict[ResourceKey, frozenset[str]], key: ResourceKey, found: frozenset[str]) -> None:
        if found:
            kept[key] = found
        else:
            kept.pop(key, None)
