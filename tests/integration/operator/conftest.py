"""Provides a control plane with the installed CRD, a namespace for each test, and clients."""

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml

from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.kube.paths import NODE
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.crds import apply_crds
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.running_operator import CrdName, add_node

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def crd(control_plane: Cluster) -> str:
    """Installs the CustomResourceDefinition, and returns its name."""
    apply_crds(control_plane, build_crd())
    return CrdName


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """Creates a namespace for this test alone."""
    name = f"operator-{next(_NUMBERS)}"
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest_asyncio.fixture
async def server(control_plane: Cluster, crd: str) -> AsyncIterator[ApiServer]:
    """Yields the API server with all permissions, through the operator's own client."""
    api_server = ApiServer(await load_configuration(str(control_plane.kubeconfig)))
    yield api_server
    await api_server.close()


CHART = REPOSITORY / "charts" / "heteroinfer"


class Installation:
    """The chart as a release without an operator pod, and the kubeconfig of its service account."""

    def __init__(self, cluster: Cluster, release: str, kubeconfig: Path) -> None:
        self.account = f"system:serviceaccount:{release}:{release}-heteroinfer"
        self.release = release
        self.kubeconfig = kubeconfig
        token = cluster.kubectl("create", "token", "-n", release, f"{release}-heteroinfer", "--duration=1h")
        config = yaml.safe_load(cluster.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": token.strip()}
        kubeconfig.write_text(yaml.safe_dump(config))
        kubeconfig.chmod(0o600)

    @property
    def key(self) -> dict[str, str]:
        """Settings with which an operator uses the release's key."""
        return {"namespace": self.release, "key_secret": f"{self.release}-heteroinfer-operator-key"}


@pytest.fixture
def install(control_plane: Cluster, crd: str, tmp_path: Path) -> Iterator[Callable[..., Installation]]:
    """Installs the chart in a namespace with the name of the release; uninstalls it after the test."""
    releases: list[str] = []

    def install_chart(*values: str) -> Installation:
        """Installs the chart with these values, and returns the installation."""
        release = f"rel{next(_NUMBERS)}"
        sets = ("replicas=0", "crds.install=false", *values)
        options = ["-f", str(LEAST_VALUES), *(option for value in sets for option in ("--set", value))]
        control_plane.helm("install", release, str(CHART), "-n", release, "--create-namespace", *options)
        releases.append(release)
        return Installation(control_plane, release, tmp_path / f"{release}.kubeconfig")

    yield install_chart
    for release in releases:
        control_plane.helm("uninstall", release, "-n", release)
        control_plane.kubectl("delete", "namespace", release, "--wait=false")


@pytest_asyncio.fixture
async def node(server: ApiServer) -> AsyncIterator[str]:
    """A node that plans use but the scheduler does not."""
    await add_node(server, "spacious", {"key": "tests.heteroinfer.dev/nobody", "effect": "NoSchedule"})
    yield "spacious"
    await server.delete(NODE.path(None, "spacious"), {})
