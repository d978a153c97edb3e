"""The metrics of a rank: the time of a step is the sum of its parts."""

import ctypes
import mmap
import resource
import time
from functools import partial
from pathlib import Path

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.integration.worker.groups import build_plan
from vllm_heteroinfer.pod.channel import RankChannel, RankMessage, RankReporter
from vllm_heteroinfer.rank.step_metrics import (
    RankMetrics,
    Step,
    locked_memory_bytes,
    locked_memory_limit_bytes,
    scale_transfer_to_step,
)

LAUNCH = PodLaunch(
    group="ns/x/0", group_uid="u", epoch=1, pod_index=0, addresses=(PodAddress(host="127.0.0.1"),)
)


def test_compute_wait_and_transfer_add_up_to_the_step() -> None:
    ours, theirs = RankChannel.open_pair()
    reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)
    try:
        rank = build_plan(Path("/model"), layers=[1], pods=[1]).ranks[0]
        metrics = RankMetrics(rank, LAUNCH, reporter)
        metrics.add_transfer("send", 1.0, 1 << 20)  # a transfer of the warm-up belongs to no step
        metrics.begin_call()
        metrics.add_wait(1e-9)
        metrics.add_transfer("send", 2e-9, 4096)
        metrics.end_call()
        metrics.finish_step(prefill_tokens=0, decode_tokens=4)

        def value(name: str, **labels: str) -> float:
            own = dict(zip(names.RANK_LABELS, ("ns/x/0", "0", "0", "role-0", "CPU"), strict=True))
            got = metrics.registry.get_sample_value(name, {**own, **labels})
            assert got is not None
            return got

        decode = {"phase": names.PHASE_DECODE}
        parts = (
            value(names.COMPUTE_SECONDS + "_sum", **decode)
            + value(names.WAIT_SECONDS + "_sum", **decode)
            + value(names.TRANSFER_SECONDS + "_sum", direction="send")
        )
        assert parts == pytest.approx(value(names.STEP_SECONDS + "_sum", **decode))
        assert value(names.TRANSFER_BYTES_TOTAL, direction="send") == 4096
        assert value(names.TOKENS_TOTAL, **decode) == 4
        metrics.record_path("ranks", "nccl_shm")
        metrics.report_locked_memory()
        metrics.record_path("stages", "gloo")
        told = reporter._report
        assert told.transports == ("ranks:nccl_shm", "stages:gloo")
        assert told.locked_memory_bytes is not None
        assert value(names.LOCKED_MEMORY_BYTES) >= 0
        assert value(names.LOCKED_MEMORY_LIMIT_BYTES) == locked_memory_limit_bytes() > 0
    finally:
        reporter.close()
        ours.close()


@pytest.mark.parametrize(
    ("limit_bytes", "reported_bytes"),
    [(65536, 65536), (2**53, 2**53), (2**53 + 2, None), (resource.RLIM_INFINITY, None)],
)
def test_a_limit_too_large_for_a_report_counts_as_no_limit(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, reported_bytes: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit_bytes, limit_bytes))
    ours, theirs = RankChannel.open_pair()
    reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)
    try:
        rank = build_plan(Path("/model"), layers=[1], pods=[1]).ranks[0]
        RankMetrics(rank, LAUNCH, reporter).report_locked_memory()
        assert reporter._report.locked_memory_limit_bytes == reported_bytes
    finally:
        reporter.close()
        ours.close()


def test_the_transfer_time_of_a_step_is_at_most_its_duration() -> None:
    step = Step(step_s=1.0, wait_s=0.4, transfer_s={"send": 0.9, "recv": 0.3})
    scale_transfer_to_step(step)
    assert step.transfer_s == pytest.approx({"send": 0.45, "recv": 0.15})


