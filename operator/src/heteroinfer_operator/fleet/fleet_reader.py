"""Reads HeteroInferences with the rights of a user: their status, and the reports of their leaders."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_operator.api import GroupStatus, HeteroInferenceStatus, parse_status
from heteroinfer_operator.cluster import Manifest, ResourceKey
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.lines import Live
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import FORBIDDEN, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.report_client import parse_report

PROXY_TIMEOUT_S: Final = 3.0
"""For the answer of a leader: a failing group must not hold up the table."""
AT_ONCE: Final = 16
_KV_USE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
"""vLLM's own gauge, 0 to 1 (`vllm/v1/metrics/loggers.py@v0.32.0`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored HeteroInference, whose leaders serve on `api_port`; `manifest` is the whole object."""

    key: ResourceKey
    api_port: int
    status: HeteroInferenceStatus
    manifest: Manifest


async def read_resources(
    server: ApiServer, namespace: str | None, name: str | None, *, selector: str | None = None
) -> list[Stored]:
    """Reads the resources of a namespace (None: all), or the one with this name.

    Args:
        selector: of labels, in Kubernetes' own grammar.

    Raises:
        HeteroInferError: no resource has this name, or the user lacks the right to read them.
    """
    path = HETERO_INFERENCE.path(namespace, name)
    try:
        answer = await server.get(path, {"labelSelector": selector} if selector else None)
    except ApiError as error:
        if error.status == NOT_FOUND:
            raise HeteroInferError(
                f"namespace {namespace}: no {names.KIND} {name}; see `kubectl get {names.SHORT_NAME} -A`"
                if name
                else f"{names.PLURAL}.{names.API_GROUP} is not served here: install HeteroInfer's chart",
                reason="NotFound",
            ) from error
        if error.status == FORBIDDEN and namespace is None:
            raise HeteroInferError(
                f"{error.message}; name a namespace with -n", reason="Forbidden"
            ) from error
        raise
    items = [answer] if name else answer["items"]
    return [_stored(item) for item in items]


def _stored(item: Manifest) -> Stored:
    metadata = item["metadata"]
    return Stored(
        key=ResourceKey(namespace=metadata["namespace"], name=metadata["name"]),
        api_port=int(item["spec"].get("engine", {}).get("port", names.DEFAULT_API_PORT)),
        status=parse_status(item.get("status") or {}),
        manifest=item,
    )


class LeaderReader:
    """Asks leaders through the API server's proxy, which needs the right to get `pods/proxy`.

    Attributes:
        problem: why the last round left out groups, for people, or "".
    """

    def __init__(self, server: ApiServer) -> None:
        self.problem = ""
        self._server = server
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def read(self, resources: Sequence[Stored]) -> dict[ResourceKey, dict[int, Live]]:
        """Reads the reports of all leaders, by resource and group index, without leaders that are silent."""
        self.problem = ""
        asked = [(stored, group) for stored in resources for group in stored.status.groups if group.members]
        answers = await asyncio.gather(*(self._read_leader(stored, group) for stored, group in asked))
        live: dict[ResourceKey, dict[int, Live]] = {}
        for (stored, group), answer in zip(asked, answers, strict=True):
            live.setdefault(stored.key, {})[group.index] = answer
        return live

    async def _read_leader(self, stored: Stored, group: GroupStatus) -> Live:
        leader = group.members[0].pod
        async with self._slots:
            text = await self._get_from_pod(
                stored.key.namespace, leader, names.DEFAULT_HEALTH_PORT, names.PATH_GROUP
            )
            if text is None:
                return Live()
            try:
                report = parse_report(text)
            except ContractError as error:
                self.problem = f"pod {leader}: its answer is of another version: {error}"
                return Live()
            if not report.ready:
                return Live(report=report)
            metrics = await self._get_from_pod(stored.key.namespace, leader, stored.api_port, "/metrics")
        return Live(report=report, kv_use=kv_use_of(metrics or ""))

    async def _get_from_pod(self, namespace: str, pod: str, port: int, path: str) -> str | None:
        try:
            async with asyncio.timeout(PROXY_TIMEOUT_S):
                return await self._server.get_text(POD.path(namespace, f"{pod}:{port}", f"proxy{path}"))
        except TimeoutError:
            self.problem = f"pod {pod} did not answer on port {port} within {PROXY_TIMEOUT_S:g} s"
        except ApiError as error:
            right = "; it takes the right to get pods/proxy" if error.status == FORBIDDEN else ""
            self.problem = f"{error.message}{right}"
        return None


def kv_use_of(exposition: str) -> float | None:
    """Returns the used share of the KV cache from vLLM's metrics, 0 to 1; None without that metric."""
    found = [share for text in _KV_USE.findall(exposition) if (share := _share(text)) is not None]
    return max(found) if found else None


def _share(text: str) -> float | None:
    """Returns the number if it is a share, 0 to 1; a leader may send any text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None
