"""One run of `heteroinfer up`: the operator's reconcile on this machine, until Ctrl-C or a failure."""

import asyncio
import functools
import os
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.group_key import KEY_BYTES
from heteroinfer_contract.plan import RankAssignment
from heteroinfer_contract.pod_launch import PodAddress
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    GroupPhase,
    HeteroInference,
    HeteroInferenceStatus,
    ModelPhase,
    ModelStatus,
    parse_status,
)
from heteroinfer_operator.cluster import RecordEvent, ResourceKey
from heteroinfer_operator.errors import HeteroInferError, Shortage
from heteroinfer_operator.fleet.lines import LeaderAnswer, ResourceLine, build_line
from heteroinfer_operator.local.adapter import LocalCluster, LocalOptions
from heteroinfer_operator.local.loopback_addressing import LocalAddressing
from heteroinfer_operator.manifests.worker_pods import WorkerImages, termination_grace_s
from heteroinfer_operator.reconcile import Allowed, Options, reconcile
from heteroinfer_operator.reconcile.group_planner import WAITING_FOR_MODEL
from heteroinfer_operator.up.console import Display
from heteroinfer_operator.workqueue import WorkQueue, build_process

REFRESH_S: Final = 0.5
_POLL_S: Final = 0.05
KILL_AFTER_S: Final = 15.0
"""Seconds after the grace period of the pods until the remaining pods are killed."""
_IMAGES: Final = WorkerImages(cpu="none", gpu="none")
"""`heteroinfer up` pulls no image: the worker's Python replaces every image."""
_PRINTED_CONDITIONS: Final = (ConditionType.PLANNED, ConditionType.CAPACITY_AVAILABLE, ConditionType.READY)
_FINAL_CONDITIONS: Final = (
    (ConditionType.FAILED, ConditionStatus.TRUE),
    (ConditionType.MODEL_READY, ConditionStatus.FALSE),
    (ConditionType.PLANNED, ConditionStatus.FALSE),
)
"""Conditions that only a change of the resource can end. They end `heteroinfer up`, which changes nothing."""


class SessionFailedError(HeteroInferError):
    """The resource failed. The message is the message of the condition that reports it."""

    reason = "Failed"


