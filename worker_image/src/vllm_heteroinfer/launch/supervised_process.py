"""A supervisor's knowledge of one process of its pod, and the description of the process's end."""

import signal
import time
from dataclasses import dataclass, field, fields, replace

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase, RankStatus
from heteroinfer_contract.plan import Plan, RankAssignment
from vllm_heteroinfer.launch.child_process import ChildProcess, ProcessObservation, ProcessState
from vllm_heteroinfer.launch.supervisor_messages import RankBeat
from vllm_heteroinfer.pod.channel import EngineEnd, RankChannel, RankReport
from vllm_heteroinfer.pod.lost_peer import Lost

STOPPED_LIMIT_S = 1.0
"""Longest stop of a process that does not end the group. Profilers stop a process for a shorter time."""
STOPPED = (
    f"has been stopped for more than {STOPPED_LIMIT_S:.0f} s (by SIGSTOP or a debugger). Do not stop "
    "processes of a running group"
)
_FIELDS_FROM_REPORT = tuple(
    {each.name for each in fields(RankReport)} & {each.name for each in fields(RankStatus)}
)
"""Names of the fields that a rank's status copies from its report."""


@dataclass(slots=True, kw_only=True)
class SupervisedProcess:
    """A supervisor's knowledge of one process.

    Attributes:
        assignment: assignment of a rank; None for vLLM's API server.
        report: last report of the process.
        reported: failure that the process itself reported.
        last_heartbeat_at_s: time of the last message, on time.monotonic()'s clock.
        last_message_awake_s: time of the last message, on PodProcesses' clock; None before the first.
        failing_since_s: time of the first sign of a failure, on PodProcesses' clock.
        lost: other process that this process lost, if its failure is only a consequence.
        engine_end: end of the engine, reported by vLLM's API server.
        failure_sent: whether PodProcesses has passed on the failure of this process.
    """

    child: ChildProcess
    channel: RankChannel
    assignment: RankAssignment | None
    report: RankReport = field(default_factory=RankReport)
    reported: Failure | None = None
    last_heartbeat_at_s: float = field(default_factory=time.monotonic)
    last_message_awake_s: float | None = None
    busy_since_awake_s: float = 0.0
    failing_since_s: float | None = None
    lost: Lost | None = None
    engine_end: EngineEnd | None = None
    failure_sent: bool = False

    @property
    def rank(self) -> int | None:
        """Global rank of the process; None for vLLM's API server."""
        return None if self.assignment is None else self.assignment.rank

    @property
    def name(self) -> str:
        """Name of the process in messages."""
        return "vLLM's API server" if self.rank is None else f"rank {self.rank}"

    def read_channel(self, awake_s: float) -> None:
        """Reads the process's new messages. Keeps the last report, and the first failure.

        Args:
            awake_s: current time of PodProcesses' clock.

        Raises:
            ContractError: the process uses a different version of the channel.
        """
        for message in self.channel.read():
            self.last_heartbeat_at_s, self.last_message_awake_s = time.monotonic(), awake_s
            if message.report is not None:
                if message.report.busy != self.report.busy:
                    self.busy_since_awake_s = awake_s
                self.report = message.report
            if message.failure is not None and self.reported is None:
                self.reported, self.lost = message.failure, message.lost
            self.engine_end = self.engine_end or message.engine_end

    def silent_s(self, awake_s: float) -> float:
        """Seconds since the process's last message; 0 before its first message."""
        return 0.0 if self.last_message_awake_s is None else awake_s - self.last_message_awake_s

    def busy_s(self, awake_s: float) -> float:
        """Seconds since the process's current activity began; 0 if it is idle."""
        return 0.0 if self.report.busy is None else awake_s - self.busy_since_awake_s


def build_beat(process: SupervisedProcess, assignment: RankAssignment, awake_s: float) -> RankBeat:
    """Returns a rank's entry in a heartbeat.

    Args:
        awake_s: current time of PodProcesses' clock.
    """
    report = process.report
    status = RankStatus(
        rank=assignment.rank,
        pod=assignment.pod,
        heartbeat_age_s=time.monotonic() - process.last_heartbeat_at_s,
        **{name: getattr(report, name) for name in _FIELDS_FROM_REPORT},
    )
    return RankBeat(
        status=status,
        busy=report.busy,
        busy_s=process.busy_s(awake_s),
        waiting_for_rank=report.waiting_for_rank,
        waiting_for_engine=report.waiting_for_engine,
        silent_s=process.silent_s(awake_s),
    )


def build_failure(
    process: SupervisedProcess, plan: Plan, pod: int, observation: ProcessObservation
) -> Failure:
    """Returns the failure of a process that failed, ended or was stopped.

    The end of the engine has priority, because the end of vLLM's API server is only a consequence. Then
    follow the process's own report, and the supervisor's observation.

    Args:
        pod: index of this pod.
        observation: the process's state in the kernel.
    """
    rank = process.rank
    observed = Failure(
        reason=exit_reason(process),
        message="",
        pod=pod,
        rank=rank,
        exit_code=observation.exit_code,
        last_log=process.child.output.last_line(),
        time=time.time(),
    )
    process_name = f"{process.name} (pod {pod})"
    phase = RankPhase(process.report.phase)
    if process.engine_end is not None:
        exit_code = process.engine_end.exit_code
        message = f"vLLM's engine (pod {pod}) {describe_exit(exit_code, phase)}"
        return replace(observed, exit_code=exit_code, message=message)
    if process.reported is not None:
        return _complete_report(process.reported, observed, plan, process_name)
    if observation.state is ProcessState.STOPPED:
        reason = FailureReason.ENGINE_STOPPED if rank is None else FailureReason.RANK_STOPPED
        return replace(observed, reason=reason, message=f"{process_name} {STOPPED}")
    return replace(observed, message=f"{process_name} {describe_exit(observation.exit_code, phase)}")


def exit_reason(process: SupervisedProcess) -> FailureReason:
    """Returns the reason for a process that ended without its own report."""
    return FailureReason.API_SERVER_EXITED if process.assignment is None else FailureReason.RANK_EXITED


def _complete_report(reported: Failure, observed: Failure, plan: Plan, process_name: str) -> Failure:
    """Completes a process's own report with the supervisor's knowledge.

    A rank may name another rank as the culprit, for example if their settings differ. Then the failure
    must not have the exit code and log of the reporting rank.
    """
    # The process reports its own failure, or names a rank that the plan does not have.
    if reported.rank in (None, observed.rank) or not 0 <= reported.rank < plan.world_size:
        return replace(observed, reason=reported.reason, message=f"{process_name} failed: {reported.message}")
    accused = plan.ranks[reported.rank]
    return replace(
        observed,
        reason=reported.reason,
        message=reported.message,
        pod=accused.pod,
        rank=accused.rank,
        exit_code=None,
        last_log="",
    )


def describe_exit(exit_code: int | None, phase: RankPhase) -> str:
    """Returns what happened to a process that ended, for a message that begins with its name.

    Args:
        exit_code: negative for a signal; None if it is unknown.
        phase: last phase that the process reported.
    """
    during = f"while {phase}"
    if exit_code is None:
        return f"ended {during} (exit code unknown). Read the log of this process"
    if exit_code >= 0:
        return (
            f"exited with code {exit_code} {during}, although it must run as long as the group. Read the log "
            "of this process"
        )
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = (
        ". If no user killed the process, memory was missing. Raise the memory limit of the pod's role, or "
        "free memory of the node"
        if -exit_code == signal.SIGKILL
        else ""
    )
    return f"was killed by {name} {during}{hint}"
