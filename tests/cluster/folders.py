"""Finds the folders of the test cluster: built parts (cache) and running clusters (state)."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.errors import ClusterError

REPOSITORY = Path(__file__).resolve().parents[2]
LEAST_VALUES = REPOSITORY / "charts/heteroinfer/ci/test-values.yaml"
"""The chart's values without a default."""
CLUSTER_SOURCE = Path(__file__).resolve().parent


def cache_folder() -> Path:
    """Returns the folder for tools, images and the image store, which outlives clusters.

    `HETEROINFER_CACHE` names it; otherwise it is `heteroinfer` in the user's cache folder.
    """
    named = os.environ.get("HETEROINFER_CACHE")
    if named:
        return Path(named).resolve()
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "heteroinfer"


def state_root() -> Path:
    """Returns the folder that has one folder for each running cluster. It is private to this user.

    Raises:
        ClusterError: the folder belongs to another user.
    """
    root = Path(tempfile.gettempdir()) / f"heteroinfer-clusters-{os.getuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    if root.is_symlink() or root.stat().st_uid != os.getuid():
        raise ClusterError(
            f"{root}: belongs to another user. Remove the folder, or set TMPDIR to your own folder"
        )
    return root


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which is created if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
