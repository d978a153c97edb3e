"""LocalCluster: one HeteroInference and its children in memory, its pods as processes."""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.report_access import ReportReader
from heteroinfer_operator.api import DEFAULT_GPU_RESOURCE
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    ConflictError,
    CreateObject,
    DeleteObject,
    Manifest,
    PatchStatus,
    RecordEvent,
    RemoveFinalizer,
    ResourceKey,
    ResourceObservation,
    ResourceView,
    TryObjects,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.local.loopback_addressing import LOOPBACK
from heteroinfer_operator.local.pod_process import parse_pod, share_cores
from heteroinfer_operator.local.process import PodFolder, RunningPod
from heteroinfer_operator.local.stored_pod import StoredPod
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.report_client import NO_ANSWER, ReportClient

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_TIMEOUT_S: Final = 10.0
WAITS_FOR_CHILDREN: Final = "foregroundDeletion"
"""Kubernetes' finalizer of a resource whose deletion waits for its pods."""
PROBE_EVERY_S: Final = 0.25
PROBE_TIMEOUT_S: Final = 1.0


class LocalClusterError(HeteroInferError):
    """`heteroinfer up` itself failed while it ran a pod. The message names the pod and the cause."""

    reason = "LocalClusterFailed"


class LocalPodError(HeteroInferError):
    """A pod cannot be started on this machine now. The message has the reason."""

    reason = "PodNotStarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of `heteroinfer up` for its cluster.

    Attributes:
        worker_python: the Python that has vLLM.
        scratch: private folder of the pods. Its path is short, because paths of sockets have a limit.
        log_dir: folder for the output of each pod, POD.log.
        gpus: GPUs for the pods, with their names in CUDA_VISIBLE_DEVICES.
        env: environment that pods inherit.
    """

    worker_python: Path
    scratch: Path
    log_dir: Path
    node: NodeView
    gpus: tuple[str, ...]
    env: Mapping[str, str]
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen


class LocalCluster:
    """The cluster that a reconcile reads and writes, on this machine.

    Use it from one event loop. The pods die with the thread of that loop.

    Args:
        on_change: called when the next reconcile may decide something new.
        on_event: called with each event.
    """

    def __init__(
        self,
        resource: Manifest,
        options: LocalOptions,
        *,
        on_change: Callable[[], None],
        on_event: Callable[[RecordEvent], None],
    ) -> None:
        metadata = resource["metadata"]
        self.key = ResourceKey(namespace=metadata.get("namespace", "default"), name=metadata["name"])
        self.deleted = asyncio.Event()
        self._options = options
        self._on_change = on_change
        self._on_event = on_event
        self._uid = str(uuid.uuid4())
        self._spec: Manifest = resource["spec"]
        self._status: Manifest = {}
        self._deleting = False
        self._version = 1
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._secrets: dict[str, Manifest] = {}
        self._pods: dict[str, StoredPod] = {}
        self._num_pods_started = 0
        self._free_gpus = list(options.gpus)
        self._reports = ReportClient()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: HeteroInferError | None = None

    @property
    def status(self) -> Manifest:
        """The status as last written."""
        return self._status

    def groups(self) -> dict[int, GroupReport]:
        """Returns the last report of each running leader, by group index."""
        reports = ((pod.group_index, pod.group_report) for pod in self._pods.values())
        return {index: report for index, report in reports if index is not None and report is not None}

    def plans(self) -> dict[str, Plan]:
        """Returns the plans in use, by hash."""
        texts = (stored.get("data", {}).get(names.PLAN_KEY) for stored in self._objects.values())
        plans = [Plan.from_json(text) for text in texts if text is not None]
        return {plan.hash: plan for plan in plans}

    def request_deletion(self) -> None:
        """Starts the deletion of the resource and its pods. Sets `deleted` after all are deleted."""
        self._deleting = True
        self._record_change()

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        """Reads the resource, its children and this machine; None if the resource is deleted.

        Raises:
            HeteroInferError: processes of a pod cannot be killed.
        """
        if self._failure is not None:
            raise self._failure
        if self._deleting and not self._pods:  # no reconcile is running that could start a pod
            self._objects.clear()
            self.deleted.set()
        if key != self.key or self.deleted.is_set():
            return None
        return ResourceObservation(
            resource=ResourceView(
                key=self.key,
                uid=self._uid,
                generation=1,
                resource_version=str(self._version),
                finalizers=(WAITS_FOR_CHILDREN,) if self._deleting else (),
                deleting=self._deleting,
                spec=self._spec,
                status=self._status,
            ),
            pods=tuple(pod.view(self._options.node.name) for pod in self._pods.values()),
            objects=tuple(self._objects.values()),
            nodes=(self._observe_node(),),
            groups=self.groups(),
            calibrations=self._options.calibrations,
            fetch=next((pod.fetch for pod in self._pods.values() if pod.fetch is not None), None),
        )

    def _observe_node(self) -> NodeView:
        """Returns this machine for plans.

        Includes only its devices, because all pods share its cores and memory.
        """
        node = self._options.node
        devices = {name: count for name, count in node.allocatable.items() if "/" in name}
        in_use = len(self._options.gpus) - len(self._free_gpus)
        return replace(node, allocatable=devices, requested={DEFAULT_GPU_RESOURCE: float(in_use)})

    async def run(self, observation: ResourceObservation, actions: Sequence[Action]) -> None:
        """Runs actions in order.

        Raises:
            ConflictError: an object exists already, or the resource has changed.
            UnsupportedPodFieldError: a pod needs something that this machine lacks.
            LocalPodError: a pod could not be started.
        """
        for action in actions:
            await self._run_action(action, observation)

    async def close(self) -> None:
        """Kills the pods that still run, and removes their folders.

        Raises:
            HeteroInferError: processes could not be killed, or a task that watches a pod failed. The message
                names them.
        """
        running = [pod for pod in self._pods.values() if pod.termination is None]
        for pod in running:
            self._start_task(pod, self._stop_pod(pod, grace_s=0.0))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        for task in self._tasks:
            task.cancel()
        await self._reports.close()
        for pod in self._pods.values():
            pod.running.folder.remove()
        if self._failure is not None:
            raise self._failure

    async def _run_action(self, action: Action, observation: ResourceObservation) -> None:
        """Runs one action; dry runs and finalizers have no effect on this machine."""
        match action:
            case CreateObject(manifest=manifest):
                await self._create_object(manifest)
            case TryObjects():
                pass  # there is no API server that could refuse objects
            case ApplyObject(manifest=manifest):
                self._apply_object(manifest)
            case DeleteObject():
                self._delete_object(action)
            case PatchStatus():
                if action.resource_version != str(self._version):
                    raise ConflictError(f"{self.key} has changed since it was observed")
                self._status = action.status
                self._record_change()
            case RemoveFinalizer():
                pass  # a resource of `heteroinfer up` has no such finalizer
            case RecordEvent():
                self._on_event(action)

    def _record_change(self) -> None:
        """Records a write of the resource, so that older decisions conflict with it."""
        self._version += 1
        self._on_change()

    async def _create_object(self, manifest: Manifest) -> None:
        """Stores an object, or starts a pod; raises ConflictError if the object exists."""
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "Secret":
            # An existing Secret stays. No observation shows Secrets, so reconciles create them repeatedly.
            self._secrets.setdefault(name, manifest)
            return
        if (kind, name) in self._objects or (kind == "Pod" and name in self._pods):
            raise ConflictError(f"{kind} {name} exists already")
        if kind != "Pod":
            self._objects[kind, name] = _with_uid(manifest, str(uuid.uuid4()))
            return
        pod = await self._start_pod(manifest)
        self._pods[name] = pod
        self._start_task(pod, self._await_end(pod))
        self._start_task(pod, self._probe_until_end(pod))
        self._on_change()

    def _apply_object(self, manifest: Manifest) -> None:
        """Stores an object; an existing object keeps its uid."""
        key = manifest["kind"], manifest["metadata"]["name"]
        old = self._objects.get(key)
        self._objects[key] = _with_uid(manifest, old["metadata"]["uid"] if old else str(uuid.uuid4()))

    def _delete_object(self, action: DeleteObject) -> None:
        """Removes an object, or starts to stop a pod, if it has the uid of the action."""
        if action.kind != "Pod":
            stored = self._objects.get((action.kind, action.name))
            if stored is not None and stored["metadata"]["uid"] == action.uid:
                del self._objects[action.kind, action.name]
            return
        pod = self._pods.get(action.name)
        if pod is None or pod.uid != action.uid or pod.deleting:
            return
        pod.deleting = True
        if pod.termination is not None:
            self._remove_pod(pod)
        else:
            grace_s = pod.running.pod.grace_s if action.grace_s is None else action.grace_s
            self._start_task(pod, self._stop_pod(pod, grace_s=grace_s))

    async def _start_pod(self, manifest: Manifest) -> StoredPod:
        """Starts the processes of a pod on free GPUs.

        Raises:
            LocalPodError: GPUs are missing, or the program cannot be started.
            UnsupportedPodFieldError: a field needs something that this machine lacks.
        """
        config_maps = {name: stored for (kind, name), stored in self._objects.items() if kind == "ConfigMap"}
        pod = share_cores(
            parse_pod(manifest, config_maps, self._secrets, self._options.node.labels),
            cores=self._options.node.allocatable["cpu"],
            groups=self._spec.get("replicas", 1),
            env=self._options.env,
        )
        if pod.num_gpus > len(self._free_gpus):
            raise LocalPodError(
                f"pod {pod.name}: needs {pod.num_gpus} GPUs, but {len(self._free_gpus)} are free. Request "
                "fewer GPUs, or stop the programs that use them"
            )
        gpus, self._free_gpus = self._free_gpus[: pod.num_gpus], self._free_gpus[pod.num_gpus :]
        self._num_pods_started += 1
        folder = PodFolder(
            path=self._options.scratch / f"p{self._num_pods_started}",
            log=self._options.log_dir / f"{pod.name}.log",
        )
        try:
            running = await RunningPod.start(
                pod, self._options.worker_python, folder, gpus, self._options.env
            )
        except OSError as error:
            self._free_gpus = sorted([*self._free_gpus, *gpus])
            folder.remove()
            raise LocalPodError(
                f"pod {pod.name}: its process cannot be started ({error}). Check the Python of the workers "
                f"({self._options.worker_python}), and the space in {self._options.scratch.parent}"
            ) from error
        return StoredPod(manifest=manifest, uid=str(uuid.uuid4()), running=running, gpus=tuple(gpus))

    async def _await_end(self, pod: StoredPod) -> None:
        """Waits until a pod has ended, and frees its GPUs. Then removes a pod that is being deleted.

        If some of the pod's processes survive, `observe` and `close` raise the error.
        """
        try:
            pod.termination = await pod.running.wait()
        except HeteroInferError as error:
            self._failure = error
        pod.ready = False
        pod.group_report = None
        pod.fetch = None
        self._free_gpus = sorted([*self._free_gpus, *pod.gpus])
        if pod.deleting:
            self._remove_pod(pod)
        self._on_change()

    async def _stop_pod(self, pod: StoredPod, *, grace_s: float) -> None:
        """Ends a pod's processes. If some survive, `observe` and `close` raise the error."""
        try:
            await pod.running.stop(grace_s)
        except HeteroInferError as error:
            self._failure = error
            self._on_change()

    def _remove_pod(self, pod: StoredPod) -> None:
        """Removes an ended pod and its folder."""
        pod.running.folder.remove()
        self._pods.pop(pod.name, None)
        self._on_change()

    async def _probe_until_end(self, pod: StoredPod) -> None:
        """Probes a pod until it ends. A pod without a readiness probe is not probed.

        Announces only a change of readiness. Other changes of the reports wait for the next reconcile.
        """
        port, path = pod.running.pod.health_port, pod.running.pod.readiness_path
        reader, limit_s = ReportReader(pod.key), PROBE_TIMEOUT_S
        while port is not None and pod.termination is None:
            ready = await self._reports.is_ready(LOOPBACK, port, path, timeout_s=limit_s)
            group_report, fetch = None, None
            if pod.leads:
                group_report = await _none_without_answer(
                    self._reports.read_group(LOOPBACK, port, reader, timeout_s=limit_s)
                )
            if pod.fetches:
                answer = await _none_without_answer(
                    self._reports.read_fetch(LOOPBACK, port, timeout_s=limit_s)
                )
                # The second value of the answer is a question that only an operator in a cluster answers.
                fetch = answer[0] if answer is not None else None
            has_ended_meanwhile = pod.termination is not None
            if not has_ended_meanwhile:
                was_ready = pod.ready, _reports_ready(pod.group_report)
                pod.ready, pod.group_report, pod.fetch = ready, group_report, fetch
                if (ready, _reports_ready(group_report)) != was_ready:
                    self._on_change()
            await asyncio.sleep(PROBE_EVERY_S)

    def _start_task(self, pod: StoredPod, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task of a pod. An exception ends this run, because no other task watches the pod."""

        def record_failure(error: BaseException) -> None:
            """Keeps the first failure of a watcher, and announces a change."""
            self._failure = self._failure or LocalClusterError(
                f"pod {pod.name}: `heteroinfer up` can no longer watch the pod ({error!r}). "
                "Report this error with the log of the pod"
            )
            self._on_change()

        task = start_task(work, name=f"pod {pod.name}", failed=record_failure)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _none_without_answer(answer: Awaitable[T]) -> T | None:
    """Returns an answer, or None if the pod does not answer because it is starting, busy or ending."""
    try:
        return await answer
    except NO_ANSWER as error:
        logger.debug("a pod did not answer: %r", error)
        return None


def _reports_ready(status: GroupReport | None) -> bool:
    """Reports whether a leader has sent a report in which its group is ready."""
    return status is not None and status.ready


def _with_uid(manifest: Manifest, uid: str) -> Manifest:
    """Returns a manifest with a uid, as the API server would store it."""
    return {**manifest, "metadata": {**manifest["metadata"], "uid": uid}}
