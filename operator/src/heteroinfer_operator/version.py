"""Which HeteroInfer this is."""

from importlib import metadata


def own_version() -> str:
    """Returns the version of the installed distribution; "none" where it is not installed."""
    try:
        return metadata.version("heteroinfer")
    except metadata.PackageNotFoundError:
        return "none"
