"""`heteroinfer-worker calibrate` builds the calibration from the output of measuring processes."""

import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.calibration import ALL_NODES, MAX_TEXT, Versions
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES
from vllm_heteroinfer.calibration import hardware
from vllm_heteroinfer.calibration.__main__ import main
from vllm_heteroinfer.calibration.command import (
    MeasuredResults,
    Measurement,
    build_calibration,
    fit_text,
    measure,
    plan_measurements,
)
from vllm_heteroinfer.calibration.hardware import observe_hardware, one_of_each_core
from vllm_heteroinfer.kernels.host_caches import bytes_beyond_caches
from vllm_heteroinfer.launch.cpu_allocation import Cpu

VERSIONS = Versions(heteroinfer="0.1.0", vllm="0.32.0", torch="2.13.0")
CPUINFO = """processor\t: 0
model name\t: Intel(R) Xeon(R) Platinum
flags\t\t: fpu avx2 avx512f amx_tile amx_bf16 of_no_interest
"""

RAISE_LIMIT = (
    "Measure again while the machine does nothing else, or raise calibration.limitSeconds (chart) or --limit "
    "(heteroinfer-worker calibrate)"
)


def line(kind: str, **values: object) -> str:
    return json.dumps({"kind": kind, **values}) + "\n"


def results(*lines: str) -> MeasuredResults:
    found = MeasuredResults()
    for each in (line("readings", threads=2, node=ALL_NODES, bytes_per_s=2e10), *lines):
        found.store_line(each)
    return found


def test_lines_of_results_become_a_calibration_and_logs_do_not() -> None:
    found = results(
        "INFO 11-22 some log of vLLM\n",
        line("operations", operations_per_s=1e12),
        line("gpu_name", name="NVIDIA H200"),
        line("gpu", bytes_per_s=4e12, operations_per_s=8e14),
        line("hops", path="gloo", message_bytes=8192, seconds=1e-4),
        line("transfers", direction="to GPU", bytes_per_s=5e10, contended=True),
        line("skipped", what="experts in MXFP4", why="RuntimeError: " + "x" * 1000),
    )
    built = build_calibration(found, VERSIONS, started=10.0, duration_s=2.0)
    assert built.operations_per_s == 1e12
    assert built.hardware.gpu == "NVIDIA H200"
    assert built.gpu is not None
    assert [hop.message_bytes for hop in built.hops] == [8192]
    assert built.transfers[0].contended
    assert len(built.skipped[0].why) == 2 * MAX_TEXT


@pytest.mark.parametrize(
    "odd",
    [
        '{"kind": garbage',
        '{"kind": "readings", "threa{"kind": "begun", "what": "b"}',
        '{"kind": ["readings"]}',
        '{"kind": {}}',
        '{"kind": "' + "[" * 100_000,
        '{"kind": "x", "begun": 1, "lists": 2}',
    ],
)
def test_an_invalid_line_does_not_affect_other_results(odd: str) -> None:
    found = MeasuredResults()
    for each in (odd, line("readings", threads=2, node=ALL_NODES, bytes_per_s=2e10)):
        found.store_line(each)
    built = build_calibration(found, VERSIONS, started=0.0, duration_s=0.0)
    assert [reading.threads for reading in built.readings] == [2]
    assert found.values == {}


def test_a_calibration_accepts_more_results_than_it_stores() -> None:
    several = [line("readings", threads=2, node=ALL_NODES, bytes_per_s=2e10)] * 1000
    several += [line("skipped", what=f"kernel {i}", why="y") for i in range(1000)]
    found = results(*several, *[line("begun", what=f"kernel {i}") for i in range(1000)])
    found.skip("GPU", "not done in 4 s")
    built = build_calibration(found, VERSIONS, started=0.0, duration_s=0.0)
    assert (len(built.readings), len(built.skipped), len(found.begun)) == (64, 64, 64)
    assert built.skipped[-1].what == "GPU"


def test_without_a_reading_calibration_fails_with_the_reason() -> None:
    found = MeasuredResults()
    found.skip("memory, all NUMA nodes", "ended with exit code 1: No module named 'torch'")
    with pytest.raises(ContractError, match=r"No module named 'torch'\. Remove the cause"):
        build_calibration(found, VERSIONS, started=0.0, duration_s=0.0)


