"""Reads a rank's metrics."""

import re
from dataclasses import dataclass

from tests.integration.worker.groups import Group, fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The present metrics of one rank, in Prometheus' text format."""

    text: str

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples with these labels, or 0 without samples."""
        return sum(value for _, value in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Returns a metric's samples with these labels."""
        found = []
        for line in self.text.splitlines():
            match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if match:
                own: dict[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
                if labels.items() <= own.items():
                    found.append((own, float(match[2])))
        return found


def scrape(group: Group, rank: int) -> Scrape:
    """Returns a rank's metrics. Raises AssertionError without an answer."""
    text = fetch(group.metrics_url(rank) + "/metrics")
    assert text is not None, f"rank {rank} serves no metrics:\n{group.logs()}"
    return Scrape(text=text)
