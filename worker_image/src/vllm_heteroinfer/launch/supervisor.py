"""PID 1 of a worker pod: starts the ranks, exchanges heartbeats with other supervisors, names the culprit.

A supervisor has one outcome: this pod was asked to stop, or a failure ended the group. The first event
decides. Then the supervisor kills all processes, writes the failure to the termination message for the
operator, and exits with a code that shows the culprit. A pod that is asked to stop drains first: the whole
group becomes unready, and its ranks continue until the leader's running requests have ended.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_key import EpochKey
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_contract.report_access import CHALLENGE_HEADER, CODE_HEADER, SCHEME, ReportGuard
from vllm_heteroinfer.launch import culprit
from vllm_heteroinfer.launch.api_probe import probe_api
from vllm_heteroinfer.launch.control import RETURN_POLL_S, Handlers
from vllm_heteroinfer.launch.control_client import ControlClient, Refused
from vllm_heteroinfer.launch.control_server import ControlServer
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.launch.engine_clock import EngineClock
from vllm_heteroinfer.launch.host import observe_host, wait_for_leader_address, waited_for_cpu_s
from vllm_heteroinfer.launch.loop_clock import LoopClock
from vllm_heteroinfer.launch.pod_processes import Commands, PodProcesses
from vllm_heteroinfer.launch.readiness import GroupView, StartClock, find_stuck_rank
from vllm_heteroinfer.launch.supervisor_messages import Message
from vllm_heteroinfer.pod import termination_message
from vllm_heteroinfer.pod.channel import BEAT_INTERVAL_S
from vllm_heteroinfer.pod.health_server import HealthAnswer, HealthRequest, HealthServer
from vllm_heteroinfer.pod.threads import call_aside

WATCH_INTERVAL_S = 0.05
GATHER_S = 0.25
"""Time from the first evidence to the leader's verdict.

In this time, the evidence of all pods must arrive. So the time covers two watch intervals, a network delay of
one heartbeat interval, and the time until the consequences of a failure appear.
"""
STOP_GATHER_S = 0.7
"""Wait for this pod's own SIGTERM after another pod received one (a deleted group stops all its pods)."""
FOLLOWERS_DRAIN_LONGER_S = 10.0
"""Extra drain time of a follower. The leader may receive SIGTERM later, and must end its server."""
VERDICT_TIMEOUT_S = 1.5
"""Longest wait of a follower for the leader's verdict; then the follower decides alone."""
TURNS_TO_READ = 3
"""Turns of the event loop before a heartbeat, in which messages from peers are read.

These messages must be read before this supervisor judges peers, and before it writes: a write to a peer that
has left breaks the connection, and the peer's last message is lost.
"""
LATE_TURN_S = 1.0
"""The supervisor logs a turn of the event loop that is later than this: peers may consider this pod lost."""
LATE_POD_S = 1.0
"""Time for pods that have not connected yet to connect and receive the verdict."""
WRITE_TIMEOUT_S = 0.5
"""Longest wait for the write of the termination message."""
_ENDING = "the group is ending"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorSettings:
    """Settings of a supervisor besides plan and launch.

    Attributes:
        base_env: environment of the pod, the base of the ranks' environments.
        step_timeout_s: longest time for one step of a rank, in seconds. Also the longest time without an
            answer from vLLM's API server or the engine while no rank is busy.
        key: key of the epoch; None if the operator gave the group no key.
    """

    base_env: Mapping[str, str]
    commands: Commands
    termination_message_path: Path
    step_timeout_s: float = names.DEFAULT_STEP_TIMEOUT_S
    key: EpochKey | None = None


