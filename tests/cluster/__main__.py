"""Runs the command line: `python -m tests.cluster`."""

import sys

from tests.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
