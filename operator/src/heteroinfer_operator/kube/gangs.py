"""Detects the gang schedulers of a cluster by the API groups that it serves, and caches their objects.

A gang scheduler places all pods of a group at the same time, or none. Every authenticated account may read
the API groups, also if the operator serves only some namespaces.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

from heteroinfer_contract.background import start_task
from heteroinfer_operator.kube.paths import GANG_CHILDREN, Kind
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import ChildRecord
from heteroinfer_operator.kube.watch_cache import WatchCache
from heteroinfer_operator.nodes.node_assignment import Gang

logger = logging.getLogger(__name__)

CHECK_EVERY_S: Final = 300.0
"""Time between two checks."""
RETRY_FIRST_S: Final = 1.0
"""First pause after a check without an answer, or after a cache failed. Each next pause is twice as long."""
MAX_RETRY_S: Final = 30.0
"""Longest such pause."""
LISTED_S: Final = 20.0
"""The operator logs a warning if it has not listed the objects of a gang scheduler within this time."""

_APIS: Final = MappingProxyType(
    {
        Gang.KUEUE: (("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"), "localqueues"),
        Gang.VOLCANO: (("scheduling.volcano.sh/v1beta1",), "podgroups"),
        Gang.COSCHEDULING: (("scheduling.x-k8s.io/v1alpha1",), "podgroups"),
        Gang.NATIVE: (("scheduling.k8s.io/v1alpha1",), "workloads"),
        Gang.NATIVE_ALPHA2: (("scheduling.k8s.io/v1alpha2",), "podgroups"),
        Gang.NATIVE_BETA: (("scheduling.k8s.io/v1beta1",), "podgroups"),
    }
)
"""API versions and resource of each gang scheduler.

