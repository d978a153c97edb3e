"""The result of `heteroinfer-worker network` between two machines. Stdlib only; pure.

It is stored in ConfigMaps and in files, as a calibration is.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.calibration import MAX_TEXT
from heteroinfer_contract.errors import ContractError

SHORTEST_ROUND_TRIP_S, LONGEST_ROUND_TRIP_S = 1e-6, 10.0
"""Allowed seconds of a round trip. Loopback needs more than the first. No group works with the second."""
MIN_RATE, MAX_RATE = 1e3, 1e12
"""Allowed bytes per second of one direction. The fastest networks of a host have 0.1e12."""
_LATEST: Final = 253402300799.0
"""The end of the year 9999, in seconds since 1970: the latest date that Python supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkMeasurement(codec.JsonValue):
    """The network between two machines: the client, which asks, and the listener, which answers.

    Attributes:
        version: version of HeteroInfer that measured.
        time: end of the measurement, in seconds since 1970 (UTC).
        round_trip_s: median time of a small message to the listener and its answer.
        to_listener_bytes_per_s: rate of large messages to the listener.
        to_client_bytes_per_s: rate of large messages from the listener.
    """

    version: str
    time: float
    round_trip_s: float
    to_listener_bytes_per_s: float
    to_client_bytes_per_s: float

    @property
    def hash(self) -> str:
        """Short hash of this measurement, for messages."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def bytes_per_s(self) -> float:
        """Rate of equally many bytes to the listener and, afterwards, back.

        The same holds if the two machines exchange their roles.
        """
        return 2 / (1 / self.to_listener_bytes_per_s + 1 / self.to_client_bytes_per_s)

    def exchange_s(self, num_bytes: float) -> float:
        """Returns the seconds of an exchange.

        Args:
            num_bytes: bytes of the question and the answer together.
        """
        return self.round_trip_s + num_bytes / self.bytes_per_s

    def check(self) -> None:
        """Checks the properties that every reader relies on.

        Raises:
            ContractError: a text is too long, or a number is outside its range. The message names the field.
        """
        name = type(self).__name__
        codec.at_least(0, name, time=self.time)
        codec.at_most(_LATEST, name, time=self.time)
        if not 0 < len(self.version) <= MAX_TEXT:
            raise ContractError(
                f"{name}.version: must have 1 to {MAX_TEXT} characters (got {len(self.version)})"
            )
        _check_range(
            SHORTEST_ROUND_TRIP_S, LONGEST_ROUND_TRIP_S, f"{name}.round_trip_s", self.round_trip_s, "seconds"
        )
        for field in ("to_listener_bytes_per_s", "to_client_bytes_per_s"):
            _check_range(MIN_RATE, MAX_RATE, f"{name}.{field}", getattr(self, field), "bytes per second")


def _check_range(least: float, most: float, field: str, value: float, unit: str) -> None:
    """Raises ContractError if a number is not from `least` to `most`, or is not a number."""
    if not least <= value <= most:
        raise ContractError(f"{field}: must be {least:g} to {most:g} {unit} (got {value:g})")
