"""The three dashboards."""

from typing import Final

from charts.dashboards.fleet import FLEET
from charts.dashboards.group import GROUP
from charts.dashboards.rank import RANK

BOARDS: Final = (FLEET, GROUP, RANK)
