"""Entry point of the leader's OpenAI server: `python -m vllm_heteroinfer.engine.api_server`.

vLLM's own command needs a distribution named `vllm`, but the CPU build has another name
(vllm/entrypoints/cli/main.py@v0.32.0). So this module builds the server from vLLM's parts.
The engine is a child process of this process; if the engine dies, this process exits immediately.
"""

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from heteroinfer_contract import names
from heteroinfer_contract.background import start_task
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.engine.draining import DRAIN
from vllm_heteroinfer.engine.first_tokens import generate_first_tokens
from vllm_heteroinfer.group.engine_calls import check_sleep_level
from vllm_heteroinfer.pod.channel import RankReporter

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

_logger = logging.getLogger(__name__)

_WATCH_INTERVAL_S = 0.1
"""Time between two checks of the engine and of the supervisor's request to drain."""
_CALL_INTERVAL_S = 0.2
"""Time between an answer of the engine and the next call. A call without an answer for 1.5 s makes the group
unready. So a group is unready within 2 s of the last answer of its engine."""
_EXIT_CODE_WAIT_S = 0.5
"""Longest wait for the exit of an engine that has reported its end."""
_EXIT_CODE_POLL_S = 0.01
_SHUTDOWN_S = 1.0
"""Longest wait for requests that still run when the server ends. Drained requests have ended before."""
_EXTRA_TIMEOUT_S = 5.0
"""Extra time of the engine for a step. The supervisors end the group earlier, and name the stuck rank."""


def main() -> NoReturn:
    """Serves the OpenAI API until SIGTERM or SIGINT; exits with an error if engine or server fail."""
    plan, launch = Plan.from_env(os.environ), PodLaunch.from_env(os.environ)
    reporter = RankReporter.from_env(os.environ)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    step_timeout_s = float(os.environ.get(names.ENV_STEP_TIMEOUT, names.DEFAULT_STEP_TIMEOUT_S))
    os.environ.setdefault("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", str(int(step_timeout_s + _EXTRA_TIMEOUT_S)))
    try:
        import uvloop

        uvloop.run(serve(parse(plan, launch), reporter))
    except KeyboardInterrupt:
        sys.exit(names.EXIT_OK)
    except BaseException as error:
        fail(error, reporter)
    sys.exit(names.EXIT_OK)


def fail(error: BaseException, reporter: RankReporter) -> NoReturn:
    """Reports the error to the supervisor and ends this process."""
    traceback.print_exception(error)
    is_bad_setting = isinstance(error, ContractError)
    reason = FailureReason.BAD_SETTINGS if is_bad_setting else FailureReason.API_SERVER_EXITED
    text = " ".join(str(error).split()) or type(error).__name__
    reporter.send_failure(Failure(reason=reason, message=f"vLLM's API server: {text}", time=time.time()))
    sys.stderr.flush()
    os._exit(names.EXIT_RANK_FAILED)


def parse(plan: Plan, launch: PodLaunch) -> argparse.Namespace:
    """Returns rank 0's arguments, which server and engine share, and adds the middleware for a drain."""
    from vllm_heteroinfer.engine import arguments

    args = arguments.parse(plan, launch, plan.ranks[0])
    # The last middleware is the outermost: it also sees the requests that the user's middleware answers.
    args.middleware = [*args.middleware, "vllm_heteroinfer.engine.draining.DrainMiddleware"]
    return args


async def serve(args: argparse.Namespace, reporter: RankReporter) -> None:
    """Serves the OpenAI API until SIGTERM or SIGINT; drains first if the supervisor asks for it.

    The server accepts clients only after every rank has computed the group's own first request.

    Source: vllm/entrypoints/launchers/api_server/entry.py::run_server@v0.32.0.

    Raises:
        RuntimeError: the engine did not start, or did not answer the group's own request.
    """
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import setup_server

    def interrupt(*_: object) -> None:
        """Ends the server as SIGINT does."""
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    listen_address, listener = setup_server(args, reuse_port=False)
    async with entry.build_async_engine_client(args) as client:
        refuse_unsupported_levels(client)
        engine, shutdown_ordered = find_engine(), record_shutdown(client)
        watchers = [
            start_task(work, name="watcher", failed=lambda error: fail(error, reporter))
            for work in (
                _watch_engine(client, reporter, engine, shutdown_ordered),
                _call_engine_regularly(client, reporter),
            )
        ]
        try:
            await generate_first_tokens(client)
            reporter.set_phase(RankPhase.READY)
            server_end = await entry.build_and_serve(client, listen_address, listener, args)
        finally:
            if client.errored and not shutdown_ordered.is_set():  # the watcher has not noticed the error yet
                await _end_with_engine(engine, reporter)
        for watcher in watchers:
            watcher.cancel()
    # A request may never end once the engine is gone, and the server waits for all requests.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server_end, _SHUTDOWN_S)
    listener.close()


