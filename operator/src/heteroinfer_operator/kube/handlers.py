"""kopf's part: it watches HeteroInference and announces each one that came, changed or went.

Handlers return None, since kopf patches a returned value into the status
(`kopf/_core/actions/progression.py::deliver_results@1.45.2`). There are only `on.event`
handlers, so that kopf writes nothing to resources: no annotation, no finalizer, no event.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import kopf
from kubernetes.aio import client

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.stored_fields import version_number

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
    resourceVersion at which it did.
    """
    registry = kopf.OperatorRegistry()

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
    async def changed(namespace: str | None, name: str | None, meta: kopf.Meta, **_: Any) -> None:
        key = ResourceKey(namespace=namespace or "", name=name or "")
        announce(key, version_number(meta["resourceVersion"]))

    return registry
