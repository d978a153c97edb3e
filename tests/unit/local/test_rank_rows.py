"""The table of ranks: a row a rank of the group's plan, with what the leader of this epoch says."""

from io import StringIO

from rich.console import Console

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import GroupPhase, GroupStatus, HeteroInferenceStatus
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.fleet.lines import LeaderAnswer, ResourceLine, build_line
from heteroinfer_operator.fleet.screen import UP_COLUMNS, build_group_rows
from heteroinfer_operator.reconcile.status_summary import build_plan_status
from heteroinfer_operator.up.console import Display
from tests.unit.local.plans import plan

KEY = ResourceKey(namespace="ns", name="a")
PLAN = plan(("cpu", Device.CPU, 1), ("gpu", Device.GPU, 1))


def _line(*ranks: RankStatus, epoch: int = 2) -> ResourceLine:
    group = GroupStatus(index=0, epoch=2, plan_hash=PLAN.hash, phase=GroupPhase.STARTING)
    report = GroupReport(
        group_uid="u", epoch=epoch, plan_hash=PLAN.hash, ready=False, message="", ranks=ranks
    )
    entry = build_plan_status(PLAN).ranks[1].model_copy(update={"predicted_step_ms": 9.0})
    plans = (build_plan_status(PLAN).model_copy(update={"ranks": (entry,)}),)
    status = HeteroInferenceStatus(groups=(group,), plans=plans)
    return build_line(KEY, status, {0: LeaderAnswer(report=report)}, {PLAN.hash: PLAN})


def test_rank_shows_its_position_its_progress_and_its_times() -> None:
    loading = RankStatus(rank=0, pod=0, phase=RankPhase.LOADING, loaded_bytes=1, total_bytes=4)
    serving = RankStatus(
        rank=1,
        pod=1,
        phase=RankPhase.READY,
        steps=7,
        step_s=0.05,
        compute_s=0.01,
        wait_s=0.0395,
        heartbeat_age_s=0.2,
    )
    (group,) = _line(loading, serving).lines
    of_group, first, second = ([row.get(each, "") for each in UP_COLUMNS] for row in build_group_rows(group))
    assert of_group[:5] == ["  group 0 epoch 2", "", "", "", "Starting"]
    assert first == ["    rank 0 cpu", "0", "CPU", "0-3", "Loading 25 %", "0", "", "", "", "", "0.0"]
    assert second == [
        "    rank 1 gpu", "1", "GPU", "4-7", "Ready", "7", "50.0", "10.0", "39.5", "9.0", "0.2"
    ]  # fmt: skip


def test_a_report_about_an_older_epoch_is_ignored() -> None:
    ready = RankStatus(rank=0, pod=0, phase=RankPhase.READY, steps=7)
    assert [rank.phase for rank in _line(ready, epoch=1).lines[0].ranks] == ["Starting", "Starting"]


def test_group_without_a_plan_has_no_ranks() -> None:
    status = HeteroInferenceStatus(groups=(GroupStatus(index=0),))
    assert build_line(KEY, status, {}, {}).lines[0].ranks == ()


def test_each_change_is_printed_once() -> None:
    output = StringIO()
    display = Display(Console(file=output, width=120), live=False)
    rank = RankStatus(rank=0, pod=0, phase=RankPhase.CONNECTING)
    for _ in range(3):
        display.show_ranks(_line(rank))
    lines = output.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "rank 0 (cpu, CPU, layers 0-3): Connecting",
        "rank 1 (gpu, GPU, layers 4-7): Starting",
    ]
