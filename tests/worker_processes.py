"""Which process of a worker pod is which, seen from outside of it."""

from pathlib import Path

RANK_TITLES = ("vllm_heteroinfer.rank.entry", "VLLM::Worker")
"""While it starts, and once vLLM has named it."""


def is_rank(pid: int) -> bool:
    """Returns whether a process is a rank; by its title: what is forked from one has its environment."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(known in title for known in RANK_TITLES)
