"""Compares answers of groups of CPU ranks, and reads their ranks' metrics, for all tests of this folder."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import Group

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""All pods share this machine, and more threads than CPUs would compete in their busy waits."""


def answer_all(group: Group, reference: Reference) -> None:
    """Sends every prompt at the same time, and compares every token."""
    with ThreadPoolExecutor(len(reference)) as pool:
        prompts = [answer["prompt_token_ids"] for answer in reference.values()]
        got = list(pool.map(group.complete, prompts))
    assert got == [answer["token_ids"] for answer in reference.values()]


def samples(text: str, name: str) -> dict[str, float]:
    """Returns a metric's values by phase or direction, or by `""` if it has neither."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
        if match:
            labels: dict[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
            found[labels.get("phase", labels.get("direction", ""))] = float(match[2])
    return found


def rank_pids(group: Group) -> list[int]:
    """Returns the process id of each rank, from its supervisor's log."""
    pids = {}
    for child in group.children:
        for line in child.log.read_text().splitlines():
            words = line.rsplit("started rank ", 1)
            if len(words) == 2:
                rank, pid = words[1].split(" as process ")
                pids[int(rank)] = int(pid)
    return [pid for _, pid in sorted(pids.items())]


def shared_memory() -> set[str]:
    """Returns the names of vLLM's shared memory on this machine that no living process has mapped."""
    names = {path.name for path in Path("/dev/shm").iterdir() if "cpushm" in path.name}
    return {
        name for name in names if not any(name in maps for maps in map(_maps, Path("/proc").glob("[0-9]*")))
    }


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:  # it ended meanwhile
        return ""
