"""Ports that tests take: no two processes get the same port."""

import subprocess
import sys
from pathlib import Path

from tests import ports

ROOT = Path(__file__).parents[2]


def test_processes_at_the_same_time_get_different_ports() -> None:
    script = "from tests.ports import free_ports; print(*free_ports(60), flush=True); input()"
    others = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    found = [*ports.free_ports(60)]
    for other in others:
        assert other.stdout is not None
        found += map(int, other.stdout.readline().split())
    for other in others:
        other.communicate("\n", timeout=10)
    assert len(set(found)) == len(found) == 4 * 60


def test_ports_are_contiguous_and_blocks_are_reused() -> None:
    blocks = (ports.END_PORT - ports.FIRST_PORT) // ports.BLOCK_PORTS
    for _ in range(2 * blocks):  # more than there are, if none came back
        first = ports.contiguous_ports(ports.BLOCK_PORTS // 2)
        assert ports.FIRST_PORT <= first < ports.END_PORT
