"""Tells which process of a worker pod is a rank, from outside of the pod."""

from pathlib import Path

RANK_TITLES = ("vllm_heteroinfer.rank.entry", "VLLM::Worker")
"""Titles of a rank: during its start, and after vLLM has named it."""


def is_rank(pid: int) -> bool:
    """Returns whether a process is a rank, by its title.

    Its environment proves nothing, because forks inherit it.
    """
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(known in title for known in RANK_TITLES)