def test_the_text_fits_a_termination_message_with_any_skipped_measurements() -> None:
    skipped = [line("skipped", what=f"kernel {i}", why="y" * 500) for i in range(20)]
    kernels = [
        line(
            "kernels",
            part="linear",
            scheme="FP8 in blocks",
            dtype="bfloat16",
            kernel="CompressedTensorsLinearMethod",
            threads=128,
            bytes_per_s=1.234e11,
        )
    ]
    built = build_calibration(results(*skipped, *kernels * 15), VERSIONS, started=1e9, duration_s=50.0)
    assert len(built.to_json().encode()) > MAX_TERMINATION_MESSAGE_BYTES
    assert len(fit_text(built).encode()) <= MAX_TERMINATION_MESSAGE_BYTES


def test_measures_each_numa_node_with_its_own_cpus_and_the_kernels_last() -> None:
    cpus = tuple(Cpu(id=number, core=number % 8, node=number % 8 // 4) for number in range(16))
    cores = one_of_each_core(cpus)
    assert [cpu.id for cpu in cores] == list(range(8))
    planned = plan_measurements(cores, Path("/run"))
    assert [(each.commands[0][:2], each.cpus) for each in planned[:3]] == [
        (("memory_reading", "1,2,4,8"), tuple(range(8))),
        (("memory_reading", "1,2,4"), (0, 1, 2, 3)),
        (("memory_reading", "1,2,4"), (4, 5, 6, 7)),
    ]
    assert planned[-1].commands == (("kernel_reading", "8"),)
    assert {"hops", "GPU"} <= {each.what for each in planned}


def test_many_numa_nodes_are_measured_shortly_and_fit_a_termination_message() -> None:
    cores = tuple(Cpu(id=number, core=number, node=number // 8) for number in range(128))
    nodes = [each for each in plan_measurements(cores, Path("/run")) if "NUMA node " in each.what]
    assert [each.commands[0][1:] for each in nodes] == [("2,4,8", str(node)) for node in range(8)]
    readings = [
        line("readings", threads=int(threads), node=int(node), bytes_per_s=1.234e11)
        for _, counts, node in (each.commands[0] for each in nodes)
        for threads in counts.split(",")
    ]
    kernel = {
        "part": "experts", "scheme": "FP8 in blocks", "dtype": "bfloat16",
        "kernel": "CompressedTensorsLinearMethod", "threads": 128, "bytes_per_s": 1.234e11,
        "more_rows": [1.234e11] * 5,
    }  # fmt: skip
    built = build_calibration(
        results(*readings, *[line("kernels", **kernel)] * 14), VERSIONS, started=1e9, duration_s=50.0
    )
    assert len(fit_text(built).encode()) <= MAX_TERMINATION_MESSAGE_BYTES


def test_no_measurement_begins_when_the_time_is_over() -> None:
    found = measure(plan_measurements((Cpu(id=0, core=0),), Path("/run")), 0.0)
    assert {each["why"] for each in found.lists["skipped"]} == {f"not begun within 0 s. {RAISE_LIMIT}"}


@pytest.mark.parametrize(
    ("script", "limit_s", "measured", "skipped"),
    [
        ("", 60, ["a", "b", "c"], []),
        ("if what == 'b': os.abort()", 60, ["a", "c"], [("b", "ended with exit code -6: ")]),
        (
            "if what == 'b': time.sleep(60)",
            5,
            ["a"],
            [
                (
                    "b",
                    f"not done within 5 s. {RAISE_LIMIT}",
                )
            ],
        ),
        (
            "os.abort()",
            60,
            [],
            [
                ("a", "ended with exit code -6: "),
                ("b", "ended with exit code -6: "),
                ("c", "ended with exit code -6: "),
            ],
        ),
    ],
)
def test_a_kernel_that_ends_its_process_affects_no_other_kernel(
    script: str,
    limit_s: float,
    measured: list[str],
    skipped: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = f"""
import json, os, sys, time
def say(**what): print(json.dumps(what), flush=True)
for what in "abc":
    if what in sys.argv[3:]: continue
    say(kind="begun", what=what)
    {script or "pass"}
    say(kind="hops", path="gloo", message_bytes=ord(what), seconds=1)
"""
    monkeypatch.setattr(subprocess, "Popen", functools.partial(_popen_code, subprocess.Popen, code))
    several = Measurement(what="kernels", commands=(("kernel_reading", "2"),), runs_several=True)
    found = measure([several], limit_s)
    assert [chr(hop["message_bytes"]) for hop in found.lists["hops"]] == measured
    assert [(each["what"], each["why"]) for each in found.lists["skipped"]] == skipped


def _popen_code(popen: Any, code: str, command: list[str], **options: Any) -> Any:
    return popen([command[0], "-c", code, *command[3:]], **options)


def test_reads_the_hardware_from_the_files_of_linux() -> None:
    cpus = (Cpu(id=0, core=0), Cpu(id=1, core=0), Cpu(id=2, core=2, node=1))
    machine = observe_hardware(CPUINFO, cpus, one_of_each_core(cpus), "")
    assert (machine.cpu, machine.cpus, machine.cores, machine.numa_nodes) == (
        "Intel(R) Xeon(R) Platinum", 3, 2, 2,
    )  # fmt: skip
    assert machine.instruction_sets == ("avx2", "avx512f", "amx_tile", "amx_bf16")
    arm = observe_hardware(
        "CPU implementer\t: 0x41\nCPU part\t: 0xd4f\nFeatures\t: asimd bf16\n", cpus, cpus[:1], ""
    )
    assert (arm.cpu, arm.instruction_sets) == ("implementer 0x41 part 0xd4f", ("asimd", "bf16"))


@pytest.mark.parametrize(
    ("size", "expected"), [("105M", 210 << 20), ("32K", 192 << 20), ("2G?", 192 << 20), ("999M", 768 << 20)]
)
def test_a_round_reads_twice_the_bytes_of_the_largest_cache(tmp_path: Path, size: str, expected: int) -> None:
    write_caches(tmp_path, 3, {"32K": "3,11", size: "0-15"})
    write_caches(tmp_path, 4, {size: "0-15"})
    assert bytes_beyond_caches([3, 4], tmp_path) == expected


def test_a_round_reads_twice_the_bytes_of_the_largest_caches_of_all_cores(tmp_path: Path) -> None:
    for cpu in range(32):
        first = cpu // 8 * 8
        write_caches(tmp_path, cpu, {"1024K": str(cpu), "96M": f"{first}-{first + 7}"})
    assert bytes_beyond_caches(range(8, 24), tmp_path) == 4 * 96 << 20
    assert bytes_beyond_caches([8, 9, 23], tmp_path) == 4 * 96 << 20
    assert bytes_beyond_caches([8], tmp_path) == 192 << 20
    assert bytes_beyond_caches([99], tmp_path) == 192 << 20


def write_caches(folder: Path, cpu: int, shared_by: dict[str, str]) -> None:
    for index, (size, cpus) in enumerate(shared_by.items()):
        cache = folder / f"cpu{cpu}/cache/index{index}"
        cache.mkdir(parents=True)
        (cache / "size").write_text(size + "\n")
        (cache / "shared_cpu_list").write_text(cpus + "\n")


def test_a_cpu_limit_counts_cores_and_does_not_select_the_first_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = tuple(Cpu(id=number, core=number // 2) for number in range(16))
    monkeypatch.setattr(hardware, "observe_cpus", lambda *_: siblings)
    for quota, cpus, cores in ((None, 16, 8), (4.0, 4, 4), (0.5, 1, 1), (12.0, 12, 8)):
        monkeypatch.setattr(hardware, "cpu_quota", lambda *_, quota=quota: quota)
        assert (len(hardware.usable_cpus()), len(hardware.usable_cores())) == (cpus, cores)


@pytest.mark.parametrize("limit", ["-5", "0", "4.9", "nan", "inf", "1e9", "minute", ""])
def test_refuses_an_invalid_limit(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--limit={limit}"])
    assert caught.value.code == 2
    assert f"must be 5 to 3600 seconds (got {limit!r})" in capsys.readouterr().err
