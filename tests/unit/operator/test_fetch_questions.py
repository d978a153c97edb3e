"""The operator accepts only questions of fetch pods that it can return in a header."""

import pytest
from aiohttp import web

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_fetch import QUESTION_HEADER, FetchProgress
from heteroinfer_operator.report_client import ReportClient


@pytest.mark.parametrize(
    ("question", "accepted"), [("", True), ("0af3", True), ("a b", False), ("a" * 65, False)]
)
async def test_questions_must_be_short_and_of_letters_and_digits(question: str, accepted: bool) -> None:
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
            assert (await client.read_fetch("127.0.0.1", port, timeout_s=5.0))[1] == question
        else:
            with pytest.raises(ContractError, match="must be up to 64 letters and digits"):
                await client.read_fetch("127.0.0.1", port, timeout_s=5.0)
    finally:
        await client.close()
        await runner.cleanup()
