"""Profiles of all shapes, as the contract reads them from their files; kept, since large ones take seconds.

python -m tests.shapes.profiles            # writes recorded/profiles.json
python -m tests.shapes.profiles --check    # exits 1 if one of them is another
"""

import json
import sys
import tempfile
from functools import cache
from pathlib import Path

from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from tests.shapes.corpus import SHAPES, Shape, write_shape

RECORDED = Path(__file__).parent / "recorded" / "profiles.json"


def read_shape(shape: Shape) -> ModelProfile:
    """Returns the profile of a shape, from files that are written and read."""
    with tempfile.TemporaryDirectory() as folder:
        return read_profile(write_shape(shape, Path(folder)))


@cache
def recorded_profiles() -> dict[str, ModelProfile]:
    """Returns the profiles that are kept, by name."""
    kept = json.loads(RECORDED.read_text())
    return {name: ModelProfile.from_json(json.dumps(value)) for name, value in kept.items()}


def main() -> int:
    """Writes or checks the profiles; returns the exit code."""
    lines = [f"{json.dumps(shape.name)}: {read_shape(shape).to_json()}" for shape in SHAPES]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    if "--check" not in sys.argv:
        RECORDED.parent.mkdir(exist_ok=True)
        RECORDED.write_text(text)
        return 0
    return int(RECORDED.read_text() != text)


if __name__ == "__main__":
    sys.exit(main())