def refuse_unsupported_levels(client: "EngineClient") -> None:
    """Makes the client refuse unsupported sleep levels before it aborts requests.

    Replaces the client's `sleep` on the instance. The request gets a 400 with the error's message.
    Source: vllm/entrypoints/serve/dev/sleep/api_router.py::sleep@v0.32.0.
    """
    original_sleep = client.sleep

    async def sleep(level: int = 1, mode: str = "abort") -> None:
        check_sleep_level(level)
        await original_sleep(level, mode)

    client.sleep = sleep


def find_engine() -> BaseProcess | None:
    """Returns the engine's process, a child of this process; None if there is none.

    Source: vllm/v1/engine/utils.py::CoreEngineProcManager@v0.32.0, which sets the name of the process.
    """
    children = multiprocessing.active_children()
    return next((child for child in children if child.name.startswith("EngineCore")), None)


async def _end_with_engine(engine: BaseProcess | None, reporter: RankReporter) -> NoReturn:
    """Reports the engine's exit code and ends this process, which is useless without the engine."""
    deadline_s = time.monotonic() + _EXIT_CODE_WAIT_S
    while engine is not None and engine.exitcode is None and time.monotonic() < deadline_s:
        await asyncio.sleep(_EXIT_CODE_POLL_S)
    code = None if engine is None else engine.exitcode
    _logger.error("the engine has died (exit code %s), so vLLM's API server ends. See the error above", code)
    reporter.report_engine_end(code)
    os._exit(names.EXIT_RANK_FAILED)


def record_shutdown(client: "EngineClient") -> threading.Event:
    """Returns an event that is set when this process itself ends the engine, for example after SIGTERM.

    Replaces the client's `shutdown` on the instance. The server calls it, maybe on another thread, and also
    after it has noticed that the engine died.
    Source: vllm/entrypoints/launchers/launcher.py::serve_http@v0.32.0.
    """
    original_shutdown, shutdown_ordered = client.shutdown, threading.Event()

    def shutdown(*args: Any, **kwargs: Any) -> None:
        if not client.errored:
            shutdown_ordered.set()
        original_shutdown(*args, **kwargs)

    client.shutdown = shutdown
    return shutdown_ordered


async def _watch_engine(
    client: "EngineClient",
    reporter: RankReporter,
    engine: BaseProcess | None,
    shutdown_ordered: threading.Event,
) -> None:
    """Drains if the supervisor asks for it; ends this process if the engine dies.

    Also reports the end of the drain. Only returns if this process itself has ended the engine.
    """
    while not client.errored:
        if reporter.asked_to_drain():
            DRAIN.begin()
            DRAIN.refuse_late_bodies()
        if DRAIN.is_done():
            reporter.report_drained()
        await asyncio.sleep(_WATCH_INTERVAL_S)
    if not shutdown_ordered.is_set():
        await _end_with_engine(engine, reporter)


async def _call_engine_regularly(client: "EngineClient", reporter: RankReporter) -> None:
    """Calls the engine regularly, so that the supervisor notices if the engine does not answer.

    The engine answers between two steps without calling a rank, even while it sleeps
    (vllm/v1/engine/core.py::EngineCoreProc._process_input_queue@v0.32.0).
    """
    question = 0
    while not client.errored:
        question += 1
        reporter.set_work(f"question {question} to the engine")
        try:
            await client.is_sleeping()
        except Exception as error:
            # vLLM has no narrower exception for a failed call. An error also proves that the engine answers.
            _logger.debug("the engine answered with an error: %r", error)
        reporter.set_work(None)
        await asyncio.sleep(_CALL_INTERVAL_S)


if __name__ == "__main__":
    main()
