"""Leader election. If several operators run, only the holder of the Lease works.

Safety depends on durations, not on synchronized clocks, as in `k8s.io/client-go/tools/leaderelection`. A
holder stops `deadline_s` after it sent its last renewal. Another process takes the Lease only after it has
itself seen the Lease unchanged for `duration_s`, which is longer. Each write calls `require_held` first. So a
process that was paused sends nothing after it wakes, even if the renewing task has not run yet.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.paths import LEASE
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Longest pause after a failed renewal."""
_NOT_SCHEDULED: Final = "this process was not scheduled"


def seconds_since_boot() -> float:
    """Returns monotonic seconds that also count while the machine sleeps, unlike `time.monotonic`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseLostError(Exception):
    """The Lease was not renewed in time, or another process holds it. This process must stop."""


class LeaseNotHeldError(HeteroInferError):
    """A write was not sent because another process may hold the Lease."""

    reason = "LeaseNotHeld"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The Lease, its holder's identity and its times.

    Attributes:
        duration_s: another process may take the Lease if it was not renewed for this time.
        renew_s: interval of renewals.
        deadline_s: this process stops if its last renewal is older. Less than duration_s.
    """

    namespace: str
    name: str
    identity: str
    duration_s: int
    renew_s: float
    deadline_s: float