class Session:
    """Starts the groups of a resource on this machine, prints their progress, and ends them.

    Args:
        document: the resource as JSON values.
        resource: the same resource, parsed.
        api_port: port of group 0's OpenAI API.
        model_cache: folder for models from a hub.
    """

    def __init__(
        self,
        document: dict[str, Any],
        resource: HeteroInference,
        *,
        api_port: int,
        model_cache: Path,
        local: LocalOptions,
        display: Display,
    ) -> None:
        self._display = display
        self._served_name = resource.served_name
        self._spec = resource.spec
        self._addressing = LocalAddressing(api_port=api_port, model_cache=model_cache)
        self._cluster = LocalCluster(
            document, local, on_change=self._request_reconcile, on_event=self._print_event
        )
        # `nodes_may_come` is False, because this machine gets no more GPUs during the run. `names_come_again`
        # is False, because each run has a single resource.
        reconcile_options = Options(
            addressing=self._addressing,
            images=_IMAGES,
            operator_key=os.urandom(KEY_BYTES),
            nodes_may_come=False,
            names_come_again=False,
            # The user owns the machine, so nothing is refused.
            allowed=Allowed(arguments=None, environment=None, annotations=None, service_accounts=None),
        )
        decide = functools.partial(reconcile, options=reconcile_options)
        self._reconcile = build_process(self._cluster, decide)
        self._queue = WorkQueue(self._reconcile_or_fail, workers=1)
        self._printed_conditions: dict[str, tuple[str, str]] = {}
        self._serving_groups: frozenset[int] = frozenset()
        self._printed_plans: set[str] = set()
        self._missing_calibration = local.calibrations.missing
        self._printed_tenths: int | None = None
        self._num_signals = 0
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Serves until SIGINT or SIGTERM. All pods have ended when it returns or raises.

        Raises:
            HeteroInferError: the resource failed, or cannot run here.
        """
        self._addressing.check_api_ports(self._spec.replicas)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        tasks = [
            start_task(self._queue.run(), name="reconciles", failed=self._fail),
            start_task(self._refresh(), name="display", failed=self._fail),
        ]
        try:
            self._request_reconcile()
            await self._stop.wait()
            self._display.print_table(self._build_resource_line())
            await self._tear_down()
        finally:
            for task in tasks:
                task.cancel()
            await self._cluster.close()
        if self._failure is not None:
            raise self._failure

    async def _tear_down(self) -> None:
        """Deletes the resource and waits until its pods have ended, or until they must be killed."""
        self._display.print_line("stopping (press Ctrl-C again to kill the pods)")
        self._cluster.request_deletion()
        timeout_s = termination_grace_s(self._spec) + KILL_AFTER_S
        try:
            async with asyncio.timeout(timeout_s):
                while not (self._cluster.deleted.is_set() or self._kill.is_set()):
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self._display.print_line(
                f"the pods did not end within {timeout_s:g} s. Killing them", warning=True
            )

    def _on_signal(self) -> None:
        """Stops the groups at the first signal, and kills their pods at the second signal."""
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            self._kill.set()

    def _request_reconcile(self) -> None:
        self._queue.add(self._cluster.key)

    async def _reconcile_or_fail(self, key: ResourceKey) -> float | None:
        """Runs one reconcile. Returns the seconds until the next reconcile, or None if none is due.

        An error ends `heteroinfer up`. An operator in a cluster would try again instead.
        """
        try:
            next_reconcile_s = await self._reconcile(key)
        except HeteroInferError as error:
            self._fail(error)
            return None
        self._print_status(parse_status(self._cluster.status))
        return next_reconcile_s

    def _fail(self, error: BaseException) -> None:
        """Ends this run with an error. If the pods are already stopping, kills them."""
        if self._stop.is_set():
            self._kill.set()
        self._failure = self._failure or error
        self._stop.set()

    def _print_status(self, status: HeteroInferenceStatus) -> None:
        """Prints the changes of the status, and ends this run if the resource cannot serve.

        Prints the URLs again each time another group begins to serve.
        """
        if self._stop.is_set():
            return
        self._print_download(status.model)
        for kind in _PRINTED_CONDITIONS:
            self._print_condition(status.condition(kind.value))
        self._print_predictions(status)
        available = status.condition(ConditionType.AVAILABLE.value)
        serves = available is not None and available.status is ConditionStatus.TRUE
        serving = frozenset(group.index for group in status.groups if group.phase is GroupPhase.READY)
        newly_serving = serving - self._serving_groups
        if serves and newly_serving:
            self._print_endpoints(status, serving)
        self._serving_groups = serving if serves else frozenset()
        if serves:
            return
        for kind, state in _FINAL_CONDITIONS:
            condition = status.condition(kind.value)
            if condition is not None and condition.status is state and _is_final(condition):
                self._fail(SessionFailedError(condition.message, reason=condition.reason))
                return

    def _print_download(self, model: ModelStatus | None) -> None:
        """Prints the progress of a download, at each tenth of its bytes."""
        if model is None or not model.bytes_total or model.phase is not ModelPhase.DOWNLOADING:
            return
        tenths = 10 * (model.bytes_done or 0) // model.bytes_total
        if self._printed_tenths != tenths:
            self._printed_tenths = tenths
            total = format_bytes(model.bytes_total)
            self._display.print_line(f"fetching {self._spec.model.uri}: {10 * tenths} % of {total}")

    def _print_predictions(self, status: HeteroInferenceStatus) -> None:
        """Prints the predicted step time of each plan once, with the rates that the prediction uses."""
        for plan in status.plans:
            if plan.hash in self._printed_plans or plan.predicted_step_ms is None or plan.calibration is None:
                continue
            self._printed_plans.add(plan.hash)
            why_defaults = f" ({self._missing_calibration})" if self._missing_calibration else ""
            self._display.print_line(
                f"plan {plan.hash}: the predicted decode step of one request takes "
                f"{plan.predicted_step_ms:.1f} ms with {plan.calibration}{why_defaults}"
            )

    def _print_condition(self, condition: Condition | None) -> None:
        """Prints a condition whose status or message has changed."""
        if condition is None or condition.status is ConditionStatus.UNKNOWN:
            return
        state_and_message = (condition.status.value, condition.message)
        if self._printed_conditions.get(condition.type) != state_and_message:
            self._printed_conditions[condition.type] = state_and_message
            message = f": {condition.message}" if condition.message else ""
            self._display.print_line(f"{condition.type}={condition.status} {condition.reason}{message}")

    def _print_event(self, event: RecordEvent) -> None:
        kind = "Warning" if event.warning else "Normal"
        self._display.print_line(f"{kind} {event.reason}: {event.message}", warning=event.warning)

    def _print_endpoints(self, status: HeteroInferenceStatus, serving: frozenset[int]) -> None:
        """Prints the URLs of the groups that serve."""
        model = self._served_name
        self._display.print_table(self._build_resource_line())
        addresses, plans = self._addressing.current_addresses(), self._cluster.plans()
        for group in status.groups:
            if group.index not in serving & addresses.keys():
                continue
            url = self._addressing.group_endpoint(group.index)
            self._display.print_plain(f"OpenAI API of group {group.index}: {url} (model {model})")
            plan = plans.get(group.plan_hash or "")
            for line in _describe_urls(addresses[group.index], plan.ranks if plan else ()):
                self._display.print_plain(line)
        first_url = self._addressing.group_endpoint(min(serving))
        self._display.print_plain(
            f"  curl {first_url}/completions -H 'Content-Type: application/json' "
            f'-d \'{{"model": "{model}", "prompt": "Hello", "max_tokens": 16}}\''
        )

    def _build_resource_line(self) -> ResourceLine:
        """Returns the values of the ranks that the display shows."""
        status = parse_status(self._cluster.status)
        live = {index: LeaderAnswer(report=report) for index, report in self._cluster.groups().items()}
        return build_line(self._cluster.key, status, live, self._cluster.plans())

    async def _refresh(self) -> None:
        while True:
            self._display.show_ranks(self._build_resource_line())
            await asyncio.sleep(REFRESH_S)


def _describe_urls(pods: Sequence[PodAddress], ranks: Iterable[RankAssignment]) -> Iterable[str]:
    """Yields lines with the addresses of the status and of the metrics."""
    yield f"  status: http://{pods[0].host}:{pods[0].health_port}{names.PATH_GROUP}"
    for rank in ranks:
        pod = pods[rank.pod]
        yield f"  metrics of rank {rank.rank}: http://{pod.host}:{pod.metrics_port + rank.local_rank}/metrics"


def _is_final(condition: Condition) -> bool:
    """Reports whether waiting cannot end the condition.

    Waiting can help if GPUs are missing, which may become free, or while the model is being fetched.
    """
    return condition.reason not in {Shortage.reason, WAITING_FOR_MODEL}
