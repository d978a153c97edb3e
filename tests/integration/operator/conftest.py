"""A control plane with the resource installed, a namespace for each test, and ways to speak to it."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import yaml

from heteroinfer_operator.crd import build_crd
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from tests.cluster.cluster import Cluster
from tests.integration.operator.support import CrdName

_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def crd(control_plane: Cluster) -> str:
    """The name of the installed CustomResourceDefinition."""
    control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(build_crd()))
    # By JSON path: `--for=condition=` fails while there are no conditions at all.
    established = 'jsonpath={.status.conditions[?(@.type=="Established")].status}=True'
    control_plane.kubectl("wait", f"--for={established}", f"crd/{CrdName}", "--timeout=20s")
    return CrdName


@pytest.fixture
def namespace(control_plane: Cluster) -> Iterator[str]:
    """A namespace of this test's own."""
    name = f"operator-{next(_NUMBERS)}"
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl("wait", "-n", name, "--for=create", "serviceaccount/default", "--timeout=20s")
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest_asyncio.fixture
async def server(control_plane: Cluster, crd: str) -> AsyncIterator[ApiServer]:
    """The API server with all rights, as the operator's own code reaches it."""
    api_server = ApiServer(await load_configuration(str(control_plane.kubeconfig)))
    yield api_server
    await api_server.close()
