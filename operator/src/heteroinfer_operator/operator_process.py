"""Runs the operator process: first the health port, then the Lease, then caches, workers and kopf."""

import asyncio
import contextlib
import logging
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

from kubernetes.aio import client

from heteroinfer_contract import names
from heteroinfer_operator.api import ConditionStatus, ConditionType, HeteroInferenceStatus
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.health import Health, list_some, serve
from heteroinfer_operator.kube import handlers
from heteroinfer_operator.kube.action_run import Callbacks
from heteroinfer_operator.kube.adapter import KubeCluster
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.installation import list_resources, wait_for_resource
from heteroinfer_operator.kube.kept_calibrations import StoredCalibrations
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.lease import LeaderLease, LeaseTerms
from heteroinfer_operator.kube.operator_key import ensure_operator_key
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.kube.server import (
    FORBIDDEN,
    NOT_FOUND,
    ApiError,
    ApiServer,
    load_configuration,
)
from heteroinfer_operator.kube.tls_buffers import shrink_tls_buffers
from heteroinfer_operator.kube.watch_cache import STALE_SILENCES
from heteroinfer_operator.metrics import OperatorMetrics, counting
from heteroinfer_operator.settings import InstallationSettings
from heteroinfer_operator.version import own_version
from heteroinfer_operator.workqueue import Decide, WorkQueue, build_process

logger = logging.getLogger(__name__)

NODES_SETTLE_S: Final = 5.0
"""Delay between a change of a node and the reconcile of the resources, so that one reconcile handles several
changes."""
POLL_S: Final = 2.0
"""Seconds between reports about caches."""
RETRY_S: Final = 5.0
"""Longest pause after a failed resync."""
MAX_RECURSION: Final = 25_000
"""Python's recursion limit; the default is 1,000.

Every account that may create pods can store JSON of 10,000 levels, which this process must be able to read.
"""


