"""Reads a rank's metrics."""

import re
from dataclasses import dataclass

from tests.integration.worker.groups import Group, fetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What one rank exports now, in Prometheus' text format."""

    text: str

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of a metric's samples that have these labels; 0 without any."""
        return sum(value for _, value in self.samples(name, **labels))

    def samples(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """Returns a metric's samples that have these labels."""
        found = []
        for line in self.text.splitlines():
            match = re.fullmatch(rf"{name}\{{(.*)\}} (\S+)", line)
            if match:
                own: dict[str, str] = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
                if labels.items() <= own.items():
                    found.append((own, float(match[2])))
        return found


def scrape(group: Group, rank: int) -> Scrape:
    """Returns what a rank exports; raises AssertionError when it exports nothing."""
    text = fetch(group.metrics_url(rank) + "/metrics")
    assert text is not None, f"rank {rank} serves no metrics:\n{group.logs()}"
    return Scrape(text=text)
