"""Builds the docs as a site, and fails at a broken link: python -m tests.docs_site."""

import os
import subprocess
import sys
from pathlib import Path

from tests.cluster.folders import REPOSITORY
from tests.pinned_environment import ensure_environment


def main() -> int:
    """Runs mkdocs, and returns its exit code."""
    programs = ensure_environment("docs-site", Path(__file__).parent / "requirements.txt")
    command = [str(programs / "mkdocs"), "build", "--strict", "--config-file", "mkdocs.yml"]
    # mkdocs-material prints advice about MkDocs 2 unless this is set.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    for line in built.stderr.splitlines():
        if built.returncode and not line.startswith("INFO"):
            print(line)
    return built.returncode


if __name__ == "__main__":
    sys.exit(main())