class Operator:
    """Creates and connects all parts of the operator.

    Args:
        build_decide: builds the pure decision function from the operator's key, or from None without a key.
    """

    def __init__(
        self, settings: InstallationSettings, build_decide: Callable[[bytes | None], Decide]
    ) -> None:
        self._settings = settings
        self._build_decide = build_decide
        self._metrics = OperatorMetrics()
        self._health = Health(stale_s=3 * settings.resync_s)
        self._lease: LeaderLease | None = None
        self._known_resources: set[ResourceKey] = set()
        self._without_capacity: set[ResourceKey] = set()
        self._scheduled_causes: set[str] = set()

    async def run(self) -> None:
        """Runs the operator until SIGTERM or SIGINT.

        Raises:
            HeteroInferError: the operator cannot start.
            ExceptionGroup: a part failed or the Lease was lost. The process must end.
        """
        shrink_tls_buffers()  # otherwise each connection to the API server takes much more memory
        sys.setrecursionlimit(MAX_RECURSION)
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        async with serve(self._health, self._metrics, self._settings.http_port) as port:
            logger.info("serving /healthz, /readyz and /metrics on port %d", port)
            configuration = await load_configuration()
            server = ApiServer(
                configuration,
                on_write=counting(self._metrics.writes),
                on_unanswered=counting(self._metrics.unanswered),
                before_write=self._require_lease,
                watch_silence_s=self._settings.watch_silence_s,
            )
            # Renewals of the Lease have their own connections, so that other requests cannot delay them.
            lease_server = ApiServer(configuration, on_write=counting(self._metrics.writes))
            try:
                self._lease = self._build_lease(lease_server)
                await _until(stop, self._work_with_lease(server, configuration))
            finally:
                await server.close()
                await lease_server.close()
        logger.info("stopped")

    async def _work_with_lease(self, server: ApiServer, configuration: client.Configuration) -> None:
        """Waits for the Lease, serves resources while this process holds the Lease, then releases it."""
        lease = self._lease
        try:
            if lease is not None:
                self._health.waits_for, self._health.standby = f"lease {self._settings.lease_name}", True
                await lease.acquire()
                logger.info("holding lease %s", self._settings.lease_name)
                self._health.standby = False
            async with asyncio.TaskGroup() as group:
                if lease is not None:
                    group.create_task(lease.keep_renewing(), name="lease")
                await self._serve_resources(group, server, configuration)
        finally:
            if lease is not None:
                await lease.release()

    async def _serve_resources(
        self, group: asyncio.TaskGroup, server: ApiServer, configuration: client.Configuration
    ) -> None:
        """Starts the parts of the operator one after the other, then resyncs without end."""
        self._health.waits_for = f"the resource {names.PLURAL}.{names.API_GROUP}"
        await wait_for_resource(server)
        operator_key = await self._read_operator_key(server)
        groups = LeaderClient(operator_key)
        recorder = EventRecorder(
            server,
            reporter=self._settings.identity or names.MANAGER,
            dropped=self._metrics.events_dropped.inc,
        )
        try:
            decide = self._build_decide(operator_key)
            cluster_state, queue = self._build_queue(server, groups, recorder, decide)
            group.create_task(cluster_state.run(), name="caches")
            group.create_task(self._report_caches(cluster_state), name="state of the caches")
            await self._wait_ready(cluster_state)
            group.create_task(queue.run(), name="workers")
            group.create_task(groups.test_connections(queue.add), name="leaders")

            def queue_new_version(key: ResourceKey, version: int) -> None:
                # If the cache has seen the version, the cache itself has added the resource to the queue.
                if cluster_state.resources.record_if_missing(key, version):
                    queue.add(key)

            kopf = handlers.announce_changes(
                configuration, self._settings.watch_namespaces, queue_new_version
            )
            group.create_task(kopf, name="kopf")
            self._health.waits_for = ""
            await self._resync_all(server, queue, cluster_state)
        finally:
            await recorder.close()
            await groups.close()

    async def _read_operator_key(self, server: ApiServer) -> bytes | None:
        """Reads the operator's key. Creates the key if the Secret has none. Returns None without a Secret."""
        settings = self._settings
        if not settings.key_secret:
            logger.warning(
                "HETEROINFER_KEY_SECRET is not set, so groups start without keys. Any program that reaches "
                "the ports of a group can send commands to the group. Set the variable to the name of "
                "a Secret"
            )
            return None
        self._health.waits_for = f"the key in Secret {settings.key_secret}"
        return await ensure_operator_key(
            server, settings.namespace, settings.key_secret, settings.former_key_secret
        )

    def _build_queue(
        self, server: ApiServer, groups: LeaderClient, recorder: EventRecorder, decide: Decide
    ) -> tuple[ClusterState, WorkQueue]:
        """Builds the caches of the cluster and the queue that reconciles resources."""

        # A function, because the caches need `touched` before the queue exists.
        def touched(key: ResourceKey) -> None:
            queue.add(key)

        def nodes_changed() -> None:
            self._reconcile_soon(queue, "nodes", self._known_resources)

        cluster_state = ClusterState(
            server,
            namespaces=self._settings.watch_namespaces,
            touched=touched,
            nodes_changed=nodes_changed,
            capacity_freed=lambda: self._reconcile_soon(queue, "capacity", self._without_capacity),
            stored_calibrations=self._build_stored_calibrations(server, changed=nodes_changed),
            operator_class=self._settings.operator_class,
        )
        callbacks = Callbacks(
            observed=self._record_status,
            status_written=self._metrics.observe_status_write,
            held_back=counting(self._metrics.held_back),
            wake=touched,
        )
        cluster = KubeCluster(server, cluster_state, recorder=recorder, groups=groups, callbacks=callbacks)
        reconcile = build_process(cluster, decide)

        async def process(key: ResourceKey) -> float | None:
            # Skip the resource while its namespace is not ready. When the namespace becomes ready, the caches
            # add its resources again.
            return await reconcile(key) if cluster_state.is_ready(key.namespace) else None

        queue = WorkQueue(process, workers=self._settings.workers, metrics=self._metrics)
        return cluster_state, queue

    def _build_stored_calibrations(
        self, server: ApiServer, *, changed: Callable[[], None]
    ) -> StoredCalibrations | None:
        """Builds the reader of the ConfigMap with measured rates; None without that ConfigMap."""
        settings = self._settings
        if not settings.calibration_config_map:
            return None
        name = NamespacedName(namespace=settings.namespace, name=settings.calibration_config_map)
        return StoredCalibrations(server, name, version=own_version(), changed=changed)

    def _build_lease(self, server: ApiServer) -> LeaderLease | None:
        """Builds the Lease of this installation; None without leader election."""
        settings = self._settings
        if not settings.leader_election:
            return None
        terms = LeaseTerms(
            namespace=settings.namespace,
            name=settings.lease_name,
            # The random part makes a restarted container another holder.
            identity=f"{settings.identity}_{secrets.token_hex(4)}",
            duration_s=settings.lease_duration_s,
            renew_s=settings.lease_renew_s,
            deadline_s=settings.lease_deadline_s,
        )
        return LeaderLease(server, terms)

    def _require_lease(self) -> None:
        if self._lease is not None:
            self._lease.require_held()

    async def _wait_ready(self, cluster_state: ClusterState) -> None:
        """Waits until one namespace is ready. During the wait, /readyz reports the missing lists."""
        while True:
            self._health.waits_for = f"the first list of {list_some(cluster_state.unsynced())}"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await cluster_state.wait_ready()
                    return

    async def _report_caches(self, cluster_state: ClusterState) -> None:
        """Reports faulty caches in /readyz and a metric. Logs unreadable namespaces when they change."""
        self._health.describe_missing = lambda: _describe_missing_functions(cluster_state)
        reported: set[str] = set()  # namespaces that the log has reported as not served
        while True:
            failing = [cache for cache in cluster_state.awaited_caches() if cache.is_failing]
            for state, caches in (
                ("unlisted", cluster_state.unsynced()),
                ("failing", failing),
                ("stale", cluster_state.stale_cache_names()),
            ):
                self._metrics.caches.labels(state).set(len(caches))
            unreadable = cluster_state.errors_by_namespace()
            for namespace in sorted(unreadable.keys() - reported):
                logger.error(
                    "namespace %s is not served, because the operator cannot read it (%s). Grant the "
                    "operator its rights in this namespace again, or remove the namespace from "
                    "watchNamespaces",
                    namespace,
                    unreadable[namespace],
                )
            for namespace in sorted(reported - unreadable.keys()):
                logger.info("namespace %s is served again", namespace)
            reported = set(unreadable)
            await asyncio.sleep(POLL_S)

    def _record_status(self, key: ResourceKey, status: HeteroInferenceStatus | None) -> None:
        """Records a resource's status for metrics, and whether the resource waits for capacity."""
        self._metrics.observe_status(key, status)
        if status is None:
            self._known_resources.discard(key)
        else:
            self._known_resources.add(key)
        if status is not None and _waits_for_capacity(status):
            self._without_capacity.add(key)
        else:
            self._without_capacity.discard(key)

    def _reconcile_soon(self, queue: WorkQueue, cause: str, keys: set[ResourceKey]) -> None:
        """Queues the resources in `keys` after NODES_SETTLE_S.

        Until then, further calls with the same cause do nothing, and `keys` may still change.
        """

        def reconcile_keys() -> None:
            self._scheduled_causes.remove(cause)
            for key in sorted(keys):
                queue.add(key)

        if cause not in self._scheduled_causes:
            self._scheduled_causes.add(cause)
            asyncio.get_running_loop().call_later(NODES_SETTLE_S, reconcile_keys)

    def _record_resync(self, cluster_state: ClusterState) -> None:
        """Records the end of a resync. Does nothing if caches are stale: the decisions used an old state."""
        self._health.stale_caches = tuple(cluster_state.stale_cache_names())
        if self._health.stale_caches:
            logger.error(
                "the resync is incomplete: the operator has received no data for more than %g s about %s. If "
                "this repeats, check the API server and the network",
                STALE_SILENCES * self._settings.watch_silence_s,
                list_some(self._health.stale_caches),
            )
            return
        self._metrics.last_resync.set(datetime.now(UTC).timestamp())
        self._health.record_resync()

    async def _list_resources(self, server: ApiServer, cluster_state: ClusterState) -> set[ResourceKey]:
        """Lists all resources, and returns the resources that a resync must reconcile.

        If the list and the cache differ about a resource, the next reconcile reads the resource from the API
        server.
        """
        resources = cluster_state.resources
        cached_versions = resources.versions()
        listed = await list_resources(server, self._settings.watch_namespaces)
        if any(version < cached_versions[scope] for scope, version in listed.versions.items()):
            logger.warning(
                "the API server returned an older state than before, for example after a restore of etcd. "
                "Listing everything again"
            )
            cluster_state.relist()
        for scope, error in listed.unread.items():
            # After the operator loses the right to watch, an open watch continues. Only a new list shows the
            # loss.
            if error.status in (FORBIDDEN, NOT_FOUND):
                cluster_state.relist(scope)
        for key, version in listed.resources.items():
            resources.record_if_missing(key, version)
        cached = resources.keys()
        cached_and_readable = {key for key in cached if key.namespace not in listed.unread}
        for key in cached_and_readable - listed.resources.keys():  # perhaps deleted
            resources.mark_outdated(key)
        return cached_and_readable | listed.resources.keys()

    async def _resync_all(self, server: ApiServer, queue: WorkQueue, cluster_state: ClusterState) -> None:
        """Reconciles all resources every resync_s seconds, also without a change."""
        self._health.record_resync()
        while True:
            pause_s = self._settings.resync_s
            try:
                keys = await self._list_resources(server, cluster_state)
                async with asyncio.timeout(2 * self._settings.resync_s):
                    await queue.process_all(keys)
                self._record_resync(cluster_state)
            except ApiError as error:
                # Count the attempt as a resync. Otherwise the liveness probe would restart this process,
                # which does not help if the API server does not answer.
                logger.warning("resync: %s. Trying again", error.message)
                self._health.record_resync()
                pause_s = min(pause_s, RETRY_S)
            except TimeoutError:
                logger.error(
                    "resync: not finished within %g s. Trying again. If this repeats, raise the chart's "
                    "workers",
                    2 * self._settings.resync_s,
                )
                pause_s = min(pause_s, RETRY_S)
            await asyncio.sleep(pause_s)


def _describe_missing_functions(cluster_state: ClusterState) -> str:
    """Describes the most important function that is missing while the operator works, or returns ""."""
    unreadable = cluster_state.errors_by_namespace()
    if unreadable:
        return f"the operator cannot read the namespaces {list_some(sorted(unreadable))}"
    unlisted = cluster_state.unsynced()
    if unlisted:
        return f"the operator has not listed {list_some(unlisted)} yet"
    stale = cluster_state.stale_cache_names()
    if stale:
        return f"the API server has sent nothing for a long time about {list_some(stale)}"
    return ""


def _waits_for_capacity(status: HeteroInferenceStatus) -> bool:
    """Reports whether a resource waits for capacity."""
    return any(
        condition.type == ConditionType.CAPACITY_AVAILABLE and condition.status is ConditionStatus.FALSE
        for condition in status.conditions
    )


async def _until(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Runs work until its end or until `stop` is set. After `stop`, cancels and awaits the work."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        if not working.done():
            logger.info("stopping")
            working.cancel()
        await asyncio.wait({working})
    if not working.cancelled():
        working.result()
