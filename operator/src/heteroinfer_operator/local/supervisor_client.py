"""What pods answer on their health ports: readiness, the leader's view of its group, a fetch's progress."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import aiohttp

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_contract.report_access import ReportReader
from heteroinfer_operator.local.loopback_addressing import LOOPBACK
from heteroinfer_operator.local.stored_pod import StoredPod

logger = logging.getLogger(__name__)

T = TypeVar("T")

PERIOD_S: Final = 0.25
TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorAnswer:
    """What a supervisor says now.

    Attributes:
        ready: whether its readiness probe succeeds.
        group: the leader's group, or None from a follower, or while it does not answer.
        fetch: the progress of a fetch, or None from any other pod.
    """

    ready: bool = False
    group: GroupReport | None = None
    fetch: FetchProgress | None = None


class SupervisorClient:
    """Asks the supervisors of running pods; nothing answers until a supervisor listens."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def watch(self, pod: StoredPod) -> AsyncIterator[SupervisorAnswer]:
        """Yields what a pod answers, every PERIOD_S until it ends; nothing if it has no probe."""
        process = pod.running.pod
        reader, anybody = ReportReader(pod.key), ReportReader(None)
        while process.health_port is not None and pod.termination is None:
            base = f"http://{LOOPBACK}:{process.health_port}"
            ready = await self._get(base + process.readiness_path, anybody) is not None
            group = (
                await self._ask(base + names.PATH_GROUP, GroupReport.from_json, reader) if pod.leads else None
            )
            fetch = (
                await self._ask(base + names.PATH_FETCH, FetchProgress.from_json, anybody)
                if pod.fetches
                else None
            )
            # The pod may have ended while it was asked.
            if pod.termination is None:
                yield SupervisorAnswer(ready=ready, group=group, fetch=fetch)
            await asyncio.sleep(PERIOD_S)

    async def _ask(self, url: str, parse: Callable[[str], T], reader: ReportReader) -> T | None:
        try:
            text = await self._get(url, reader) or await self._get(url, reader)  # the second with the key
            return None if text is None else parse(text)
        except ContractError as error:
            logger.debug("%s: %s", url, error)
            return None

    async def _get(self, url: str, reader: ReportReader) -> str | None:
        """Returns the body of a 200, or None: not listening yet, busy, not ready, or to be asked again.

        Raises:
            ContractError: who answers does not have the group's key.
        """
        if self._session is None:
            # Loopback is reached directly, whatever proxy the environment names.
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=TIMEOUT_S), trust_env=False
            )
        try:
            async with self._session.get(url, headers=reader.headers(), allow_redirects=False) as response:
                if response.status != 200:
                    return None
                return reader.read(response.headers, await response.text())
        except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
            logger.debug("%s: %r", url, error)
            return None
