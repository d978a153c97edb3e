"""The operator's own key, of which it makes those of groups: kept in one Secret beside it."""

import asyncio
import base64
import binascii
import logging
import os
from typing import Final

from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import SECRET
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer

logger = logging.getLogger(__name__)

DATA_KEY: Final = "key"
RETRY_S: Final = 1.0


async def ensure_operator_key(server: ApiServer, namespace: str, name: str) -> bytes:
    """Returns the key in the Secret of this name, made by the first operator that comes.

    The chart makes the Secret, empty.

    Raises:
        HeteroInferError: there is no such Secret, or what it holds is no key.
        ApiError: the API server did not answer, or refused.
    """
    path = SECRET.path(namespace, name)
    while True:
        try:
            stored = await server.get(path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            raise HeteroInferError(
                f"Secret {namespace}/{name} is not there: `helm upgrade` makes it, or create it empty",
                reason="KeyMissing",
            ) from error
        text = (stored.get("data") or {}).get(DATA_KEY)
        if text is not None:
            return _decode(text, f"{namespace}/{name}")
        key = os.urandom(KEY_BYTES)
        body = {**stored, "data": {DATA_KEY: base64.b64encode(key).decode()}}
        try:
            await server.update(path, body)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            await asyncio.sleep(RETRY_S)  # another replica was faster: its key holds
        else:
            logger.info("made the operator's key in Secret %s/%s", namespace, name)
            return key


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
