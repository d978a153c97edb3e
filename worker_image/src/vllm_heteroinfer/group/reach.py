"""Checks that the pods of a group reach each other at arbitrary ports, before torch and vLLM connect.

torch's process groups and vLLM's queues listen at ports that the kernel chooses. If a firewall or a
NetworkPolicy drops packets to these ports, torch and vLLM wait until the start times out, and their errors do
not name the unreachable pod.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Final

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group.deadline import Deadline, WaitCountdown
from vllm_heteroinfer.group.rendezvous import GroupStore
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.threads import start_thread

REACH_TIMEOUT_S: Final = 30.0
"""Longest wait until a pod can be reached. A CNI may need seconds to allow traffic of a new pod."""
_ATTEMPT_TIMEOUT_S: Final = 3.0
"""Timeout of an attempt. The kernel resends a lost first packet after one second."""
_NAP_S: Final = 0.2


class UnreachableError(RuntimeError):
    """This pod cannot connect to another pod of the group."""


def check_pods(
    plan: Plan, launch: PodLaunch, rank: RankAssignment, store: GroupStore, deadline: Deadline
) -> None:
    """Waits until each pod of the group has reached every other pod.

    Every rank calls this; only the first rank of each pod checks.

    Raises:
        UnreachableError: a pod that has started cannot be reached; the message names the pod.
    """
    if len(plan.pods) == 1 or rank.local_rank != 0:
        return
    own_host = addresses.own_address(os.environ)
    with _listening(own_host) as port:
        store.put(f"reach/{rank.pod}", json.dumps([own_host, port]))
        others = [pod.index for pod in plan.pods if pod.index != rank.pod]
        for pod in others:
            first_rank = plan.pods[pod].ranks[0].rank
            text = store.get(f"reach/{pod}", deadline, awaited=f"address of pod {pod}", rank=first_rank)
            _connect_to_pod(launch, pod, *_parse_address(text, pod))
        store.put(f"reached/{rank.pod}", "")
        # Keep listening until all other pods have reached this pod.
        for pod in others:
            first_rank = plan.pods[pod].ranks[0].rank
            store.get(
                f"reached/{pod}",
                deadline,
                awaited=f"message that pod {pod} reaches all other pods",
                rank=first_rank,
            )


@contextlib.contextmanager
def _listening(host: str) -> Iterator[int]:
    """Listens at a free port, yields the port, and closes each connection immediately."""
    with socket.socket(addresses.family_of(host), socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        ended = threading.Event()

        def close_all() -> None:
            """Accepts and closes connections until the check has ended."""
            while not ended.is_set():
                try:
                    listener.accept()[0].close()
                except OSError:  # the connection failed, or this process has too many open files
                    ended.wait(_NAP_S)

        failures: list[BaseException] = []
        closing = start_thread(close_all, name="reach", failed=failures.append)
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)  # ends the accept
            closing.join(_ATTEMPT_TIMEOUT_S)
        if failures:
            raise failures[0]


def _parse_address(text: str, pod: int) -> tuple[str, int]:
    """Parses the address that a pod has stored; raises ContractError."""
    match json.loads(text):
        case [str(host), int(port)]:
            return host, port
    raise ContractError(
        f"address of pod {pod}: must be a host and a port (got {text!r}). Use one worker image for all pods"
    )


def _connect_to_pod(launch: PodLaunch, pod: int, host: str, port: int) -> None:
    """Waits until a pod accepts a connection; raises UnreachableError after REACH_TIMEOUT_S.

    The time counts only while this process runs.
    """
    countdown = WaitCountdown(REACH_TIMEOUT_S)
    while True:
        began_s = time.monotonic()
        try:
            socket.create_connection((host, port), timeout=_ATTEMPT_TIMEOUT_S).close()
        except OSError as error:
            time.sleep(_NAP_S)
            countdown.record_nap(time.monotonic() - began_s)
            if countdown.left_s > 0:
                continue
            raise UnreachableError(
                f"pod {pod} ({launch.addresses[pod].host}, {host}): pod {launch.pod_index} cannot connect to "
                f"port {port} of this pod ({error}). Let the pods of a group reach each other at all ports: "
                "check the NetworkPolicies of the namespace and the firewalls between the nodes"
            ) from error
        return
