"""The order of the pods in `heteroinfer logs`, and the description of each pod."""

from dataclasses import replace
from datetime import UTC, datetime

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.api import FailureStatus, GroupPhase, GroupStatus, RankEntry
from heteroinfer_operator.cluster import ContainerTermination, PodView, Waiting
from heteroinfer_operator.fleet.story import build_stories, epochs, failure_text, group_text

NOW = datetime(2026, 11, 21, 8, tzinfo=UTC)
KILLED = Failure(
    reason=FailureReason.RANK_EXITED,
    message="rank 2 was killed",
    pod=2,
    rank=2,
    exit_code=-9,
    last_log="step 7",
)


def pod(index: int, *, epoch: int = 1, ended: ContainerTermination | None = None) -> PodView:
    labels = {
        names.LABEL_POD_INDEX: str(index),
        names.LABEL_EPOCH: str(epoch),
        names.LABEL_ROLE: "cpu",
    }
    return PodView(
        name=f"g-0-{epoch}-{index}", uid=f"{index}", labels=labels, created=NOW, node="a", termination=ended
    )


def ended(exit_code: int, message: str) -> ContainerTermination:
    return ContainerTermination(exit_code=exit_code, reason="Error", message=message)


def group(*failures: FailureStatus, epoch: int = 1, ran: bool = True) -> GroupStatus:
    reported = tuple(RankEntry(rank=i, role="cpu", pod=f"g-0-{epoch}-{i}") for i in range(3))
    return GroupStatus(index=0, epoch=epoch, failures=failures, members=reported if ran else ())


def failure(rank: int) -> FailureStatus:
    return FailureStatus(epoch=1, time=NOW, reason="RankExited", message="killed", rank=rank, exit_code=-9)


def order(status: GroupStatus, pods: list[PodView]) -> list[str]:
    return [story.name[-1] for story in build_stories(status, pods, epochs(pods)[-1])]


def test_the_pod_that_ended_the_epoch_is_listed_before_other_failed_pods() -> None:
    peers = replace(KILLED, reason=FailureReason.POD_LOST, message="gone").to_json()
    pods = [pod(0), pod(1, ended=ended(71, peers)), pod(2, ended=ended(70, KILLED.to_json()))]
    first, second, _ = build_stories(group(ran=False), pods, 1)
    assert (first.name, first.culprit, second.name, second.culprit) == ("g-0-1-2", True, "g-0-1-1", False)
    assert first.ended == (
        "ended with exit code 70 (Error): RankExited: rank 2: rank 2 was killed (exit code -9); "
        "its last log line: step 7"
    )


def test_reports_of_other_pods_identify_a_culprit_that_is_gone_or_silent() -> None:
    pods = [pod(0, ended=ended(71, KILLED.to_json())), pod(1), pod(2)]
    assert order(group(ran=False), pods) == ["2", "0", "1"]


def test_in_a_running_epoch_the_last_culprit_comes_first() -> None:
    pods = [pod(i, epoch=2) for i in range(3)]
    stories = build_stories(group(failure(1), epoch=2), [*pods, pod(0)], 2)
    assert [story.name for story in stories] == ["g-0-2-1", "g-0-2-0", "g-0-2-2"]
    assert not any(story.culprit for story in stories), "it has not ended this epoch"
    assert stories[0].prefix == "rank 1 cpu"
    assert order(group(epoch=2), pods) == ["0", "1", "2"]


def test_a_message_of_kubernetes_is_shown_unchanged() -> None:
    (story,) = build_stories(group(), [pod(0, ended=ended(137, "out of memory"))], 1)
    assert story.ended == "ended with exit code 137 (Error): out of memory"
    waiting = replace(pod(0), waiting=Waiting("ImagePullBackOff", "no such image"))
    (story,) = build_stories(group(), [waiting], 1)
    assert story.title == "g-0-1-0: rank 0, role cpu on node a, waiting: ImagePullBackOff: no such image"


def test_each_failure_of_the_status_is_shown_on_one_line() -> None:
    uncounted = failure(1).model_copy(update={"counted": False})
    assert failure_text(failure(1)) == (
        "epoch 1 ended at 2026-11-21 08:00:00Z: RankExited, rank 1, exit code -9: killed"
    )
    assert ", does not count towards restart.maxRestarts: killed" in failure_text(uncounted)
    waiting = group().model_copy(update={"phase": GroupPhase.WAITING, "message": "back-off"})
    assert group_text(waiting) == "group 0 epoch 1: Waiting: back-off"
