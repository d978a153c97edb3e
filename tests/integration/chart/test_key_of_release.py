"""Tests that a release keeps the operator's key, also after an upgrade from an earlier chart."""

import base64
import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.operator_key import DATA_KEY, ensure_operator_key
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.crds import apply_crds
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster, start_control_plane_only

CHART = str(REPOSITORY / "charts" / "heteroinfer")
FORMER_CHART = str(REPOSITORY / "tests/integration/upgrade/heteroinfer-at-5ba4481.tgz")
"""The earlier chart, which rendered the Secret."""
VALUES = ("-f", str(LEAST_VALUES), "--set", "replicas=0", "--set", "crds.install=false")
OWN, FORMER = "heteroinfer-operator-key", "heteroinfer-key"

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """Yields a control plane with the CRD."""
    with start_control_plane_only() as cluster:
        apply_crds(cluster, build_crd())
        yield cluster


class Release:
    """The release `heteroinfer` in its own namespace."""

    def __init__(self, plane: Cluster, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace

    def helm(self, verb: str, *arguments: str) -> str:
        return self.plane.helm(verb, "heteroinfer", *arguments, "-n", self.namespace)

    def key(self, name: str) -> bytes | None:
        """Returns the key in a Secret: None without a Secret, b"" if the Secret is empty."""
        text = self.plane.kubectl(
            "get", "secret", name, "-n", self.namespace, "--ignore-not-found", "-o", "json"
        )
        return base64.b64decode((json.loads(text).get("data") or {}).get(DATA_KEY, "")) if text else None

    def fill_former(self) -> bytes:
        """Writes a key into the earlier chart's Secret, as its operator does, and returns the key."""
        key = os.urandom(KEY_BYTES)
        patch = json.dumps({"data": {DATA_KEY: base64.b64encode(key).decode()}})
        self.plane.kubectl("patch", "secret", FORMER, "-n", self.namespace, "-p", patch)
        return key

    @contextlib.asynccontextmanager
    async def account(self) -> AsyncIterator[ApiServer]:
        """Yields the API server with the permissions of the operator's account only."""
        token = self.plane.kubectl("create", "token", "-n", self.namespace, "heteroinfer").strip()
        config = yaml.safe_load(self.plane.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token}
        path = Path(self.plane.state.folder) / f"{self.namespace}.kubeconfig"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        server = ApiServer(await load_configuration(str(path)))
        try:
            yield server
        finally:
            await server.close()

    async def start(self) -> bytes:
        """Returns the key with which an operator of this version starts."""
        async with self.account() as server:
            return await ensure_operator_key(server, self.namespace, OWN, FORMER)


@pytest.fixture
def release(plane: Cluster) -> Iterator[Release]:
    namespace = f"key-{next(_NUMBERS)}"
    plane.kubectl("create", "namespace", namespace)
    found = Release(plane, namespace)
    yield found
    found.helm("uninstall", "--ignore-not-found")
    plane.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.parametrize("scope", ["Cluster", "Namespaced"])
async def test_every_tool_that_applies_the_chart_keeps_the_key(release: Release, scope: str) -> None:
    values = (*VALUES, "--set", f"scope={scope}")
    release.helm("install", CHART, *values)
    assert release.key(OWN) is None, "no template creates the Secret"
    key = await release.start()
    assert (release.key(OWN), release.key(FORMER)) == (key, None)
    release.helm("upgrade", CHART, *values, "--set", "workers=2")
    release.helm("upgrade", CHART, *values, "--force")
    place = ("-n", release.namespace, "--kube-version", "1.35.4")
    rendered = release.plane.helm("template", "heteroinfer", CHART, *place, *values)
    objects = [o for o in yaml.safe_load_all(rendered) if o and o["kind"] != "Pod"]
    assert "Secret" not in {each["kind"] for each in objects}
    release.plane.kubectl("replace", "-f", "-", stdin=yaml.safe_dump_all(objects))
    release.helm("rollback", "1")
    assert release.key(OWN) == key
    release.helm("uninstall")
    release.helm("install", CHART, *values)
    assert await release.start() == release.key(OWN) == key, "the operator knows the groups that kept running"


def upgrade_to_this(release: Release, *options: str) -> None:
    release.helm("upgrade", CHART, "--reset-then-reuse-values", "-f", str(LEAST_VALUES), *options)


@pytest.mark.parametrize("options", [(), ("--force",)], ids=["plain", "force"])
async def test_an_upgrade_from_the_former_chart_keeps_the_key(
    release: Release, options: tuple[str, ...]
) -> None:
    """Later upgrades keep the key, too, and after a rollback the former chart finds it."""
    release.helm("install", FORMER_CHART, *VALUES)
    key = release.fill_former()
    upgrade_to_this(release, *options)
    assert await release.start() == key
    assert (release.key(OWN), release.key(FORMER)) == (key, key)
    upgrade_to_this(release, *options)
    assert await release.start() == key
    assert (release.key(OWN), release.key(FORMER)) == (key, key)
    release.helm("rollback", "1")
    assert release.key(FORMER) == key
    upgrade_to_this(release, *options)
    assert await release.start() == key
    release.helm("uninstall")
    assert (release.key(OWN), release.key(FORMER)) == (key, key)


async def test_an_upgrade_without_hooks_keeps_the_key(release: Release) -> None:
    release.helm("install", FORMER_CHART, *VALUES)
    key = release.fill_former()
    upgrade_to_this(release, "--no-hooks")
    assert release.key(OWN) is None
    assert await release.start() == release.key(OWN) == key


async def test_an_upgrade_of_a_release_that_never_ran_has_one_key(release: Release) -> None:
    """The Secret of the former chart exists and is empty."""
    release.helm("install", FORMER_CHART, *VALUES)
    upgrade_to_this(release)
    assert release.key(OWN) is None
    key = await release.start()
    assert (release.key(OWN), release.key(FORMER)) == (key, key)


async def test_a_key_that_a_former_operator_created_after_a_rollback_is_used(release: Release) -> None:
    """After a rollback with an emptied Secret, the operator of the former chart created another key."""
    release.helm("install", FORMER_CHART, *VALUES)
    release.fill_former()
    upgrade_to_this(release)
    await release.start()
    release.helm("rollback", "1", "--force")
    assert release.key(FORMER) == b""
    newer = release.fill_former()
    upgrade_to_this(release)
    assert await release.start() == newer
    assert (release.key(OWN), release.key(FORMER)) == (newer, newer)


async def test_a_secret_of_another_release_is_not_changed(release: Release) -> None:
    """A Secret of another owner with the former name does not belong to this release."""
    metadata: dict[str, Any] = {"name": FORMER, "namespace": release.namespace}
    body = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {"x": "eA=="}}
    release.plane.kubectl("create", "-f", "-", stdin=yaml.safe_dump(body))
    release.helm("install", CHART, *VALUES)
    assert "Secret" not in release.helm("get", "manifest").split()
