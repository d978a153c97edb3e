"""The ConfigMap of what was measured of nodes: the chart's Jobs write it, the operator reads it.

It has no code of the operator's key, which the Jobs must not have. It is in the operator's own namespace, and
holds numbers within bounds: they decide predictions and how layers are shared, and nothing else of a pod.
"""

import logging
from collections.abc import Callable
from typing import TypeAlias

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import CONFIG_MAP, NamespacedName
from heteroinfer_operator.kube.server import FORBIDDEN, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.nodes.calibrations import CalibrationError, Calibrations, MeasuredKind, read_kept
from heteroinfer_operator.stored_fields import as_text_map

logger = logging.getLogger(__name__)

Entries: TypeAlias = tuple[tuple[str, str], ...]


class KeptCalibrations:
    """What the ConfigMap says now; nothing while it is not there.

    Args:
        version: of HeteroInfer: what another one measured is not used.
        changed: called when there is something else to plan and predict with.
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
            trim=read_entries,
            changed=self._changed,
        )

    def _changed(self, _before: Entries | None, after: Entries | None) -> None:
        self.calibrations, problems = read_kept(dict(after or ()), self._version)
        for kind in self.calibrations.kinds:
            logger.info("nodes of kind %s: calibration %s", kind.name, kind.calibration.hash)
        for problem in problems:
            logger.warning("calibration %s", problem)
        self._notify()


def read_entries(stored: Manifest) -> Entries:
    """Returns the entries of the ConfigMap; raises UnreadableError."""
    return tuple(sorted(as_text_map(stored.get("data"), "data").items()))


async def keep(server: ApiServer, name: NamespacedName, kind: MeasuredKind) -> None:
    """Keeps what was measured of a kind of nodes in the ConfigMap, beside what it has of others.

    No template makes the ConfigMap: what replaces an object by a template would empty it. Each kind has a
    field manager of its own, so that an apply leaves the entries of other kinds alone.

    Raises:
        CalibrationError: the namespace is gone, or the ConfigMap may not be written.
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
            path, {**config_map, "data": kind.to_entry()}, manager=f"{names.MANAGER}-calibration-{kind.name}"
        )
    except ApiError as error:
        if error.status not in (NOT_FOUND, FORBIDDEN):
            raise
        raise CalibrationError(
            f"ConfigMap {name}: {error.said}; `helm upgrade` with calibration.nodeKinds gives the right to "
            "write it; with rbac.create=false, give the verbs create and patch yourself"
        ) from error
