"""The three dashboards."""

from typing import Final

from tests.watching.boards.fleet import FLEET
from tests.watching.boards.group import GROUP
from tests.watching.boards.rank import RANK

BOARDS: Final = (FLEET, GROUP, RANK)
