"""The lines that `python -m vllm_heteroinfer.kernels.build` prints while it compiles."""

from pathlib import Path

import pytest

from vllm_heteroinfer.kernels import build

COMPILER = """#!/bin/sh
[ "$1" != --version ] || { echo compiler 1; exit; }
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


def test_prints_a_line_before_and_after_it_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    arguments = ["--into", str(tmp_path / "into"), "--compiler", str(compiler)]
    assert build.main(arguments) == 0
    printed = capsys.readouterr()
    files = len(list(build.SOURCE.glob("*.cpp")))
    before, after = printed.err.splitlines()
    assert before == f"kernels: compiling {files} files, which can take 6 minutes"
    assert after.startswith("kernels: compiled in ")
    assert build.main(arguments) == 0
    assert capsys.readouterr() == (printed.out, ""), "the second build compiles nothing"
