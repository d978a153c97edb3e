"""Measures a network of 100 Mbit/s between two network namespaces.

`python -m tests.integration.calibration.limited_network PREFIX` prints the client's output. Run it in a
network namespace of its own. The rate is limited only for the packets to the listener.
"""

import subprocess
import sys

from tests.integration.worker.pod_networks import pair, pod_namespace, run

TIMEOUT_S = 60.0
NETWORK = (sys.executable, "-m", "vllm_heteroinfer.launch.entry", "network")


def main(prefix: str) -> None:
    """Listens in another namespace, and measures from this one."""
    with pod_namespace(0, (prefix,)) as inside:
        listener = subprocess.Popen([*inside, *NETWORK, "--listen", "--wait", "60"])
        try:
            # 100mbit/s: tbf needs a burst of at least a packet of the device, which may join packets.
            limit = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "400ms")
            run("tc", "qdisc", "add", "dev", "pod0", "root", *limit)
            _, address, _ = pair(prefix, 0)
            command = [*NETWORK, "--connect", address, "--wait", "30"]
            subprocess.run(command, check=True, timeout=TIMEOUT_S)
            assert listener.wait(TIMEOUT_S) == 0
        finally:
            listener.kill()
            listener.wait()


if __name__ == "__main__":
    main(sys.argv[1])
