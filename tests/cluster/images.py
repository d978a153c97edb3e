"""Builds the product's images from the Dockerfile, with buildah and a base by debootstrap.

Only package indexes are downloaded, nothing from an image registry. The name of an image is the hash of all
its inputs: the Dockerfile, the files that .dockerignore allows, and the base. So an unchanged tree builds
nothing, and a changed tree builds from the first changed layer on. `HETEROINFER_BASE_IMAGE` uses a base from
a registry instead. `HETEROINFER_TORCH_INDEX` is the Dockerfile's TORCH_INDEX.
"""

import contextlib
import hashlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.cluster import debian, oci, processes
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY, cache_folder, locked
from tests.cluster.oci import Image
from tests.cluster.progress import say

TARGETS = ("operator", "worker-cpu")
SUITE = "bookworm"  # its Python is 3.11, which the Dockerfile requires
BASE_PACKAGES = ("python3", "python3-venv", "python3-dev", "ca-certificates")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# The mounts of a command end with it, however it ends.
PRIVATE_MOUNTS = ("unshare", "--mount", "--propagation", "private")
BUILDAH_LIMIT = 32768  # its default for processes, set before our own value
BUILD_TIMEOUT_S = 3600  # of a command: builds may be limited to idle CPU time (.ci/idle)
RECIPE = "1"  # raise this number when the steps of a build change


