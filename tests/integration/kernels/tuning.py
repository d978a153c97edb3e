"""Sets how the kernels compute, for measurements and tests."""

from vllm_heteroinfer.kernels.library import PATHS, KernelLibrary


def tune(library: KernelLibrary, path: str | None = None, streams: int = -1, prefetch: int = -1) -> None:
    """Sets a path, a number of streams or a prefetch distance. Restores the defaults of missing settings.

    Args:
        path: one of PATHS.
        streams: positions that a thread reads at the same time: 1, 2 or 4.
        prefetch: distance in units of 2 KiB of a stream, or 4 KiB of an FP8 stream.

    Raises:
        ValueError: this CPU or this library does not support the setting.
    """
    index = -1 if path is None else PATHS.index(path)
    if not library.calls.heteroinfer_tune(index, streams, prefetch):
        raise ValueError(
            f"got {path=} {streams=} {prefetch=}, expected a path of {library.paths}, 1, 2 or 4 streams"
        )
