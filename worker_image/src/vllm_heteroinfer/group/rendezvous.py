"""The group's small store: fingerprints, hop schemas and message queue handles, by key.

Rank 0 hosts it, so that ranks meet and load without waiting for the API server's process.
Every wait has a deadline. Imports torch.
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

_SERVED_BY = 0
"""The rank that serves the store."""
_POLL_S = 1.0
"""How long one look for a key may block; between looks a signal is seen."""


WORLD_SCHEME: Final = "heteroinfer"


def world_init_method(launch: PodLaunch) -> str:
    """Returns the init method of the group's torch.distributed world; can be called again.

    As `tcp://`, but rank 0 listens where `addresses.bind_host` says: torch's own handler listens on
    every interface, and `heteroinfer up` has no NetworkPolicy around it.
    """
    global _registered  # noqa: PLW0603 - torch's table of schemes is as global, and takes each once
    if not _registered:
        register_rendezvous_handler(WORLD_SCHEME, _meet)
        _registered = True
    host = addresses.host_in_url(launch.leader.host)
    return f"{WORLD_SCHEME}://{host}:{launch.leader.rendezvous_port}"


_registered = False


def _meet(
    url: str, timeout: timedelta = default_pg_timeout, **_: object
) -> Iterator[tuple[TCPStore, int, int]]:
    """Yields store, rank and world size.

    Source: torch/distributed/rendezvous.py::_tcp_rendezvous_handler@v2.13.0.
    """
    where = urlsplit(url)
    query = parse_qs(where.query)
    rank, world_size = int(query["rank"][0]), int(query["world_size"][0])
    assert where.hostname is not None  # world_init_method wrote both
    assert where.port is not None
    listener = _listen(where.hostname, where.port, "rendezvous") if rank == 0 else None
    store = TCPStore(
        where.hostname,
        where.port,
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listener,
    )
    yield store, rank, world_size
    raise RuntimeError("a world is met once: the group starts again as a whole")


def _listen(host: str, port: int, what: str) -> int:
    """Returns the descriptor of a socket that listens on the leader's port; its taker closes it.

    Raises:
        OSError: the port is taken.
    """
    try:
        listener = addresses.open_listener(host, port)
    except OSError as error:
        raise OSError(f"{what} port {port}: {error}; the leader needs this port for its group") from error
    listener.listen(1024)
    return listener.detach()


class GroupStore:
    """Keys of one epoch of one group, on the leader's executor port.

    Attributes:
        waits_for: called with the rank whose word this process waits for, and with None when it has come.
    """

    def __init__(self, store: TCPStore, launch: PodLaunch) -> None:
        self.waits_for: Callable[[int | None], None] = lambda rank: None
        key = GroupKey.from_env(os.environ)
        self._key = None if key is None else key.of_epoch(launch.epoch)
        self._store = store
        self._launch = launch
        self._prefix = f"{launch.group_uid}/{launch.epoch}/"

    @classmethod
    def host(cls, launch: PodLaunch, deadline: Deadline) -> "GroupStore":
        """Returns the store, served by this process (rank 0).

        Raises:
            OSError: the port is taken.
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
        """Returns the store that rank 0 serves, waiting for it.

        Raises:
            TimeoutError: it was not there by the deadline.
        """
        leader = launch.leader
        address = (addresses.resolve(leader.host), leader.executor_port)
        while True:
            try:
                socket.create_connection(address, timeout=min(_POLL_S, deadline.left_s or 0.001)).close()
                break
            except OSError as error:
                if deadline.left_s == 0:
                    raise TimeoutError(
                        f"rank 0 did not open {leader.host}:{leader.executor_port} within "
                        f"{deadline.total_s:.0f} s ({error}); look at the leader's log"
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
        """Stores text under a key, signed; every process of the group can read it.

        Queue addresses are among them, and what comes out of a queue is unpickled: the port of
        the store is open to whoever reaches it.
        """
        if self._key is not None:
            value = self._key.sign("store", key, value)
        with Conversation(_SERVED_BY, "the group's store"):
            self._store.set(self._prefix + key, value)

    def get(self, key: str, deadline: Deadline, *, what: str, rank: int | None = None) -> str:
        """Returns the text under a key, waiting for it.

        Args:
            what: what is waited for and from whom, for the error.
            rank: the global rank that will put it, if it is one.

        Raises:
            TimeoutError: it was not there by the deadline.
            PeerGoneError: rank 0, which serves the store, is gone.
            ContractError: no process of the epoch has stored what is there.
        """
        full = self._prefix + key
        self.waits_for(rank)
        while not self._has(full):
            if deadline.left_s == 0:
                raise TimeoutError(
                    f"got no {what} within {deadline.total_s:.0f} s; look at that process's log"
                )
            time.sleep(min(0.02, deadline.left_s))
        self.waits_for(None)
        with Conversation(_SERVED_BY, "the group's store"):
            value = str(self._store.get(full).decode())
        return value if self._key is None else self._key.read_signed("store", key, value)

    def _has(self, key: str) -> bool:
        with Conversation(_SERVED_BY, "the group's store"):
            return bool(self._store.check([key]))
