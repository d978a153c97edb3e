"""Which gang schedulers a cluster has, by the API groups that it serves.

Discovery is open to everybody who may log in, in namespaced mode too.
"""

from types import MappingProxyType
from typing import Final

from heteroinfer_operator.cluster import Gang
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer

_SIGNS: Final = MappingProxyType(
    {
        Gang.KUEUE: (("kueue.x-k8s.io/v1beta1", "kueue.x-k8s.io/v1beta2"), "localqueues"),
        Gang.VOLCANO: (("scheduling.volcano.sh/v1beta1",), "podgroups"),
        Gang.COSCHEDULING: (("scheduling.x-k8s.io/v1alpha1",), "podgroups"),
        Gang.NATIVE: (("scheduling.k8s.io/v1alpha1",), "workloads"),
    }
)
"""Group versions, of which one must serve this resource."""


async def find_gangs(server: ApiServer) -> frozenset[Gang]:
    """Returns the gang schedulers whose API is served now; raises ApiError if it cannot be asked."""
    found = set()
    for gang, (versions, plural) in _SIGNS.items():
        for version in versions:
            if plural in await _served(server, version):
                found.add(gang)
    return frozenset(found)


async def _served(server: ApiServer, group_version: str) -> set[str]:
    try:
        answer = await server.get(f"/apis/{group_version}")
    except ApiError as error:
        if error.status == NOT_FOUND:
            return set()
        raise
    return {resource["name"] for resource in answer.get("resources", ())}
