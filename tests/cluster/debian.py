"""Lists the programs that come from Debian, and installs the missing ones."""

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

INSTALL_TIMEOUT_S = 3600  # The installation may run in advance, with idle CPU time only (.ci/idle).

# The required program or file -> its package. The check looks for the program and not for the package, so
# that a program from another package is accepted.
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
    """Returns the packages of those programs and files that this machine lacks, sorted."""

    def there(need: str) -> bool:
        return Path(need).exists() if need.startswith("/") else shutil.which(need) is not None

    return sorted({package for need, package in needs.items() if not there(need)})


def ensure_packages(needs: dict[str, str]) -> None:
    """Installs the missing packages once, without starting any service of a package.

    Raises:
        ClusterError: a program is missing, and this machine is not Debian or the user is not root.
    """
    missing = missing_packages(needs)
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        raise ClusterError(
            f"programs are missing, and there is no apt-get. Install these Debian packages: {names}"
        )
    if os.geteuid() != 0:
        raise ClusterError(
            f"Debian packages are missing. As root, run `apt-get install --no-install-recommends {names}`"
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
        raise ClusterError(f"apt-get installed {names}, but it did not install {' '.join(still)}")


@contextlib.contextmanager
def _services_kept_off() -> Iterator[None]:
    """Prevents package scripts from starting services (`policy-rc.d`) until the context ends.

    An existing `policy-rc.d` stays.
    """
    if POLICY.exists():
        yield
        return
    # invoke-rc.d and deb-systemd-invoke run this script first, and its exit code 101 refuses the start.
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()
