"""Tests a cluster without IPv4: API server, operator, fetch, group and Service, with real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster import debian, tools
from tests.cluster.folders import REPOSITORY
from tests.cluster.running_cluster import ensure_tools
from tests.integration.operator.ipv6_cluster import MODEL, SERVICES
from tests.integration.worker.conftest import make, refer

pytestmark = pytest.mark.timeout(900)

# The new root has its own folder for the model, and its own /run for the state of the cluster. The cluster's
# process ids belong to a namespace that ends with the test. Everything else is the machine's.
ROOT = """
set -eu
root=$1; shift
mount -t tmpfs tmpfs "$root"
for entry in /*; do
  if [ -L "$entry" ]; then cp -P "$entry" "$root$entry"
  elif [ -d "$entry" ]; then mkdir "$root$entry"; [ "$entry" = /run ] || mount --rbind "$entry" "$root$entry"
  fi
done
mkdir -p "$root/model" "$root/run/tmp"
export TMPDIR=/run/tmp
mount -t tmpfs tmpfs "$root/model"
exec chroot "$root" sh -c 'cd "$0" && exec "$@"' "$@"
"""


def test_everything_works_without_ipv4(tmp_path: Path) -> None:
    ensure_tools(tools.CONTROL_PLANE)
    debian.ensure_packages({"nft": debian.NODE_NEEDS["nft"], "ip": debian.NODE_NEEDS["ip"]})
    model = make(tmp_path / "model")
    (tmp_path / "reference").write_text(json.dumps(refer(model)))
    (tmp_path / "root").mkdir()
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    own = ("--net", "--mount", "--pid", "--mount-proc", "--propagation", "private", "--kill-child", "--fork")
    apart = ("unshare", *user, *own)
    root = ("sh", "-c", ROOT, "root", str(tmp_path / "root"), str(REPOSITORY))
    script = (sys.executable, "-m", "tests.integration.operator.ipv6_cluster", str(model), str(tmp_path))
    command = [*apart, *root, *script]
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(REPOSITORY))}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, timeout=800, check=False
    )
    logs = "\n".join(f"--- {log}\n{log.read_text()[-3000:]}" for log in sorted(tmp_path.glob("log-*")))
    assert done.returncode == 0, logs
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["ipv4"] == "", "the operator's namespace"
    assert 0 < seen["fetched"]["bytesDone"] < seen["fetched"]["bytesTotal"], MODEL
    assert seen["tokens"] == seen["expected"]
    assert seen["families"] == ["IPv6"]
    assert seen["service"].startswith(SERVICES.partition("::")[0])
    assert seen["endpoints"] == [[seen["leader"]]]
    (group,) = seen["status"]["groups"]
    assert (group["phase"], group["epoch"] > 0, group.get("failures", [])) == ("Ready", True, [])
    assert "heteroinfer_operator_" in seen["metrics"]
