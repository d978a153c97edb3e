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
from heteroinfer_operator.fleet.lines import LeaderAnswer
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD
from heteroinfer_operator.kube.server import BAD_REQUEST, FORBIDDEN, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.report_client import parse_report

PROXY_TIMEOUT_S: Final = 3.0
"""Time limit of a request to a leader. A leader that does not answer must not delay the output for long."""
MAX_REQUESTS: Final = 16
"""Requests to leaders that may run at the same time."""
_NO_ADDRESS: Final = "address not allowed"
"""The API server's answer to a request for a pod that has no address yet."""
_KV_USE: Final = re.compile(r"^vllm:kv_cache_usage_perc(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
"""vLLM's own gauge, 0 to 1 (`vllm/v1/metrics/loggers.py@v0.32.0`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResource:
    """A stored HeteroInference.

    Attributes:
        api_port: port of the OpenAI API in its leaders' pods.
        manifest: the whole stored object.
    """

    key: ResourceKey
    api_port: int
    status: HeteroInferenceStatus
    manifest: Manifest


async def read_resources(
    server: ApiServer, namespace: str | None, name: str | None, *, selector: str | None = None
) -> list[StoredResource]:
    """Reads the HeteroInferences of a namespace, or only the HeteroInference `name`.

    Args:
        namespace: None for all namespaces.
        selector: selects resources by labels, in the syntax of kubectl.

    Raises:
        HeteroInferError: no resource has this name, or the user lacks the right to read resources.
    """
    path = HETERO_INFERENCE.path(namespace, name)
    try:
        answer = await server.get(path, {"labelSelector": selector} if selector else None)
    except ApiError as error:
        if error.status == NOT_FOUND:
            problem = (
                f"the API server does not serve {names.PLURAL}.{names.API_GROUP}. Install HeteroInfer's chart"
            )
            if name:
                problem = (
                    f"namespace {namespace}: has no {names.KIND} {name}. List all: kubectl get "
                    f"{names.SHORT_NAME} -A"
                )
            raise HeteroInferError(problem, reason="NotFound") from error
        if error.status == FORBIDDEN and namespace is None:
            raise HeteroInferError(
                f"{error.message}. Use -n NAMESPACE with a namespace that you may read", reason="Forbidden"
            ) from error
        raise
    items = [answer] if name else answer["items"]
    return [_parse_stored(item) for item in items]


def _parse_stored(item: Manifest) -> StoredResource:
    """Parses a stored HeteroInference."""
    metadata = item["metadata"]
    return StoredResource(
        key=ResourceKey(namespace=metadata["namespace"], name=metadata["name"]),
        api_port=int(item["spec"].get("engine", {}).get("port", names.DEFAULT_API_PORT)),
        status=parse_status(item.get("status") or {}),
        manifest=item,
    )


class LeaderReader:
    """Reads the reports of leaders through the API server's proxy.

    The user needs the right to get `pods/proxy`.

    Attributes:
        problem: message about a leader that the last `read` could not reach or understand, or "".
    """

    def __init__(self, server: ApiServer) -> None:
        self.problem = ""
        self._server = server
        self._slots = asyncio.Semaphore(MAX_REQUESTS)

    async def read(self, resources: Sequence[StoredResource]) -> dict[ResourceKey, dict[int, LeaderAnswer]]:
        """Reads the reports of all leaders, by resource and group index.

        A leader without a valid report has an empty LeaderAnswer.
        """
        self.problem = ""
        groups = [(stored, group) for stored in resources for group in stored.status.groups if group.members]
        answers = await asyncio.gather(*(self._read_leader(stored, group) for stored, group in groups))
        found: dict[ResourceKey, dict[int, LeaderAnswer]] = {}
        for (stored, group), answer in zip(groups, answers, strict=True):
            found.setdefault(stored.key, {})[group.index] = answer
        return found

    async def _read_leader(self, stored: StoredResource, group: GroupStatus) -> LeaderAnswer:
        """Reads a leader's report and, if the group is ready, the use of its KV cache."""
        leader = group.members[0].pod
        async with self._slots:
            text = await self._get_from_pod(
                stored.key.namespace, leader, names.DEFAULT_HEALTH_PORT, names.PATH_GROUP
            )
            if text is None:
                return LeaderAnswer()
            try:
                report = parse_report(text)
            except ContractError as error:
                self.problem = (
                    f"pod {leader}: this client cannot read the report of the pod ({error}). Use a client "
                    "with the version of this pod"
                )
                return LeaderAnswer()
            if not report.ready:
                return LeaderAnswer(report=report)
            metrics = await self._get_from_pod(stored.key.namespace, leader, stored.api_port, "/metrics")
        return LeaderAnswer(report=report, kv_use=kv_use_of(metrics or ""))

    async def _get_from_pod(self, namespace: str, pod: str, port: int, path: str) -> str | None:
        """Returns the text of a response; without a response, sets `problem` and returns None."""
        try:
            async with asyncio.timeout(PROXY_TIMEOUT_S):
                return await self._server.get_text(POD.path(namespace, f"{pod}:{port}", f"proxy{path}"))
        except TimeoutError:
            self.problem = (
                f"pod {pod}: no answer on port {port} within {PROXY_TIMEOUT_S:g} s. If this repeats, read "
                "the log of the pod"
            )
        except ApiError as error:
            fix = ". Ask for the right to get pods/proxy" if error.status == FORBIDDEN else ""
            has_no_address = error.status == BAD_REQUEST and _NO_ADDRESS in error.message
            self.problem = f"pod {pod} has no address yet" if has_no_address else f"{error.message}{fix}"
        return None


def kv_use_of(exposition: str) -> float | None:
    """Returns the used share of the KV cache, 0 to 1, in vLLM's metrics; None without a valid value."""
    shares = [_parse_share(text) for text in _KV_USE.findall(exposition)]
    return max((share for share in shares if share is not None), default=None)


def _parse_share(text: str) -> float | None:
    """Returns a number from 0 to 1; None for any other text, because a leader may send any text."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None
