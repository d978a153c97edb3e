"""Entry of `heteroinfer-worker`, which handles SIGTERM before it loads anything else.

PID 1 has no default handler for SIGTERM: the kernel drops a signal that arrives before the process has a
handler, and the kubelet would wait for the whole grace period. Imports as little as possible. Stdlib only.
"""

import os
import signal
import sys

from heteroinfer_contract.names import EXIT_OK, exit_code_of_signal


def main() -> int:
    """Runs the command line (see `heteroinfer-worker --help`). Returns the exit code."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    # A slow import, so only now.
    from vllm_heteroinfer.launch.cli import main as run

    return run()


def _exit_on_sigterm(*_: object) -> None:
    """Ends a process that has started nothing yet; a supervisor later installs its own handler."""
    is_supervisor = sys.argv[1:2] in ([], ["run"])  # `run` is the default
    os._exit(EXIT_OK if is_supervisor else exit_code_of_signal(signal.SIGTERM))


if __name__ == "__main__":
    sys.exit(main())
