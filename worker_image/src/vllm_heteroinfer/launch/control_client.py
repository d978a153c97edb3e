"""A follower's side of the control port, with one link to the leader. Stdlib and the contract only."""

import asyncio
import contextlib
import logging
import uuid

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_key import EpochKey
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.control import HELLO_TIMEOUT_S, REFUSALS, RETURN_POLL_S, Handlers, build_pod_lost
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.launch.loop_clock import LoopClock
from vllm_heteroinfer.launch.supervisor_link import NO_ANSWER, SupervisorLink
from vllm_heteroinfer.launch.supervisor_messages import Hello, Message
from vllm_heteroinfer.pod.addresses import look_up

CONNECT_TIMEOUT_S = 2.0
RETRY_INTERVAL_S = 0.2
RECONNECT_TIMEOUT_S = 0.4
"""Time-out of one attempt to reconnect. It is short because TCP repeats a lost first packet after 1 s."""
RECONNECT_HELLO_TIMEOUT_S = 0.4
"""First time-out for the leader's welcome after a reconnect. It doubles each time: the leader may be busy."""

log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 - a decision of the leader, not an error of ours
    """The leader refuses this pod; `failure` names the difference."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ControlClient:
    """Connects to the leader, and reconnects after a lost connection.

    Args:
        key: key of the epoch; with None, neither side proves its identity.
    """

    def __init__(
        self, plan: Plan, launch: PodLaunch, handlers: Handlers, key: EpochKey | None, clock: LoopClock
    ) -> None:
        self._plan = plan
        self._launch = launch
        self._handlers = handlers
        self._key = key
        self._clock = clock
        self._process_id = uuid.uuid4().hex
        self._address = ""
        self._link: SupervisorLink | None = None
        self._group_age_s = 0.0
        self._leader_stopping = False
        self._reconnecting = False
        self._resent_after_reconnect: list[Message] = []

    async def connect(self) -> None:
        """Waits until the leader accepts this pod.

        Has no time-out: the leader's node may be pulling the image, which only the operator can see.

        Raises:
            Refused: the leader refuses this pod.
        """
        leader = self._launch.leader
        logged_error = ""
        while self._link is None:
            try:
                # The address of a pod never changes. No time-out: a resolver that has to repeat its query
                # takes 5 s (resolv.conf(5)).
                self._address = await look_up(leader.host, leader.control_port)
                self._link = await self._try_connect(CONNECT_TIMEOUT_S, HELLO_TIMEOUT_S)
            except (OSError, TimeoutError, ContractError) as error:
                problem = str(error) or "no answer in time"
                if problem != logged_error:
                    logged_error = problem
                    log.info("waiting for the leader at %s:%d: %s", leader.host, leader.control_port, problem)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _try_connect(self, timeout_s: float, hello_timeout_s: float) -> SupervisorLink:
        """Connects once and identifies this pod. Returns the link after the leader has accepted the pod.

        Raises:
            Refused: the leader refuses this pod.
            OSError: the leader cannot be reached, or closes the connection.
            TimeoutError: the leader does not answer in time.
            ContractError: the other end is not the leader.
        """
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(self._address, self._launch.leader.control_port)
        link = SupervisorLink(reader, writer, self._launch.heartbeat_timeout_s, self._clock)
        hello = Hello(
            group_uid=self._launch.group_uid,
            epoch=self._launch.epoch,
            plan_hash=self._plan.hash,
            pod=self._launch.pod_index,
            instance=self._process_id,
        )
        try:
            async with asyncio.timeout(hello_timeout_s):
                if self._key is not None:
                    await link.prove_as_follower(self._key, self._launch.pod_index)
                link.send(Message(hello=hello))
                answer = await link.receive()
        except BaseException:
            link.close()
            raise
        if answer is not None and answer.welcome:
            return link
        link.close()
        if answer is not None and answer.refused is not None:
            raise Refused(answer.refused)
        raise OSError(NO_ANSWER)

    async def listen(self) -> None:
        """Handles the leader's messages until the verdict. Reports a leader that has left or is lost.

        A stopping leader that closes its connection has left, so there is no attempt to reconnect to it.
        """
        assert self._link is not None
        while True:
            link = self._link
            with contextlib.suppress(ContractError):  # an invalid message; `link.how_it_ended` describes it
                while (message := await link.receive()) is not None:
                    if message.verdict is not None:
                        self._handlers.on_verdict(message.verdict)
                        return
                    self._handle(message)
            leader_left = self._leader_stopping and not link.network_failed
            self._reconnecting = True
            if leader_left or not await self._reconnect(link):
                self._report_gone_leader(link.how_it_ended)
                return
            self._reconnecting = False

    def _handle(self, message: Message) -> None:
        """Stores the group age that the leader has sent. Reports a leader that is stopping."""
        if message.group_age_s is not None:
            self._group_age_s = message.group_age_s
        if message.stopping:
            self._leader_stopping = True
            self._handlers.on_stopping(0)

    async def _reconnect(self, lost_link: SupervisorLink) -> bool:
        """Reconnects to the leader, within the leader's heartbeat limit. Returns whether this succeeded.

        If the leader's port refuses connections, the leader's process has ended, so the attempts end too.
        Each time-out of the leader's welcome doubles the next time-out, because the leader may be busy.
        """
        lost_link.close()
        refusals, hello_timeout_s = 0, RECONNECT_HELLO_TIMEOUT_S
        while (remaining_s := lost_link.allowed_silence_left_s()) > 0:
            try:
                async with asyncio.timeout(remaining_s):
                    link = await self._try_connect(RECONNECT_TIMEOUT_S, hello_timeout_s)
            except ConnectionRefusedError:
                refusals += 1
                if refusals == REFUSALS:
                    return False
                # The leader has probably ended. A second refusal proves this, so the next attempt comes
                # sooner.
                await asyncio.sleep(RETURN_POLL_S / 2)
            except (OSError, TimeoutError, ContractError) as error:
                refusals = 0
                if isinstance(error, TimeoutError):
                    hello_timeout_s *= 2
                await asyncio.sleep(RETURN_POLL_S)
            except Refused:  # the leader's decision does not change
                return False
            else:
                log.info("reconnected to the leader after %.1f s", lost_link.silent_for_s())
                self._link = link
                # The old connection may have lost these messages.
                for message in self._resent_after_reconnect:
                    link.send(message)
                return True
        return False

    def send(self, message: Message) -> None:
        """Sends a message to the leader. Evidence and a stop are sent again after a reconnect."""
        if message.evidence is not None or message.stopping:
            self._resent_after_reconnect.append(message)
        if self._link is not None:
            self._link.send(message)

    def own_address(self) -> str:
        """Returns this pod's IP address in the connection to the leader. Call it after `connect`."""
        assert self._link is not None
        return self._link.own_host

    def was_accepted(self) -> bool:
        """Returns whether the leader has accepted this pod, even if the leader is lost since then."""
        return self._link is not None

    def is_reconnecting_to_stopping_leader(self) -> bool:
        """Returns whether this pod lost the connection to a leader that was asked to stop.

        The leader may have ended, or may accept a new connection.
        """
        return self._leader_stopping and self._reconnecting

    def connected(self) -> bool:
        """Returns whether the leader's last heartbeat is within the heartbeat limit."""
        return self._link is not None and self._link.silent_for_s() <= self._launch.heartbeat_timeout_s

    def group_age_s(self) -> float:
        """Returns the seconds since all pods of the group were last known to run.

        This is the time in the leader's last heartbeat, plus the time since that heartbeat.
        """
        return 0.0 if self._link is None else self._group_age_s + self._link.silent_for_s()

    def check_silence(self) -> None:
        """Reports the leader if it was silent for too long."""
        if self._link is not None and self._link.allowed_silence_left_s() < 0:
            self._report_gone_leader(self._link.describe_silence())

    async def end(self) -> None:
        """Closes the link after all messages have left."""
        if self._link is not None:
            await self._link.flush()
            self._link.close()

    def _report_gone_leader(self, how: str) -> None:
        """Reports that a stopping leader has left, or that the leader is lost.

        Args:
            how: how the connection ended, for the message.
        """
        if self._leader_stopping:
            self._handlers.on_left(0)
        else:
            seen = f"{how} (seen by pod {self._launch.pod_index})"
            self._handlers.on_evidence(Evidence(failure=build_pod_lost(self._launch, 0, seen)))
