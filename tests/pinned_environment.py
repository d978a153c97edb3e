"""Makes a Python environment for programs whose pinned packages conflict with ours."""

import hashlib
import shutil
import sys
from pathlib import Path

from tests.cluster import processes
from tests.cluster.folders import cache_folder, locked
from tests.cluster.progress import say


def ensure_environment(name: str, pins: Path) -> Path:
    """Installs the pinned packages, once for each list of pins. Returns the folder of their programs."""
    folder = cache_folder() / name / hashlib.sha256(pins.read_bytes()).hexdigest()[:16]
    done = folder / ".done"
    with locked(cache_folder() / name / ".lock"):
        if not done.exists():
            say(f"installing {pins.parent.name} (once) ...")
            shutil.rmtree(folder, ignore_errors=True)
            uv = str(Path(sys.executable).parent / "uv")
            processes.run([uv, "venv", "--quiet", "--python", sys.executable, str(folder)], timeout_s=120)
            install = [uv, "pip", "install", "--quiet", "--no-deps", "--python", str(folder / "bin/python")]
            processes.run([*install, "-r", str(pins)], timeout_s=600)
            done.touch()
    return folder / "bin"
