"""One process of a pod as its supervisor knows it, and its end in words."""

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
"""A debugger or profiler stops a process for less."""
STOPPED = f"has been stopped for more than {STOPPED_LIMIT_S:.0f} s (SIGSTOP or a debugger)"
_OF_REPORT = tuple({each.name for each in fields(RankReport)} & {each.name for each in fields(RankStatus)})
"""What the status of a rank takes over from its report, by name."""


@dataclass(slots=True, kw_only=True)
class SupervisedProcess:
    """One process, and what is known of it. `assignment` is None for the API server."""

    child: ChildProcess
    channel: RankChannel
    assignment: RankAssignment | None
    report: RankReport = field(default_factory=RankReport)
    reported: Failure | None = None
    last_heartbeat_at_s: float = field(default_factory=time.monotonic)
    heard_awake_s: float | None = None
    busy_since_awake_s: float = 0.0
    failing_since_s: float | None = None
    lost: Lost | None = None
    engine_end: EngineEnd | None = None
    blamed: bool = False

    @property
    def rank(self) -> int | None:
        """Returns its global rank, None for the API server."""
        return None if self.assignment is None else self.assignment.rank

    def read_channel(self, awake_s: float) -> None:
        """Takes in what it has said.

        Args:
            awake_s: now, by the clock of PodProcesses.

        Raises:
            ContractError: it speaks another version of the channel.
        """
        for message in self.channel.read():
            self.last_heartbeat_at_s, self.heard_awake_s = time.monotonic(), awake_s
            if message.report is not None:
                if message.report.busy != self.report.busy:
                    self.busy_since_awake_s = awake_s
                self.report = message.report
            if message.failure is not None and self.reported is None:
                self.reported, self.lost = message.failure, message.lost
            self.engine_end = self.engine_end or message.engine_end

    def silent_s(self, awake_s: float) -> float:
        """Returns since when nothing was heard of it, in seconds; 0 until it has spoken once."""
        return 0.0 if self.heard_awake_s is None else awake_s - self.heard_awake_s

    def busy_s(self, awake_s: float) -> float:
        """Returns for how long it has been busy with the same thing, as far as is known at a time."""
        return 0.0 if self.report.busy is None else awake_s - self.busy_since_awake_s


def beat_of(process: SupervisedProcess, assignment: RankAssignment, awake_s: float) -> RankBeat:
    """Returns what is known of a rank now, `awake_s` being now by the clock of PodProcesses."""
    report = process.report
    status = RankStatus(
        rank=assignment.rank,
        pod=assignment.pod,
        heartbeat_age_s=time.monotonic() - process.last_heartbeat_at_s,
        **{name: getattr(report, name) for name in _OF_REPORT},
    )
    return RankBeat(
        status=status,
        busy=report.busy,
        busy_s=process.busy_s(awake_s),
        waiting_for_rank=report.waiting_for_rank,
        waiting_for_engine=report.waiting_for_engine,
        silent_s=process.silent_s(awake_s),
    )


def failure_of(process: SupervisedProcess, plan: Plan, pod: int, seen: ProcessObservation) -> Failure:
    """Returns why this process failed: its own word if it gave one, else what the kernel says."""
    rank = process.rank
    known = Failure(
        reason=exit_reason(process),
        message="",
        pod=pod,
        rank=rank,
        exit_code=seen.exit_code,
        last_log=process.child.output.last_line(),
        time=time.time(),
    )
    who = f"rank {rank} (pod {pod})" if rank is not None else f"the API server (pod {pod})"
    if process.engine_end is not None:
        code = process.engine_end.exit_code
        known, who = replace(known, exit_code=code), f"the engine (pod {pod})"
        return replace(known, message=f"{who} {describe_exit(code, RankPhase(process.report.phase))}")
    if process.reported is not None:
        return _as_reported(process.reported, known, plan, who)
    if seen.state is ProcessState.STOPPED:
        reason = FailureReason.ENGINE_STOPPED if rank is None else FailureReason.RANK_STOPPED
        return replace(known, reason=reason, message=f"{who} {STOPPED}")
    return replace(known, message=f"{who} {describe_exit(seen.exit_code, RankPhase(process.report.phase))}")


def exit_reason(process: SupervisedProcess) -> FailureReason:
    """Returns the reason of a process that has ended without a word of its own."""
    return FailureReason.API_SERVER_EXITED if process.assignment is None else FailureReason.RANK_EXITED


def _as_reported(reported: Failure, known: Failure, plan: Plan, who: str) -> Failure:
    """Returns what a process said of its end, with what its supervisor knows.

    A rank may accuse another one, as when their settings differ: then its own exit code
    and log are not the culprit's.
    """
    if reported.rank in (None, known.rank) or not 0 <= reported.rank < plan.world_size:
        return replace(known, reason=reported.reason, message=f"{who} failed: {reported.message}")
    accused = plan.ranks[reported.rank]
    return replace(
        known,
        reason=reported.reason,
        message=reported.message,
        pod=accused.pod,
        rank=accused.rank,
        exit_code=None,
        last_log="",
    )


def describe_exit(exit_code: int | None, phase: RankPhase) -> str:
    """Returns an exit in words; `exit_code` is negative for a signal, None if the kernel didn't tell."""
    during = f"while {phase}"
    if exit_code is None:
        return f"ended {during}; its exit code is not known"
    if exit_code >= 0:
        return f"exited with code {exit_code} {during}; expected it to run; see its log"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = "; if nobody killed it, the pod's memory limit was reached" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name} {during}{hint}"
