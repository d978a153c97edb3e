"""The leader's side of the control port, with one link for each follower. Stdlib and the contract only."""

import asyncio
import contextlib
import logging
import time

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_key import EpochKey
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.control import (
    HELLO_TIMEOUT_S,
    REFUSALS,
    RETURN_POLL_S,
    Handlers,
    build_pod_lost,
    refuses_connections,
)
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.launch.loop_clock import LoopClock
from vllm_heteroinfer.launch.supervisor_link import SupervisorLink
from vllm_heteroinfer.launch.supervisor_messages import Hello, Message, RankBeat, check_hello
from vllm_heteroinfer.pod.addresses import bind_host, look_up
from vllm_heteroinfer.pod.channel import BEAT_INTERVAL_S
from vllm_heteroinfer.pod.listening import ConnectionLimit, listen

MAX_UNKNOWN_PEERS = 64
"""Limit of open connections without a proof of identity."""
LAST_READ_S = 0.2
"""Time for followers to read the last message and close the connection."""
LOG_INTERVAL_S = 10.0
"""Shortest interval between log lines about connections without a proof of identity."""

log = logging.getLogger(__name__)


class ControlServer:
    """Accepts the followers and reports each lost follower.

    Args:
        key: key of the epoch; with None, followers need no proof, as in pods without a key.
    """

    def __init__(
        self, plan: Plan, launch: PodLaunch, handlers: Handlers, key: EpochKey | None, clock: LoopClock
    ) -> None:
        self._plan = plan
        self._launch = launch
        self._handlers = handlers
        self._key = key
        self._clock = clock
        self._links: dict[int, SupervisorLink] = {}
        self._instances: dict[int, str] = {}
        self._disconnected: set[int] = set()
        self._stopping: set[int] = set()
        self._ranks: dict[int, tuple[RankBeat, ...]] = {}
        self._server: asyncio.Server | None = None
        self._verdict: Failure | None = None
        self._announced_stop = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._unknown_connections = ConnectionLimit(MAX_UNKNOWN_PEERS)
        self._num_refused = 0
        self._logged_at_s = -LOG_INTERVAL_S

    async def start(self) -> None:
        """Listens for the followers.

        Raises:
            ContractError: the port is not available.
        """
        host, port = self._launch.address.host, self._launch.address.control_port
        try:
            self._server = await listen(self._serve, bind_host(host), port)
        except OSError as error:
            raise ContractError(
                f"control port {port} is not available: {error}. End the process that uses the port, or set "
                f"another control_port in {names.ENV_ADDRESSES}"
            ) from error

    def missing_pods(self) -> list[int]:
        """Returns the pods that have not connected yet."""
        return [pod.index for pod in self._plan.pods[1:] if pod.index not in self._links]

    def ranks(self) -> list[RankBeat]:
        """Returns the last report of each rank of the other pods."""
        return [rank for ranks in self._ranks.values() for rank in ranks]

    def group_age_s(self) -> float:
        """Returns the longest silence of a follower, in seconds."""
        return max((link.silent_for_s() for link in self._links.values()), default=0.0)

    def is_stopping_pod_disconnected(self) -> bool:
        """Returns whether the connection to a pod that was asked to stop is lost.

        The pod may have ended, or may reconnect.
        """
        return bool(self._stopping & self._disconnected)

    def beat(self) -> None:
        """Sends a heartbeat to every follower, with the longest silence of a follower."""
        self._send_to_all(Message(group_age_s=self.group_age_s(), late_s=self._clock.late_s()))

    def announce_stop(self) -> None:
        """Reports to every follower that this pod was asked to stop."""
        self._announced_stop = True
        self._send_to_all(Message(stopping=True))

    def check_silence(self) -> None:
        """Reports each follower that was silent for too long."""
        for pod, link in self._links.items():
            if pod not in self._disconnected and link.allowed_silence_left_s() < 0:
                self._report_gone_pod(pod, link.describe_silence())

    async def end(self, verdict: Failure | None, wait_for_missing_s: float) -> None:
        """Sends the verdict, if any, to all followers and closes the connections.

        Args:
            verdict: the failure that ended the group; None if this pod only stops.
            wait_for_missing_s: longest wait for pods that have not connected yet, in seconds. Without the
                verdict, they would try to connect until their startup time-out.
        """
        if verdict is not None:
            self._verdict = verdict
            self._send_to_all(Message(verdict=verdict))
            deadline_s = time.monotonic() + wait_for_missing_s
            while self.missing_pods() and time.monotonic() < deadline_s:
                await asyncio.sleep(BEAT_INTERVAL_S / 4)
        await asyncio.gather(*(link.flush() for link in self._links.values()))
        if self._server is not None:
            self._server.close()
        # If this end closes a connection with unread heartbeats, the kernel resets it, and the verdict may be
        # lost (RFC 1122, 4.2.2.13). So close only the sending side first.
        for link in self._links.values():
            link.send_end()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_READ_S)
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()

    def _send_to_all(self, message: Message) -> None:
        """Sends a message to every connected follower."""
        for link in self._links.values():
            link.send(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection: admits the client, then handles its messages."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            link = SupervisorLink(reader, writer, self._launch.heartbeat_timeout_s, self._clock)
        except OSError:
            writer.close()  # the client has left already
            return
        try:
            with self._unknown_connections.counting(link.abort):
                pod = await self._admit(link)
            if pod is not None:
                await self._handle_follower(pod, link)
        except asyncio.CancelledError:
            pass  # end() closes the links; asyncio would log the cancellation as an error
        finally:
            link.close()

    async def _admit(self, link: SupervisorLink) -> int | None:
        """Checks a new client. Returns its pod's index; None if this group refuses the client."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                if self._key is not None:
                    await link.prove_as_leader(self._key)
                message = await link.receive()
        except (TimeoutError, ContractError) as error:
            self._log_refused_connection(error)
            return None
        if message is None or message.hello is None:
            return None
        hello = message.hello
        difference, ends_group = check_hello(
            hello, plan=self._plan, launch=self._launch, connected=self._instances
        )
        if difference:
            await self._refuse(link, hello, difference, ends_group=ends_group)
            return None
        self._accept_follower(hello, link)
        return hello.pod

    def _log_refused_connection(self, error: Exception) -> None:
        """Logs refused connections once in LOG_INTERVAL_S, so that strangers cannot fill the log."""
        self._num_refused += 1
        if time.monotonic() - self._logged_at_s > LOG_INTERVAL_S:
            self._logged_at_s = time.monotonic()
            log.warning(
                "control port: refused %d connections so far (the last one: %s). Check which clients "
                "connect to this port",
                self._num_refused,
                str(error) or f"the client did not identify itself within {HELLO_TIMEOUT_S:g} s",
            )

    def _accept_follower(self, hello: Hello, link: SupervisorLink) -> None:
        """Stores a follower's connection, and sends it the state of the group."""
        old_link = self._links.get(hello.pod)
        self._links[hello.pod], self._instances[hello.pod] = link, hello.instance
        self._disconnected.discard(hello.pod)
        log.info("pod %d connected%s", hello.pod, "" if old_link is None else " again")
        if old_link is not None:
            old_link.close()
        link.send(Message(welcome=True))
        # A follower that was not connected has missed these messages.
        if self._announced_stop:
            link.send(Message(stopping=True))
        if self._verdict is not None:
            link.send(Message(verdict=self._verdict))

    async def _refuse(self, link: SupervisorLink, hello: Hello, difference: str, *, ends_group: bool) -> None:
        """Sends a follower the reason for its refusal, and reports the mismatch if it ends the group."""
        failure = Failure(
            reason=FailureReason.PLAN_MISMATCH,
            message=(
                f"pod {hello.pod} was refused by the leader of {self._launch.group}: {difference}. "
                "Start all pods of a group from the same plan and epoch"
            ),
            pod=hello.pod,
            time=time.time(),
        )
        log.warning("%s", failure.message)
        link.send(Message(refused=failure))
        await link.flush()
        if ends_group:
            self._handlers.on_evidence(Evidence(failure=failure))

    async def _handle_follower(self, pod: int, link: SupervisorLink) -> None:
        """Handles a follower's messages until the connection ends, then waits for the follower to reconnect.

        Reports the follower as gone if it has left, or does not reconnect in time.
        """
        with contextlib.suppress(ContractError):  # an invalid message; `link.how_it_ended` describes it
            while (message := await link.receive()) is not None:
                if message.ranks is not None:
                    self._ranks[pod] = message.ranks
                if message.stopping:
                    self._stopping.add(pod)
                    self._handlers.on_stopping(pod)
                if message.evidence is not None:
                    self._handlers.on_evidence(message.evidence)
        if self._links.get(pod) is link:  # no newer connection of this pod has replaced it
            self._disconnected.add(pod)
            has_left = pod in self._stopping and not link.network_failed
            if has_left or not await self._wait_for_reconnect(pod, link):
                self._report_gone_pod(pod, link.how_it_ended)

    async def _wait_for_reconnect(self, pod: int, link: SupervisorLink) -> bool:
        """Waits for a follower to reconnect, within its heartbeat limit. Returns whether the follower did.

        If the follower's health port refuses connections, its process has ended, so the wait ends too.

        Args:
            link: the lost connection. A new connection of the pod replaces it in `_links`.
        """
        refusals, address = 0, self._launch.addresses[pod]
        # Use the address on which the pod listens: its connection to this pod may come from a gateway's
        # address.
        lookup = start_task(
            look_up(bind_host(address.host) or address.host, address.health_port),
            name="address of a pod",
            failed=lambda error: log.info("looking up the address of pod %d failed: %r", pod, error),
        )
        try:
            while link.allowed_silence_left_s() > 0:
                if self._links[pod] is not link:
                    return True
                if not lookup.done():
                    await asyncio.wait((lookup,), timeout=RETURN_POLL_S)
                    continue
                has_address = lookup.exception() is None
                refused = has_address and await refuses_connections(lookup.result(), address.health_port)
                refusals = refusals + 1 if refused else 0
                if refusals == REFUSALS:
                    break
                # After a refusal, the follower has probably ended. A second refusal proves this, so check
                # sooner.
                await asyncio.sleep(RETURN_POLL_S / 2 if refused else RETURN_POLL_S)
        finally:
            lookup.cancel()
        return self._links[pod] is not link

    def _report_gone_pod(self, pod: int, how: str) -> None:
        """Reports that a stopping pod has left, or that another pod is lost.

        Args:
            how: how the connection ended, for the message.
        """
        if pod in self._stopping:
            self._handlers.on_left(pod)
        else:
            self._handlers.on_evidence(Evidence(failure=build_pod_lost(self._launch, pod, how)))
