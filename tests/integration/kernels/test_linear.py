"""The kernels against exact products, on every instruction set they have code for."""

import itertools
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kernels.asking import ask
from vllm_heteroinfer.kernels import build

pytestmark = pytest.mark.timeout(300)

PROBE = "tests.integration.kernels.probe"
PATHS = ("avx512f", "avx512_bf16", "amx_bf16")
SIZES = (1, 2, 31, 32, 33, 64, 100, 257, 1000)
"""Of columns and inputs: around a block, and with a rest."""
INSTRUCTIONS = Path(__file__).parent / "emulated_instructions.h"


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


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with the newer instructions emulated, so that each path runs on any AVX-512 CPU."""
    folder = tmp_path_factory.mktemp("emulated")
    for source in build.SOURCE.iterdir():
        # The compiler itself must not use what this CPU lacks.
        (folder / source.name).write_text(source.read_text().replace(",avx512bf16", ""))
    library = folder / "library.so"
    flags = [flag for flag in build.FLAGS if not flag.startswith("-W")]
    command = ["g++", *flags, "-w", "-include", str(INSTRUCTIONS), *map(str, folder.glob("*.cpp"))]
    objects = subprocess.run(
        [*command, "-c"], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert objects.returncode == 0, objects.stderr
    subprocess.run(
        ["g++", *build.LINK_FLAGS, *map(str, folder.glob("*.o")), "-o", str(library)], check=True, timeout=60
    )
    return library


def check(answer: dict[str, Any], cases: list[dict[str, Any]]) -> None:
    wrong = [(error, case) for error, case in zip(answer["errors"], cases, strict=True) if not error <= 1.0]
    assert not wrong, wrong


def test_this_cpu_by_default() -> None:
    cases = draw_cases(None, 150, seed=1)
    answer = ask(PROBE, "products", {"cases": cases})
    check(answer, cases)
    assert "avx512f" in answer["paths"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path(path: str, emulated: Path) -> None:
    cases = draw_cases(path, 146, seed=PATHS.index(path))
    check(ask(PROBE, "products", {"cases": cases, "library": str(emulated)}), cases)


def test_layers_of_a_real_model() -> None:
    """Llama's shapes, a little narrower; a head of 32000 and a router of 8 columns."""
    shapes = [(1536, 1024), (1024, 3584), (7168, 1024), (32000, 256), (8, 1024)]
    cases = [
        {"rows": rows, "columns": columns, "inputs": inputs, "bias": False, "threads": threads}
        for (columns, inputs), rows, threads in itertools.product(shapes, (1, 4, 17), (1, 3))
    ]
    check(ask(PROBE, "products", {"cases": cases}), cases)


def test_infinities_and_rounding_are_torchs() -> None:
    assert ask(PROBE, "special")["equal"]


def test_what_does_not_fit_is_refused() -> None:
    said = ask(PROBE, "refused")
    assert set(said) == {"dtype", "inputs", "columns", "bias", "weight"}
    assert "expected bf16" in said["dtype"]
    assert "(4, 32, 32, 2)" in said["inputs"]


def test_under_torch_compile() -> None:
    assert max(ask(PROBE, "compiled")["gaps"]) < 0.1


def test_one_pool_of_threads() -> None:
    """Ours is torch's OpenMP: one library of it in the process, and no thread more than torch's own."""
    answer = ask(PROBE, "threads", {"threads": 3})
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


def test_build_is_done_once_and_anew_for_another_compiler(tmp_path: Path) -> None:
    made = build.build(tmp_path)
    first = made.stat()
    assert build.build(tmp_path).stat().st_mtime_ns == first.st_mtime_ns
    made.with_suffix(".compiler").write_text("another one")
    (tmp_path / "libheteroinfer_cpu-0123456789abcdef.so").write_text("of other sources")
    assert build.build(tmp_path).stat().st_mtime_ns > first.st_mtime_ns
    assert {file.name for file in tmp_path.iterdir()} == {made.name, made.with_suffix(".compiler").name}


def test_build_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match="no-such-compiler not found; install it"):
        build.build(tmp_path, "no-such-compiler")
