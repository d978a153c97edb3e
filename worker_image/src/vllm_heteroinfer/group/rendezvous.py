"""The group's key-value store, for fingerprints, hop schemas and handles of message queues.

Rank 0 hosts the store, so that ranks can connect and load without waiting for vLLM's API server. Every wait
has a deadline. Imports torch.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final
from urllib.parse import parse_qs, urlsplit

from torch.distributed import TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import register_rendezvous_handler

from heteroinfer_contract.group_key import GroupKey
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.lost_peer import Conversation

_STORE_RANK = 0
"""The rank that serves the store."""
_POLL_S = 1.0
"""Timeout of an attempt to connect. Python handles signals between attempts."""


WORLD_SCHEME: Final = "heteroinfer"


def world_init_method(launch: PodLaunch) -> str:
    """Returns the URL by which torch.distributed connects all ranks of the group.

    The URL's scheme is our own, and this function registers it with torch at the first call. With this
    scheme, rank 0 listens only at `addresses.bind_address`. torch's `tcp://` would listen on every interface,
    and no NetworkPolicy protects `heteroinfer up`.
    """
    global _registered  # noqa: PLW0603 - torch's table of schemes is global and accepts each scheme once
    if not _registered:
        register_rendezvous_handler(WORLD_SCHEME, _open_stores)
        _registered = True
    host = addresses.host_in_url(launch.leader.host)
    return f"{WORLD_SCHEME}://{host}:{launch.leader.rendezvous_port}"


_registered = False


def _open_stores(
    url: str, timeout: timedelta = default_pg_timeout, **_: object
) -> Iterator[tuple[TCPStore, int, int]]:
    """Yields the store, the rank and the world size, as torch expects of a rendezvous handler.

    A second rendezvous fails, because a group restarts only as a whole.

    Source: torch/distributed/rendezvous.py::_tcp_rendezvous_handler@v2.13.0.
    """
    address = urlsplit(url)
    query = parse_qs(address.query)
    rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
    assert address.hostname is not None  # world_init_method wrote both
    assert address.port is not None
    listener = _listen(address.hostname, address.port, "rendezvous") if rank == 0 else None
    store = TCPStore(
        address.hostname,
        address.port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )
    yield store, rank, world_size
    raise RuntimeError(
        "rendezvous: must happen once, because a group restarts only as a whole (torch requested a "
        "second rendezvous). Report this as a bug"
    )


def _listen(host: str, port: int, port_name: str) -> int:
    """Listens on the leader's port. Returns the descriptor of the socket, which the caller must close.

    Raises:
        OSError: the port is in use.
    """
    try:
        listener = addresses.open_listener(host, port)
    except OSError as error:
        raise OSError(
            f"{port_name} port {port}: is not available ({error}). End the process that uses this port on "
            "the leader's machine"
        ) from error
    listener.listen(1024)
    return listener.detach()


class GroupStore:
    """A store for an epoch of a group, on the leader's executor port.

    Attributes:
        set_awaited_rank: called with the rank whose value this process waits for, and with None after the
            wait.
    """

    def __init__(self, store: TCPStore, launch: PodLaunch) -> None:
        self.set_awaited_rank: Callable[[int | None], None] = lambda rank: None
        key = GroupKey.from_env(os.environ)
        self._key = None if key is None else key.of_epoch(launch.epoch)
        self._store = store
        self._launch = launch
        self._prefix = f"{launch.group_uid}/{launch.epoch}/"

    @classmethod
    def host(cls, launch: PodLaunch, deadline: Deadline) -> "GroupStore":
        """Starts the store in this process, rank 0.

        Raises:
            OSError: the port is in use.
        """
        leader = launch.leader
        listener = _listen(leader.host, leader.executor_port, "executor")
        store = TCPStore(
            leader.host,
            leader.executor_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline.left_s),
            master_listen_fd=listener,
        )
        return cls(store, launch)

    @classmethod
    def connect(cls, launch: PodLaunch, deadline: Deadline) -> "GroupStore":
        """Connects to the store of rank 0; waits until rank 0 serves it.

        Waits by plain connections, because Python handles no signal while torch itself waits.

        Raises:
            TimeoutError: rank 0 did not serve the store before the deadline.
        """
        leader = launch.leader
        address = (addresses.resolve(leader.host), leader.executor_port)
        while True:
            timeout_s = min(_POLL_S, deadline.left_s or 0.001)  # a time-out of 0 would not wait at all
            try:
                socket.create_connection(address, timeout=timeout_s).close()
                break
            except OSError as error:
                if deadline.left_s == 0:
                    raise TimeoutError(
                        f"rank 0 did not open {leader.host}:{leader.executor_port} within "
                        f"{deadline.total_s:.0f} s ({error}). Check the leader's log"
                    ) from error
                time.sleep(min(0.05, deadline.left_s))
        store = TCPStore(
            leader.host,
            leader.executor_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(1.0, deadline.left_s)),
        )
        return cls(store, launch)

    def put(self, key: str, value: str) -> None:
        """Stores a signed value under a key; every process of the group can read it.

        Values are signed because any process that reaches the port can write to the store, and some values
        are addresses of queues, whose messages vLLM unpickles.
        """
        if self._key is not None:
            value = self._key.sign("store", key, value)
        with Conversation(_STORE_RANK, "the group's store"):
            self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline: Deadline, *, awaited: str, rank: int | None = None) -> str:
        """Waits for the value under a key and returns it.

        Args:
            awaited: name of the value and of its source, for the error.
            rank: the global rank that will store the value; None if another process stores it.

        Raises:
            TimeoutError: the value was not there before the deadline.
            PeerGoneError: rank 0, which serves the store, is gone.
            ContractError: no process of this epoch signed the value.
        """
        full_key = self._prefix + key
        self.set_awaited_rank(rank)
        while not self._has_value(full_key):
            if deadline.left_s == 0:
                source = "the process that sends it" if rank is None else f"rank {rank}"
                raise TimeoutError(
                    f"got no {awaited} within {deadline.total_s:.0f} s. Read the log of {source}"
                )
            time.sleep(min(0.02, deadline.left_s))
        self.set_awaited_rank(None)
        with Conversation(_STORE_RANK, "the group's store"):
            value = str(self._store.get(full_key).decode())
        return value if self._key is None else self._key.read_signed("store", key, value)

    def _has_value(self, key: str) -> bool:
        """Returns whether the store has a value under a key."""
        with Conversation(_STORE_RANK, "the group's store"):
            return bool(self._store.check([key]))