def context_files() -> list[Path]:
    """Returns the files that the build gets, sorted. .dockerignore lists the files that are allowed."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    let_in = [REPOSITORY / line[1:] for line in lines if line.startswith("!")]
    found = {
        file for root in let_in for file in ([root] if root.is_file() else root.rglob("*")) if file.is_file()
    }
    left_out = {line.removeprefix("**/") for line in lines if line.startswith("**/")}
    return sorted(file for file in found if not left_out & set(file.parts))


def ensure_images(targets: Sequence[str] = TARGETS) -> list[Image]:
    """Returns the images of these targets of the Dockerfile. Builds those that the cache lacks.

    Raises:
        ClusterError: a tool is missing, or the build failed. Its output went to stderr.
    """
    debian.ensure_packages(debian.IMAGE_NEEDS)
    with locked(cache_folder() / "images" / ".lock"):
        base = os.environ.get("HETEROINFER_BASE_IMAGE") or f"localhost/heteroinfer/base:{_base_key()}"
        wanted = [_image(target, base) for target in targets]
        layout = oci.layout()
        layout.ensure()
        missing = [image for image in wanted if image.tag not in layout.manifests()]
        if missing:
            with _buildah() as buildah:
                if not os.environ.get("HETEROINFER_BASE_IMAGE"):
                    _ensure_base(buildah, base)
                for image in missing:
                    _build(buildah, image, base)
    return wanted


def reference_of(target: str) -> str:
    """Returns the name by which a pod refers to the image of a target."""
    return f"localhost/heteroinfer/{target}:test"


def _image(target: str, base: str) -> Image:
    made_of = hashlib.sha256(f"{RECIPE} {base} {_torch_index()}".encode())
    for file in (REPOSITORY / "Dockerfile", *context_files()):
        made_of.update(str(file.relative_to(REPOSITORY)).encode())
        made_of.update(hashlib.sha256(file.read_bytes()).digest())
    return Image(tag=f"{target}-{made_of.hexdigest()[:16]}", reference=reference_of(target))


def _torch_index() -> str:
    return os.environ.get("HETEROINFER_TORCH_INDEX", "")


@contextlib.contextmanager
def _buildah() -> Iterator[list[str]]:
    """Yields the command of buildah on our own store, after removing leftovers of a killed build."""
    if os.geteuid() != 0:
        raise ClusterError("building images needs root, for debootstrap and mounts. Run it as root")
    buildah = [
        *PRIVATE_MOUNTS,
        *("buildah", "--root", str(_store() / "root"), "--runroot", str(_store() / "run")),
        *("--storage-driver", "overlay"),
    ]
    shutil.rmtree(_store() / "run", ignore_errors=True)  # its record of mounts that no longer exist
    processes.run([*buildah, "rm", "--all"], timeout_s=BUILD_TIMEOUT_S)
    yield buildah


def _store() -> Path:
    return cache_folder() / "buildah"


def _base_key() -> str:
    parts = (RECIPE, SUITE, *BASE_PACKAGES, hashlib.sha256(_certificates()).hexdigest())
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]


def _certificates() -> bytes:
    return CERTIFICATES.read_bytes() if CERTIFICATES.exists() else b""


def _ensure_base(buildah: list[str], base: str) -> None:
    """Makes the base: Debian with Python, and this machine's certificate authorities.

    A machine behind a TLS proxy trusts the proxy's CA, so programs in a build on this machine must, too. This
    belongs to the local base, never to the Dockerfile.
    """
    if (
        subprocess.run(
            [*buildah, "inspect", "--type", "image", base], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return
    began = time.monotonic()
    say("making a base image with debootstrap (about a minute, once) …")
    root = _store() / "base"
    shutil.rmtree(root, ignore_errors=True)  # of a start that was interrupted
    include = f"--include={','.join(BASE_PACKAGES)}"
    debootstrap = ["debootstrap", "--variant=minbase", include, SUITE, str(root)]
    processes.run([*PRIVATE_MOUNTS, *debootstrap], timeout_s=BUILD_TIMEOUT_S)
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    if _certificates():
        (root / CERTIFICATES.relative_to("/")).write_bytes(_certificates())
    container = processes.run([*buildah, "from", "scratch"], timeout_s=BUILD_TIMEOUT_S).strip()
    processes.run([*buildah, "add", container, str(root), "/"], timeout_s=BUILD_TIMEOUT_S)
    settings = [f"--env={name}={CERTIFICATES}" for name in ("SSL_CERT_FILE", "PIP_CERT")]
    processes.run([*buildah, "config", *settings, "--cmd", "/bin/sh", container], timeout_s=BUILD_TIMEOUT_S)
    processes.run([*buildah, "commit", "--rm", container, base], timeout_s=BUILD_TIMEOUT_S)
    shutil.rmtree(root)
    say(f"made the base in {time.monotonic() - began:.0f} s")


def _build(buildah: list[str], image: Image, base: str) -> None:
    """Builds an image with buildah, and copies it into the layout."""
    began = time.monotonic()
    target = image.reference.rpartition("/")[2].removesuffix(":test")
    say(f"building image {target} …")
    limits = (("nofile", resource.RLIMIT_NOFILE), ("nproc", resource.RLIMIT_NPROC))
    command = [
        *buildah,
        *("build", "--layers", "--isolation=chroot", "--network=host", "--target", target),
        f"--pull={'missing' if os.environ.get('HETEROINFER_BASE_IMAGE') else 'never'}",
        # Without CAP_SYS_RESOURCE, no limit can be raised, but buildah's defaults would raise limits.
        *(f"--ulimit={name}={_limit(kind)}:{_limit(kind)}" for name, kind in limits),
        *("--build-arg", f"BASE={base}", "--build-arg", f"TORCH_INDEX={_torch_index()}"),
        *("--tag", image.reference, "--file", str(REPOSITORY / "Dockerfile"), str(REPOSITORY)),
    ]
    built = subprocess.run(["nice", *command], stdout=2, stdin=subprocess.DEVNULL, check=False)
    if built.returncode:
        raise ClusterError(
            f"building image {target}: buildah ended with exit code {built.returncode}. Read its output above"
        )
    seconds = time.monotonic() - began
    # skopeo instead of `buildah push`, which compresses everything, for a minute and a half.
    store = f"[overlay@{_store() / 'root'}+{_store() / 'run'}]"
    copy = ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
    target_layout = f"oci:{oci.layout().folder}:{image.tag}"
    processes.run(
        [*PRIVATE_MOUNTS, *copy, f"containers-storage:{store}{image.reference}", target_layout],
        timeout_s=BUILD_TIMEOUT_S,
    )
    say(f"built {target} in {seconds:.0f} s, kept it in {time.monotonic() - began - seconds:.0f} s")


def _limit(kind: int) -> int:
    """Returns a limit that buildah may set: the hard limit, or buildah's default if it is lower."""
    hard = resource.getrlimit(kind)[1]
    return BUILDAH_LIMIT if hard == resource.RLIM_INFINITY else min(hard, BUILDAH_LIMIT)
