"""A calibration for tests: a machine whose figures are easy to reckon with."""

from dataclasses import replace
from typing import Any

from heteroinfer_contract.calibration import (
    Calibration,
    Hardware,
    Hop,
    HopPath,
    KernelPart,
    KernelRate,
    MemoryReading,
    Skipped,
    Versions,
)
from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.network_measurement import NetworkMeasurement

CPU = "Intel(R) Xeon(R) Processor"
AMX = ("avx512f", "avx512_bf16", "amx_tile", "amx_bf16")


def kernel(part: KernelPart, scheme: SchemeName, gigabytes: float, dtype: str = "bfloat16") -> KernelRate:
    return KernelRate(
        part=part, scheme=scheme, dtype=dtype, kernel="of tests", threads=16, bytes_per_s=gigabytes * 1e9
    )


CALIBRATION = Calibration(
    hardware=Hardware(cpu=CPU, instruction_sets=AMX, cpus=32, cores=16),
    versions=Versions(heteroinfer="0.1.0", vllm="0.32.0", torch="2.13.0"),
    time=1795334400.0,
    duration_s=42.0,
    readings=tuple(MemoryReading(threads=n, bytes_per_s=n * 10e9) for n in (1, 2, 4, 8, 16)),
    kernels=(
        kernel(KernelPart.LINEAR, SchemeName.NONE, 160),
        kernel(KernelPart.LINEAR, SchemeName.NONE, 40, "float32"),
        kernel(KernelPart.LINEAR, SchemeName.AWQ, 320),
        kernel(KernelPart.EXPERTS, SchemeName.NONE, 80),
        kernel(KernelPart.EXPERTS, SchemeName.FP8_BLOCK, 100),
    ),
    operations_per_s=1e12,
    hops=(
        Hop(path=HopPath.GLOO, message_bytes=8192, seconds=1e-4),
        Hop(path=HopPath.GLOO, message_bytes=1 << 20, seconds=1e-3),
        Hop(path=HopPath.EXCHANGE, message_bytes=8192, seconds=5e-6),
    ),
    skipped=(Skipped(what="experts in MXFP4", why="RuntimeError: no"),),
)
"""16 cores that read 10 GB/s each."""


def calibration(**changed: Any) -> Calibration:
    return replace(CALIBRATION, **changed)


NETWORK = NetworkMeasurement(
    version="0.1.0",
    time=1795334400.0,
    round_trip_s=300e-6,
    to_listener_bytes_per_s=1e9,
    to_client_bytes_per_s=4e9,
)
