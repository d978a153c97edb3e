"""How status and top describe a leader that the API server cannot reach."""

from typing import cast

import pytest

from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.fleet.fleet_reader import LeaderReader, StoredResource
from heteroinfer_operator.kube.server import ApiError, ApiServer

MEMBER = {"rank": 0, "role": "cpu", "pod": "llama-0-3-0", "ready": False}
STORED = StoredResource(
    key=ResourceKey(namespace="ml", name="llama"),
    api_port=8000,
    status=parse_status({"groups": [{"index": 0, "epoch": 3, "phase": "Starting", "members": [MEMBER]}]}),
    manifest={},
)


class RefusingServer:
    """Refuses each request with the given error."""

    def __init__(self, error: ApiError) -> None:
        self.error = error

    async def get_text(self, path: str) -> str:
        raise self.error


@pytest.mark.parametrize(
    ("message", "status", "problem"),
    [
        ("GET /proxy/group: 400 address not allowed", 400, "pod llama-0-3-0 has no address yet"),
        ("GET /proxy/group: 400 bad", 400, "GET /proxy/group: 400 bad"),
        ("GET /proxy/group: 403 no", 403, "GET /proxy/group: 403 no. Ask for the right to get pods/proxy"),
    ],
)
async def test_describes_why_a_leader_gives_no_report(message: str, status: int, problem: str) -> None:
    leaders = LeaderReader(cast("ApiServer", RefusingServer(ApiError(message, status=status))))
    answers = await leaders.read([STORED])
    assert answers[STORED.key][0].report is None
    assert leaders.problem == problem
