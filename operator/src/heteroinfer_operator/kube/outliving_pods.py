"""Deletes pods by force if their HeteroInference is deleted and their node is lost.

The kubelet of a lost node does not confirm the end of a pod, so without force the pod would stay.
"""

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from heteroinfer_contract.background import start_task
from heteroinfer_operator.cluster import DeleteObject, ResourceKey
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.object_writes import delete_options
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.reconcile.left_pods import decide_left_pods

logger = logging.getLogger(__name__)

CHECK_AGAIN_S: Final = 10.0
"""Time until the next check. Changes of nodes do not wake a deleted resource, so a timer must wake it."""


class LeftPods:
    """Deletes the pods that a deleted resource leaves on lost nodes.

    Use from one event loop.

    Args:
        wake: called with the key of a deleted resource when its remaining pods need another check.
    """

    def __init__(
        self, server: ApiServer, cluster_state: ClusterState, *, wake: Callable[[ResourceKey], None]
    ) -> None:
        self._server = server
        self._cluster_state = cluster_state
        self._wake = wake
        self._timers: dict[ResourceKey, asyncio.TimerHandle] = {}
        self._deletions: dict[str, asyncio.Task[None]] = {}

    def delete_lost_pods(self, key: ResourceKey, uid: str) -> None:
        """Force-deletes, in the background, the pods that a deleted resource left on lost nodes.

        While pods of the deleted resource are terminating, a timer starts the next check after CHECK_AGAIN_S.

        Args:
            key: name of the deleted resource.
            uid: uid of the resource that has this name now, also if another operator serves that resource;
                "" if no resource has the name.
        """
        pods = [pod.view for pod in self._cluster_state.pods_of_earlier_resources(key, uid)]
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if not any(pod.deleting for pod in pods):
            return
        for deletion in decide_left_pods(pods, self._cluster_state.nodes(), datetime.now(UTC)):
            is_running = deletion.uid in self._deletions
            if not is_running:
                self._start_deletion(key, deletion)
        self._timers[key] = asyncio.get_running_loop().call_later(CHECK_AGAIN_S, self._wake, key)

    def _start_deletion(self, key: ResourceKey, delete: DeleteObject) -> None:
        """Starts the forced deletion of a pod as a background task."""
        task = start_task(self._force_delete(key, delete), name=f"pod {delete.name}", failed=_report_error)
        self._deletions[delete.uid] = task
        task.add_done_callback(lambda _: self._deletions.pop(delete.uid, None))

    async def _force_delete(self, key: ResourceKey, delete: DeleteObject) -> None:
        """Sends one forced delete of a pod; logs a failure."""
        try:
            await self._server.delete(
                POD.path(key.namespace, delete.name), delete_options(delete.uid, delete.grace_s)
            )
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # gone, or another pod has the name
                logger.warning(
                    "pod %s/%s: its HeteroInference is deleted and its node is lost, but the operator cannot "
                    "delete the pod: %s. Trying again",
                    key.namespace,
                    delete.name,
                    error.message,
                )


def _report_error(error: BaseException) -> None:
    """Logs an error that is a defect of the operator. The next check tries the deletion again."""
    logger.error(
        "cannot delete a pod of a lost node, because of a defect of the operator. Report it, with this log",
        exc_info=error,
    )
