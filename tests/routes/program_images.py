"""Makes images of other projects' programs, which are built here."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.node import NodeCluster
from tests.cluster.oci import Image, Layout

USER = "65532"


def load_images(cluster: NodeCluster, programs: Mapping[str, Sequence[Path]]) -> None:
    """Loads an image for each reference into the node.

    Its root folder has the programs; the first one starts.
    """
    layout = Layout(folder=cluster.state.folder / "program-images")
    images = []
    for number, (reference, files) in enumerate(programs.items()):
        content = {file.name: file for file in files} | libraries(files)
        config = {"User": USER, "Env": ["PATH=/"], "Entrypoint": [f"/{files[0].name}"]}
        read = {path.lstrip("/"): file.read_bytes() for path, file in content.items()}
        layout.put_image(f"program-{number}", read, config)
        images.append(Image(tag=f"program-{number}", reference=reference))
    cluster.load(images, layout)


def libraries(programs: Sequence[Path]) -> dict[str, Path]:
    """Returns the shared libraries of programs, by path. Go programs need none."""
    found = {}
    for program in programs:
        output = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
        for path in re.findall(r"(/lib\S+) \(0x", output):
            found[path] = Path(path)
    return found
