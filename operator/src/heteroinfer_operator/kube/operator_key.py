"""The operator's own key, of which it makes those of groups: kept in one Secret beside it."""

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import SECRET
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer

logger = logging.getLogger(__name__)

DATA_KEY: Final = "key"
RETRY_S: Final = 1.0


async def ensure_operator_key(server: ApiServer, namespace: str, name: str, former: str = "") -> bytes:
    """Returns the key in the Secret of this name, which the first operator makes.

    No template makes the Secret: what replaces an object by a template would empty it.

    Args:
        former: name of the Secret that the chart made until 0.2.0, or "". Its key counts before all others.
            While it is there it holds the same key, so that a chart of that time finds it after a rollback.
            A Secret of this name that an operator made belongs to another release, and is left alone.

    Raises:
        HeteroInferError: a Secret holds what is no key.
        ApiError: the API server did not answer, or refused.
    """
    while True:
        try:
            return await _ensure(server, namespace, name, former)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await asyncio.sleep(RETRY_S)  # another replica was faster: its key holds


async def _ensure(server: ApiServer, namespace: str, name: str, former: str) -> bytes:
    own = await _find(server, namespace, name)
    older = await _find(server, namespace, former) if former else None
    if older is not None and _is_made_by_operator(older):  # the own Secret of a release of another name
        older = None
    own_key, older_key = _key_in(own, f"{namespace}/{name}"), _key_in(older, f"{namespace}/{former}")
    key = older_key or own_key or os.urandom(KEY_BYTES)
    data = {"data": {DATA_KEY: base64.b64encode(key).decode()}}
    if own is None:
        await server.create(SECRET.path(namespace), {**_empty(namespace, name), **data})
    elif own_key != key:
        await server.update(SECRET.path(namespace, name), {**own, **data})
    if older is not None and older_key != key:
        await server.update(SECRET.path(namespace, former), {**older, **data})
    if own_key is not None and own_key != key:
        logger.warning("Secret %s/%s has the key of %s now, used meanwhile", namespace, name, former)
    elif own_key is None:
        origin = "made" if older_key is None else f"took from Secret {former}"
        logger.info("Secret %s/%s: %s the operator's key", namespace, name, origin)
    return key


def _empty(namespace: str, name: str) -> dict[str, Any]:
    """Returns the Secret without its key.

    It has no label that tells its release: by such labels tools find what to remove.
    """
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {names.LABEL_MANAGED_BY: names.MANAGER},
    }
    return {"apiVersion": SECRET.api_version, "kind": SECRET.name, "metadata": metadata, "type": "Opaque"}


def _is_made_by_operator(stored: Mapping[str, Any]) -> bool:
    """Returns whether an operator made a Secret; the chart made the former ones."""
    labels = stored["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_MANAGED_BY) == names.MANAGER)


async def _find(server: ApiServer, namespace: str, name: str) -> dict[str, Any] | None:
    try:
        return await server.get(SECRET.path(namespace, name))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None


def _key_in(stored: Mapping[str, Any] | None, where: str) -> bytes | None:
    text = ((stored or {}).get("data") or {}).get(DATA_KEY)
    return None if text is None else _decode(text, where)


def _decode(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise HeteroInferError(
            f"Secret {where}: got {len(key)} bytes under {DATA_KEY!r}, expected {KEY_BYTES}; "
            "remove that entry, and a key is made",
            reason="KeyMissing",
        )
    return key
