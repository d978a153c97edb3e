"""The kstatus of sigs.k8s.io/cli-utils, which Flux and other tools use, on stored objects."""

import json
import subprocess
from typing import Any, Final

from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiServer
from tests.cluster import tools
from tests.integration.operator.running_operator import until

IN_PROGRESS: Final = "InProgress"
CURRENT: Final = "Current"
FAILED: Final = "Failed"
TERMINATING: Final = "Terminating"


def judge(resource: dict[str, Any]) -> str:
    """Computes the kstatus of an object."""
    program = tools.program(tools.KSTATUS, "kstatus")
    done = subprocess.run(
        [str(program)], input=json.dumps(resource), check=True, capture_output=True, text=True, timeout=30
    )
    status: str = json.loads(done.stdout)["status"]
    return status


async def kstatus(server: ApiServer, namespace: str, name: str = "tiny") -> str:
    """Computes the kstatus of a stored resource."""
    return judge(await server.get(HETERO_INFERENCE.path(namespace, name)))


async def becomes(server: ApiServer, namespace: str, status: str, condition: tuple[str, str, str]) -> None:
    """Waits until a condition has this status and reason; its kstatus must be `status`."""
    kind, wanted, reason = condition
    seen: list[Any] = []

    async def holds() -> bool:
        resource = await server.get(HETERO_INFERENCE.path(namespace, "tiny"))
        seen[:] = resource.get("status", {}).get("conditions", [])
        if resource.get("status", {}).get("observedGeneration") != resource["metadata"]["generation"]:
            assert judge(resource) == IN_PROGRESS, resource
            return False
        if not any((c["type"], c["status"], c["reason"]) == (kind, wanted, reason) for c in seen):
            return False
        assert judge(resource) == status, resource
        return True

    await until(f"{kind} {wanted} {reason}", holds, timeout_s=30, details=lambda: json.dumps(seen, indent=1))
