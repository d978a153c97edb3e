"""Judges the results of a soak, and prints their table."""

from tests.soak.chaos import REAL_RANK_KILLED
from tests.soak.observing import GROWTH_MIB, growth_mib
from tests.soak.soak import Result

MIN_SAMPLES = 16
"""A smaller growth is noise."""


def find_faults(result: Result, *, has_real_ranks: bool) -> list[str]:
    """Returns the faults in a result, or nothing."""
    found = [f"not Ready at the end: {words}" for words in result.not_ready]
    found += [f"two epochs at the same time: {words}" for words in result.mixed]
    if result.after != result.before:
        found.append(f"objects: got {dict(result.after)}, expected {dict(result.before)} as at the begin")
    if result.left:
        found.append(f"left after their resources: {dict(result.left)}")
    found += [f"the operator's log: {line}" for line in result.errors]
    if has_real_ranks and not result.done[REAL_RANK_KILLED]:
        found.append("no real rank was killed, expected some: none was found on the node")
    if len(result.samples) < MIN_SAMPLES:
        found.append(f"got {len(result.samples)} samples, expected at least {MIN_SAMPLES}: make it longer")
    elif (growth := growth_mib(result.samples)) > GROWTH_MIB:
        found.append(f"the operator's memory grew by {growth:.1f} MiB, expected at most {GROWTH_MIB:g}")
    return found


def build_table(result: Result) -> str:
    """Returns a Markdown table for people."""
    quarter = max(len(result.samples) // 4, 1)
    rss = [sample.rss_mib for sample in result.samples]
    files = [sample.files for sample in result.samples]
    settled = "never" if result.settled_s is None else f"after {result.settled_s:.0f} s"
    rows = {
        "length": f"{result.seconds / 60:.0f} min",
        "resources": f"{result.resources}",
        **{what: f"{count}" for what, count in sorted(result.done.items())},
        "epochs seen, every 5 s": f"{len(result.epochs)}",
        "groups seen with two epochs at the same time": f"{len(result.mixed)}",
        "all Ready again": settled,
        "objects, first all Ready": _counts(result.before),
        "objects, at the end": _counts(result.after),
        "objects left after deleting the resources": f"{result.left.total()}",
        "operator's memory: start, after a quarter, end, most": " / ".join(
            f"{value:.1f} MiB" for value in (rss[0], rss[quarter], rss[-1], max(rss))
        ),
        "growth from the second quarter to the last": f"{growth_mib(result.samples):+.1f} MiB",
        "operator's open files: after a quarter, end, most": f"{files[quarter]} / {files[-1]} / {max(files)}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _counts(objects: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(objects.items()))
