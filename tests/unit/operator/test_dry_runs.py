"""A slow dry run blocks no reconcile, and a later reconcile finds its result."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from heteroinfer_operator.cluster import ResourceKey, ResourceView, TryObjects
from heteroinfer_operator.kube.child_errors import ChildError
from heteroinfer_operator.kube.dry_runs import AT_ONCE, RESULT_VALID_S, DryRuns
from heteroinfer_operator.kube.server import ApiError
from heteroinfer_operator.reconcile.refusals import NOT_ANSWERED

POD = {"kind": "Pod", "metadata": {"name": "demo-0"}}


def resource(name: str = "demo", uid: str = "u") -> ResourceView:
    key = ResourceKey(namespace="default", name=name)
    return ResourceView(
        key=key,
        uid=uid,
        generation=1,
        resource_version="1",
        finalizers=(),
        deleting=False,
        spec={},
        status={},
    )


def asks(revision: str = "r") -> TryObjects:
    return TryObjects(revision=revision, manifests=(POD, POD))


class Server:
    """Answers only after the test allows it."""

    def __init__(self, error: ApiError | None = None) -> None:
        self.may = asyncio.Event()
        self.error = error
        self.asked = self.at_once = self.max_at_once = 0

    async def dry_run_create(self, manifest: Mapping[str, Any]) -> None:
        self.asked += 1
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        try:
            await self.may.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.at_once -= 1


async def until_known(find: Callable[[], Awaitable[None]]) -> None:
    """Calls `find` repeatedly, like reconciles do."""
    async with asyncio.timeout(5):
        while True:
            try:
                return await find()
            except ChildError as error:
                if error.reason != NOT_ANSWERED:
                    raise


async def test_reconciles_do_not_wait_for_a_slow_webhook() -> None:
    server = Server()
    runs = DryRuns(server.dry_run_create)
    for _ in range(3):
        with pytest.raises(ChildError, match="waiting for the API server to validate"):
            await runs.await_admission(resource(), asks(), patience_s=0)
    assert runs.admitted_revisions(resource()) == frozenset()
    server.may.set()
    await until_known(lambda: runs.await_admission(resource(), asks(), patience_s=0))
    assert runs.admitted_revisions(resource()) == {"r"}
    assert server.asked == 2, "each object is sent once"


async def test_the_result_of_a_dry_run_applies_to_one_uid_and_expires() -> None:
    now = 0.0
    server = Server()
    server.may.set()
    runs = DryRuns(server.dry_run_create, clock=lambda: now)
    await runs.await_admission(resource(), asks(), patience_s=5)
    assert runs.admitted_revisions(resource()) == {"r"}
    assert runs.admitted_revisions(resource(uid="another")) == frozenset()
    now = RESULT_VALID_S + 1
    assert runs.admitted_revisions(resource()) == frozenset()


async def test_a_refused_dry_run_is_reported_once_and_sent_again() -> None:
    server = Server(ApiError("POST /pods", status=422, answer_message="no such field"))
    server.may.set()
    runs = DryRuns(server.dry_run_create)
    with pytest.raises(ChildError, match="refuses Pod demo-0: no such field"):
        await runs.await_admission(resource(), asks(), patience_s=5)
    server.error = None
    await runs.await_admission(resource(), asks(), patience_s=5)
    assert runs.admitted_revisions(resource()) == {"r"}


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_a_dry_run_without_an_answer_has_no_result_and_is_sent_again(status: int) -> None:
    server = Server(ApiError("POST /pods: no answer", status=status))
    server.may.set()
    runs = DryRuns(server.dry_run_create)
    for tries in (1, 2):
        with pytest.raises(ChildError, match=r"waiting for the API server .*POST /pods: no answer"):
            await runs.await_admission(resource(), asks(), patience_s=5)
        assert server.asked == tries


@pytest.mark.parametrize("status", [409, 500])
async def test_an_existing_name_or_a_failing_webhook_does_not_refuse_a_revision(status: int) -> None:
    server = Server(ApiError("POST /pods", status=status, answer_message="failed calling webhook"))
    server.may.set()
    runs = DryRuns(server.dry_run_create)
    await runs.await_admission(resource(), asks(), patience_s=5)
    assert runs.admitted_revisions(resource()) == {"r"}


async def test_a_new_revision_does_not_wait_for_the_result_of_another() -> None:
    server = Server()
    runs = DryRuns(server.dry_run_create)
    with pytest.raises(ChildError, match="waiting for the API server to validate"):
        await runs.await_admission(resource(), asks("old"), patience_s=0)
    server.may.set()
    await until_known(lambda: runs.await_admission(resource(), asks("new"), patience_s=0))
    assert runs.admitted_revisions(resource()) == {"new"}


async def test_at_most_16_dry_runs_run_at_the_same_time() -> None:
    server = Server()
    runs = DryRuns(server.dry_run_create)
    names = [f"demo-{i}" for i in range(3 * AT_ONCE)]
    for name in names:
        with pytest.raises(ChildError, match="waiting for the API server to validate"):
            await runs.await_admission(resource(name), asks(), patience_s=0)
    server.may.set()
    for name in names:
        await until_known(lambda name=name: runs.await_admission(resource(name), asks(), patience_s=0))  # type: ignore[misc]
    assert server.max_at_once <= AT_ONCE
    assert server.asked == 2 * len(names)


async def test_dry_runs_of_deleted_resources_are_forgotten() -> None:
    server = Server()
    runs = DryRuns(server.dry_run_create)
    with pytest.raises(ChildError, match="waiting for the API server to validate"):
        await runs.await_admission(resource(), asks(), patience_s=0)
    runs.forget(resource().key)
    server.may.set()
    await until_known(lambda: runs.await_admission(resource(), asks(), patience_s=0))
    runs.forget(resource().key)
    assert runs.admitted_revisions(resource()) == frozenset()
