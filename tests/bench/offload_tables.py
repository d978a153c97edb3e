"""Stores the results of the offloading benchmark, and shows them as tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a measurement: their number, the timed steps, and the repetitions."""

    requests: int
    steps: int
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """The times of one load, in seconds for each step.

    Attributes:
        step_s: median over the rounds.
        ranks: for ours only: the parts of the step's time by rank.
    """

    step_s: float
    ranks: tuple[Mapping[str, float], ...] = ()


Results = dict[str, dict[Load, Times]]
"""By `kind/layers off the GPU`."""

PEERS = ("uva", "prefetch")


def read_results(path: Path | None) -> Results:
    """Reads the results in a file. Returns no results if there is no file."""
    if path is None or not path.exists():
        return {}
    return {
        name: {Load(**load): Times(**{**times, "ranks": tuple(times["ranks"])}) for load, times in rows}
        for name, rows in json.loads(path.read_text()).items()
    }


def write_results(path: Path, results: Results) -> None:
    """Writes results to a file."""
    kept = {
        name: [[asdict(load), asdict(times)] for load, times in rows.items()]
        for name, rows in results.items()
    }
    path.write_text(json.dumps(kept))


def to_markdown(results: Results, layers: Sequence[int]) -> str:
    """Returns two tables: ours against each stock way, and the parts of our steps."""
    lines = [
        "| layers off the GPU | requests | ours | UVA | prefetch | UVA / ours | prefetch / ours |",
        "|---|---|---|---|---|---|---|",
    ]
    parts = [
        "| layers off | N | rank | compute | device | wait for peers | transfer | idle | explained | alone |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for off in layers:
        for load, ours in results.get(f"ours/{off}", {}).items():
            peers = [results.get(f"{peer}/{off}", {}).get(load) for peer in PEERS]
            cells = [str(off), str(load.requests), f"{ours.step_s * 1e3:.1f}"]
            cells += ["not run" if peer is None else f"{peer.step_s * 1e3:.1f}" for peer in peers]
            cells += ["-" if peer is None else f"{peer.step_s / ours.step_s:.2f}" for peer in peers]
            lines.append(row(cells))
            alone = results.get(f"alone/{off}", {}).get(load)
            parts += [row(cells) for cells in rank_rows(off, load, ours, alone)]
    return "\n".join([*lines, "", *parts])


def rank_rows(off: int, load: Load, ours: Times, alone: Times | None) -> list[list[str]]:
    """Returns the cells of each rank, with times in milliseconds."""
    rows = []
    for rank, part in enumerate(ours.ranks):
        times = [f"{part[key] * 1e3:.2f}" for key in ("compute", "device", "wait", "transfer", "idle")]
        device = f"{alone.ranks[0]['device'] * 1e3:.2f}" if rank and alone else ""
        who = f"{rank} ({'GPU' if rank else 'CPU'})"
        rows.append([str(off), str(load.requests), who, *times, f"{part['explained']:.1%}", device])
    return rows


def row(cells: Sequence[str]) -> str:
    """Returns a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"
