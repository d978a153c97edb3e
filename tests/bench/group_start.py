"""Measures the start of a tiny CPU group: its phases, and the CPU time and memory of its processes.

    .venv/bin/python -m tests.bench.group_start [--runs 3] [--pods 1,1] [--log DIR] [--write FILE]

The first run has empty compile caches (cold). The others use the caches of the first run (warm), and only
they count in the median. Wall seconds are the time from the start of the supervisors until /readyz of the
leader reports that the group would answer a request. CPU seconds are those of the group's own processes. On a
busy machine, use the CPU seconds.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase
from heteroinfer_contract.plan import Plan
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import Group, build_plan, fetch, start_group

POLL_S = 0.05
START_TIMEOUT_S = 300.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PHASES = (RankPhase.CONNECTING, RankPhase.LOADING, RankPhase.WARMING_UP, RankPhase.READY)


@dataclass(slots=True, kw_only=True)
class Start:
    """One start.

    Attributes:
        ready_s: seconds until a request would be answered.
        reached_s: rank -> phase -> seconds until the rank had reached it.
        cpu_s: process -> its CPU seconds until then, including its dead children.
        pss_bytes: process -> its share of the machine's memory when the group is ready.
    """

    ready_s: float = 0.0
    reached_s: dict[int, dict[RankPhase, float]] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    pss_bytes: dict[str, int] = field(default_factory=dict)


def measure(plan: Plan, log_dir: Path, env: dict[str, str]) -> Start:
    """Starts a group, measures the start, and ends the group."""
    start = Start(reached_s={rank.rank: {} for rank in plan.ranks})
    began_s = time.monotonic()
    with start_group(plan, log_dir, env=env) as group:
        address = group.addresses[0]
        url = f"http://{address.host}:{address.health_port}"
        while fetch(url + names.PATH_READYZ) is None:
            now_s = time.monotonic() - began_s
            assert now_s < START_TIMEOUT_S, group.logs()
            assert not any(child.ended() for child in group.children), group.logs()
            note_phases(start, fetch(url + names.PATH_GROUP), now_s)
            time.sleep(POLL_S)
        start.ready_s = time.monotonic() - began_s
        note_phases(start, fetch(url + names.PATH_GROUP), start.ready_s)
        for name, pid in processes(group):
            start.cpu_s[name] = start.cpu_s.get(name, 0.0) + cpu_s(pid)
            start.pss_bytes[name] = start.pss_bytes.get(name, 0) + pss_bytes(pid)
    return start


def note_phases(start: Start, text: str | None, now_s: float) -> None:
    """Records the phases that ranks have newly reached."""
    if text is None:
        return
    for rank in GroupReport.from_json(text).ranks:
        order = list(RankPhase)
        for phase in PHASES:
            if order.index(rank.phase) >= order.index(phase):
                start.reached_s[rank.rank].setdefault(phase, now_s)


def processes(group: Group) -> Iterator[tuple[str, int]]:
    """Yields name and process of the group's processes."""
    parents = {int(entry.name): parent_of(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    ranks = {group.rank_pid(rank.rank): f"rank {rank.rank}" for rank in group.plan.ranks}
    for pod, supervisor in enumerate(group.children):
        yield f"supervisor {pod}", supervisor.process.pid
        for child in sorted(pid for pid, parent in parents.items() if parent == supervisor.process.pid):
            yield ranks.get(child, "API server"), child
            for helper in sorted(pid for pid, parent in parents.items() if parent == child):
                yield "engine", helper


def parent_of(entry: Path) -> int:
    """Returns the parent of a process in /proc, or 0 if it has ended."""
    try:
        return int(stat(entry)[1])
    except OSError:
        return 0


def stat(entry: Path) -> list[str]:
    text = (entry / "stat").read_text()
    return text[text.rindex(")") + 2 :].split()


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process and of its reaped descendants."""
    return sum(map(int, stat(Path(f"/proc/{pid}"))[11:15])) / TICKS_PER_S


def pss_bytes(pid: int) -> int:
    """Returns the bytes of a process's proportional share of memory. A shared page counts once in the sum."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def to_markdown(starts: Sequence[Start]) -> str:
    """Returns the tables."""
    labels = ["cold", *(f"warm {i}" for i in range(1, len(starts)))]
    rows: list[tuple[str, list[float]]] = [("ready, s", [s.ready_s for s in starts])]
    for rank in sorted(starts[0].reached_s):
        rows += [
            (f"rank {rank} {phase}, s", [s.reached_s[rank].get(phase, s.ready_s) for s in starts])
            for phase in PHASES
        ]
    rows.append(("CPU time of all, s", [sum(s.cpu_s.values()) for s in starts]))
    rows += [
        (f"CPU time of {name}, s", [s.cpu_s.get(name, 0.0) for s in starts]) for name in starts[-1].cpu_s
    ]
    rows.append(("memory of all, MB", [sum(s.pss_bytes.values()) / 1e6 for s in starts]))
    rows += [
        (f"memory of {name}, MB", [s.pss_bytes.get(name, 0) / 1e6 for s in starts])
        for name in starts[-1].pss_bytes
    ]
    head = f"| | {' | '.join(labels)} | median warm |"
    lines = [head, "|---" * (len(labels) + 2) + "|"]
    for name, values in rows:
        warm = statistics.median(values[1:] or values)
        lines.append(f"| {name} | {' | '.join(f'{value:.1f}' for value in values)} | {warm:.1f} |")
    return "\n".join(lines)


def main() -> int:
    """Runs the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.group_start")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pods", default="1,1", help="ranks of each pod; each rank has a stage")
    parser.add_argument("--threads", default="1", help="OMP_NUM_THREADS of each rank")
    parser.add_argument("--log", type=Path, help="store the pods' output here")
    parser.add_argument("--write", type=Path, help="write the tables as Markdown")
    options = parser.parse_args()
    pods = [int(ranks) for ranks in options.pods.split(",")]
    starts = []
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        model = make(Path(scratch) / "model")
        for run in range(options.runs):
            plan = build_plan(model, layers=[8 // sum(pods)] * sum(pods), pods=pods)
            env = {
                "OMP_NUM_THREADS": options.threads,
                "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
                "VLLM_CACHE_ROOT": f"{scratch}/vllm",
            }
            starts.append(measure(plan, (options.log or Path(scratch)) / f"run-{run}", env))
            print(json.dumps({"run": run, "ready_s": round(starts[-1].ready_s, 1)}), flush=True)
    today = datetime.datetime.now(datetime.UTC).date()
    text = f"{platform.machine()}, {os.cpu_count()} CPUs, {today}\n\n{to_markdown(starts)}\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