class Supervisor:
    """The supervisor of one pod. Call `run` once."""

    def __init__(self, plan: Plan, launch: PodLaunch, settings: SupervisorSettings) -> None:
        self._plan = plan
        self._launch = launch
        self._settings = settings
        handlers = Handlers(
            on_evidence=self._on_evidence,
            on_stopping=self._on_stopping,
            on_left=lambda pod: self._end_drain(),
            on_verdict=self._on_verdict,
        )
        leads = launch.pod_index == 0
        self._clock = LoopClock(BEAT_INTERVAL_S, time.monotonic())
        self._server = ControlServer(plan, launch, handlers, settings.key, self._clock) if leads else None
        self._client = None if leads else ControlClient(plan, launch, handlers, settings.key, self._clock)
        self._processes = PodProcesses(plan, launch, self._on_evidence, self._awake_s)
        self._health = HealthServer(self._answer_request)
        self._guard = None if settings.key is None else ReportGuard(settings.key)
        has_api_server = leads and bool(settings.commands.api_server)
        self._api_healthy = not has_api_server  # a pod without vLLM's API server does not wait for it
        self._was_ready = False
        self._start_clock = StartClock(launch.startup_timeout_s)
        self._engine_clock = EngineClock(settings.step_timeout_s, self._awake_s())
        self._asked_to_stop = False
        self._draining = False
        self._drained = False
        self._evidence: list[tuple[float, Evidence]] = []
        """(time of the failure, evidence) of all failures so far."""
        self._stopping_pods: set[int] = set()
        self._stop_at_once = asyncio.Event()
        self._own_address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._outcome: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        """Supervises the pod until all its processes are gone. Returns the exit code."""
        self._install_signal_handlers()
        tasks: list[asyncio.Task[None]] = []
        verdict: Failure | None = None
        try:
            await self._listen()
            tasks = [
                start_task(work, name="supervisor", failed=self._task_failed)
                for work in self._background_work()
            ]
            verdict = await self._outcome
        except ContractError as error:
            verdict = self._failure_of_this_pod(FailureReason.BAD_SETTINGS, str(error))
        except Exception as error:
            # This is the only broad except: even after a bug in the supervisor, the group must end with a
            # message.
            log.exception("the supervisor failed")
            verdict = self._failure_of_this_pod(
                FailureReason.POD_LOST,
                f"the supervisor failed: {error!r}. Report this bug with the log of this pod",
            )
        finally:
            for task in tasks:
                task.cancel()
            await self._end(verdict)
        return names.EXIT_OK if verdict is None else culprit.exit_code(verdict, self._launch.pod_index)

    def _install_signal_handlers(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    async def _listen(self) -> None:
        """Opens the health port and, on the leader, the control port."""
        address = self._launch.address
        await self._health.start(address.host, address.health_port)
        if self._server is not None:
            await self._server.start()

    def _background_work(self) -> list[Coroutine[Any, Any, None]]:
        """Returns the coroutines that run until the outcome is known."""
        coroutines = [self._start_pod(), self._send_heartbeats_for_ever(), self._watch_for_ever()]
        if self._launch.pod_index == 0 and self._settings.commands.api_server:
            port = self._launch.address.api_port
            coroutines.append(probe_api(self._own_address, port, self._on_api_health, self._awake_s))
        return coroutines

    def _task_failed(self, error: BaseException) -> None:
        """Ends the group because a task of the supervisor raised an error."""
        if self._outcome.done():
            log.error("a task of the supervisor failed during the shutdown: %r. Report this bug", error)
        else:
            self._outcome.set_exception(error)

    async def _start_pod(self) -> None:
        """Joins the group, starts the ranks, and handles the leader's messages.

        If the leader has no address or refuses this pod, ends the supervisor with that failure.
        """
        try:
            address = await self._join()
        except TimeoutError:
            name = self._launch.leader.host
            self._conclude(self._startup_timeout_failure(f"DNS has no address for {name}", pod=0))
            return
        except Refused as refusal:
            self._conclude(refusal.failure)
            return
        self._own_address.set_result(address)
        host = observe_host(self._launch, address)
        # Listen before the commands are loaded, because loading may take long.
        listening = start_task(self._listen_to_leader(), name="leader", failed=self._task_failed)
        try:
            await self._processes.start(self._settings.commands, self._settings.base_env, host)
            await asyncio.wait((listening,))
        except OSError as error:
            raise ContractError(
                f"cannot start a process: {error}. Check the worker image and the pod's limits"
            ) from error
        finally:
            listening.cancel()

    async def _listen_to_leader(self) -> None:
        """Handles the leader's messages; returns immediately on the leader itself."""
        if self._client is not None:
            await self._client.listen()

    async def _join(self) -> str:
        """Joins the group. Returns this pod's own IP address.

        A connected follower takes its address from the connection: a DNS answer may take longer than the
        heartbeat limit.

        Raises:
            Refused: the leader refuses this pod.
            TimeoutError: DNS has no address for the leader within the startup time-out.
        """
        if self._client is not None:
            await self._client.connect()
            return self._client.own_address()
        end_s = self._awake_s() + self._launch.startup_timeout_s
        while True:
            try:
                async with asyncio.timeout(end_s - self._awake_s()):
                    return await wait_for_leader_address(self._launch)
            except TimeoutError:
                # asyncio also counts time in which this process did not run, so time may be left.
                if self._awake_s() >= end_s:
                    raise

    async def _watch_for_ever(self) -> None:
        """Checks the pod's processes, and ends a drain once all requests have ended."""
        while True:
            self._processes.watch()
            if self._draining and self._server is not None and self._processes.drained():
                self._end_drain()
            await asyncio.sleep(WATCH_INTERVAL_S)

    async def _send_heartbeats_for_ever(self) -> None:
        """Sends heartbeats, and logs a turn of the event loop that is too late."""
        waited_s = waited_for_cpu_s()
        while True:
            late_s = self._clock.turn(time.monotonic())
            before_s, waited_s = waited_s, waited_for_cpu_s()
            if late_s > LATE_TURN_S:
                log.warning(
                    "the supervisor was not scheduled for %.1f s (%.1f s waiting for a CPU, the rest stopped "
                    "or blocked in the kernel). Check the load of this node",
                    late_s,
                    min(late_s, waited_s - before_s),
                )
            for _ in range(TURNS_TO_READ):
                await asyncio.sleep(0)
            self._send_heartbeats()
            await asyncio.sleep(BEAT_INTERVAL_S)

    def _send_heartbeats(self) -> None:
        """Sends a heartbeat to the other supervisors, and checks all limits.

        A follower has a client, and the leader has a server. The pod's ranks get the group age, that is, the
        time since all supervisors were last heard. The ranks serve this time as a metric, and their /healthz
        fails if it is too long.
        """
        if self._client is not None:
            self._client.send(Message(ranks=self._processes.rank_beats(), late_s=self._clock.late_s()))
            self._client.check_silence()
            self._processes.send_group_age(self._client.group_age_s())
        if self._server is not None:
            self._server.beat()
            self._server.check_silence()
            self._processes.send_group_age(self._server.group_age_s())
            self._check_deadlines(self._server)

    def _check_deadlines(self, server: ControlServer) -> None:
        """Ends a start without progress, and reports a stuck rank, engine or API server of vLLM."""
        self._update_engine_clock(server)
        view = self._group_view()
        self._was_ready = self._was_ready or view.ready
        self._processes.watch_engine(started=self._was_ready)
        busy_ranks, limit_s = view.busy_ranks(), self._settings.step_timeout_s
        if not self._was_ready and not self._check_start(view):
            return
        failure = find_stuck_rank(busy_ranks, limit_s) or self._engine_clock.find_overdue()
        if failure is not None:
            # Only this supervisor noticed the late rank. `accused` gives this report less weight than a
            # report of the rank itself.
            accused = failure.reason is FailureReason.STEP_TIMEOUT
            self._on_evidence(Evidence(failure=replace(failure, time=time.time()), accused=accused))

    def _check_start(self, view: GroupView) -> bool:
        """Ends an overdue start. Reports whether the time limit of a step already applies.

        The warm-up may take longer than a step. After the warm-up, all ranks are ready and vLLM's API server
        sends a first request of its own, in which a rank may be stuck. Only then does the limit apply.
        """
        now_s = self._awake_s()
        if self._start_clock.is_overdue(view, now_s):
            self._conclude(
                self._startup_timeout_failure(view.message, pod=view.awaited_pod, rank=view.awaited_rank)
            )
        return view.computes and self._start_clock.no_progress_s(now_s) > self._settings.step_timeout_s

    def _update_engine_clock(self, server: ControlServer) -> None:
        """Passes the state of ranks, engine and vLLM's API server to the clock of missing answers.

        The clock stops during a drain, and until all ranks are ready. While all ranks are ready but the group
        is not, only the engine must answer: vLLM's API server does not listen yet, but already sends calls to
        the engine.
        """
        ranks_busy = any(beat.busy is not None for beat in (*self._processes.rank_beats(), *server.ranks()))
        all_ranks_were_ready = self._was_ready or self._group_view().computes
        self._engine_clock.update(
            ranks_busy=ranks_busy or self._draining or not all_ranks_were_ready,
            api_answers=self._api_healthy or not self._was_ready,
            api_silent_s=self._processes.api_silent_s(),
            engine_unanswered_s=self._processes.engine_unanswered_s(),
            now_s=self._awake_s(),
        )

    def _failure_of_this_pod(self, reason: FailureReason, message: str) -> Failure:
        """Returns a failure of this pod itself."""
        pod = self._launch.pod_index
        return Failure(reason=reason, message=f"pod {pod}: {message}", pod=pod, time=time.time())

    def _startup_timeout_failure(self, message: str, *, pod: int | None, rank: int | None = None) -> Failure:
        """Returns the failure of a start that makes no progress.

        Args:
            message: names the parts for which the start waits.
        """
        return Failure(
            reason=FailureReason.STARTUP_TIMEOUT,
            message=(
                f"no progress for {self._launch.startup_timeout_s:g} s: {message}. "
                f"Read the log of {'the pods' if pod is None else f'pod {pod}'}, or raise startup.timeout"
            ),
            pod=pod,
            rank=rank,
            last_log="" if rank is None else self._processes.last_log(rank),
            time=time.time(),
        )

    # Decisions

    def _on_evidence(self, evidence: Evidence) -> None:
        """Stores new evidence of a failure, sends it to the leader, and schedules this pod's own decision.

        The leader, and a follower that has lost the leader, decide after GATHER_S, in which further evidence
        may arrive. Any other follower decides only if the leader sends no verdict within VERDICT_TIMEOUT_S.
        """
        failure = evidence.failure
        known_keys = {_duplicate_key(known) for _, known in self._evidence}
        if self._outcome.done() or _duplicate_key(evidence) in known_keys:
            return
        log.warning("%s: %s", failure.reason, failure.message)
        self._evidence.append((time.monotonic() - evidence.age_s, evidence))
        leader_lost = failure.reason is FailureReason.POD_LOST and failure.pod == 0
        if self._client is not None:
            # Also send evidence that the leader is lost: a leader that still runs learns why this pod leaves.
            self._client.send(Message(evidence=evidence))
        is_decider = self._server is not None or leader_lost
        wait_s = GATHER_S if is_decider else VERDICT_TIMEOUT_S
        self._call_later(wait_s, self._decide)

    def _call_later(self, wait_s: float, act: Callable[[], None]) -> None:
        """Calls `act` after `wait_s` seconds in which this process runs.

        Time in which this process is paused does not count. Otherwise `act` would run before this process has
        read the messages that arrived during the pause.
        """
        self._call_at(self._awake_s() + wait_s, act)

    def _call_at(self, awake_s: float, act: Callable[[], None]) -> None:
        """Calls `act` once the clock of _awake_s() shows `awake_s`."""
        left_s = awake_s - self._awake_s()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._call_at, awake_s, act)
        else:
            act()

    def _decide(self) -> None:
        """Ends the group with the most likely cause of all evidence."""
        # After a drain, processes end because the group was asked to stop, so their ends are not failures.
        if self._outcome.done() or self._drained:
            return
        # Ranks of other pods fail when a stopping pod leaves, and these failures are only consequences. So
        # wait until the stopping pod has reconnected or is reported as gone.
        if self._is_stopping_pod_disconnected():
            self._call_later(RETURN_POLL_S, self._decide)
            return
        now_s = time.monotonic()
        self._conclude(
            culprit.most_likely_cause(
                [replace(evidence, age_s=now_s - seen_s) for seen_s, evidence in self._evidence]
            )
        )

    def _is_stopping_pod_disconnected(self) -> bool:
        """Returns whether the connection to a stopping pod is lost."""
        return (self._server is not None and self._server.is_stopping_pod_disconnected()) or (
            self._client is not None and self._client.is_reconnecting_to_stopping_leader()
        )

    def _on_signal(self, number: signal.Signals) -> None:
        """Begins a drain at the first signal; stops immediately at the second."""
        if self._asked_to_stop or self._outcome.done():
            self._stop_at_once.set()
            self._stop()
            return
        log.info(
            "received %s: draining running requests for at most %g s",
            number.name,
            self._launch.drain_timeout_s,
        )
        self._asked_to_stop = True
        if self._client is not None:
            self._client.send(Message(stopping=True))
        if self._drained:  # another pod's stop has already drained this pod
            self._stop()
        else:
            self._drain()

    def _on_stopping(self, pod: int) -> None:
        """Begins a drain because another pod is stopping."""
        self._stopping_pods.add(pod)
        self._drain()

    def _drain(self) -> None:
        """Makes the group unready; its ranks continue until the leader's requests have ended.

        Ends the drain at once if no request can run: on a leader whose group is not ready or has no time to
        drain, and on a follower that the leader has not accepted. The limits of a drain also count time in
        which this process is paused, like the kubelet's grace period.
        """
        if self._draining or self._outcome.done():
            return
        self._draining = True
        loop, timeout_s = asyncio.get_running_loop(), self._launch.drain_timeout_s
        if self._server is not None:
            self._server.announce_stop()
            if timeout_s > 0 and (self._was_ready or self._group_view().ready):
                self._processes.drain()
                loop.call_later(timeout_s, self._end_drain)
                return
        elif self._client is not None and self._client.was_accepted():
            loop.call_later(timeout_s + FOLLOWERS_DRAIN_LONGER_S, self._end_drain)
            return
        self._end_drain()

    def _end_drain(self) -> None:
        """Stops this pod if it received SIGTERM; otherwise ends the group after STOP_GATHER_S.

        A pod without SIGTERM drained because another pod is stopping. If the whole group is being deleted,
        this pod receives SIGTERM within STOP_GATHER_S, and stops without a failure.
        """
        if self._drained or self._outcome.done():
            return
        self._drained = True
        if self._asked_to_stop:
            self._stop()
        else:
            self._call_later(STOP_GATHER_S, self._conclude_stopped)

    def _stop(self) -> None:
        """Ends the supervisor without a failure."""
        if not self._outcome.done():
            self._outcome.set_result(None)

    def _conclude_stopped(self) -> None:
        """Ends the group because another pod is stopping."""
        pod = min(self._stopping_pods)
        self._conclude(
            Failure(
                reason=FailureReason.POD_LOST,
                message=(
                    f"pod {pod} was asked to stop (SIGTERM), and a group needs all its pods. Read the events "
                    "of this pod and its node for the cause"
                ),
                pod=pod,
                time=time.time(),
            )
        )

    def _on_verdict(self, failure: Failure) -> None:
        """Ends the group with the leader's verdict."""
        if self._asked_to_stop and failure.reason is FailureReason.POD_LOST:
            self._stop()  # this pod was asked to stop, too, so the lost pod is no failure
        else:
            self._conclude(failure)

    def _awake_s(self) -> float:
        """Returns the time of a clock that pauses while this process is not scheduled, in seconds."""
        return self._clock.awake_s(time.monotonic())

    def _on_api_health(self, healthy: bool) -> None:
        """Stores the result of a health check of vLLM's API server."""
        self._api_healthy = healthy

    def _conclude(self, failure: Failure) -> None:
        """Ends the supervisor with a failure, unless its outcome is known."""
        if not self._outcome.done():
            self._outcome.set_result(failure)

    # The end

    async def _end(self, verdict: Failure | None) -> None:
        """Sends the verdict to the group, writes the termination message, and ends all processes."""
        announcement = start_task(
            self._announce(verdict),
            name="announcement",
            failed=lambda error: log.error(
                "the verdict may not have reached the other pods (%r), so they may report another cause. The "
                "log of this pod has the right cause",
                error,
            ),
        )
        if verdict is None:
            all_ended = await self._processes.stop(self._stop_at_once)
        else:
            await self._write_termination_message(verdict)
            log.error("group %s ends: %s: %s", self._launch.group, verdict.reason, verdict.message)
            all_ended = await self._processes.kill()
        if not all_ended:
            log.error(
                "%s: did not end after SIGKILL, probably because the kernel blocks them. The supervisor ends "
                "without them. See the node's kernel log",
                self._processes.describe_remaining(),
            )
        await asyncio.wait((announcement,))
        self._health.close()
        log.info("the supervisor has ended")

    async def _write_termination_message(self, verdict: Failure) -> None:
        """Writes the failure to the termination message; does not wait long for a slow disk."""
        path, text = self._settings.termination_message_path, verdict.to_json()
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await call_aside("failure", lambda: termination_message.write(path, text))
        except TimeoutError:
            log.error(
                "the termination message was not written within %g s. Check the node's disk", WRITE_TIMEOUT_S
            )

    async def _announce(self, verdict: Failure | None) -> None:
        """Sends the verdict to the other supervisors, or announces to them that this pod stops."""
        if self._server is not None:
            if verdict is None:
                self._server.announce_stop()
            await self._server.end(verdict, LATE_POD_S)
        if self._client is not None:
            if verdict is None:
                self._client.send(Message(stopping=True))
            await self._client.end()

    # Answers

    def _group_view(self) -> GroupView:
        """Returns the current knowledge of all ranks. Call it on the leader only, which knows all ranks."""
        assert self._server is not None
        return GroupView(
            plan=self._plan,
            beats=(*self._processes.rank_beats(), *self._server.ranks()),
            missing_pods=tuple(self._server.missing_pods()),
            api_healthy=self._api_healthy,
            engine_answers=self._engine_clock.engine_answers,
        )

    def _not_ready_reason(self) -> str:
        """Returns the reason why this pod is not ready; "" if it is ready."""
        has_outcome = self._outcome.done()
        verdict = self._outcome.result() if has_outcome else None
        if verdict is not None:
            return f"{_ENDING}: {verdict.message}"
        if has_outcome or self._draining or self._evidence or self._processes.has_failing_process():
            causes = ", ".join(evidence.failure.message for _, evidence in self._evidence)
            return f"{_ENDING}: {causes or 'asked to stop'}"
        if self._server is not None:
            return self._group_view().message
        assert self._client is not None
        if not self._client.connected():
            return "waiting for the leader"
        this_pod = self._plan.pods[self._launch.pod_index]
        view = GroupView(plan=self._plan, beats=self._processes.rank_beats(), only_pod=this_pod.index)
        return view.message

    def _answer_request(self, request: HealthRequest) -> HealthAnswer:
        """Answers a request to the health port."""
        path = request.path
        if path == names.PATH_HEALTHZ:
            return HealthAnswer(status=HTTPStatus.OK, body="ok")
        if path == names.PATH_READYZ:
            reason = self._not_ready_reason()
            status = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
            if self._guard is not None:  # clients of this path do not prove that they have the group's key
                reason = _without_failure(reason)
            return HealthAnswer(status=status, body=reason or "ready")
        if path == names.PATH_GROUP and self._server is not None:
            return self._answer_group(request.credentials)
        return HealthAnswer(
            status=HTTPStatus.NOT_FOUND,
            body=f"unknown path {path}. Use {names.PATH_HEALTHZ}, {names.PATH_READYZ}"
            f", or {names.PATH_GROUP} (on the leader's pod only)",
        )

    def _answer_group(self, credentials: str) -> HealthAnswer:
        """Answers with the group's report; a client without the key gets a report without the group's name.

        Each answer contains a new challenge. A client with the key sends the code of this challenge in its
        next request, as its credentials. The answer to such a request has a code, too, so the client can
        verify it.
        """
        report = self._group_view().build_report(self._launch, self._not_ready_reason())
        kind = "application/json"
        if self._guard is None:
            return HealthAnswer(status=HTTPStatus.OK, body=report.to_json(), content_type=kind)
        now_s = time.monotonic()
        challenge = self._guard.accepted_challenge(credentials, now_s)
        headers = {CHALLENGE_HEADER: f"{SCHEME} {self._guard.challenge(now_s)}"}
        if challenge is None:
            message = _without_failure(report.message)
            report = replace(report, group_uid="", epoch=0, plan_hash="", message=message)
        else:
            headers[CODE_HEADER] = self._guard.code_of_report(challenge, f"{report.to_json()}\n")
        return HealthAnswer(status=HTTPStatus.OK, body=report.to_json(), content_type=kind, headers=headers)


def _duplicate_key(evidence: Evidence) -> tuple[object, ...]:
    """Returns a key that is equal for duplicates of evidence.

    An accusation by another process never duplicates a process's own report, which proves more.
    """
    return evidence.failure.reason, evidence.failure.pod, evidence.failure.rank, evidence.accused


def _without_failure(reason: str) -> str:
    """Removes the cause of the group's end from a reason, because clients without the key must not see it."""
    return _ENDING if reason.startswith(_ENDING) else reason
