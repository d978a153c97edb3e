"""Measures a TCP connection like those to feed-forward ranks of other pods. Imports no torch.

A client opens a connection with a line, and the listener answers with a line. After that, each message of the
client has a header with two numbers: the bytes after the header, and the bytes that the listener answers. A
message that asks for no answer ends the measurement.

No key is needed, because the messages have no content. The listener reads at most LARGE_BYTES for a message,
and only for a limited time.
"""

import asyncio
import socket
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.calibration import MAX_TEXT
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.network_measurement import NetworkMeasurement
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.pod.threads import call_aside

PROTOCOL: Final = 1
"""Version of the messages in this module."""
SMALL_BYTES: Final = 56
"""Bytes after the header of a small message. A row has more, and the rate gives the time for these."""
LARGE_BYTES: Final = 4 << 20
"""Bytes of the largest message: 512 rows of a model with hidden size 4096."""
MAX_MESSAGES: Final = 1000
"""Maximum number of messages of a client. `measure` sends fewer."""
OPENING_S: Final = 3.0
"""Time for a client's connection and its first line. A stranger without this line occupies the listener no
longer."""
_LOOK_UP_S: Final = 30.0
"""Time for one look-up of the listener's name."""
_NAP_S: Final = 0.5
"""Time between two attempts to connect."""
_SHORTEST_WAIT_S: Final = 0.001
"""Timeout of a socket at its deadline; 0 would mean not to wait at all."""
_LINE_BYTES: Final = 1024
_CHUNK_BYTES: Final = 1 << 20
_HEADER: Final = struct.Struct(">II")
_MIN_ROUNDS, _MAX_ROUNDS, _ROUNDS_S = 9, 200, 2.0
"""Numbers of small messages, and seconds after which no further message begins, unless there are too few."""
_MIN_LARGE, _MAX_LARGE, _LARGE_S = 3, 50, 2.0
"""The same for the large messages of one direction."""
_FIRST_BYTES: Final = 64 << 10
_LONG_S: Final = 0.05
"""Seconds of a large message, besides its round trips, that suffice for a precise rate."""
_WARM_UP: Final = 5
_LEAST_TRANSFER: Final = 0.1
"""By chance, a large message may take hardly longer than a small one. At least this part of its time counts
as transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOpening:
    """First line of each end: the version of the protocol, and that of HeteroInfer."""

    protocol: int
    version: str


def answer_clients(
    listener: socket.socket,
    version: str,
    *,
    wait_s: float,
    limit_s: float,
    linger_s: float,
    report: Callable[[str], None],
) -> None:
    """Answers clients, one after another, until a measurement is complete.

    Args:
        listener: a socket that listens.
        wait_s: time for a complete measurement to begin.
        limit_s: time for the measurement of one client.
        linger_s: time after the first complete measurement in which clients may repeat it.
        report: gets a line about each client.

    Raises:
        ContractError: no client completed a measurement.
    """
    deadline, is_measured = Deadline.after(wait_s), False
    while deadline.left_s:
        listener.settimeout(max(deadline.left_s, _SHORTEST_WAIT_S))
        try:
            connected, address = listener.accept()
        except TimeoutError:
            break
        except ConnectionError as error:  # the client left before it was accepted
            report(f"client: {error}. Waiting for the next client")
            continue
        with connected:
            try:
                is_complete = _answer(connected, version, Deadline.after(limit_s))
            except (OSError, ContractError) as error:
                report(f"client {address[0]}: {error}. Waiting for the next client")
                continue
        if not is_complete:
            report(
                f"client {address[0]}: did not measure the network with version {version}. Waiting for the "
                "next client"
            )
            continue
        report(f"client {address[0]}: measured the network")
        if not is_measured:  # only once, so that further clients do not prolong the wait
            deadline, is_measured = Deadline.after(linger_s), True
    if not is_measured:
        raise ContractError(
            f"listener: no client measured the network within {wait_s:g} s. Run `heteroinfer-worker "
            "network --connect HOST` on the other machine, and let that machine reach this port"
        )


def _answer(connected: socket.socket, version: str, deadline: Deadline) -> bool:
    """Answers the messages of a client until its last message.

    Returns:
        whether this was a measurement: the client has this version, and exchanged large messages.

    Raises:
        OSError: the client left, or was too slow.
        ContractError: the client does not measure a network, or sends too much.
    """
    _set_options(connected)
    opening = _read_opening(connected, Deadline.after(min(OPENING_S, deadline.total_s)))
    _check_protocol("client", opening)
    _send_opening(connected, version, deadline)
    most_asked = most_answered = 0
    for _ in range(MAX_MESSAGES):
        ask_bytes, answer_bytes = _HEADER.unpack(_read(connected, _HEADER.size, deadline))
        if not answer_bytes:
            return opening.version == version and min(most_asked, most_answered) >= _FIRST_BYTES
        codec.at_most(LARGE_BYTES, "message", ask_bytes=ask_bytes, answer_bytes=answer_bytes)
        _discard(connected, ask_bytes, deadline)
        _send(connected, bytes(answer_bytes), deadline)
        most_asked, most_answered = max(most_asked, ask_bytes), max(most_answered, answer_bytes)
    raise ContractError(f"the client sent more than {MAX_MESSAGES} messages")


def connect(host: str, port: int, version: str, wait: Deadline) -> socket.socket:
    """Returns a connection to a listener; tries again until the listener answers.

    Raises:
        ContractError: no listener answered by the deadline, another program answered, or the listener is of
            another version.
    """
    problem = "the time is over"
    while wait.left_s:
        try:
            connected = _connect_to_any(_look_up(host, port, wait), wait)
        except UnicodeError as error:
            raise ContractError(
                f"{host!r}: must be a host name or an address ({error}). Correct --connect"
            ) from error
        except OSError as error:
            problem = str(error)
        else:
            try:
                _set_options(connected)
                _open(connected, host, port, version, wait)
            except OSError as error:  # the listener ended, or answers another client
                connected.close()
                problem = str(error)
            except BaseException:
                connected.close()
                raise
            else:
                return connected
        time.sleep(min(_NAP_S, wait.left_s))
    raise ContractError(
        f"{host} port {port}: no listener answered within {wait.total_s:g} s ({problem}). Run "
        "`heteroinfer-worker network --listen` on the other machine, and let this machine reach that port"
    )


def _look_up(host: str, port: int, wait: Deadline) -> list[tuple[str, int]]:
    """Returns the addresses of a host. A thread looks them up, because a resolver has no time-out of its own.

    Raises:
        OSError: the host has no address, or the resolver did not answer in time.
        UnicodeError: the name is invalid.
    """

    async def look_up() -> list[tuple[str, int]]:
        """Looks up the host until the deadline."""
        resolving = call_aside(
            "look up the listener", lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        found = await asyncio.wait_for(resolving, _at_most(_LOOK_UP_S, wait))
        return [(str(address[0]), int(address[1])) for *_, address in found]

    try:
        return asyncio.run(look_up())
    except TimeoutError:
        raise TimeoutError(f"the name {host} was not resolved in time") from None


def _connect_to_any(addresses: Sequence[tuple[str, int]], wait: Deadline) -> socket.socket:
    """Returns a connection to the first address that accepts it; raises the OSError of the last address."""
    error = OSError("the name has no address")
    for address in addresses:
        try:
            return socket.create_connection(address, timeout=_at_most(OPENING_S, wait))
        except OSError as failure:
            error = failure
    raise error


def _open(connected: socket.socket, host: str, port: int, version: str, wait: Deadline) -> None:
    """Exchanges the first lines with a listener; raises OSError, or ContractError as `connect` does."""
    deadline = Deadline.after(_at_most(OPENING_S, wait))
    _send_opening(connected, version, deadline)
    name = f"{host} port {port}"
    try:
        opening = _read_opening(connected, deadline)
        _check_protocol(name, opening)
    except ContractError as error:
        raise ContractError(
            f"{name}: another program answers ({error}). Choose the host and the port of "
            "`heteroinfer-worker network --listen`"
        ) from error
    if opening.version != version:
        raise ContractError(
            f"{name}: the listener has version {opening.version!r} of HeteroInfer, and this client has "
            f"{version!r}. Use the same version on both machines"
        )


def measure(connected: socket.socket, version: str, deadline: Deadline) -> NetworkMeasurement:
    """Measures an opened connection.

    Raises:
        OSError: the connection ended, or the deadline passed.
        ContractError: the result is outside the range of plausible networks.
    """

    def exchange(ask_bytes: int, answer_bytes: int) -> float:
        """Returns the seconds from the message to the end of its answer."""
        message = _HEADER.pack(ask_bytes, answer_bytes) + bytes(ask_bytes)
        start = time.perf_counter()
        _send(connected, message, deadline)
        _discard(connected, answer_bytes, deadline)
        return time.perf_counter() - start

    def exchange_small() -> float:
        return exchange(SMALL_BYTES, SMALL_BYTES)

    for _ in range(_WARM_UP):
        exchange_small()
    round_trip_s = _median_s(exchange_small, _MIN_ROUNDS, _MAX_ROUNDS, _ROUNDS_S)
    to_listener = _rate(lambda size: exchange(size, 1), round_trip_s)
    to_client = _rate(lambda size: exchange(0, size), round_trip_s)
    _send(connected, _HEADER.pack(0, 0), deadline)
    measured = NetworkMeasurement(
        version=version[:MAX_TEXT],
        time=round(time.time(), 1),
        round_trip_s=_four_digits(round_trip_s),
        to_listener_bytes_per_s=_four_digits(to_listener),
        to_client_bytes_per_s=_four_digits(to_client),
    )
    try:
        measured.check()
    except ContractError as error:
        raise ContractError(f"{error}. Measure again while both machines and the network are idle") from error
    return measured


def _rate(transfer: Callable[[int], float], round_trip_s: float) -> float:
    """Returns the bytes per second of large messages in one direction.

    The size grows until a message takes long enough. These first messages also open TCP's window.

    Args:
        transfer: sends a number of bytes, and returns the seconds including a round trip.
    """
    size = _FIRST_BYTES
    while transfer(size) < _LONG_S + 5 * round_trip_s and size < LARGE_BYTES:
        size *= 2
    large_s = _median_s(lambda: transfer(size), _MIN_LARGE, _MAX_LARGE, _LARGE_S)
    return size / max(large_s - round_trip_s, _LEAST_TRANSFER * large_s)


def _median_s(call: Callable[[], float], least: int, most: int, max_s: float) -> float:
    """Returns the median of `least` to `most` calls, which return seconds.

    Args:
        max_s: seconds after which no further call begins, if there are enough.
    """
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < least or (len(times) < most and time.perf_counter() - start < max_s):
        times.append(call())
    return statistics.median(times)


def _four_digits(value: float) -> float:
    """Rounds a measured value to its precision."""
    return float(f"{value:.4g}")


def _set_options(connected: socket.socket) -> None:
    """Makes a socket send at once, as connections to feed-forward ranks do."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _check_protocol(name: str, opening: NetworkOpening) -> None:
    """Raises ContractError if the other end has another protocol.

    Args:
        name: name of the other end, for the message.
    """
    if opening.protocol != PROTOCOL:
        raise ContractError(
            f"{name}: must have protocol {PROTOCOL} (got {opening.protocol}). Use the same version of "
            "HeteroInfer on both machines"
        )


