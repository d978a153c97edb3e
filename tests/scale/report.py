"""Defines the figures of a run, their limits, and the page that shows them."""

import datetime
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.control_plane import GO_ENVIRONMENT
from tests.scale.fleet import NAMESPACES

CREATED_LIMIT_S = 270.0
CREATED_AIM_S = 135.0
RSS_LIMIT_BYTES = 300e6
RESTART_LIMIT_S = 60.0
LIMITS_ARE_FOR = 1000
"""Number of resources."""
_PAGE = """# The operator at scale

This page shows how much time, memory and how many writes one operator needs for many resources.

There are {resources} resources in {namespaces} namespaces on {nodes} nodes of 8 GPUs. Each resource
has one group of four pods (one GPU pod and three CPU pods). etcd, API server, controllers and
scheduler are the real programs, and share the machine with the operator. They run with GOGC={gogc},
with which they use more memory and less CPU time. kwok simulates the kubelets: it reports that pods
run, and reports the model for inspect pods. The operator is one process with the rights and defaults
of the chart. The operator's own metric counts the writes. Objects are compared by uid and
resourceVersion.

Measured on {date} by `{command}` on {machine}. The average load of
the 15 minutes before was {load:.1f}.

{table}

The pods of kwok have no processes, so these figures do not include the reports of leaders (`/group`).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limited:
    """A figure with a limit."""

    what: str
    got: str
    limit: str
    met: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run.

    Attributes:
        resources: number of HeteroInferences.
        pods: number of their pods.
        nodes: number of kwok nodes.
        created_s: seconds from the first resource's creation until the last pod was created.
        ready_s: seconds until the last group served.
        writes: writes of the operator until then, by verb and kind as in its metric.
        reconciles: reconciles of the operator until then.
        create_cpu_s: the operator's CPU time until then.
        idle_s: length of the idle phase.
        idle_writes: writes of the operator in the idle phase.
        idle_touched: objects that were created, deleted or changed in the idle phase.
        idle_cpu_s: CPU time of the operator in the idle phase.
        rss_bytes: resident memory after the idle phase.
        peak_bytes: peak of the resident memory.
        restart_s: seconds from the start of a new process to the end of its first resync.
        restart_writes: its writes until there were no more.
        restart_touched: pods that were created, deleted or changed since before the old process ended.
    """

    resources: int
    pods: int
    nodes: int
    created_s: float
    ready_s: float
    writes: Mapping[str, float]
    reconciles: float
    create_cpu_s: float
    idle_s: float
    idle_writes: int
    idle_touched: int
    idle_cpu_s: float
    rss_bytes: int
    peak_bytes: int
    restart_s: float
    restart_writes: int
    restart_touched: int

    @property
    def limited(self) -> tuple[Limited, ...]:
        """Returns the figures that have a limit."""
        return (
            Limited(
                what=f"all {self.pods} pods created",
                got=f"{self.created_s:.0f} s",
                limit=f"{CREATED_LIMIT_S:.0f} s (aim {CREATED_AIM_S:.0f} s)",
                met=self.created_s <= CREATED_LIMIT_S,
            ),
            Limited(
                what="operator, peak resident memory",
                got=f"{self.peak_bytes / 1e6:.0f} MB",
                limit=f"{RSS_LIMIT_BYTES / 1e6:.0f} MB",
                met=self.peak_bytes <= RSS_LIMIT_BYTES,
            ),
            Limited(
                what=f"writes during {self.idle_s:g} s without changes",
                got=f"{self.idle_writes}; {self.idle_touched} objects changed",
                limit="0",
                met=self.idle_writes == self.idle_touched == 0,
            ),
            Limited(
                what="operator killed and started again: time to its first resync",
                got=f"{self.restart_s:.1f} s",
                limit=f"{RESTART_LIMIT_S:.0f} s",
                met=self.restart_s <= RESTART_LIMIT_S,
            ),
            Limited(
                what="writes, and changed pods, after that",
                got=f"{self.restart_writes}; {self.restart_touched}",
                limit="0; 0",
                met=self.restart_writes == self.restart_touched == 0,
            ),
        )


def build_table(figures: Figures) -> list[str]:
    """Returns the lines of a Markdown table."""
    whole = figures.resources >= LIMITS_ARE_FOR
    rows = [
        (f.what, f.got, f.limit, ("yes" if f.met else "**no**") if whole else "") for f in figures.limited
    ]
    writes = sum(figures.writes.values())
    rows += [
        ("time until all groups serve", f"{figures.ready_s:.0f} s", "", ""),
        ("writes until then", f"{writes:.0f}, {writes / figures.resources:.1f} per resource", "", ""),
        (
            "reconciles until then",
            f"{figures.reconciles:.0f}, {figures.reconciles / figures.resources:.1f} per resource",
            "",
            "",
        ),
        ("operator, CPU time until then", f"{figures.create_cpu_s:.0f} s", "", ""),
        (
            f"operator, CPU time in {figures.idle_s:g} s without changes",
            f"{figures.idle_cpu_s:.1f} s",
            "",
            "",
        ),
        ("operator, resident memory after that", f"{figures.rss_bytes / 1e6:.0f} MB", "", ""),
    ]
    head = ("", "measured", f"limit of {LIMITS_ARE_FOR} resources", "met" if whole else "")
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * 4, *rows)]


def build_page(figures: Figures, command: str, date: datetime.date, load: float) -> str:
    """Returns the whole page: the figures, the command, the date, and the load of the machine."""
    return _PAGE.format(
        resources=figures.resources,
        nodes=figures.nodes,
        namespaces=len(NAMESPACES),
        gogc=GO_ENVIRONMENT["GOGC"],
        date=date.isoformat(),
        machine=describe_machine(),
        command=command,
        load=load,
        table="\n".join(build_table(figures)),
    )


def describe_machine() -> str:
    """Describes processor, cores and memory of this machine."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    model = found[1] if found else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{os.cpu_count()} cores of {model}, {memory / 2**30:.0f} GiB"
