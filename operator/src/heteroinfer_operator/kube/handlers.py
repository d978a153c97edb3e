"""kopf's part: it watches HeteroInference and announces each one that came, changed or went.

It is the second pair of eyes: a client of its own, on a connection and in a thread of its own. What it
announces and the operator's copy has not, the next reconcile reads anew (`resource_cache.py`), however long
the copy's own watch says nothing.

Handlers return None, since kopf patches a returned value into the status
(`kopf/_core/actions/progression.py::deliver_results@1.45.2`). There are only `on.event`
handlers, so that kopf writes nothing to resources: no annotation, no finalizer, no event.
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
"""How long the end of the process waits for kopf's."""
Announce: TypeAlias = Callable[[ResourceKey, int], None]


def build_settings() -> kopf.OperatorSettings:
    """Returns settings with which kopf only watches, and needs no rights but that."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # it would list and watch all CRDs and namespaces
    settings.peering.standalone = True
    settings.process.ultimate_exiting_timeout = None  # operator_process.py ends the process
    # The API server ends a watch before this; should it not, the connection is dead.
    settings.watching.server_timeout = 290
    settings.watching.client_timeout = 320
    return settings


def build_registry(configuration: client.Configuration, announce: Announce) -> kopf.OperatorRegistry:
    """Returns the handlers.

    kopf calls `announce` in its own thread, with each resource that came, changed or went, and the
    resourceVersion at which it did. A change of the status alone is not announced, since the operator writes
    the status and reads the API server's answer. Nor are labels and annotations: no decision reads them.
    """
    registry = kopf.OperatorRegistry()
    announced: dict[ResourceKey, tuple[object, ...]] = {}
    """By resource, the fields that were last announced."""

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
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
    async def changed(
        event: kopf.RawEvent, namespace: str | None, name: str | None, meta: kopf.Meta, **_: Any
    ) -> None:
        key = ResourceKey(namespace=namespace or "", name=name or "")
        fields = ("uid", "generation", "deletionTimestamp", "finalizers")
        seen = tuple(copy.deepcopy(meta.get(field)) for field in fields)
        if event["type"] == "DELETED":
            announced.pop(key, None)
        elif announced.get(key) == seen:
            return
        else:
            announced[key] = seen
        announce(key, version_number(meta["resourceVersion"]))

    return registry


async def announce_changes(
    configuration: client.Configuration, namespaces: Sequence[str], announce: Announce
) -> None:
    """Runs kopf until cancelled, in a thread with an event loop of its own; raises what ended it.

    At its end kopf cancels every task of its loop that it does not know
    (`kopf/_core/reactor/running.py::run_tasks@1.45.2`), and in the main thread it takes over the signals.
    """
    loop, stop = asyncio.get_running_loop(), threading.Event()
    ended: asyncio.Future[BaseException] = loop.create_future()

    def announce_in_loop(key: ResourceKey, version: int) -> None:
        loop.call_soon_threadsafe(announce, key, version)

    async def operator() -> None:
        await kopf.operator(
            registry=build_registry(configuration, announce_in_loop),
            settings=build_settings(),
            standalone=True,
            clusterwide=not namespaces,
            namespaces=tuple(namespaces),
            stop_flag=stop,
        )

    def run_kopf() -> None:
        error: BaseException = HeteroInferError("kopf ended by itself", reason="KopfEnded")
        try:
            asyncio.run(operator())
        except BaseException as caught:  # handed over to the main thread
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set_result, error)

    threading.Thread(target=run_kopf, name="kopf", daemon=True).start()
    try:
        raise await asyncio.shield(ended)
    finally:
        stop.set()
        await asyncio.wait({ended}, timeout=STOP_S)
