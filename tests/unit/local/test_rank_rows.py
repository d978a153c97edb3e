"""The table of ranks: a row a rank of the group's plan, with what the leader of this epoch says."""

from io import StringIO

from rich.console import Console

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import GroupPhase, GroupStatus, HeteroInferenceStatus
from heteroinfer_operator.reconcile.status_summary import plan_status
from heteroinfer_operator.up.console import Display
from heteroinfer_operator.up.rank_rows import HEADINGS, RankRow, build_rows
from tests.unit.local.plans import plan

PLAN = plan(("cpu", Device.CPU, 1), ("gpu", Device.GPU, 1))


def _rows(*ranks: RankStatus, epoch: int = 2) -> tuple[RankRow, ...]:
    group = GroupStatus(index=0, epoch=2, plan_hash=PLAN.hash, phase=GroupPhase.STARTING)
    report = GroupReport(
        group_uid="u", epoch=epoch, plan_hash=PLAN.hash, ready=False, message="", ranks=ranks
    )
    entry = plan_status(PLAN).ranks[1].model_copy(update={"predicted_step_ms": 9.0})
    plans = (plan_status(PLAN).model_copy(update={"ranks": (entry,)}),)
    status = HeteroInferenceStatus(groups=(group,), plans=plans)
    return build_rows(status, {PLAN.hash: PLAN}, {0: report})


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
    rows = _rows(loading, serving)
    assert rows[0].cells == ("0", "0", "cpu", "CPU", "0-3", "Loading 25 %", "0", "", "", "", "", "0.0")
    assert rows[1].cells == (
        "1",
        "1",
        "gpu",
        "GPU",
        "4-7",
        "Ready",
        "7",
        "50.0",
        "10.0",
        "9.0",
        "39.5",
        "0.2",
    )
    assert all(len(row.cells) == len(HEADINGS) for row in rows)


def test_report_of_an_older_epoch_is_not_taken_for_this_one() -> None:
    ready = RankStatus(rank=0, pod=0, phase=RankPhase.READY, steps=7)
    assert [row.state for row in _rows(ready, epoch=1)] == ["Starting", "Starting"]


def test_group_without_a_plan_has_no_rows() -> None:
    assert build_rows(HeteroInferenceStatus(groups=(GroupStatus(index=0),)), {}, {}) == ()


def test_lines_tell_each_change_once() -> None:
    output = StringIO()
    display = Display(Console(file=output, width=120), live=False)
    rank = RankStatus(rank=0, pod=0, phase=RankPhase.CONNECTING)
    for _ in range(3):
        display.show(_rows(rank))
    lines = output.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        "rank 0 (cpu, CPU, layers 0-3): Connecting",
        "rank 1 (gpu, GPU, layers 4-7): Starting",
    ]
