"""The operator's own key, in a Secret of its namespace. The operator derives the keys of groups from it."""

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
"""Pause after another replica has written a Secret at the same time."""


async def ensure_operator_key(server: ApiServer, namespace: str, name: str, former: str = "") -> bytes:
    """Returns the operator's key; creates the Secret if it does not exist.

    The chart has no template for this Secret, because a tool that replaces objects by their templates would
    remove the key.

    Args:
        former: name of the Secret that charts before 0.2.0 created, or "". The key of that Secret takes
            precedence. As long as that Secret exists, this function writes the same key to both Secrets, so
            that an older chart finds the key after a rollback. If an operator, not a chart, created the
            Secret of this name, it belongs to another Helm release, so this function ignores it.

    Raises:
        HeteroInferError: a Secret contains an invalid key.
        ApiError: the API server did not answer, or refused.
    """
    while True:
        try:
            return await _try_ensure(server, namespace, name, former)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await asyncio.sleep(RETRY_S)  # another replica was faster: use its key


async def _try_ensure(server: ApiServer, namespace: str, name: str, former: str) -> bytes:
    """Returns the operator's key. Creates or corrects its Secrets in one attempt.

    Raises:
        ApiError: with status 409 if another replica wrote a Secret at the same time.
    """
    own_secret = await _read_secret(server, namespace, name)
    older_secret = await _read_secret(server, namespace, former) if former else None
    if older_secret is not None and _is_made_by_operator(older_secret):
        older_secret = None  # this Secret belongs to another Helm release, so ignore it
    own_key = _read_key(own_secret, f"{namespace}/{name}")
    older_key = _read_key(older_secret, f"{namespace}/{former}")
    key = older_key or own_key or os.urandom(KEY_BYTES)
    data = {"data": {DATA_KEY: base64.b64encode(key).decode()}}
    if own_secret is None:
        await server.create(SECRET.path(namespace), {**_build_secret(namespace, name), **data})
    elif own_key != key:
        await server.update(SECRET.path(namespace, name), {**own_secret, **data})
    if older_secret is not None and older_key != key:  # the older Secret exists without a key
        await server.update(SECRET.path(namespace, former), {**older_secret, **data})
    if own_key is not None and own_key != key:
        logger.warning(
            "Secret %s/%s: the operator replaced the key by the key of Secret %s (after a rollback, an "
            "earlier version of HeteroInfer used that Secret). Groups that started with the replaced key "
            "report no progress and step times until their next epoch. No action is needed",
            namespace,
            name,
            former,
        )
    elif own_key is None:
        how = "created" if older_key is None else f"copied from Secret {former}"
        logger.info("Secret %s/%s: %s the operator's key", namespace, name, how)
    return key


def _build_secret(namespace: str, name: str) -> dict[str, Any]:
    """Builds the Secret without its key.

    The Secret has no label of the Helm release, because tools delete objects with such labels.
    """
    metadata = {
        "namespace": namespace,
        "name": name,
        "labels": {names.LABEL_MANAGED_BY: names.MANAGER},
    }
    return {"apiVersion": SECRET.api_version, "kind": SECRET.name, "metadata": metadata, "type": "Opaque"}


def _is_made_by_operator(stored: Mapping[str, Any]) -> bool:
    """Reports whether an operator created the Secret. In earlier versions, the chart created it."""
    labels = stored["metadata"].get("labels") or {}
    return bool(labels.get(names.LABEL_MANAGED_BY) == names.MANAGER)


async def _read_secret(server: ApiServer, namespace: str, name: str) -> dict[str, Any] | None:
    """Returns a Secret, or None if it does not exist."""
    try:
        return await server.get(SECRET.path(namespace, name))
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None


def _read_key(stored: Mapping[str, Any] | None, where: str) -> bytes | None:
    """Returns the key in a Secret; None without a Secret or without an entry.

    Args:
        where: namespace and name of the Secret, for errors.
    """
    text = ((stored or {}).get("data") or {}).get(DATA_KEY)
    return None if text is None else _decode_key(text, where)


def _decode_key(text: str, where: str) -> bytes:
    """Decodes the operator's key; raises HeteroInferError if it is not base64 or has a wrong length."""
    try:
        key = base64.b64decode(text, validate=True)
    except binascii.Error:
        key = b""
    if len(key) != KEY_BYTES:
        raise HeteroInferError(
            f"Secret {where}: entry {DATA_KEY!r} must be {KEY_BYTES} bytes in base64 (got {len(key)} bytes). "
            "Remove this entry. The operator then creates a new key",
            reason="KeyMissing",
        )
    return key
