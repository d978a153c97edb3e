"""Starts, watches and ends the processes of one pod, and reports failures. Independent of other pods."""

import asyncio
import contextlib
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.child_process import (
    REAP_TIMEOUT_S,
    ChildProcess,
    ProcessObservation,
    ProcessState,
    StopClock,
    child_pids,
    kill_everything,
    reap_orphans,
)
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.launch.environment import Host, api_environment, can_be_forked, rank_environment
from vllm_heteroinfer.launch.supervised_process import (
    STOPPED,
    STOPPED_LIMIT_S,
    SupervisedProcess,
    build_beat,
    build_failure,
    exit_reason,
)
from vllm_heteroinfer.launch.supervisor_messages import RankBeat
from vllm_heteroinfer.pod.channel import RankChannel, SupervisorMessage
from vllm_heteroinfer.pod.forking import ForkClient, ForkRequest, environment_changes
from vllm_heteroinfer.pod.threads import LastingThread

EXIT_CODE_WAIT_S = 0.15
"""Time to wait for the exit code of a rank that reported a failure or is exiting."""
API_STOP_TIMEOUT_S = 3.0
"""Time for vLLM's API server to close its connections. After this time, the server is killed."""
STOP_INTERVAL_S = 0.02
ENGINE_LIST_INTERVAL_S = 1.0
"""Interval for listing the processes of vLLM's API server while it starts."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The commands of a pod's processes. Tests replace them with small real processes.

    Attributes:
        api_server: vLLM's API server, in the leader's pod only. If empty, the group has none.
        forks: whether the pod's other processes are forked from its first rank, which has already imported
            their libraries (pod/forking.py). Then each command must be a Python interpreter, `-m` and a
            module.
    """

    rank: tuple[str, ...] = (sys.executable, "-m", "vllm_heteroinfer.rank.entry")
    api_server: tuple[str, ...] = (sys.executable, "-m", "vllm_heteroinfer.engine.api_server")
    forks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProcessToStart:
    """A process to start. `assignment` is None for vLLM's API server."""

    label: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    assignment: RankAssignment | None


