"""The version of this HeteroInfer."""

from importlib import metadata


def own_version() -> str:
    """Returns the version of the installed distribution, or "none" if it is not installed."""
    try:
        return metadata.version("heteroinfer")
    except metadata.PackageNotFoundError:
        return "none"
