"""How far a rank has come and how long its steps take, for people. Pure."""

from heteroinfer_contract.group_report import RankPhase, RankStatus


def describe_progress(status: RankStatus) -> str:
    """Returns a rank's phase, with the share of its weights that is read while it loads them."""
    if status.phase is RankPhase.LOADING and status.total_bytes:
        return f"{status.phase.value} {100 * status.loaded_bytes // status.total_bytes} %"
    return status.phase.value


def step_times_ms(status: RankStatus) -> tuple[float | None, float | None, float | None]:
    """Returns a decode step, its own compute and wait for peers, in milliseconds; before the first None."""
    if not status.steps:
        return None, None, None
    return 1e3 * status.step_s, 1e3 * status.compute_s, 1e3 * status.wait_s


def format_ms(value: float | None) -> str:
    """Returns a time in milliseconds as a cell; "" for None."""
    return "" if value is None else f"{value:.1f}"