class PodProcesses:
    """All processes of this pod.

    Args:
        awake_s: reads a clock that counts only the seconds in which this process was scheduled (LoopClock).
            All time limits for the pod's processes use this clock.
    """

    def __init__(
        self,
        plan: Plan,
        launch: PodLaunch,
        on_evidence: Callable[[Evidence], None],
        awake_s: Callable[[], float],
    ) -> None:
        self._plan = plan
        self._launch = launch
        self._on_evidence = on_evidence
        self._awake_s = awake_s
        self._processes: list[SupervisedProcess] = []
        self._starts = LastingThread("starts")
        self._starting = False
        self._fork_client: ForkClient | None = None
        self._draining = False
        self._engine_pids: list[int] = []
        self._engine_listed_at_s = -ENGINE_LIST_INTERVAL_S  # so that the first check lists
        self._engine_stop_clocks: dict[int, StopClock] = {}

    async def start(self, commands: Commands, base_env: Mapping[str, str], host: Host) -> None:
        """Starts every rank of the pod. In the leader's pod, also starts vLLM's API server.

        The first rank forks the others if possible, because a fork has torch and vLLM imported already.

        Raises:
            ContractError: an environment is invalid. No process was started.
            OSError: a command cannot be started.
        """
        first, *others = self._processes_to_start(commands, base_env, host)
        assert first.assignment is not None
        # CUDA does not work after a fork, and the imports of a CUDA build may initialize CUDA.
        first_can_fork = commands.forks and first.assignment.device is Device.CPU
        # vLLM's API server computes nothing. So it can be forked from a rank with other thread settings.
        to_fork = [
            other
            for other in others
            if first_can_fork and (other.assignment is None or can_be_forked(other.env, first.env))
        ]
        self._starting = True
        await self._start_first(first, to_fork, sorted(cpu.id for cpu in host.cpus))
        for other in others:
            if other not in to_fork:
                await self._start_one(other)
        self._starting = False

    def _processes_to_start(
        self, commands: Commands, base_env: Mapping[str, str], host: Host
    ) -> "list[_ProcessToStart]":
        """Returns the ranks of the pod and, in the leader's pod, vLLM's API server."""
        to_start = [
            _ProcessToStart(
                label=f"rank {rank.rank}",
                command=commands.rank,
                env=rank_environment(self._plan, self._launch, rank, base_env, host),
                assignment=rank,
            )
            for rank in self._plan.pods[self._launch.pod_index].ranks
        ]
        if self._launch.pod_index == 0 and commands.api_server:
            env = api_environment(self._plan, base_env, host)
            to_start.append(
                _ProcessToStart(label="api", command=commands.api_server, env=env, assignment=None)
            )
        return to_start

    async def _start_first(
        self, first: "_ProcessToStart", to_fork: "Sequence[_ProcessToStart]", cpus: Sequence[int]
    ) -> None:
        """Starts the pod's first rank, and asks this rank to fork the processes in `to_fork`.

        Args:
            cpus: numbers of the CPUs for the forked processes.
        """
        if not to_fork:
            await self._start_one(first)
            return
        self._fork_client, server_end = ForkClient.open_pair()
        env = {**first.env, names.ENV_FORK_FD: str(server_end.fileno())}
        await self._start_one(replace(first, env=env), server_end)
        for other in to_fork:
            await self._request_fork(other, first, cpus)
        with contextlib.suppress(OSError):  # the first rank has ended: watch() reports this
            self._fork_client.end_requests()
        asyncio.get_running_loop().add_reader(
            self._fork_client.fileno(), self._adopt_forks, self._fork_client
        )

    async def _start_one(self, to_start: "_ProcessToStart", *child_sockets: socket.socket) -> None:
        """Starts a process without blocking the event loop, and watches its channel.

        Args:
            child_sockets: sockets that the new process inherits; the supervisor's copies are closed.
        """
        process = await self._starts.call(lambda: self._keep_process(_start(to_start, child_sockets)))
        self._watch_channel(process)
        log.info("started %s as process %d", to_start.label, process.child.pid)

    async def _request_fork(
        self, to_start: "_ProcessToStart", first: "_ProcessToStart", cpus: Sequence[int]
    ) -> None:
        """Asks the pod's first rank to fork a process, and watches the channel of this process.

        Does not wait for the fork: the first rank answers only after its imports (see _adopt_forks).
        """
        fork_client = self._fork_client
        assert fork_client is not None
        self._watch_channel(
            await self._starts.call(
                lambda: self._keep_process(_request_process(fork_client, to_start, first, cpus))
            )
        )

    def _keep_process(self, process: SupervisedProcess) -> SupervisedProcess:
        """Stores a new process, on the thread that starts it. So kill() finds it after a cancelled start."""
        self._processes.append(process)
        return process

    def _watch_channel(self, process: SupervisedProcess) -> None:
        """Makes the event loop read the messages of a process when they arrive."""
        asyncio.get_running_loop().add_reader(process.channel.fileno(), self._read_channel, process)

    def _adopt_forks(self, fork_client: ForkClient) -> None:
        """Reads the first rank's answers: adopts forked processes, and reports each failed fork."""
        for answer in fork_client.read():
            process = next(process for process in self._processes if process.child.label == answer.label)
            if answer.pid:
                process.child.adopt(answer.pid)
                log.info("started %s as process %d", answer.label, answer.pid)
            elif process.reported is None:
                message = (
                    f"the process cannot be forked: {answer.error}. Raise the pod's memory limit or the "
                    "pod's limit on processes"
                )
                process.reported = Failure(reason=exit_reason(process), message=message)
        if fork_client.closed:
            asyncio.get_running_loop().remove_reader(fork_client.fileno())
            fork_client.close()
            self._fork_client = None

    @property
    def _api(self) -> SupervisedProcess | None:
        """The process of vLLM's API server; None in other pods than the leader's."""
        return next((process for process in self._processes if process.assignment is None), None)

    def rank_beats(self) -> tuple[RankBeat, ...]:
        """Returns the heartbeat entries of this pod's ranks."""
        awake_s = self._awake_s()
        return tuple(
            build_beat(process, process.assignment, awake_s)
            for process in self._processes
            if process.assignment is not None
        )

    def send_group_age(self, group_age_s: float) -> None:
        """Sends every process the group age: seconds since all supervisors of the group were last heard.

        The same message starts a drain in vLLM's API server.
        """
        message = SupervisorMessage(group_age_s=group_age_s, drain=self._draining)
        for process in self._processes:
            process.channel.send(message)

    def last_log(self, rank: int) -> str:
        """Returns the last log line of a rank of this pod; "" for a rank of another pod."""
        own = (process for process in self._processes if process.rank == rank)
        return next((process.child.output.last_line() for process in own), "")

    def drain(self) -> None:
        """Makes vLLM's API server refuse new requests from the next heartbeat on.

        Then the end of vLLM's API server is not a failure.
        """
        self._draining = True

    def drained(self) -> bool:
        """Whether all requests have ended.

        vLLM's API server has reported this or has ended, or this pod has no API server.
        """
        api = self._api
        return api is None or api.report.drained or api.child.observe().state is ProcessState.ENDED

    def engine_unanswered_s(self) -> float:
        """Seconds for which vLLM's API server has waited for the engine's answer; 0 if it does not wait."""
        api = self._api
        if api is None or api.last_message_awake_s is None:
            return 0.0
        # Counts until the last message of vLLM's API server, not until now: after this message, the engine
        # may have given an answer that vLLM's API server has not reported.
        return api.busy_s(api.last_message_awake_s)

    def api_silent_s(self) -> float:
        """Seconds since the last message of vLLM's API server; 0 if the pod has no such server."""
        return 0.0 if self._api is None else self._api.silent_s(self._awake_s())

    def watch_engine(self, *, started: bool) -> None:
        """Reports an engine process that has been stopped for STOPPED_LIMIT_S (by SIGSTOP or a debugger).

        All children of vLLM's API server count as the engine.

        Args:
            started: whether vLLM's API server is up. A server that is up starts no more processes, so its
                children are listed only once more.
        """
        server = self._api
        if server is None or not server.child.started or server.failure_sent or self._draining:
            return
        now_s = self._awake_s()
        if self._engine_listed_at_s < now_s - ENGINE_LIST_INTERVAL_S:
            try:
                self._engine_pids = child_pids(server.child.pid)
            except OSError:  # too many open files: the next call tries again
                return
            self._engine_listed_at_s = math.inf if started else now_s  # inf: never listed again
        clocks = {pid: self._engine_stop_clocks.get(pid, StopClock()) for pid in self._engine_pids}
        self._engine_stop_clocks = clocks
        stopped_s_by_pid = {pid: clock.stopped_for_s(pid, now_s) for pid, clock in clocks.items()}
        for pid, stopped_s in stopped_s_by_pid.items():
            if stopped_s > STOPPED_LIMIT_S:
                server.failure_sent = True
                self._report_stopped_engine(pid, stopped_s)
                return

    def _report_stopped_engine(self, pid: int, stopped_s: float) -> None:
        """Passes on a stopped process of the engine as evidence."""
        pod = self._launch.pod_index
        message = f"vLLM's engine (pod {pod}, process {pid}) {STOPPED}"
        failure = Failure(reason=FailureReason.ENGINE_STOPPED, message=message, pod=pod, time=time.time())
        self._on_evidence(Evidence(failure=failure, age_s=stopped_s))

    def watch(self) -> None:
        """Checks every process, reports each failure once, and reaps orphans.

        During a drain, the end of vLLM's API server is expected. Orphans are reaped only after the start,
        because an orphan may be a fork whose process id is not known yet.
        """
        now_s = self._awake_s()
        for process in self._processes:
            is_expected_to_end = self._draining and process.assignment is None
            if not process.failure_sent and not is_expected_to_end:
                self._watch_one(process, now_s)
        if self._fork_client is None and not self._starting:
            reap_orphans([process.child for process in self._processes])

    def has_failing_process(self) -> bool:
        """Whether a process has failed, even if its failure is not reported yet."""
        return any(process.failure_sent or process.failing_since_s is not None for process in self._processes)

    async def stop(self, stop_at_once: asyncio.Event) -> bool:
        """Asks vLLM's API server to end, waits for this end, then kills all processes.

        Args:
            stop_at_once: stops the wait if set.

        Returns:
            Whether all processes are gone.
        """
        deadline_s = time.monotonic() + API_STOP_TIMEOUT_S
        if self._api is not None and not self._api.child.is_reaped():
            self._api.child.terminate()
            while (
                not self._api.child.is_reaped()
                and not stop_at_once.is_set()
                and time.monotonic() <= deadline_s
            ):
                await asyncio.sleep(STOP_INTERVAL_S)
        return await self.kill()

    async def kill(self) -> bool:
        """Kills every process of the pod, and waits for the last output. Returns whether all are gone."""
        loop = asyncio.get_running_loop()
        for process in self._processes:
            loop.remove_reader(process.channel.fileno())
        if self._fork_client is not None:
            loop.remove_reader(self._fork_client.fileno())
            self._fork_client.close()
        deadline_s = time.monotonic() + REAP_TIMEOUT_S
        while not await self._starts.end(STOP_INTERVAL_S) and time.monotonic() < deadline_s:
            await self._kill_all()  # also ends the process of a start that is still running
        all_ended = await self._kill_all()
        deadline_s = time.monotonic() + EXIT_CODE_WAIT_S
        outputs = [process.child.output for process in self._processes]
        # The pipes may still have lines that were not copied to the log.
        while not all(output.ended for output in outputs) and time.monotonic() < deadline_s:
            await asyncio.sleep(STOP_INTERVAL_S)
        for process in self._processes:
            process.channel.close()
        return all_ended

    def describe_remaining(self) -> str:
        """Returns the names and process ids of the processes that have not ended."""
        remaining = [process for process in self._processes if not process.child.is_reaped()]
        found = [f"{process.name} (process {process.child.pid})" for process in remaining]
        return ", ".join(found) or "a process that a rank started"

    async def _kill_all(self) -> bool:
        """Kills every process that is known now. Returns whether all are gone."""
        return await kill_everything([process.child for process in self._processes])

    def _read_channel(self, process: SupervisedProcess) -> None:
        """Reads the new messages of a process; stops watching a closed channel."""
        try:
            process.read_channel(self._awake_s())
        except ContractError as error:
            process.reported = Failure(reason=FailureReason.RANK_RAISED, message=str(error))
            process.channel.closed = True
        if process.channel.closed:
            asyncio.get_running_loop().remove_reader(process.channel.fileno())

    def _watch_one(self, process: SupervisedProcess, now_s: float) -> None:
        """Reports a process that has failed, or that has been stopped for STOPPED_LIMIT_S.

        After the process ended or reported a failure, waits up to EXIT_CODE_WAIT_S for its exit code and its
        last output.
        """
        observation = process.child.observe()
        has_ended = observation.state is ProcessState.ENDED
        if has_ended:
            self._read_channel(process)  # the socket may hold the process's last messages
        is_stopped = observation.state is ProcessState.STOPPED
        if is_stopped and process.child.stopped_for_s(now_s) > STOPPED_LIMIT_S:
            self._report_failure(process, observation, now_s)
        elif has_ended or process.reported is not None:
            if process.failing_since_s is None:
                process.failing_since_s = now_s
            has_all_output = not process.child.output.has_unread_output()
            is_fully_known = observation.exit_code is not None and has_all_output
            if is_fully_known or now_s - process.failing_since_s > EXIT_CODE_WAIT_S:
                self._report_failure(process, observation, now_s)

    def _report_failure(
        self, process: SupervisedProcess, observation: ProcessObservation, now_s: float
    ) -> None:
        """Passes on the failure of a process as evidence, once."""
        process.failure_sent = True
        since_s = process.failing_since_s if process.failing_since_s is not None else now_s
        failure = build_failure(process, self._plan, self._launch.pod_index, observation)
        accused = failure.rank not in (None, process.rank)  # the process named another rank as the culprit
        evidence = Evidence(failure=failure, age_s=now_s - since_s, lost=process.lost, accused=accused)
        self._on_evidence(evidence)


