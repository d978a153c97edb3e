"""Runs kopf, which watches HeteroInference and announces each added, changed or deleted resource.

kopf's watch is independent of the operator's cache: it has its own client, connection and thread. If kopf
announces a version that the cache lacks, the next reconcile reads the resource (`resource_cache.py`). So a
silent watch of the cache does no harm.

Handlers return None, because kopf patches a returned value into the status
(`kopf/_core/actions/progression.py::deliver_results@1.45.2`). There are only `on.event` handlers, so that
kopf writes no annotation, finalizer or event to resources.
"""

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import kopf
from kubernetes.aio import client

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.stored_fields import version_number

STOP_S: Final = 5.0
"""How long a stopping process waits for kopf to stop."""
Announce: TypeAlias = Callable[[ResourceKey, int], None]


def build_settings() -> kopf.OperatorSettings:
    """Builds settings with which kopf only watches, so that it needs no other rights."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # kopf would list and watch all CRDs and namespaces
    settings.peering.standalone = True
    settings.process.ultimate_exiting_timeout = None  # operator_process.py ends the process
    # The API server ends a watch after server_timeout. If a watch lasts until client_timeout, its connection
    # is dead, and kopf ends the watch.
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 320
    return settings


def build_registry(configuration: client.Configuration, announce: Announce) -> kopf.OperatorRegistry:
    """Returns the handlers that announce each added, changed or deleted resource.

    kopf calls `announce` in kopf's own thread, with the resource and its resourceVersion. The handler
    `announce_change` ignores these changes:
    - of the status, because the operator itself wrote the status, and its cache has the API server's answer;
    - of labels and annotations, because no decision reads these.
    """
    registry = kopf.OperatorRegistry()
    announced: dict[ResourceKey, tuple[object, ...]] = {}
    """Last announced fields, by resource."""

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        """Returns the operator's own credentials for the API server, with a fresh token."""
        refresh: Callable[[client.Configuration], Any] | None = getattr(
            configuration, "refresh_api_key_hook", None
        )
        refreshed = refresh(configuration) if refresh is not None else None
        if inspect.isawaitable(refreshed):
            await refreshed
        scheme, _sep, token = configuration.api_key.get("BearerToken", "").partition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            scheme=scheme.title() or None,
            token=token or None,
        )

    @kopf.on.event(names.API_GROUP, names.API_VERSION, names.PLURAL, registry=registry)
    async def announce_change(
        event: kopf.RawEvent, namespace: str | None, name: str | None, meta: kopf.Meta, **_: Any
    ) -> None:
        """Announces a deletion, or a change of a field that decisions read."""
        key = ResourceKey(namespace=namespace or "", name=name or "")
        fields = ("uid", "generation", "deletionTimestamp", "finalizers")  # a new spec has a new generation
        fields_now = tuple(copy.deepcopy(meta.get(field)) for field in fields)
        if event["type"] == "DELETED":
            announced.pop(key, None)
        elif announced.get(key) == fields_now:
            return
        else:
            announced[key] = fields_now
        announce(key, version_number(meta["resourceVersion"]))

    return registry


async def announce_changes(
    configuration: client.Configuration, namespaces: Sequence[str], announce: Announce
) -> None:
    """Runs kopf in a thread with its own event loop, until cancelled or until kopf ends.

    A separate thread is necessary: when kopf stops, it cancels all unknown tasks of its event loop
    (`kopf/_core/reactor/running.py::run_tasks@1.45.2`). In the main thread, kopf would also handle signals.

    Raises:
        BaseException: the error that ended kopf.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[BaseException] = loop.create_future()

    def announce_in_loop(key: ResourceKey, version: int) -> None:
        """Calls `announce` in the operator's own event loop."""
        loop.call_soon_threadsafe(announce, key, version)

    async def run_operator() -> None:
        """Runs kopf's operator until `stop` is set."""
        await kopf.operator(
            registry=build_registry(configuration, announce_in_loop),
            settings=build_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=tuple(namespaces),
            stop_flag=stop,
        )

    def run_kopf() -> None:
        """Runs kopf in this thread, and hands its error to the operator's event loop."""
        error: BaseException = HeteroInferError("kopf stopped unexpectedly", reason="KopfEnded")
        try:
            asyncio.run(run_operator())
        except BaseException as caught:  # `announce_changes` raises this error in the operator's event loop
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set_result, error)

    threading.Thread(target=run_kopf, name="kopf", daemon=True).start()
    try:
        # `shield`, because `finally` waits for `ended` after a cancellation.
        raise await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait({ended}, timeout=STOP_S)
