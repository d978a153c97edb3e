"""`heteroinfer-worker` from its first instant: PID 1 can be asked to end before it has loaded anything.

The kernel gives PID 1 no default for SIGTERM: what comes before there is a handler is lost, and the
kubelet would wait for the whole grace period. Stdlib only, and as little of it as can be.
"""

import os
import signal
import sys

from heteroinfer_contract.names import exit_code_of

_STOPPED = 0


def main() -> int:
    """Returns the exit code of the command line; see `heteroinfer-worker --help`."""
    signal.signal(signal.SIGTERM, _leave)
    from vllm_heteroinfer.launch.cli import main as run

    return run()


def _leave(*_: object) -> None:
    """Ends a process that has started nothing; a supervisor has its own handler by the time it has."""
    os._exit(_STOPPED if sys.argv[1:2] in ([], ["run"]) else exit_code_of(signal.SIGTERM))


if __name__ == "__main__":
    sys.exit(main())