@pytest.mark.parametrize("ends", ["before the call is left", "after it", "in the next step"])
def test_time_counts_once_if_the_device_is_done_before_the_call_returns(ends: str) -> None:
    """The GPU's last copy may be done before the worker's call returns, or long after."""
    ours, theirs = RankChannel.open_pair()
    reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)
    try:
        rank = build_plan(Path("/model"), layers=[1], pods=[1]).ranks[0]
        metrics = RankMetrics(rank, LAUNCH, reporter)
        began = time.perf_counter()
        metrics.begin_call()
        done = metrics.continue_on_device()
        time.sleep(0.02)
        if ends == "before the call is left":
            done(0.0)
        metrics.end_call()
        metrics.finish_step(prefill_tokens=0, decode_tokens=1)
        if ends == "in the next step":
            metrics.begin_call()
        if ends != "before the call is left":
            done(0.0)
        took_s = time.perf_counter() - began
        own = dict(zip(names.RANK_LABELS, ("ns/x/0", "0", "0", "role-0", "CPU"), strict=True))
        step_s = metrics.registry.get_sample_value(
            names.STEP_SECONDS + "_sum", {**own, "phase": names.PHASE_DECODE}
        )
        assert step_s is not None
        assert 0.02 <= step_s <= took_s
    finally:
        reporter.close()
        ours.close()


@pytest.mark.parametrize("ahead", [False, True], ids=["its last copy", "a whole step"])
def test_a_rank_is_busy_while_its_device_works(ahead: bool) -> None:
    """The supervisor then blames a hanging device, and not the engine."""
    ours, theirs = RankChannel.open_pair()
    reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)

    def busy() -> str | None:
        """Returns the work in the rank's second report from now. The first may be an older report."""
        ours.read()
        said: list[RankMessage] = []
        deadline = time.monotonic() + 5
        while len(said) < 2:
            assert time.monotonic() < deadline
            said += ours.read()
            time.sleep(0.01)
        assert said[-1].report is not None
        return said[-1].report.busy

    try:
        metrics = RankMetrics(build_plan(Path("/model"), layers=[1], pods=[1]).ranks[0], LAUNCH, reporter)
        metrics.begin_call()
        first = metrics.continue_into_next_step() if ahead else partial(metrics.continue_on_device(), 0.0)
        metrics.end_call()
        metrics.finish_step(prefill_tokens=1, decode_tokens=0)
        assert busy() == "step 1"
        metrics.begin_call()
        second = metrics.continue_into_next_step() if ahead else partial(metrics.continue_on_device(), 0.0)
        first()
        metrics.end_call()
        metrics.finish_step(prefill_tokens=0, decode_tokens=1)
        assert busy() is not None, "the device works on the second step"
        second()
        assert busy() is None
    finally:
        reporter.close()
        ours.close()


def test_steps_of_the_groups_own_request_have_names_of_their_own() -> None:
    """A supervisor checks at intervals. Two steps with the same name would look like one long step."""
    ours, theirs = RankChannel.open_pair()
    reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)
    try:
        metrics = RankMetrics(build_plan(Path("/model"), layers=[1], pods=[1]).ranks[0], LAUNCH, reporter)
        names_of_steps = []
        for counts in (False, False, True):
            metrics.begin_call()
            names_of_steps.append(reporter._report.busy)
            metrics.end_call()
            metrics.finish_step(prefill_tokens=1, decode_tokens=0, for_client=counts)
        assert len(set(names_of_steps)) == 3
    finally:
        reporter.close()
        ours.close()


def test_locked_memory_is_the_kernels_count(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tx\nVmLck:\t    8 kB\nVmPin:\t  16 kB\n")
    assert locked_memory_bytes(tmp_path) == 24 * 1024
    for status in ("Name:\tx\n", "Name:\tx\nVmLck:\t 8 kB\n"):  # gVisor lacks one or both fields
        (tmp_path / "status").write_text(status)
        assert locked_memory_bytes(tmp_path) == 0
    before = locked_memory_bytes()
    with mmap.mmap(-1, 4 * mmap.PAGESIZE) as memory:
        libc = ctypes.CDLL(None, use_errno=True)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mlock(ctypes.c_void_p(start), ctypes.c_size_t(len(memory))) == 0
        assert locked_memory_bytes() == before + len(memory)
        libc.munlock(ctypes.c_void_p(start), ctypes.c_size_t(len(memory)))
