"""The kernels against exact products, on every instruction set they have code for.

A path runs on this CPU's own instructions if it has them, and emulated if not.
"""

import itertools
import math
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kernels.instructions import CODED_SETS, SETS, emulated_library, of_this_cpu
from tests.integration.kernels.probe_answers import Asking, asking
from vllm_heteroinfer.kernels import build

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.probe"
PROBE_SETS = SETS
PATHS = tuple(SETS)
SIZES = (1, 2, 31, 32, 33, 64, 100, 257, 1000)
"""Of columns and inputs: around a block, and with a rest."""
NO_AVX512 = "this CPU lacks AVX512F, which the kernels need"
SMALLEST_NORMAL = 2.0**-126


def draw_cases(path: str | None, count: int, seed: int) -> list[dict[str, Any]]:
    """Returns cases of all sizes, row counts, threads and settings, drawn at random."""
    draw = random.Random(seed)
    return [
        {
            "path": path,
            "rows": rows,
            "columns": draw.choice(SIZES),
            "inputs": draw.choice(SIZES),
            "bias": draw.random() < 0.5,
            "threads": draw.choice((1, 2, 3, 5)),
            "streams": draw.choice((-1, 1, 2, 4)),
            "prefetch": draw.choice((-1, 0, 1, 2, 5)),
            "stride": draw.choice((0, 0, 3)),
        }
        for rows in itertools.islice(itertools.cycle([*range(1, 71), 100, 257, 600]), count)
    ]


def check(answer: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    wrong = [(error, case) for error, case in zip(answer["errors"], cases, strict=True) if not error <= 1.0]
    assert not wrong, wrong


@pytest.mark.usefixtures("usable")
def test_kernel_paths_match_the_cpus_instructions() -> None:
    with asking(PROBE) as ask:
        answer = ask("paths")
    assert answer["paths"] == of_this_cpu()
    assert answer["refusal"] == (None if answer["paths"] else NO_AVX512)
    assert answer["coded"] == of_this_cpu(CODED_SETS)


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize("highest", ["avx2", "avx512f", "avx512_bf16", "amx_bf16"])
def test_a_variable_limits_the_instruction_sets(highest: str) -> None:
    """With `avx2`, this CPU behaves like a CPU without AVX-512."""
    allowed = {"avx2", *PATHS[: PATHS.index(highest) + 1 if highest in PATHS else 0]}
    with asking(PROBE, env={"HETEROINFER_MAX_INSTRUCTIONS": highest}) as ask:
        answer = ask("paths")
    assert answer["paths"] == [path for path in of_this_cpu() if path in allowed]
    assert answer["coded"] == [path for path in of_this_cpu(CODED_SETS) if path in allowed]
    assert answer["refusal"] == (None if answer["paths"] else NO_AVX512)


def test_a_cpu_without_supported_instructions_is_refused() -> None:
    with asking(PROBE, str(emulated_library(cpu_has_them=False))) as ask:
        assert ask("paths") == {
            "paths": [],
            "refusal": NO_AVX512,
            "coded": "this CPU lacks AVX2, FMA or F16C, which the kernels need",
        }


def test_the_default_path_matches_this_cpu(kernels: Asking) -> None:
    cases = draw_cases(None, 150, seed=1)
    check(kernels("products", cases=cases), cases)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_matches_the_reference(path: str, on_path: Asking) -> None:
    cases = draw_cases(path, 146, seed=PATHS.index(path))
    check(on_path("products", cases=cases), cases)


@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_the_emulation_matches_this_cpu(scale: float, kernels: Asking, emulation: Asking) -> None:
    """The results are equal to the last bit, so the emulation can test paths that this CPU lacks.

    At 1e-20 nearly all products are denormal.
    """
    cases = [
        {**case, "scale": scale}
        for path in of_this_cpu()
        for case in draw_cases(path, 71, seed=len(path))[:: 5 if scale == 1.0 else 10]
    ]
    assert kernels("bits", cases=cases) == emulation("bits", cases=cases)


def test_layers_of_a_real_model_match_vllm(kernels: Asking) -> None:
    """The layers have Llama's shapes, but are narrower. The head has 32,000 columns, and the router 8."""
    shapes = [(1536, 1024), (1024, 3584), (7168, 1024), (32000, 256), (8, 1024)]
    cases = [
        {"rows": rows, "columns": columns, "inputs": inputs, "bias": False, "threads": threads}
        for (columns, inputs), rows, threads in itertools.product(shapes, (1, 4, 17), (1, 3))
    ]
    check(kernels("products", cases=cases), cases)


@pytest.mark.parametrize("path", PATHS)
def test_infinities_rounding_and_denormals_match_torch(path: str, on_path: Asking) -> None:
    """Each sum has one product, so the result follows IEEE 754.

    Only BF16 instructions treat denormals as zero.
    """
    weights = [math.nan, math.inf, -math.inf, 3.3e38, 1e-40, 2e-38, 1.2e-38, 0.0, 1.00390625, 1.01171875]
    answer = on_path("special", path=path, weights=weights, inputs=[1.0, 0.5, 3.0, -1.0, 1e-39])
    expected, changed = [], 0
    for x, row in zip(answer["inputs"], answer["exact"], strict=True):
        for weight, product in zip(answer["weights"], row, strict=True):
            flushed = (
                flush(product) if flush(x) == x and flush(weight) == weight else flush(x) * flush(weight)
            )
            changed += flushed != product
            expected.append(product if path == "avx512f" else flushed)
    got = [product for row in answer["got"] for product in row]
    assert changed > 10, "the case is about denormals"
    # A sum starts with +0, so that none is -0.
    assert list(map(repr, got)) == [repr(product + 0.0) for product in expected]


def flush(value: float) -> float:
    return 0.0 if abs(value) < SMALLEST_NORMAL else value


def test_arguments_of_wrong_type_or_size_are_refused(kernels: Asking) -> None:
    said = kernels("refused")
    assert set(said) == {"dtype", "inputs", "columns", "bias", "weight"}
    assert "must be bf16" in said["dtype"]
    assert "(4, 32, 32, 2)" in said["inputs"]


def test_the_op_works_under_torch_compile(kernels: Asking) -> None:
    assert all(gap < 0.1 for gap in kernels("compiled")["gaps"])


def test_kernels_use_the_threads_of_torch(usable: list[str]) -> None:
    """The kernels use torch's OpenMP: the process has one OpenMP library, and only torch's threads."""
    with asking(PROBE, *usable) as ask:
        answer = ask("threads", threads=3)
    assert len(answer["openmp"]) == 1, answer
    assert answer["openmp"][0].startswith(answer["torch"])
    assert answer["team"] == 3
    assert answer["after"] == answer["before"]


def test_library_links_no_openmp() -> None:
    needed = subprocess.run(
        ["readelf", "-d", str(build.build())], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "libc.so.6" in needed
    assert "omp" not in needed


def test_builds_once_and_again_for_another_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without optimization, because this test compiles everything twice and uses no kernel."""
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    made = build.build(tmp_path)
    first = made.stat()
    assert build.build(tmp_path).stat().st_mtime_ns == first.st_mtime_ns
    made.with_suffix(".compiler").write_text("another one")
    (tmp_path / "libheteroinfer_cpu-0123456789abcdef.so").write_text("of other sources")
    assert build.build(tmp_path).stat().st_mtime_ns > first.st_mtime_ns
    assert {file.name for file in tmp_path.iterdir()} == {made.name, made.with_suffix(".compiler").name}


def test_build_names_the_missing_compiler(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=r"no-such-compiler not found\. Install it"):
        build.build(tmp_path, "no-such-compiler")