def _start(to_start: _ProcessToStart, child_sockets: Sequence[socket.socket]) -> SupervisedProcess:
    """Starts a process that inherits `child_sockets`. Closes the supervisor's copies of these sockets."""
    channel, child_end = RankChannel.open_pair()
    with contextlib.ExitStack() as inherited:
        descriptors = [inherited.enter_context(each).fileno() for each in (child_end, *child_sockets)]
        child = ChildProcess.start(
            label=to_start.label,
            command=to_start.command,
            env={**to_start.env, names.ENV_RANK_CHANNEL_FD: str(child_end.fileno())},
            inherited_fds=descriptors,
        )
    return SupervisedProcess(child=child, channel=channel, assignment=to_start.assignment)


def _request_process(
    fork_client: ForkClient, to_start: _ProcessToStart, first: _ProcessToStart, cpus: Sequence[int]
) -> SupervisedProcess:
    """Asks the pod's first rank to fork a process. The result has no process id yet.

    Args:
        first: the first rank. The request contains only the variables that differ from its environment.
        cpus: numbers of the CPUs for the new process.
    """
    channel, child_end = RankChannel.open_pair()
    read_fd, write_fd = os.pipe()
    request = ForkRequest(
        label=to_start.label,
        module=to_start.command[-1],
        environment=environment_changes(first.env, to_start.env),
        cpus=cpus,
    )
    with contextlib.suppress(ConnectionError):  # the first rank has ended: watch() reports this
        fork_client.ask(request, output_fd=write_fd, channel_fd=child_end.fileno())
    os.close(write_fd)
    child_end.close()
    child = ChildProcess(to_start.label, os.fdopen(read_fd, "rb", buffering=0))
    return SupervisedProcess(child=child, channel=channel, assignment=to_start.assignment)
