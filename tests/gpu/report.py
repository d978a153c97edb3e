"""Collects the results of each topology, and prints them as a table for docs/user/benchmarks.md."""

import datetime
from dataclasses import dataclass, field

from tests.gpu.machine import describe_cpus, describe_gpus
from tests.gpu.topologies import Topology


@dataclass(slots=True, kw_only=True)
class Row:
    """Results of one topology; None if there is no such result.

    Attributes:
        ready_s: seconds from its start until it would answer a request.
        equal_tokens: number of greedy tokens that equal both references.
        all_tokens: number of compared tokens.
        largest_gap: largest difference of a greedy token's logprob from stock vLLM's.
        within_bar: share of positions whose best token's logprob is within the limit for bf16.
        ended_s: seconds from the death of a rank until the group was not ready.
        failures: names of tests that failed.
    """

    topology: Topology
    ready_s: float | None = None
    equal_tokens: int | None = None
    all_tokens: int | None = None
    largest_gap: float | None = None
    within_bar: float | None = None
    ended_s: float | None = None
    failures: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        """Returns the row of the table."""
        topology = self.topology
        graphs = "graphs" if topology.graphs else "eager"
        tokens = "-" if self.all_tokens is None else f"{self.equal_tokens} of {self.all_tokens}"
        cells = [
            topology.name,
            topology.mode.value,
            graphs,
            topology.dtype,
            str(topology.gpus),
            _text(self.ready_s, ".1f"),
            tokens,
            _text(self.largest_gap, ".1e"),
            _text(self.within_bar, ".1%"),
            _text(self.ended_s, ".2f"),
            "failed: " + ", ".join(self.failures) if self.failures else "passed",
        ]
        return "| " + " | ".join(cells) + " |"


@dataclass(slots=True, kw_only=True)
class Report:
    """The rows of a session.

    Attributes:
        as_cpu: whether CPU ranks replaced GPU ranks.
        rows: rows by name of topology, in the order of their tests.
    """

    as_cpu: bool
    rows: dict[str, Row] = field(default_factory=dict)

    def row(self, topology: Topology) -> Row:
        """Returns the row of a topology. Adds it if needed."""
        return self.rows.setdefault(topology.name, Row(topology=topology))

    def to_markdown(self) -> str:
        """Returns the table with its caption."""
        devices = "a dry run: CPU ranks in place of GPU ranks" if self.as_cpu else describe_gpus()
        date = datetime.datetime.now(tz=datetime.UTC).date()
        head = (
            "| topology | mode | GPU ranks | dtype | GPUs | Ready, s | greedy tokens equal | "
            "largest logprob gap | bf16: best token's logprob within 0.05 | death seen after, s | result |"
        )
        lines = [
            f"{devices}; {describe_cpus()}; {date}. Command: `make test-gpu`.",
            "",
            head,
            "|---" * (head.count("|") - 1) + "|",
            *(row.to_markdown() for row in self.rows.values()),
            "",
        ]
        return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
