"""The operator's own key. A Secret in its namespace holds it; the keys of groups are derived from it."""

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
    """Returns the operator's key; creates the Secret if it does not exist.

    The chart has no template for this Secret: a tool that replaces objects by their templates would empty it.

    Args:
        former: name of the Secret that charts before 0.2.0 created, or "". Its key takes precedence. As long
            as that Secret exists, this function keeps the same key in it, so that an older chart finds the
            key after a rollback. If an operator created a Secret of this name, it belongs to another release
            and stays unchanged.

    Raises:
        HeteroInferError: a Secret contains an invalid key.
        ApiError: the API server did not answer, or refused.
    """
    while True:
        try:
            return await _find_or_create(server, namespace, name, former)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await asyncio.sleep(RETRY_S)  # another replica was faster: use its key


async def _find_or_create(server: ApiServer, namespace: str, name: str, former: str) -> bytes:
    own = await _read_secret(server, namespace, name)
    older = await _read_secret(server, namespace, former) if former else None
    if older is not None and _is_made_by_operator(older):  # belongs to a release of another name
        older = None
    own_key, older_key = _key_in(own, f"{namespace}/{name}"), _key_in(older, f"{namespace}/{former}")
    key = older_key or own_key or os.urandom(KEY_BYTES)
    data = {"data": {DATA_KEY: base64.b64encode(key).decode()}}
    if own is None:
        await server.create(SECRET.path(namespace), {**_secret_without_key(namespace, name), **data})
    elif own_key != key:
        await server.update(SECRET.path(namespace, name), {**own, **data})
    if older is not None and older_key != key:
        await server.update(SECRET.path(namespace, former), {**older, **data})
    if own_key is not None and own_key != key:
        logger.warning(
            "Secret %s/%s: replaced its key by that of Secret %s, which an older release has used since",
            namespace,
            name,
            former,
        )
    elif own_key is None:
        origin = "created" if older_key is None else f"copied from Secret {former}"
        logger.info("Secret %s/%s: %s the operator's key", namespace, name, origin)
    return key


def _secret_without_key(namespace: str, name: str) -> dict[str, Any]:
    """Builds the Secret without its key.

    It has no label of the Helm release, because tools delete objects by such labels.
    """
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {names.LABEL_MANAGED_BY: names.MANAGER},
    }
    return {"apiVersion": SECRET.api_version, "kind": SECRET.name, "metadata": metadata, "type": "Opaque"}


def _is_made_by_operator(stored: Mapping[str, Any]) -> bool:
    """Returns whether an operator created the Secret. The chart created the former ones."""
    labels = stored["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_MANAGED_BY) == names.MANAGER)


async def _read_secret(server: ApiServer, namespace: str, name: str) -> dict[str, Any] | None:
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
            f"Secret {where}: {DATA_KEY!r} must be {KEY_BYTES} bytes, got {len(key)}. "
            "Remove that entry; the operator then creates a key",
            reason="KeyMissing",
        )
    return key