A cluster has the gang scheduler if it serves the resource in one of these versions.
"""

Caches: TypeAlias = dict[str | None, WatchCache[ChildRecord]]
"""Caches of one kind, by scope."""


async def detect_gangs(server: ApiServer) -> Mapping[Gang, bool | ApiError]:
    """Returns for each gang scheduler whether the cluster serves its API, or the error of the request."""
    answers = await asyncio.gather(*(_is_served(server, gang) for gang in _APIS))
    return dict(zip(_APIS, answers, strict=True))


async def find_unsupported_versions(server: ApiServer) -> tuple[str, ...]:
    """Returns the API versions of gang schedulers that the cluster serves and this operator does not support.

    Raises:
        ApiError: the API server refused or did not answer.
    """
    supported_versions: dict[str, set[str]] = {}
    plurals: dict[str, set[str]] = {}
    for group_versions, plural in _APIS.values():
        for group_version in group_versions:
            group, _, version = group_version.partition("/")
            supported_versions.setdefault(group, set()).add(version)
            plurals.setdefault(group, set()).add(plural)
    unsupported: list[str] = []
    for group, supported in supported_versions.items():
        for version in await _served_versions(server, group):
            if version in supported:
                continue
            group_version = f"{group}/{version}"
            # The group may also have resources of other programs. Only those of gang schedulers matter.
            if plurals[group] & await _served_resources(server, group_version):
                unsupported.append(group_version)
    return tuple(sorted(unsupported))


async def _served_versions(server: ApiServer, group: str) -> list[str]:
    """Returns the versions of an API group that the cluster serves; empty without the group."""
    try:
        answer = await server.get(f"/apis/{group}")
    except ApiError as error:
        if error.status == NOT_FOUND:
            return []
        raise
    versions = answer.get("versions")
    entries = versions if isinstance(versions, list) else []
    return [str(entry.get("version")) for entry in entries if isinstance(entry, dict)]


async def _is_served(server: ApiServer, gang: Gang) -> bool | ApiError:
    """Returns whether the cluster serves one of the API versions of a gang scheduler.

    Returns the error of a failed request instead if no other request has shown a served version.
    """
    versions, plural = _APIS[gang]
    problem: ApiError | None = None
    for version in versions:
        try:
            if plural in await _served_resources(server, version):
                return True
        except ApiError as error:
            problem = error
    return problem or False


async def _served_resources(server: ApiServer, group_version: str) -> set[str]:
    """Returns the plurals of the resources that the cluster serves in a group version."""
    try:
        answer = await server.get(f"/apis/{group_version}")
    except ApiError as error:
        if error.status == NOT_FOUND:
            return set()
        raise
    resources = answer.get("resources")
    entries = resources if isinstance(resources, list) else []
    return {str(entry.get("name")) for entry in entries if isinstance(entry, dict)}


class GangSchedulers:
    """Finds the cluster's gang schedulers, also those that users install or remove later.

    Attributes:
        found: gang schedulers whose objects are listed.
        unknown: served API versions of gang schedulers that this operator does not support.
        kinds: caches of the gang schedulers' objects, by kind and scope.
        known: set once the API server has answered for every gang scheduler, and the objects of all served
            gang schedulers are listed.

    Args:
        build: builds the caches of the objects of one kind, by scope.
        changed: called after a change of `found`.
    """

    def __init__(
        self, server: ApiServer, build: Callable[[Kind], Caches], changed: Callable[[], None]
    ) -> None:
        self.found: frozenset[Gang] = frozenset()
        self.unknown: tuple[str, ...] = ()
        self.kinds: dict[Kind, Caches] = {}
        self.known = asyncio.Event()
        self._server = server
        self._build = build
        self._changed = changed
        self._unanswered = frozenset(Gang)
        """Gang schedulers for which the API server has never answered."""
        self._reported: frozenset[Gang] = frozenset()
        """Gang schedulers whose last check failed, so that each new error is logged once."""
        self._cache_failure = asyncio.Event()
        self._tasks: dict[Gang, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Looks for gang schedulers every CHECK_EVERY_S until cancelled; sooner after an error."""
        retry_s = RETRY_FIRST_S
        try:
            while True:
                has_cache_failed = self._cache_failure.is_set()
                self._cache_failure = asyncio.Event()
                with contextlib.suppress(ApiError):  # only a message uses `unknown`, so it may be old
                    self.unknown = await find_unsupported_versions(self._server)
                self._update(await detect_gangs(self._server))
                if has_cache_failed or self._unanswered:
                    await asyncio.sleep(retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)
                    continue
                retry_s = RETRY_FIRST_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_EVERY_S):
                        await self._cache_failure.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _update(self, answers: Mapping[Gang, bool | ApiError]) -> None:
        """Starts the caches of new gang schedulers, and stops the caches of gang schedulers that are gone.

        Logs each new error. An error changes no cache.
        """
        problems = {gang: answer for gang, answer in answers.items() if isinstance(answer, ApiError)}
        for gang in sorted(problems.keys() - self._reported):
            logger.warning(
                "gang scheduler %s: cannot find out whether the cluster serves its API: %s. Trying again",
                gang,
                problems[gang].message,
            )
        self._reported = frozenset(problems)
        self._unanswered -= answers.keys() - problems.keys()
        for gang, is_served in sorted(answers.items()):
            if is_served is True and gang not in self._tasks:
                logger.info("gang scheduler %s: the cluster serves its API", gang)
                self._start_caching(gang)
            if is_served is False and gang in self._tasks:
                logger.warning(
                    "gang scheduler %s: the cluster no longer serves its API. If groups need this gang "
                    "scheduler, install it again",
                    gang,
                )
                self._tasks.pop(gang).cancel()
                self._forget(gang)
        self._set_known_if_complete()

    def _start_caching(self, gang: Gang) -> None:
        """Starts the caches of a gang scheduler's objects.

        If a cache fails, the gang scheduler counts as absent until the next check.
        """

        def forget_after_error(error: BaseException) -> None:
            """Logs the error, and forgets the gang scheduler until the next check."""
            logger.error(
                "gang scheduler %s: the operator cannot cache its objects: %r. Listing the objects again",
                gang,
                error,
                exc_info=error,
            )
            del self._tasks[gang]
            self._forget(gang)
            self._cache_failure.set()

        self._tasks[gang] = start_task(
            self._cache_objects(gang), name=f"objects of {gang}", failed=forget_after_error
        )

    async def _cache_objects(self, gang: Gang) -> None:
        """Caches the objects of a gang scheduler. After the first lists, the gang scheduler counts as found.

        A gang scheduler without objects (Kueue) counts as found immediately.
        """
        kind = GANG_CHILDREN.get(gang)
        caches = self._build(kind) if kind is not None else {}
        async with asyncio.TaskGroup() as group:
            for cache in caches.values():
                group.create_task(cache.run(), name=cache.collection.label)
            try:
                async with asyncio.timeout(LISTED_S):
                    await _wait_listed(caches)
            except TimeoutError:
                logger.warning(
                    "gang scheduler %s: its objects are not listed after %g s. Still trying", gang, LISTED_S
                )
                await _wait_listed(caches)
            if kind is not None:
                self.kinds = {**self.kinds, kind: caches}
            self.found |= {gang}
            self._set_known_if_complete()
            self._changed()

    def _forget(self, gang: Gang) -> None:
        """Removes a gang scheduler and the caches of its objects."""
        self.kinds = {kind: caches for kind, caches in self.kinds.items() if kind != GANG_CHILDREN.get(gang)}
        if gang in self.found:
            self.found -= {gang}
            self._changed()

    def _set_known_if_complete(self) -> None:
        """Sets `known` once each gang scheduler is either absent or found."""
        are_all_served_found = self._tasks.keys() <= self.found
        if not self._unanswered and are_all_served_found:
            self.known.set()


async def _wait_listed(caches: Caches) -> None:
    """Waits until each cache has its first list."""
    for cache in caches.values():
        await cache.synced.wait()
