"""The three dashboards."""

from typing import Final

from charts.dashboards.fleet_board import FLEET
from charts.dashboards.group_board import GROUP
from charts.dashboards.rank_board import RANK

BOARDS: Final = (FLEET, GROUP, RANK)
