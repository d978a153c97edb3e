"""Shows that the tests catch faults: `python -m tests.planted_faults [WORD...] [--list]`.

The program puts each fault of `faults.py` into a copy of the working tree, and runs the fault's tests there,
in the environments of this tree. If all of them pass, the tests no longer catch the fault, and the exit code
is 1. A row shows how the first test failed, because on a busy machine, a time-out looks like a caught fault.

Not part of `make test`: run it before and after changes of the tests.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.planted_faults.faults import FAULTS, PlantedFault

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENTS = (".venv", ".venv-worker")
COMPILED = "worker_image/src/vllm_heteroinfer/kernels/compiled"
TIMEOUT_S = 900.0


def main(arguments: Sequence[str]) -> int:
    """Tries the faults whose names contain one of the words, or all. Prints a table row for each."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted_faults", description=__doc__)
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="word in the faults' names; default: all faults"
    )
    parser.add_argument("--list", action="store_true", help="only list the faults")
    chosen = parser.parse_args(arguments)
    faults = [
        fault for fault in FAULTS if not chosen.words or any(word in fault.name for word in chosen.words)
    ]
    if chosen.list:
        for fault in faults:
            print(f"{fault.name}: {' '.join(fault.tests)}")
        return 0
    print("| fault | caught by | how the first failed | after |\n|---|---|---|---|", flush=True)
    missed = [fault.name for fault in faults if not try_fault(fault)]
    return 1 if missed else 0


def try_fault(fault: PlantedFault) -> bool:
    """Returns whether the tests catch a fault, and prints its row."""
    with tempfile.TemporaryDirectory(prefix="hi-fault-") as scratch:
        tree = Path(scratch) / "tree"
        copy(tree)
        plant_fault(fault, tree)
        start = time.monotonic()
        failed = run_tests(fault, tree)
    by = ", ".join(failed) or "**nothing**"
    how = next(iter(failed.values()), "")
    print(f"| {fault.name} | {by} | {how} | {time.monotonic() - start:.0f} s |", flush=True)
    return bool(failed)


def copy(tree: Path) -> None:
    """Copies the files that git knows, with the environments of this tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        source, target = REPOSITORY / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    shutil.copytree(REPOSITORY / COMPILED, tree / COMPILED)  # compiled again only if a source has changed
    for name in ENVIRONMENTS:
        (tree / name).symlink_to(REPOSITORY / name)


def plant_fault(fault: PlantedFault, tree: Path) -> None:
    """Changes one file of a tree.

    Raises:
        ValueError: the file does not contain the text exactly once.
    """
    path = tree / fault.path
    text = path.read_text()
    if text.count(fault.right) != 1:
        raise ValueError(
            f"{fault.path} has {text.count(fault.right)} times {fault.right!r}, expected once. Mend "
            f"'{fault.name}' in tests/planted_faults/faults.py"
        )
    path.write_text(text.replace(fault.right, fault.wrong))


def run_tests(fault: PlantedFault, tree: Path) -> dict[str, str]:
    """Runs the fault's tests in a tree. Returns the failed tests and pytest's short reason.

    Raises:
        RuntimeError: pytest could not run the tests, or they did not end.
    """
    python = str(tree / ".venv/bin/python")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree / "operator/src"), str(tree / "worker_image/src")]),
        "COLUMNS": "250",  # otherwise the summary has no reasons
    }
    subprocess.run(
        [python, "-m", "vllm_heteroinfer.kernels.build"],
        cwd=tree,
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    done = subprocess.run(
        [python, "-m", "pytest", "-q", *fault.tests],
        cwd=tree, env=env, check=False, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"{fault.name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}"
        )
    failed = {}
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            test, _, why = line.partition(" - ")
            how = "in a fixture: " if line.startswith("ERROR ") else ""
            failed[test.rsplit("::", 1)[-1]] = how + why[:100].replace("|", "/")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
