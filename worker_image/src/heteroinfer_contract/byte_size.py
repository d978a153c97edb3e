"""A size in bytes as every message, log line and table says it. Stdlib only; pure."""


def format_bytes(size: float) -> str:
    """Returns a size for people: GiB with two digits, MiB below 0.1 GiB."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 2**30 // 10 else f"{size / 2**20:.1f} MiB"
