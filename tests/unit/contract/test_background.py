"""Background tasks report the exception that ends them."""

import asyncio

from heteroinfer_contract.background import start_task


async def _raise() -> None:
    await asyncio.sleep(0)
    raise OSError("disk is gone")


async def test_reports_the_exception_that_ended_the_task() -> None:
    seen: list[BaseException] = []
    start_task(_raise(), name="reader", failed=seen.append)
    for _ in range(5):
        await asyncio.sleep(0)
    assert [str(error) for error in seen] == ["disk is gone"]


async def test_does_not_report_cancellation_or_success() -> None:
    seen: list[BaseException] = []
    cancelled = start_task(asyncio.sleep(60), name="sleeper", failed=seen.append)
    done = start_task(asyncio.sleep(0, "result"), name="quick", failed=seen.append)
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await done == "result"
    await asyncio.sleep(0)
    assert seen == []
