"""The NUMA memory policy of a rank. Runs in a process of its own, because the policy stays set."""

import subprocess
import sys


def policy(*nodes: str) -> tuple[str, str]:
    """Returns the problem that `prefer_nodes` reports, and the policy of the process's first mapping."""
    script = (
        "import sys\n"
        "from vllm_heteroinfer.rank.worker.memory_policy import prefer_nodes\n"
        "print(prefer_nodes([int(node) for node in sys.argv[1:]]))\n"
        "print(open('/proc/self/numa_maps').readline().split()[1])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *nodes], check=True, capture_output=True, text=True, timeout=30
    )
    problem, mapped = done.stdout.splitlines()
    return problem, mapped


def test_one_node_is_preferred_and_several_nodes_are_interleaved() -> None:
    for nodes, expected in ((("0",), "prefer:0"), (("0", "5"), "interleave:0")):
        problem, mapped = policy(*nodes)
        if problem:  # a sandbox without libnuma, or without the right to call it
            assert "libnuma1" in problem or "set_mempolicy" in problem
        else:
            assert mapped.startswith(expected)
