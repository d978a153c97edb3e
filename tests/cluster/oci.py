"""Manages an OCI image layout in the cache, into which images are built and from which containerd imports.

Layers are stored uncompressed, each once, under its digest. An import sends only the layers that the
containerd lacks, so that a change in our own code sends one small layer.
"""

import dataclasses
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

from tests.cluster.errors import ClusterError
from tests.cluster.folders import cache_folder

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
REF_NAME = "org.opencontainers.image.ref.name"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image of the layout. `tag` is its name in the layout, `reference` its name for pods."""

    tag: str
    reference: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A folder with an image layout, as the OCI image specification defines it."""

    folder: Path

    def ensure(self) -> None:
        """Makes the folder an (empty) layout if it is none."""
        (self.folder / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        (self.folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def blob(self, digest: str) -> Path:
        """Returns the file of a digest `sha256:…`."""
        return self.folder / "blobs" / digest.replace(":", "/", 1)

    def manifests(self) -> dict[str, dict[str, Any]]:
        """Returns the descriptor of each image's manifest by its tag."""
        index = self.folder / "index.json"
        entries = json.loads(index.read_text())["manifests"] if index.exists() else []
        return {entry["annotations"][REF_NAME]: entry for entry in entries}

    def digest(self, image: Image) -> str:
        """Returns the digest of the image's manifest.

        Raises:
            ClusterError: the layout has no such image.
        """
        entry = self.manifests().get(image.tag)
        if entry is None:
            raise ClusterError(f"no image {image.tag} in {self.folder}. Run `python -m tests.cluster images`")
        return str(entry["digest"])

    def needs(self, image: Image) -> list[str]:
        """Returns the digests of an image: manifest, configuration, and layers from the bottom up."""
        manifest = self.digest(image)
        parts = json.loads(self.blob(manifest).read_text())
        return [manifest, parts["config"]["digest"], *(layer["digest"] for layer in parts["layers"])]

    def put(self, content: bytes, media_type: str) -> dict[str, Any]:
        """Adds a blob, and returns its descriptor."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.blob(digest).write_bytes(content)
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def put_image(self, tag: str, files: Mapping[str, bytes], config: Mapping[str, object]) -> None:
        """Adds an image with one layer of these files (path -> content). Each file is executable."""
        self.ensure()
        layer = self.put(_tar(files), LAYER)
        settings = {
            "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
            "os": "linux",
            "config": dict(config),
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"]]},
        }
        parts = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self.put(json.dumps(settings).encode(), CONFIG),
            "layers": [layer],
        }
        entry = self.put(json.dumps(parts).encode(), MANIFEST) | {"annotations": {REF_NAME: tag}}
        entries = {**self.manifests(), tag: entry}
        index = {"schemaVersion": 2, "manifests": list(entries.values())}
        (self.folder / "index.json").write_text(json.dumps(index))

    def write_archive(self, target: IO[bytes], images: Collection[Image], present: Collection[str]) -> int:
        """Writes an archive for `ctr images import`: these images without the blobs in `present`.

        Returns the bytes of the written blobs.
        """
        manifests = self.manifests()
        index = {
            "schemaVersion": 2,
            "manifests": [
                {**manifests[image.tag], "annotations": {"io.containerd.image.name": image.reference}}
                for image in images
            ],
        }
        sent = 0
        with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
            _add(archive, "oci-layout", (self.folder / "oci-layout").read_bytes())
            _add(archive, "index.json", json.dumps(index).encode())
            wanted = dict.fromkeys(digest for image in images for digest in self.needs(image))
            for digest in wanted:
                # The archive always has the manifests, because containerd finds all other blobs by them.
                if digest not in present or digest in {entry["digest"] for entry in manifests.values()}:
                    archive.add(self.blob(digest), f"blobs/{digest.replace(':', '/', 1)}")
                    sent += self.blob(digest).stat().st_size
        return sent


def layout() -> Layout:
    """Returns the layout in the cache."""
    return Layout(folder=cache_folder() / "images")


def _tar(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in sorted(files.items()):
            _add(archive, path, content)
    return made.getvalue()


def _add(archive: tarfile.TarFile, path: str, content: bytes) -> None:
    entry = tarfile.TarInfo(path)
    entry.size = len(content)
    entry.mode = 0o755
    archive.addfile(entry, io.BytesIO(content))
