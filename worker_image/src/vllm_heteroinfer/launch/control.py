"""How the supervisors of a group speak: JSON lines over TCP, followers to the leader.

A follower says who it is and is welcomed or refused in words; then both beat five times
a second. Whoever turns silent or closes is lost. Evidence of failures goes to the
leader, which alone decides who is to blame and tells all. Stdlib and the contract only.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence
from vllm_heteroinfer.launch.supervisor_link import (
    Hello,
    Message,
    RankBeat,
    SupervisorLink,
    check_hello,
)
from vllm_heteroinfer.pod.addresses import bind_host
from vllm_heteroinfer.pod.channel import BEAT_INTERVAL_S

CONNECT_TIMEOUT_S = 2.0
HELLO_TIMEOUT_S = 5.0
"""For a stranger on the port to say who it is, and for the leader to answer."""
RETRY_INTERVAL_S = 0.2

log = logging.getLogger(__name__)


class Refused(Exception):  # noqa: N818 - a decision of the leader, not an error of ours
    """The leader doesn't take this pod in; `failure` says what differs."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """What the supervisor does on news; all run on its loop.

    Attributes:
        on_evidence: a pod saw a failure (leader), or a peer's supervisor was lost (both).
        on_stopping: that pod was asked to stop.
        on_left: that pod, which was asked to stop, is gone.
        on_verdict: the leader has decided (followers).
    """

    on_evidence: Callable[[Evidence], None]
    on_stopping: Callable[[int], None]
    on_left: Callable[[int], None]
    on_verdict: Callable[[Failure], None]


class ControlServer:
    """The leader's side: one link for each other pod."""

    def __init__(self, plan: Plan, launch: PodLaunch, handlers: Handlers) -> None:
        self._plan = plan
        self._launch = launch
        self._handlers = handlers
        self._links: dict[int, SupervisorLink] = {}
        self._stopping: set[int] = set()
        self._ranks: dict[int, tuple[RankBeat, ...]] = {}
        self._server: asyncio.Server | None = None
        self._verdict: Failure | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listens for the followers.

        Raises:
            ContractError: the port cannot be taken.
        """
        host, port = self._launch.address.host, self._launch.address.control_port
        try:
            self._server = await asyncio.start_server(self._serve, host=bind_host(host), port=port)
        except OSError as error:
            raise ContractError(
                f"control port {port} cannot be used: {error}; end the process that has it, or set another "
                f"control_port in {names.ENV_ADDRESSES}"
            ) from error

    def missing_pods(self) -> list[int]:
        """Returns the pods that have not connected."""
        return [pod.index for pod in self._plan.pods[1:] if pod.index not in self._links]

    def ranks(self) -> list[RankBeat]:
        """Returns the last word on each rank of the other pods that have spoken."""
        return [rank for ranks in self._ranks.values() for rank in ranks]

    def news_age_s(self) -> float:
        """Returns the age of the oldest news of a connected pod, in seconds."""
        return max((link.silent_for_s() for link in self._links.values()), default=0.0)

    def beat(self) -> None:
        """Tells every follower that this pod lives, and how old its news of the others is."""
        self._tell_all(Message(group_age_s=self.news_age_s()))

    def tell_stopping(self) -> None:
        """Tells every follower that this pod was asked to stop."""
        self._tell_all(Message(stopping=True))

    def check_silence(self, excused_s: float) -> None:
        """Reports each follower that was silent for too long.

        Args:
            excused_s: how long this process itself was held up just now; others may
                have spoken meanwhile.
        """
        for pod, link in self._links.items():
            if link.silent_for_s() > self._launch.heartbeat_timeout_s + excused_s:
                self._lost(pod, f"was silent for {link.silent_for_s():.1f} s")

    async def end(self, verdict: Failure | None, late_s: float) -> None:
        """Tells everybody the verdict, if there is one, and closes.

        Args:
            verdict: who ended the group; None when this pod just stops.
            late_s: how long to wait for pods that have not connected yet, in seconds:
                they would otherwise try until their start-up deadline.
        """
        if verdict is not None:
            self._verdict = verdict
            self._tell_all(Message(verdict=verdict))
            deadline_s = time.monotonic() + late_s
            while self.missing_pods() and time.monotonic() < deadline_s:
                await asyncio.sleep(BEAT_INTERVAL_S / 4)
        await asyncio.gather(*(link.flush() for link in self._links.values()))
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for link in self._links.values():
            link.close()

    def _tell_all(self, message: Message) -> None:
        for link in self._links.values():
            link.send(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link = SupervisorLink(reader, writer, self._launch.heartbeat_timeout_s)
        try:
            pod = await self._welcome(link)
            if pod is not None:
                await self._listen(pod, link)
        except asyncio.CancelledError:
            pass  # end() closes the links itself, and asyncio would log the cancellation as an error
        finally:
            link.close()

    async def _welcome(self, link: SupervisorLink) -> int | None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await link.receive()
        except (TimeoutError, ContractError) as error:
            log.warning("sent away a stranger on the control port: %s", error)
            return None
        if message is None or message.hello is None:
            return None
        hello = message.hello
        difference, ends_group = check_hello(
            hello, plan=self._plan, launch=self._launch, connected=set(self._links)
        )
        if difference:
            await self._refuse(link, hello, difference, ends_group=ends_group)
            return None
        link.send(Message(welcome=True))
        self._links[hello.pod] = link
        log.info("pod %d connected", hello.pod)
        if self._verdict is not None:
            link.send(Message(verdict=self._verdict))
        return hello.pod

    async def _refuse(self, link: SupervisorLink, hello: Hello, difference: str, *, ends_group: bool) -> None:
        failure = Failure(
            reason=FailureReason.PLAN_MISMATCH,
            message=(
                f"pod {hello.pod} was refused by the leader of {self._launch.group}: {difference}; "
                "start all pods of a group from one plan and one epoch"
            ),
            pod=hello.pod,
            time=time.time(),
        )
        log.warning("%s", failure.message)
        link.send(Message(refused=failure))
        await link.flush()
        if ends_group:
            self._handlers.on_evidence(Evidence(failure=failure))

    async def _listen(self, pod: int, link: SupervisorLink) -> None:
        try:
            while (message := await link.receive()) is not None:
                if message.ranks is not None:
                    self._ranks[pod] = message.ranks
                if message.stopping:
                    self._stopping.add(pod)
                    self._handlers.on_stopping(pod)
                if message.evidence is not None:
                    self._handlers.on_evidence(message.evidence)
        except ContractError as error:
            self._lost(pod, f"spoke another protocol: {error}")
        else:
            self._lost(pod, "closed its connection")

    def _lost(self, pod: int, how: str) -> None:
        if pod in self._stopping:
            self._handlers.on_left(pod)
        else:
            self._handlers.on_evidence(Evidence(failure=pod_lost(self._launch, pod, how)))


class ControlClient:
    """A follower's side: one link to the leader."""

    def __init__(self, plan: Plan, launch: PodLaunch, handlers: Handlers) -> None:
        self._plan = plan
        self._launch = launch
        self._handlers = handlers
        self._link: SupervisorLink | None = None
        self._group_age_s = 0.0
        self._leader_stopping = False

    async def connect(self) -> None:
        """Returns once the leader has welcomed this pod.

        Tries again for ever: the leader may be waiting for its node to pull the image, and only
        the operator sees that.

        Raises:
            Refused: the leader says what differs.
        """
        leader = self._launch.leader
        complaint = ""
        while self._link is None:
            try:
                self._link = await self._try_connect()
            except (OSError, TimeoutError, ContractError) as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.info("waiting for the leader at %s:%d: %s", leader.host, leader.control_port, error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _try_connect(self) -> SupervisorLink:
        leader = self._launch.leader
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(leader.host, leader.control_port)
        link = SupervisorLink(reader, writer, self._launch.heartbeat_timeout_s)
        hello = Hello(
            group_uid=self._launch.group_uid,
            epoch=self._launch.epoch,
            plan_hash=self._plan.hash,
            pod=self._launch.pod_index,
        )
        try:
            link.send(Message(hello=hello))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                answer = await link.receive()
        except BaseException:
            link.close()
            raise
        if answer is not None and answer.welcome:
            return link
        link.close()
        if answer is not None and answer.refused is not None:
            raise Refused(answer.refused)
        raise OSError("the leader closed the connection without an answer")

    async def listen(self) -> None:
        """Handles what the leader says until the connection ends."""
        assert self._link is not None
        try:
            while (message := await self._link.receive()) is not None:
                if message.group_age_s is not None:
                    self._group_age_s = message.group_age_s
                if message.stopping:
                    self._leader_stopping = True
                    self._handlers.on_stopping(0)
                if message.verdict is not None:
                    self._handlers.on_verdict(message.verdict)
                    return
        except ContractError as error:
            self._lost(f"spoke another protocol: {error}")
        else:
            self._lost("closed its connection")

    def send(self, message: Message) -> None:
        """Tells the leader."""
        if self._link is not None:
            self._link.send(message)

    def connected(self) -> bool:
        """Returns whether the leader's last heartbeat is within the heart-beat deadline."""
        return self._link is not None and self._link.silent_for_s() <= self._launch.heartbeat_timeout_s

    def news_age_s(self) -> float:
        """Returns the age of the oldest news of the group, in seconds."""
        return 0.0 if self._link is None else self._group_age_s + self._link.silent_for_s()

    def check_silence(self, excused_s: float) -> None:
        """Reports the leader if it was silent for too long; `excused_s` as in ControlServer."""
        link = self._link
        if link is not None and link.silent_for_s() > self._launch.heartbeat_timeout_s + excused_s:
            self._lost(f"was silent for {link.silent_for_s():.1f} s")

    async def end(self) -> None:
        """Closes the link once everything said has left."""
        if self._link is not None:
            await self._link.flush()
            self._link.close()

    def _lost(self, how: str) -> None:
        if self._leader_stopping:
            self._handlers.on_left(0)
        else:
            self._handlers.on_evidence(Evidence(failure=pod_lost(self._launch, 0, how)))


def pod_lost(launch: PodLaunch, pod: int, how: str) -> Failure:
    """Returns the failure that names a pod whose supervisor is gone."""
    return Failure(
        reason=FailureReason.POD_LOST,
        message=(
            f"the supervisor of pod {pod} ({launch.addresses[pod].host}) {how}; look at that pod and its node"
        ),
        pod=pod,
        time=time.time(),
    )
