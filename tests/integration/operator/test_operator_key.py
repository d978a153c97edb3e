"""Tests that the operator's key is created once, even by concurrent operators, and never changes."""

import asyncio
import base64

import pytest

from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.operator_key import DATA_KEY, ensure_operator_key
from heteroinfer_operator.kube.paths import SECRET
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster.running_cluster import Cluster


async def test_two_operators_that_start_together_have_one_key(
    server: ApiServer, namespace: str, control_plane: Cluster
) -> None:
    for name in ("absent", "empty"):
        if name == "empty":
            control_plane.kubectl("create", "-n", namespace, "secret", "generic", name)
        keys = await asyncio.gather(*(ensure_operator_key(server, namespace, name) for _ in range(4)))
        assert len(keys[0]) == KEY_BYTES
        assert set(keys) == {await ensure_operator_key(server, namespace, name)}


@pytest.mark.parametrize("filled", [(), ("own",), ("former",), ("own", "former")])
async def test_both_secrets_get_the_same_key(
    server: ApiServer, namespace: str, filled: tuple[str, ...]
) -> None:
    """The former Secret takes precedence, even if several operators start at the same time."""
    held = {name: bytes([number]) * KEY_BYTES for number, name in enumerate(filled)}
    for name in ("own", "former"):
        data = {DATA_KEY: base64.b64encode(held[name]).decode()} if name in held else {}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": data}
        await server.create(SECRET.path(namespace), body)
    keys = set(
        await asyncio.gather(*(ensure_operator_key(server, namespace, "own", "former") for _ in range(3)))
    )
    assert len(keys) == 1
    assert not held or keys == {held.get("former") or held["own"]}
    for name in ("own", "former"):
        stored = await server.get(SECRET.path(namespace, name))
        assert {base64.b64decode(stored["data"][DATA_KEY])} == keys


async def test_two_releases_of_one_namespace_have_two_keys(server: ApiServer, namespace: str) -> None:
    """The Secret of release `heteroinfer` has the name of the former Secret of `heteroinfer-operator`."""
    own, others = "heteroinfer-operator-key", "heteroinfer-operator-operator-key"
    first = await ensure_operator_key(server, namespace, own, "heteroinfer-key")
    second = await ensure_operator_key(server, namespace, others, own)
    assert first != second
    assert await ensure_operator_key(server, namespace, own, "heteroinfer-key") == first
    assert await ensure_operator_key(server, namespace, others, own) == second


async def test_reports_an_invalid_key(server: ApiServer, namespace: str, control_plane: Cluster) -> None:
    literal = f"--from-literal={DATA_KEY}=x"
    control_plane.kubectl("create", "-n", namespace, "secret", "generic", "key", literal)
    with pytest.raises(HeteroInferError, match=rf"'key' must be {KEY_BYTES} bytes in base64 \(got 1 bytes"):
        await ensure_operator_key(server, namespace, "key")
    stored = await server.get(SECRET.path(namespace, "key"))
    assert base64.b64decode(stored["data"][DATA_KEY]) == b"x"
