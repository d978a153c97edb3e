"""Checks random resources with spec classes, CRD, planner, manifests and a real API server."""

import asyncio
import contextlib
import json
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import render_crd
from heteroinfer_operator.kube.installation import wait_for_resource
from heteroinfer_operator.kube.paths import HETERO_INFERENCE
from heteroinfer_operator.kube.server import ApiError, ApiServer, load_configuration
from tests.cluster import tools
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only
from tests.integration.crd.strategies import changed, resources
from tests.integration.specs.lives import NAMESPACE, Crash, Life, live

_PROBLEM = re.compile(r"(?:invalid: \[?|, )((?:spec|metadata)[./a-zA-Z0-9_\[\]-]*): ")
_OTHERS = re.compile(
    r"pods .* is forbidden: (no PriorityClass with name|pod rejected: RuntimeClass)"
    r"|spec\.containers\[0\]\.resources"
)
"""Reasons that no schema can contain: names of other objects, and container resources without a limit."""
BATCH = 100
AT_ONCE = 16
TRIES = 5
_PLURALS = {
    "Pod": "pods",
    "Service": "services",
    "ConfigMap": "configmaps",
    "Secret": "secrets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "NetworkPolicy": "networkpolicies",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "Job": "jobs",
}


@dataclass(slots=True)
class Result:
    """The outcomes of all resources.

    Attributes:
        counts: number of resources by outcome.
        objects: number of objects that the API server accepted.
        findings: errors, each with its resource.
    """

    counts: Counter[str] = field(default_factory=Counter)
    objects: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """Returns all results as one line."""
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items()))
        return (
            f"{self.counts.total()} specs: {counts}; {self.objects} objects accepted by the API server; "
            f"{len(self.findings)} findings"
        )


@contextlib.contextmanager
def start_cluster() -> Iterator[Cluster]:
    """Yields a control plane that serves HeteroInference."""
    ensure_tools(tools.CONTROL_PLANE)
    with start_control_plane_only() as started:
        started.kubectl("create", "-f", "-", stdin=render_crd())
        asyncio.run(_served(started))
        yield started


async def _served(cluster: Cluster) -> None:
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    try:
        async with asyncio.timeout(30):
            await wait_for_resource(server)
    finally:
        await server.close()


def check_specs(
    cluster: Cluster, count: int, *, number: int, reported: Callable[[Result], None] = lambda result: None
) -> Result:
    """Checks `count` random resources, drawn from the seed `number`. Returns the outcomes.

    Half of them are meant to be valid. The others are valid resources with one change.
    """
    result = Result()
    batch: list[dict[str, Any]] = []

    def flush() -> None:
        asyncio.run(_check_batch(cluster, batch, result))
        batch.clear()
        reported(result)

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[
            Phase.generate
        ],  # Without shrinking, because shrinking a failure would send requests for hours.
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(resources(), changed()))
    def collect(body: dict[str, Any]) -> None:
        batch.append(body)
        if len(batch) == BATCH:
            flush()

    collect()
    flush()
    return result


async def _check_batch(cluster: Cluster, bodies: Sequence[dict[str, Any]], result: Result) -> None:
    server = ApiServer(await load_configuration(str(cluster.kubeconfig)))
    limit = asyncio.Semaphore(AT_ONCE)
    try:
        await asyncio.gather(*(_check(server, limit, body, result) for body in bodies))
    finally:
        await server.close()


async def _check(server: ApiServer, limit: asyncio.Semaphore, body: dict[str, Any], result: Result) -> None:
    async with limit:
        try:
            outcome = await _outcome(server, live(body), result)
        except (Crash, _Finding) as finding:
            cause = finding.__cause__
            trace = "".join(traceback.format_exception(cause)[-4:]) if cause else ""
            result.findings.append(f"{finding}\n{json.dumps(body)}\n{trace}")
            outcome = "wrong"
    result.counts[outcome] += 1


class _Finding(Exception):  # noqa: N818 - of a test
    pass


async def _outcome(server: ApiServer, life: Life, result: Result) -> str:
    """Returns the outcome of a resource. Raises _Finding if the parts of the product disagree."""
    reason = await _refusal(server, HETERO_INFERENCE.path(NAMESPACE), life.body)
    if bool(life.refused) != bool(reason):
        raise _Finding(f"the spec classes report {life.refused!r}, the API server reports {reason!r}")
    if life.refused:
        return "refused"
    for manifest in life.objects:
        reason = await _refusal(server, _path(manifest), manifest)
        if reason:
            return _refused_later(life, manifest, reason)
        result.objects += 1
    return "without a plan, in words" if life.unplanned else "planned"


def _refused_later(life: Life, manifest: Any, reason: str) -> str:
    """Returns the outcome of a resource of which the API server refuses an object.

    Only the API server checks references to other objects of a cluster. The status then has its message.
    """
    refusal = f"the API server refuses {manifest['kind']} {manifest['metadata']['name']}: {reason}"
    if manifest["kind"] != "Pod" or not all(map(_OTHERS.match, _PROBLEM.findall(reason) or [reason])):
        raise _Finding(refusal)
    if not life.tells(refusal):
        raise _Finding(f"the status does not quote this refusal: {refusal}")
    return "refused by the API server, reported in the status"


def _path(manifest: Any) -> str:
    version, kind = manifest["apiVersion"], manifest["kind"]
    root = "/apis" if "/" in version else "/api"
    return f"{root}/{version}/namespaces/{NAMESPACE}/{_PLURALS[kind]}"


async def _refusal(server: ApiServer, path: str, body: Any) -> str:
    """Returns the API server's reason to refuse an object, or "". Nothing is stored."""
    query = {"dryRun": "All", "fieldValidation": "Strict", "fieldManager": names.MANAGER}
    for left in reversed(range(TRIES)):
        try:
            await server.create(path, body, query)
        except ApiError as error:
            if error.is_refusal:
                return error.answer_message
            if error.status or not left:
                raise
            # without an answer, a server that lacks CPU time has not judged the object
            await asyncio.sleep(1)
        else:
            break
    return ""