def _send_opening(connected: socket.socket, version: str, deadline: Deadline) -> None:
    """Sends the first line of an end."""
    line = codec.to_json(NetworkOpening(protocol=PROTOCOL, version=version))
    _send(connected, line.encode() + b"\n", deadline)


def _read_opening(connected: socket.socket, deadline: Deadline) -> NetworkOpening:
    """Reads the first line of the other end.

    Reads byte by byte, because the bytes after the line must stay in the socket.

    Raises:
        OSError: the connection ended, or the line did not arrive by the deadline.
        ContractError: the line is too long, or is not an opening.
    """
    line = b""
    while not line.endswith(b"\n"):
        if len(line) == _LINE_BYTES:
            raise ContractError(f"first line: must have at most {_LINE_BYTES} bytes")
        line += _read(connected, 1, deadline)
    return codec.from_json(NetworkOpening, line.decode(errors="replace"), where="first line")


def _read(connected: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
    """Reads a few bytes; raises OSError if the connection ends, or at the deadline."""
    read = b""
    while len(read) < num_bytes:
        read += _receive(connected, num_bytes - len(read), deadline)
    return read


def _discard(connected: socket.socket, num_bytes: int, deadline: Deadline) -> None:
    """Reads bytes and drops them; raises OSError if the connection ends, or at the deadline."""
    left = num_bytes
    while left:
        left -= len(_receive(connected, min(left, _CHUNK_BYTES), deadline))


def _receive(connected: socket.socket, most: int, deadline: Deadline) -> bytes:
    """Reads 1 to `most` bytes; raises OSError if the connection ends, or at the deadline."""
    _limit_wait(connected, deadline)
    try:
        received = connected.recv(most)
    except TimeoutError as error:
        raise _too_slow(deadline) from error
    if not received:
        raise ConnectionError("the other end closed the connection")
    return received


def _send(connected: socket.socket, message: bytes, deadline: Deadline) -> None:
    """Sends a message; raises OSError if the connection ends, or at the deadline."""
    _limit_wait(connected, deadline)
    try:
        connected.sendall(message)  # the timeout limits the whole call
    except TimeoutError as error:
        raise _too_slow(deadline) from error


def _limit_wait(connected: socket.socket, deadline: Deadline) -> None:
    """Limits the next wait of a socket to the deadline; raises TimeoutError at the deadline."""
    left_s = deadline.left_s
    if not left_s:
        raise _too_slow(deadline)
    connected.settimeout(max(left_s, _SHORTEST_WAIT_S))


def _too_slow(deadline: Deadline) -> TimeoutError:
    """Returns the error of an end that was not done by the deadline."""
    return TimeoutError(f"the other end was not done within {deadline.total_s:g} s")


def _at_most(seconds: float, deadline: Deadline) -> float:
    """Returns a wait that ends by the deadline."""
    return max(min(seconds, deadline.left_s), _SHORTEST_WAIT_S)
