"""`heteroinfer-worker fetch`: the only process of a fetch pod; serves its progress over HTTP."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final, NoReturn

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.model_fetch import HUB_SCHEME, QUESTION_HEADER, CacheCleanup
from heteroinfer_contract.printable import printable
from heteroinfer_contract.report_access import read_proof
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.hub import HubModel
from vllm_heteroinfer.fetch.job import FetchJob, FetchOptions
from vllm_heteroinfer.pod import termination_message
from vllm_heteroinfer.pod.health_server import HealthAnswer, HealthRequest, HealthServer
from vllm_heteroinfer.pod.threads import call_aside
from vllm_heteroinfer.pod.turn_clock import TurnClock

logger = logging.getLogger(__name__)

LOG_INTERVAL_S = 10.0
WATCH_INTERVAL_S = 1.0
_UMASK: Final = 0o002
"""Other pods, which may run as another user, read the files. Later fetches may also run as another user of
the volume's group: they write to the folders, take the lock and touch the marker."""


class FetchLogFormatter(logging.Formatter):
    """Escapes control characters, because hubs and index files can put any text into a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Formats the line of one record. A message cannot add a line, because line breaks are escaped."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record. Keeps the line breaks and tabs of its traceback."""
        return printable(super().format(record), keep="\n\t")


def fetch_model(options: FetchOptions) -> int:
    """Fetches the model into the cache. Returns the exit code, or ends this process after a failure.

    Writes a FetchedModel or a Failure as the termination message.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(FetchLogFormatter("[fetch] %(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for library in ("httpx", "httpx2"):  # they log URLs, with signatures in them
        logging.getLogger(library).setLevel(logging.WARNING)
    os.umask(_UMASK)
    clock = TurnClock(WATCH_INTERVAL_S, time.monotonic())
    try:
        hub = HubModel(options.repository, options.revision)
        job = FetchJob(hub, options, now_s=lambda: clock.awake_s(time.monotonic()))
        text, code = asyncio.run(_run(job, options, clock)), names.EXIT_OK
    except Exception as error:  # the boundary of this process: the message must report every failure
        text, code = _build_failure(options, error).to_json(), names.EXIT_FETCH_FAILED
    _write_result(options, text)
    if code != names.EXIT_OK:
        os._exit(code)  # a download that hangs would delay the exit; the cache keeps unfinished downloads
    return code


def read_cleanup(env: Mapping[str, str]) -> CacheCleanup | None:
    """Reads the rule by which this fetch removes commits from the cache; None to remove no commit.

    If another version of the operator wrote the rule, this version may not understand it, and removes no
    commit.
    """
    text = env.get(names.ENV_CACHE_CLEANUP, "")
    try:
        return CacheCleanup.from_json(text) if text else None
    except ContractError as error:
        logger.warning("%s: %s. No commit is removed", names.ENV_CACHE_CLEANUP, error)
        return None


def report_failure(options: FetchOptions, error: ContractError) -> int:
    """Writes the error as the termination message. Returns the exit code."""
    _write_result(options, _build_failure(options, error).to_json())
    return names.EXIT_FETCH_FAILED


def _build_failure(options: FetchOptions, error: Exception) -> Failure:
    """Logs the error and converts it to a Failure."""
    reason = error.reason if isinstance(error, FetchError) else FailureReason.MODEL_NOT_READABLE
    has_fix = isinstance(error, ContractError)
    model = f"{HUB_SCHEME}{options.repository}"
    message = str(error) if has_fix else f"{model} cannot be fetched: {error!r}. Read the log of this pod"
    logger.error("%s: %s", reason, message, exc_info=None if has_fix else error)
    return Failure(reason=reason, message=message, exit_code=names.EXIT_FETCH_FAILED, time=time.time())


def _write_result(options: FetchOptions, text: str) -> None:
    """Writes the result as the termination message and to the standard output."""
    if options.termination_message_path is not None:
        termination_message.write(options.termination_message_path, text)
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def _run(job: FetchJob, options: FetchOptions, clock: TurnClock) -> str:
    """Fetches the model while it serves and logs the progress. Returns the result as JSON.

    Raises:
        FetchError: the model cannot be fetched, or the hub stalls.
    """
    # The kernel does not end PID 1 at a SIGTERM without a handler. The process can end immediately, because
    # the cache keeps unfinished downloads.
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: os._exit(names.exit_code_of_signal(signal.SIGTERM))
    )
    server = HealthServer(lambda request: _answer_request(job, request))
    await server.start(options.health_host, options.health_port)
    try:
        async with asyncio.TaskGroup() as group:  # the first of the three that raises ends the others
            watchers = [group.create_task(_log_progress(job)), group.create_task(_watch(job, clock))]
            model = await call_aside("fetch", job.run)
            for task in watchers:
                task.cancel()
    except ExceptionGroup as errors:  # raise the first error itself, with its own cause
        raise errors.exceptions[0] from errors.exceptions[0].__cause__
    finally:
        server.close()
    return model.to_json()


async def _watch(job: FetchJob, clock: TurnClock) -> NoReturn:
    """Raises FetchError if the hub stalls.

    The clock leaves out the time in which this process did not run.
    """
    while True:
        clock.turn(time.monotonic())
        stall = job.find_stall()
        if stall is not None:
            raise stall
        await asyncio.sleep(WATCH_INTERVAL_S)


def _answer_request(job: FetchJob, request: HealthRequest) -> HealthAnswer:
    """Answers a request to the health port.

    A fetch asks the operator through this port whether it may remove old commits: the answer for PATH_FETCH
    has the number of this question (QUESTION_HEADER). The operator confirms the question with a token in its
    next request.
    """
    if request.path == names.PATH_HEALTHZ:
        return HealthAnswer(status=HTTPStatus.OK, body="ok")
    if request.path == names.PATH_FETCH:
        token = read_proof(request.credentials)
        if token:
            job.cleanup_question.confirm(token)
        number = job.cleanup_question.number
        return HealthAnswer(
            status=HTTPStatus.OK,
            body=job.progress().to_json(),
            content_type="application/json",
            headers={} if number is None else {QUESTION_HEADER: str(number)},
        )
    return HealthAnswer(
        status=HTTPStatus.NOT_FOUND,
        body=f"unknown path {request.path}. Use {names.PATH_HEALTHZ} or {names.PATH_FETCH}",
    )


async def _log_progress(job: FetchJob) -> NoReturn:
    """Logs the progress every LOG_INTERVAL_S seconds if it changed."""
    reported = ""
    while True:
        progress = job.progress()
        line = f"{progress.done_bytes} of {progress.total_bytes} bytes" + (
            f": {progress.message}" if progress.message else ""
        )
        if line != reported:
            logger.info("%s", line)
            reported = line
        await asyncio.sleep(LOG_INTERVAL_S)
