"""Files of published Go modules, such as the CRDs of other projects, pinned by version.

The module's contents are checked by Go itself against its checksum database.
"""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.errors import ClusterError

TIMEOUT_S = 300


def module_folder(module: str, version: str) -> Path:
    """Returns the read-only folder of a module's version, fetched by Go if it is not there.

    Raises:
        ClusterError: Go is missing, or the proxy does not have it.
    """
    go = shutil.which("go")
    if go is None:
        raise ClusterError("no `go` on the PATH: install Go 1.25 or newer (https://go.dev/dl)")
    with tempfile.TemporaryDirectory() as outside_of_any_module:
        done = subprocess.run(
            [go, "mod", "download", "-json", f"{module}@{version}"],
            cwd=outside_of_any_module,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        raise ClusterError(f"go mod download {module}@{version}: {done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])
