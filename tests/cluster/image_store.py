"""Manages containerd's image store, which is filled once for each set of images and shared by all nodes.

A seed is a containerd root in the cache, with imported and unpacked images. A node gets its own root: its
databases are copies, its snapshots are read-only bind mounts of the seed's, and its content overlays the
seed's. So seconds of copying become milliseconds, and no write of a node reaches the seed.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import oci, processes, tools
from tests.cluster.errors import ClusterError
from tests.cluster.folders import CLUSTER_SOURCE, cache_folder, locked
from tests.cluster.oci import Image, Layout
from tests.cluster.progress import say
from tests.cluster.state import State, all_states

SEED_MARK = "seed"  # the file of a cluster's state folder that names its mounted seed
PAUSE = "localhost/heteroinfer/pause:test"
BOLT = Path("io.containerd.metadata.v1.bolt/meta.db")
SNAPSHOTTER = Path("io.containerd.snapshotter.v1.overlayfs")
CONTENT = Path("io.containerd.content.v1.content")
# Unused on the test node. `opt` would create a folder in the machine's own /opt.
DISABLED_PLUGINS = (
    "io.containerd.internal.v1.opt",
    "io.containerd.nri.v1.nri",
    "io.containerd.snapshotter.v1.blockfile",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.erofs",
    "io.containerd.snapshotter.v1.zfs",
)
CRI_PLUGINS = ("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime")
"""The kubelet's interface, which a store without pods does not need."""
# A garbage collection between an import and its unpacking would delete the old image's layers, which the new
# image is about to use. So a collection runs only on request.
COLLECT_WHEN_ASKED = """
[plugins.'io.containerd.gc.v1.scheduler']
  deletion_threshold = 0
  mutation_threshold = 0
  startup_delay = "24h"
"""
KEEP_UNUSED_S = 600.0


def ensure_pause_image() -> Image:
    """Returns the pause image. Compiles it if the layout has none of this source."""
    source = CLUSTER_SOURCE / "pause.c"
    image = Image(tag=f"pause-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}", reference=PAUSE)
    layout = oci.layout()
    with locked(cache_folder() / "images" / ".lock"):
        if image.tag not in layout.manifests():
            with tempfile.TemporaryDirectory() as folder:
                program = Path(folder) / "pause"
                processes.run(["cc", "-static", "-Os", "-s", "-Wall", "-o", str(program), str(source)])
                layout.put_image(image.tag, {"pause": program.read_bytes()}, {"Entrypoint": ["/pause"]})
    return image


def ensure_seed(images: Sequence[Image]) -> Path:
    """Returns a containerd root in the cache that holds exactly these images, imported and unpacked."""
    layout = oci.layout()
    named = sorted(f"{image.reference} {layout.digest(image)}" for image in images)
    containerd = tools.program_folder(tools.CONTAINERD).parent.name
    key = hashlib.sha256("\n".join([containerd, *named]).encode()).hexdigest()[:16]
    seeds = cache_folder() / "containerd"
    with locked(seeds / ".lock"):
        if not (seeds / key).is_dir():
            _fill_seed(seeds / key, images)
            _remove_unused(seeds)
        os.utime(seeds / key)
    return seeds / key


def _remove_unused(seeds: Path) -> None:
    """Removes seeds that no cluster uses and that were not used recently, because a seed may be large."""
    used = {mark.read_text() for state in all_states() if (mark := state.folder / SEED_MARK).exists()}
    for seed in seeds.iterdir():
        lately = time.time() - seed.stat().st_mtime < KEEP_UNUSED_S
        if seed.is_dir() and not lately and str(seed) not in used:
            shutil.rmtree(seed)


def _fill_seed(seed: Path, images: Sequence[Image]) -> None:
    """Makes a seed with these images, from the nearest seed if there is one."""
    began = time.monotonic()
    draft = seed.with_name(f".{seed.name}")
    shutil.rmtree(draft, ignore_errors=True)  # of a build that was interrupted
    nearest = _nearest_seed(seed.parent, images)
    if nearest is None:
        draft.mkdir()
    else:
        # Layers and contents never change, so the new seed may share them. Databases change.
        processes.run(["cp", "-al", str(nearest), str(draft)], timeout_s=300)
        for database in (BOLT, SNAPSHOTTER / "metadata.db"):
            (draft / database).unlink()
            shutil.copy2(nearest / database, draft / database)
    state = State.claim("image-store", 1)
    try:
        sent = _import_into(state, draft, images)
    finally:
        state.remove()
    draft.rename(seed)
    os.utime(seed)
    say(f"imported {sent / 1e6:.0f} MB of image layers in {time.monotonic() - began:.1f} s")


