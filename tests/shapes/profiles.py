"""Stores the profiles of all shapes, because the contract needs seconds to read a large model's profile.

The first command writes recorded/profiles.json and recorded/profiles_2026.json; the second one exits 1 if one
of them is not current:

    python -m tests.shapes.profiles
    python -m tests.shapes.profiles --check
"""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from tests.shapes.corpus import SHAPES, Shape, write_shape
from tests.shapes.corpus_2026 import SHAPES_2026

_FOLDER = Path(__file__).parent / "recorded"
KEPT = {_FOLDER / "profiles.json": SHAPES, _FOLDER / "profiles_2026.json": SHAPES_2026}


def read_shape(shape: Shape) -> ModelProfile:
    """Writes a shape's files, reads them, and returns the profile."""
    with tempfile.TemporaryDirectory() as folder:
        return read_profile(write_shape(shape, Path(folder)))


@cache
def recorded_profiles(name: str = "profiles.json") -> dict[str, ModelProfile]:
    """Returns the profiles in a file, by the shape's name."""
    kept = json.loads((_FOLDER / name).read_text())
    return {name: ModelProfile.from_json(json.dumps(value)) for name, value in kept.items()}


def main() -> int:
    """Writes or checks the profiles, and returns the exit code."""
    for path, shapes in KEPT.items():
        lines = [f"{json.dumps(shape.name)}: {read_shape(shape).to_json()}" for shape in shapes]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        if "--check" in sys.argv and path.read_text() != text:
            return 1
        if "--check" not in sys.argv:
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