class LeaderLease:
    """A Lease that this process acquires, renews and releases.

    Args:
        server: client of the API server. It must not call `require_held` before its writes, because then the
            Lease could never be acquired.
    """

    def __init__(
        self, server: ApiServer, terms: LeaseTerms, *, clock: Callable[[], float] = seconds_since_boot
    ) -> None:
        self._server = server
        self._terms = terms
        self._clock = clock
        self._held_lease: dict[str, Any] | None = None
        self._renewed_at = 0.0

    async def acquire(self) -> None:
        """Waits until this process holds the Lease, without a time limit. Logs each new holder."""
        last_version, unchanged_since, logged_holder = "", self._clock(), ""
        while True:
            try:
                stored = await self._read()
                version = stored["metadata"]["resourceVersion"] if stored else ""
                if version != last_version:  # the holder has renewed the Lease
                    last_version, unchanged_since = version, self._clock()
                is_free = self._is_free(stored, self._clock() - unchanged_since)
                if is_free and await self._write_holder(stored):
                    return
                # Without a stored Lease there is no holder to log.
                holder = stored["spec"].get("holderIdentity", "") if stored else logged_holder
                if holder != logged_holder:
                    logged_holder = holder
                    logger.info("lease %s: waiting (holder: %s)", self._terms.name, holder or "none")
            except ApiError as error:
                logger.warning("lease %s: %s. Trying again", self._terms.name, error.message)
            await asyncio.sleep(self._terms.renew_s)

    async def keep_renewing(self) -> None:
        """Renews the Lease until cancelled.

        Raises:
            LeaseLostError: the Lease was not renewed in time, or another process holds it.
        """
        pause_s, problem = self._terms.renew_s, _NOT_SCHEDULED
        while True:
            await asyncio.sleep(pause_s)
            left_s = self._seconds_left()
            if left_s <= 0:  # this process was paused for too long to send even a renewal
                raise self._build_late_error(problem)
            pause_s = min(self._terms.renew_s, RETRY_S)  # if this renewal fails
            try:
                # One renewal may hang forever although the API server would answer the next renewal.
                async with asyncio.timeout(min(left_s, self._terms.renew_s)):
                    await self._renew()
                pause_s, problem = self._terms.renew_s, _NOT_SCHEDULED
            except TimeoutError as error:
                problem = "the API server did not answer in time"
                if self._seconds_left() <= 0:
                    raise self._build_late_error(problem) from error
                logger.warning("lease %s not renewed: %s. Trying again", self._terms.name, problem)
            except ApiError as error:
                problem = error.message
                logger.warning("lease %s not renewed: %s. Trying again", self._terms.name, problem)

    def require_held(self) -> None:
        """Raises an error unless this process certainly holds the Lease. Each write calls this method first.

        Raises:
            LeaseNotHeldError: this process does not hold the Lease, or did not renew it in time.
        """
        if self._held_lease is None or self._seconds_left() <= 0:
            raise LeaseNotHeldError(
                f"lease {self._terms.name}: not renewed in {self._terms.deadline_s:g} s, so another process "
                "may hold this Lease. Nothing was written"
            )

    def _seconds_left(self) -> float:
        """Returns the seconds until this process must stop without a renewal."""
        return self._renewed_at + self._terms.deadline_s - self._clock()

    async def _renew(self) -> None:
        """Renews the Lease once; raises LeaseLostError if this process no longer holds it."""
        if await self._write_holder(self._held_lease):
            return
        # The stored Lease has changed. Either another process took the Lease, or the API server stored an
        # earlier renewal of this process, and the answer was lost. Then the next renewal succeeds.
        self._held_lease = await self._read()
        holder = self._held_lease["spec"].get("holderIdentity", "") if self._held_lease else ""
        if holder != self._terms.identity:
            continues = f"; {holder} continues the work" if holder else ""
            raise self._build_lost_error(
                f"{holder or 'no process'} holds this Lease now, so this process exits{continues}"
            )

    def _build_late_error(self, problem: str) -> LeaseLostError:
        """Returns the error for a Lease that was not renewed in time.

        Args:
            problem: reason for the missing renewal.
        """
        return self._build_lost_error(
            f"not renewed in {self._terms.deadline_s:g} s ({problem}), so this process exits. Its container "
            "starts again. If this repeats, check the API server and the load of this node, or raise the CPU "
            "request of the operator"
        )

    def _build_lost_error(self, why: str) -> LeaseLostError:
        """Forgets the Lease, so that this process writes nothing more, and returns the error for its loss."""
        self._held_lease = None
        return LeaseLostError(f"lease {self._terms.name}: {why}")

    async def release(self) -> None:
        """Releases the Lease if this process holds it, so that the next holder does not wait.

        Logs a failure.
        """
        held_lease, self._held_lease = self._held_lease, None
        if held_lease is None:
            return
        # The API server refuses a duration of 0.
        spec = {**held_lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            await self._server.update(self._path, {**held_lease, "spec": spec})
        except ApiError as error:
            logger.warning(
                "lease %s not released: %s. The next operator waits until the Lease expires",
                self._terms.name,
                error.message,
            )

    @property
    def _path(self) -> str:
        return LEASE.path(self._terms.namespace, self._terms.name)

    async def _read(self) -> dict[str, Any] | None:
        """Returns the stored Lease, or None if it does not exist."""
        try:
            return await self._server.get(self._path)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return None

    def _is_free(self, stored: dict[str, Any] | None, unchanged_s: float) -> bool:
        """Reports whether this process may take the Lease.

        The Lease is free if it has no holder, or if it was not renewed for its duration. Holder and this
        process may have different settings for the duration, so the longer duration counts.

        Args:
            unchanged_s: seconds for which this process has seen the Lease unchanged.
        """
        if stored is None or not stored["spec"].get("holderIdentity"):
            return True
        holder_duration_s = float(stored["spec"].get("leaseDurationSeconds", 0))
        return unchanged_s > max(holder_duration_s, self._terms.duration_s)

    async def _write_holder(self, stored: dict[str, Any] | None) -> bool:
        """Writes this process as holder if the stored Lease has not changed since it was read.

        The deadline counts from the time at which the request was sent, because the API server may store the
        renewal at any time between request and answer.

        Args:
            stored: the state of the Lease; None if the Lease does not exist.

        Returns:
            Whether the API server accepted the write.
        """
        body = self._build_held_lease(stored)
        sent_at = self._clock()
        try:
            if stored is None:
                self._held_lease = await self._server.create(LEASE.path(self._terms.namespace), body)
            else:
                self._held_lease = await self._server.update(self._path, body)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            return False
        self._renewed_at = sent_at
        return True

    def _build_held_lease(self, stored: dict[str, Any] | None) -> dict[str, Any]:
        """Builds the Lease with this process as holder, renewed now. A new holder counts as a transition."""
        last_spec = dict(stored["spec"]) if stored else {}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            **last_spec,
            "holderIdentity": self._terms.identity,
            "leaseDurationSeconds": self._terms.duration_s,
            "renewTime": now,
        }
        if last_spec.get("holderIdentity") != self._terms.identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(last_spec.get("leaseTransitions", 0)) + 1
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": {"namespace": self._terms.namespace, "name": self._terms.name},
            **(stored or {}),
            "spec": spec,
        }
