"""The operator accepts only numbers as questions of fetch pods."""

import pytest
from aiohttp import web

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_fetch import QUESTION_HEADER, FetchProgress
from heteroinfer_operator.report_client import ReportClient


@pytest.mark.parametrize(
    ("question", "accepted"),
    [("0", True), ("7", True), ("", False), ("-1", False), ("0af3", False), ("1 2", False), ("1" * 5, False)],
)
async def test_the_question_of_a_fetch_pod_must_be_a_short_number(question: str, accepted: bool) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=FetchProgress().to_json(), headers={QUESTION_HEADER: question})

    app = web.Application()
    app.router.add_get(names.PATH_FETCH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = ReportClient()
    try:
        port = runner.addresses[0][1]
        if accepted:
            assert (await client.read_fetch("127.0.0.1", port, timeout_s=5.0))[1] == int(question)
        else:
            with pytest.raises(ContractError, match="must be a number of up to 4 digits"):
                await client.read_fetch("127.0.0.1", port, timeout_s=5.0)
    finally:
        await client.close()
        await runner.cleanup()
