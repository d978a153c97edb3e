"""The ConfigMap with the measured rates of nodes. The chart's Jobs write it, the operator reads it.

The entries are not signed with the operator's key, because the Jobs must not have that key. Entries of an
attacker do little harm: the ConfigMap is in the operator's own namespace, and its numbers have bounds. The
numbers affect only predictions and the division of layers among ranks.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import CONFIG_MAP, NamespacedName
from heteroinfer_operator.kube.server import FORBIDDEN, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.nodes.calibrations import (
    CalibrationError,
    Calibrations,
    MeasuredKind,
    MeasuredNetwork,
    read_stored_calibrations,
)
from heteroinfer_operator.stored_fields import as_text_map

logger = logging.getLogger(__name__)

Entries: TypeAlias = tuple[tuple[str, str], ...]


class StoredCalibrations:
    """The calibrations in the ConfigMap; empty while the ConfigMap does not exist.

    Args:
        version: version of the operator. Calibrations of other versions are ignored.
        changed: called after the calibrations change.
    """

    def __init__(
        self, server: ApiServer, name: NamespacedName, *, version: str, changed: Callable[[], None]
    ) -> None:
        self.calibrations = Calibrations()
        self._version, self._notify = version, changed
        self.cache: WatchCache[Entries] = WatchCache(
            server,
            Collection(
                label=f"ConfigMap {name}",
                path=CONFIG_MAP.path(name.namespace),
                query={"fieldSelector": f"metadata.name={name.name}"},
            ),
            trim=read_sorted_entries,
            changed=self._read_calibrations,
        )

    def _read_calibrations(self, _before: Entries | None, after: Entries | None) -> None:
        """Reads the calibrations of a changed ConfigMap. Logs each calibration, and each unusable entry."""
        self.calibrations, problems = read_stored_calibrations(dict(after or ()), self._version)
        for kind in self.calibrations.kinds:
            logger.info("nodes of kind %s: using calibration %s", kind.name, kind.calibration.hash)
        for network in self.calibrations.networks:
            logger.info(
                "network between nodes of kinds %s and %s: using measurement %s",
                *network.kinds,
                network.network.hash,
            )
        for problem in problems:
            logger.warning("calibration %s", problem)
        self._notify()


def read_sorted_entries(stored: Manifest) -> Entries:
    """Returns the ConfigMap's entries in order of their keys.

    Raises:
        UnreadableError: `data` has the wrong type.
    """
    return tuple(sorted(as_text_map(stored.get("data"), "data").items()))


async def write_calibration(
    server: ApiServer, name: NamespacedName, measured: MeasuredKind | MeasuredNetwork
) -> None:
    """Writes the measured rates of one kind of nodes, or of one network, into the ConfigMap.

    The other entries stay: each entry has its own field manager, so an apply does not change the other
    entries. The chart has no template for the ConfigMap, because a tool that replaces objects by
    their templates would empty it.

    Raises:
        CalibrationError: the namespace does not exist, or this process may not write the ConfigMap.
        ApiError: the API server did not answer.
    """
    metadata = {
        "namespace": name.namespace,
        "name": name.name,
        "labels": {"app.kubernetes.io/managed-by": names.MANAGER},
    }
    config_map = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.name, "metadata": metadata}
    path = CONFIG_MAP.path(name.namespace, name.name)
    try:
        await server.apply(
            path,
            {**config_map, "data": measured.to_entry()},
            manager=f"{names.MANAGER}-calibration-{measured.full_name}",
        )
    except ApiError as error:
        if error.status not in (NOT_FOUND, FORBIDDEN):
            raise
        raise CalibrationError(
            f"ConfigMap {name}: the API server refuses the write: {error.answer_message}. Run `helm upgrade` "
            "with calibration.nodeKinds, which grants the right to write this ConfigMap. With "
            "rbac.create=false, grant the verbs create and patch yourself"
        ) from error
