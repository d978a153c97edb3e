"""Measures the present rate of a CPU kernel, in a process that measures again at each request.

The rate of a host changes by half within seconds (docs/user/benchmarks.md). So to compare a prediction with
measured times, measure the rate between these times, and predict from the mean of the rates.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import harmonic_mean
from typing import Any

from heteroinfer_contract.calibration import Calibration, KernelPart, KernelRate
from heteroinfer_contract.model import SchemeName
from tests.integration.worker.groups import WORKER_PYTHON

ENV = {"CUDA_VISIBLE_DEVICES": "-1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}


class KernelRates:
    """The measuring process, for its caller."""

    def __init__(self, process: "subprocess.Popen[str]", calibration: Calibration) -> None:
        self._process, self.calibration = process, calibration

    def now(self, part: KernelPart, scheme: SchemeName) -> KernelRate:
        """Returns the present rate of a kernel. Raises RuntimeError if the kernel cannot run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([part, scheme]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"kind": "kernels"'):
                return rate_of(json.loads(line))
        raise RuntimeError(f"{part} in {scheme} was not measured: {self._process.wait(10)}")


def rate_of(found: Mapping[str, Any]) -> KernelRate:
    """Converts a kernel's rate from JSON."""
    return KernelRate(
        part=KernelPart(found["part"]),
        scheme=SchemeName(found["scheme"]),
        dtype=found["dtype"],
        kernel=found["kernel"],
        threads=found["threads"],
        bytes_per_s=found["bytes_per_s"],
        more_rows=tuple(found["more_rows"]),
    )


def mean_of(rates: Sequence[KernelRate]) -> KernelRate:
    """Returns the mean of one kernel's rates, averaged by the time for a byte."""
    more = zip(*(rate.more_rows for rate in rates), strict=False)
    return replace(
        rates[0],
        bytes_per_s=harmonic_mean([rate.bytes_per_s for rate in rates]),
        more_rows=tuple(map(harmonic_mean, more)),
    )


def with_kernel(calibration: Calibration, rate: KernelRate) -> Calibration:
    """Returns the calibration with this rate instead of its own rate of the kernel."""
    others = (
        each
        for each in calibration.kernels
        if (each.part, each.scheme, each.dtype) != (rate.part, rate.scheme, rate.dtype)
    )
    return replace(calibration, kernels=(*others, rate))


@contextmanager
def kernel_rates(calibration: Calibration, threads: int) -> Iterator[KernelRates]:
    """Yields a process that measures the kernels with this number of threads."""
    with subprocess.Popen(
        [str(WORKER_PYTHON), "-m", __name__, str(threads)],
        env={**os.environ, **ENV, "OMP_NUM_THREADS": str(threads)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield KernelRates(process, calibration)
        finally:
            process.kill()


def main(threads: int) -> None:
    """Measures each kernel of stdin, [part, format], and prints its rate as `calibrate` does."""
    import torch

    from vllm_heteroinfer.calibration.kernel_reading import KernelBench, measure_our_linear
    from vllm_heteroinfer.kernels.library import KernelsUnavailableError

    torch.set_num_threads(threads)
    bench = KernelBench(threads)
    for line in sys.stdin:
        part, scheme = KernelPart(json.loads(line)[0]), SchemeName(json.loads(line)[1])
        with torch.inference_mode():
            if (part, scheme) == (KernelPart.LINEAR, SchemeName.NONE):
                with suppress(KernelsUnavailableError):  # like vLLM's own layers in a group
                    measure_our_linear(threads)
                    continue
            bench.measure(part, scheme)


if __name__ == "__main__":
    main(int(sys.argv[1]))
