"""`heteroinfer logs` without failures in the status."""

import asyncio
from unittest.mock import Mock

import pytest

from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.commands import logs_command


def test_previous_without_failures_names_the_events(capsys: pytest.CaptureFixture[str]) -> None:
    """A new revision clears the failures, so the group may have failed before."""
    asyncio.run(logs_command._print_previous(Mock(), "team", GroupStatus(index=0), (), 50))
    [_, line] = capsys.readouterr().out.splitlines()
    assert "A new revision (a change of the spec, or heteroinfer restart) clears earlier failures" in line
    assert line.endswith("kubectl get events -n team")
