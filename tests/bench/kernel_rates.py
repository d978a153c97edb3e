"""How fast a CPU kernel is at this moment: a process that measures it each time it is asked.

A host's rate moves by half within minutes (docs/benchmarks.md): who compares a prediction with a measured
time asks just before, and predicts from the answer.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from heteroinfer_contract.calibration import Calibration, KernelPart, KernelRate
from heteroinfer_contract.model import SchemeName
from tests.integration.worker.groups import WORKER_PYTHON

ENV = {"CUDA_VISIBLE_DEVICES": "-1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}


class KernelRates:
    """The process, as who asks sees it."""

    def __init__(self, process: "subprocess.Popen[str]", calibration: Calibration) -> None:
        self._process, self._calibration = process, calibration

    def now(self, part: KernelPart, scheme: SchemeName) -> Calibration:
        """Returns the calibration with a kernel as it is now; raises RuntimeError if it cannot be run."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([part, scheme]), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"kind": "kernels"'):
                self._calibration = with_kernel(self._calibration, json.loads(line))
                return self._calibration
        raise RuntimeError(f"{part} in {scheme} was not measured: {self._process.wait(10)}")


def with_kernel(calibration: Calibration, found: Mapping[str, Any]) -> Calibration:
    """Returns the calibration with a kernel, as JSON has it, instead of the one that it has."""
    rate = KernelRate(
        part=KernelPart(found["part"]),
        scheme=SchemeName(found["scheme"]),
        dtype=found["dtype"],
        kernel=found["kernel"],
        threads=found["threads"],
        bytes_per_s=found["bytes_per_s"],
        more_rows=tuple(found["more_rows"]),
    )
    others = (
        each
        for each in calibration.kernels
        if (each.part, each.scheme, each.dtype) != (rate.part, rate.scheme, rate.dtype)
    )
    return replace(calibration, kernels=(*others, rate))


@contextmanager
def kernel_rates(calibration: Calibration, threads: int) -> Iterator[KernelRates]:
    """Yields what measures kernels by so many threads, instead of those that a calibration has."""
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
    """Measures what each line of stdin asks for, [part, format], and writes it as `calibrate` does."""
    import torch

    from vllm_heteroinfer.calibration.kernels import KernelBench, measure_ours
    from vllm_heteroinfer.kernels.library import KernelsUnavailableError

    torch.set_num_threads(threads)
    bench = KernelBench(threads)
    for line in sys.stdin:
        part, scheme = KernelPart(json.loads(line)[0]), SchemeName(json.loads(line)[1])
        with torch.inference_mode():
            if (part, scheme) == (KernelPart.LINEAR, SchemeName.NONE):
                with suppress(KernelsUnavailableError):  # as in a group, vLLM's own layers then
                    measure_ours(threads)
                    continue
            bench.measure(part, scheme)


if __name__ == "__main__":
    main(int(sys.argv[1]))
