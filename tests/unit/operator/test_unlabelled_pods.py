"""An answer about a pod without the operator's label counts only if the pod is still requested."""

import asyncio
from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import ResourceKey, ResourceView
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.kube.unlabelled_pods import UnlabelledPods
from heteroinfer_operator.manifests.identity import Owner

KEY = ResourceKey(namespace="default", name="demo")
OWNER = Owner(key=KEY, uid="u")
POD = "demo-0-7-0"


def stored(**labels: str) -> dict[str, Any]:
    metadata = {
        "namespace": "default",
        "name": POD,
        "uid": "p",
        "labels": labels,
        "ownerReferences": [OWNER.reference],
    }
    return {"metadata": metadata, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}


def resource(uid: str = OWNER.uid) -> ResourceView:
    member = {"rank": 0, "role": "cpu", "pod": POD, "started": True, "ready": True}
    return ResourceView(
        key=KEY,
        uid=uid,
        generation=1,
        resource_version="1",
        finalizers=(),
        deleting=False,
        spec={},
        status={"groups": [{"index": 0, "epoch": 7, "members": [member]}]} if uid == OWNER.uid else {},
    )


async def find(pods: UnlabelledPods, of: ResourceView, shown: list[PodRecord]) -> list[PodRecord]:
    return await pods.find(of, parse_status(of.status), shown)


class Server:
    """Answers only after the test allows it."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.is_gone = False

    async def get_quickly(self, path: str) -> dict[str, Any]:
        await self.may.wait()
        if self.is_gone:
            raise ApiError(f"{path}: not found", status=NOT_FOUND)
        return stored()


async def test_a_late_answer_is_not_used_for_a_later_request() -> None:
    """Once, a pod that got its label back and was deleted later was reported as Ready."""
    server = Server()
    pods = UnlabelledPods(server, patience_s=0.01)  # type: ignore[arg-type]
    shown = trim.pod_record(stored(**{names.LABEL_RESOURCE: "demo"}))
    assert shown is not None
    (unknown,) = await find(pods, resource(), [])
    assert unknown.view.unknown
    server.may.set()
    await asyncio.sleep(0)
    assert await find(pods, resource(), [shown]) == []
    server.is_gone = True
    assert await find(pods, resource(), []) == []


async def test_a_pod_of_an_earlier_resource_does_not_belong_to_a_new_one_of_its_name() -> None:
    """Once, the new resource took the pod for its own and created no pods."""
    server = Server()
    server.may.set()
    pods = UnlabelledPods(server)  # type: ignore[arg-type]
    shown = trim.pod_record(stored(**{names.LABEL_RESOURCE: "demo"}))
    assert shown is not None
    assert await find(pods, resource(), [shown]) == []
    (found,) = await find(pods, resource(), [])
    assert (found.view.name, found.view.unknown) == (POD, "")
    assert await find(pods, resource("another"), []) == []