def _nearest_seed(seeds: Path, images: Sequence[Image]) -> Path | None:
    """Returns the seed that saves the most: bytes of these images minus other bytes.

    None if none saves any.
    """
    layout = oci.layout()
    wanted = {digest.partition(":")[2] for image in images for digest in layout.needs(image)}

    def gain(seed: Path) -> int:
        blobs = (seed / CONTENT / "blobs" / "sha256").iterdir()
        return sum(blob.stat().st_size * (1 if blob.name in wanted else -1) for blob in blobs)

    made = [folder for folder in seeds.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    best = max(made, key=gain, default=None)
    return best if best is not None and gain(best) > 0 else None


def _import_into(state: State, root: Path, images: Sequence[Image]) -> int:
    """Imports the images into a containerd root. Returns the number of sent bytes."""
    socket = state.folder / "containerd.sock"
    config = state.folder / "containerd.toml"
    disabled = [*DISABLED_PLUGINS, *CRI_PLUGINS]
    config.write_text(
        f"version = 4\nroot = '{root}'\nstate = '{state.folder}/run'\ndisabled_plugins = {disabled}\n"
        f"[plugins.'io.containerd.server.v1.grpc']\n  address = '{socket}'\n{COLLECT_WHEN_ASKED}"
    )
    program = str(tools.program(tools.CONTAINERD, "containerd"))
    containerd = processes.spawn(
        ["unshare", "--mount", "--propagation", "private", program, "--config", str(config)],
        mark=state.folder,
        log=state.log("containerd"),
        environment={"TMPDIR": str(state.folder)},
    )
    client = str(tools.program(tools.CONTAINERD, "ctr"))
    ctr = [client, "--address", str(socket), "--namespace", "k8s.io"]
    wait_for_containerd(ctr, containerd, state.log("containerd"))
    sent = import_images(ctr, images)
    wanted = {image.reference for image in images}
    # Removes the other images of the nearest seed, so that no pod finds last week's image here. One more name
    # is removed with them, because a synchronous removal starts the collection, and there may be no other
    # image.
    processes.run([*ctr, "images", "tag", PAUSE, "localhost/heteroinfer/removed:test"])
    for other in set(processes.run([*ctr, "images", "ls", "-q"]).split()) - wanted:
        processes.run([*ctr, "images", "rm", "--sync", other], timeout_s=300)
    processes.stop_gently(containerd)
    return sent


def wait_for_containerd(ctr: Sequence[str], containerd: processes.ProcessIdentity, log: Path) -> None:
    """Waits until containerd answers. `ctr` is the command of its client."""

    def answers() -> bool:
        return subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode == 0

    processes.wait_until("containerd", answers, timeout_s=30, process=containerd, log=log)


def import_images(ctr: Sequence[str], images: Sequence[Image], layout: Layout | None = None) -> int:
    """Imports images that a running containerd lacks. Returns the number of sent bytes.

    By default, the images are in the cache's layout.

    Raises:
        ClusterError: the import failed. The message has ctr's output.
    """
    present = set(processes.run([*ctr, "content", "ls", "-q"]).split())
    with subprocess.Popen(
        [*ctr, "images", "import", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as importing:
        assert importing.stdin is not None
        assert importing.stdout is not None
        try:
            sent = (layout or oci.layout()).write_archive(importing.stdin, images, present)
            importing.stdin.close()
        except BrokenPipeError:
            sent = 0  # the message below contains its output
        output = importing.stdout.read().decode(errors="replace")
    if importing.returncode:
        raise ClusterError(f"ctr images import: exit code {importing.returncode}\n{output}")
    return sent


def build_mount_script(seed: Path, root: Path) -> str:
    """Returns shell commands that give `root` the seed's images. They run in the node's mount namespace."""
    lines = ["set -eu"]
    for database in (BOLT, SNAPSHOTTER / "metadata.db"):
        lines += [f"mkdir -p {(root / database).parent}", f"cp {seed / database} {root / database}"]
    for snapshot in sorted((seed / SNAPSHOTTER / "snapshots").iterdir()):
        mine = root / SNAPSHOTTER / "snapshots" / snapshot.name
        lines += [f"mkdir -p {mine}", f"mount --bind {snapshot} {mine}", f"mount -o remount,bind,ro {mine}"]
    content, upper, work = root / CONTENT, root / "content-upper", root / "content-work"
    lines.append(f"mkdir -p {content} {upper} {work}")
    options = f"lowerdir={seed / CONTENT},upperdir={upper},workdir={work}"
    lines.append(f"mount -t overlay -o {options} overlay {content}")
    return "\n".join(lines)
