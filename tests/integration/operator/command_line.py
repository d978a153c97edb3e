"""The command line as a user runs it, with the API server of the tests."""

import os
import subprocess
import sys
from pathlib import Path


def heteroinfer(kubeconfig: Path, *arguments: str) -> tuple[int, str, str]:
    """Runs the command as a user does; returns exit code, output and errors."""
    done = subprocess.run(
        [sys.executable, "-m", "heteroinfer_operator.cli", *arguments],
        env={
            "KUBECONFIG": str(kubeconfig),
            "NO_PROXY": "*",
            "HOME": str(kubeconfig.parent),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def reported(kubeconfig: Path, *arguments: str) -> str:
    code, out, errors = heteroinfer(kubeconfig, *arguments)
    assert (code, errors) == (0, ""), errors
    return out
