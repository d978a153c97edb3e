"""Records whether the present test cluster has passed its own tests on this kind of machine.

The tests take minutes, and depend only on tests/cluster, the pinned programs and the machine. So a stamp in
the cache, named by a hash of these, records a run that passed.
"""

import hashlib
import platform
import sys
from pathlib import Path

from tests.cluster.folders import CLUSTER_SOURCE, cache_folder


def digest() -> str:
    """Returns the hash of every file of tests/cluster, the Python and the kernel."""
    made_of = hashlib.sha256(f"{sys.version} {platform.platform()}".encode())
    for file in sorted(CLUSTER_SOURCE.rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts:
            made_of.update(f"\0{file.relative_to(CLUSTER_SOURCE)}\0".encode())
            made_of.update(hashlib.sha256(file.read_bytes()).digest())
    return made_of.hexdigest()[:16]


def is_tested() -> bool:
    """Returns whether the stamp exists."""
    return _stamp().exists()


def record() -> None:
    """Writes the stamp. Call it after a run in which all tests of the test cluster passed."""
    _stamp().parent.mkdir(parents=True, exist_ok=True)
    _stamp().touch()


def _stamp() -> Path:
    return cache_folder() / "tested" / f"cluster-{digest()}"
