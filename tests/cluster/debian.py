"""The programs that come from Debian: which, why, and their installation where they are missing."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.errors import ClusterError
from tests.cluster.processes import run
from tests.cluster.progress import say

CNI_FOLDER = Path("/usr/lib/cni")
POLICY = Path("/usr/sbin/policy-rc.d")

INSTALL_TIMEOUT_S = 3600  # it may run ahead of what needs it, on the time that others leave over (.ci/idle)

# What must be there -> the package that has it. Looked for by program and not by package, so
# that another packaging of the same program is left alone.
CONTROL_PLANE_NEEDS = {"openssl": "openssl"}
NODE_NEEDS = {
    "runc": "runc",
    "nft": "nftables",  # kube-proxy's nftables mode and the NetworkPolicy enforcer
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "cc": "gcc",  # compiles the pause image's only file
    str(CNI_FOLDER / "ptp"): "containernetworking-plugins",
    "/usr/include/stdlib.h": "libc6-dev",
}
IMAGE_NEEDS = {"buildah": "buildah", "debootstrap": "debootstrap", "skopeo": "skopeo", "runc": "runc"}


def missing_packages(needs: dict[str, str]) -> list[str]:
    """Returns the packages of those programs and files that are not on this machine, sorted."""

    def there(need: str) -> bool:
        return Path(need).exists() if need.startswith("/") else shutil.which(need) is not None

    return sorted({package for need, package in needs.items() if not there(need)})


def ensure_packages(needs: dict[str, str]) -> None:
    """Installs what is missing, once, without starting any service that a package brings.

    Raises:
        ClusterError: something is missing and this is not Debian, or we are not root.
    """
    missing = missing_packages(needs)
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"missing programs, and no apt-get to install them: install what Debian calls {names}"
        )
    if os.geteuid() != 0:
        raise ClusterError(
            f"missing Debian packages: as root, run `apt-get install --no-install-recommends {names}`"
        )
    say(f"installing Debian packages: {names}")
    quiet = {"DEBIAN_FRONTEND": "noninteractive"}
    with _services_kept_off():
        run(["apt-get", "update", "-qq"], timeout_s=INSTALL_TIMEOUT_S, environment=quiet)
        run(
            ["apt-get", "install", "--no-install-recommends", "-y", "-qq", *missing],
            timeout_s=INSTALL_TIMEOUT_S,
            environment=quiet,
        )
    still = missing_packages(needs)
    if still:
        raise ClusterError(
            f"apt-get installed {names}, yet something of {' '.join(still)} is still not found"
        )


@contextlib.contextmanager
def _services_kept_off() -> Iterator[None]:
    """While entered, `policy-rc.d` forbids package scripts to start anything; one that is there stays."""
    if POLICY.exists():
        yield
        return
    # A script that refuses (101) is what invoke-rc.d and deb-systemd-invoke ask first.
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
