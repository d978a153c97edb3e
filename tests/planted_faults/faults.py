"""Lists small faults of product code, and for each the tests that must fail with it."""

from dataclasses import dataclass
from typing import Final

_WORKER: Final = "worker_image/src/vllm_heteroinfer"
_OPERATOR: Final = "operator/src/heteroinfer_operator"
_GROUPS: Final = "tests/integration/worker"
_KERNELS: Final = "tests/integration/kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """One change that makes the product wrong.

    Attributes:
        name: effect of the fault.
        path: path of the changed file.
        right: text that the file contains exactly once.
        wrong: text that replaces it.
        tests: arguments of pytest. At least one of these tests must fail with the fault, and all pass
            without it.
    """

    name: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS: Final = (
    PlantedFault(
        name="transfer bytes are counted twice",
        path=f"{_WORKER}/rank/step_metrics.py",
        right="self._step.transfer_bytes[direction] += num_bytes",
        wrong="self._step.transfer_bytes[direction] += 2 * num_bytes",
        tests=(f"{_GROUPS}/test_two_stages.py", "-k", "metrics"),
    ),
    PlantedFault(
        name="two halves of decoding requests stay apart for good",
        path=f"{_WORKER}/engine/scheduler.py",
        right="if len(self._decodes_in_flight) >= self._limit:",
        wrong="if len(self._decodes_in_flight) > 9:",
        tests=(f"{_GROUPS}/test_scheduler.py",),
    ),
    PlantedFault(
        name="a group that drains refuses nothing",
        path=f"{_WORKER}/engine/draining.py",
        right="        elif not DRAIN.refuses():",
        wrong="        elif DRAIN is not None:",
        tests=(f"{_GROUPS}/test_two_stages.py", "-k", "running_stream"),
    ),
    PlantedFault(
        name="the drain timeout never comes",
        path=f"{_WORKER}/launch/supervisor.py",
        right="                loop.call_later(timeout_s, self._end_drain)",
        wrong="                loop.call_later(timeout_s + 99, self._end_drain)",
        tests=("tests/integration/launch/test_drain.py", "-k", "ends_at_the_drain_timeout"),
    ),
    PlantedFault(
        name="a rank that sleeps keeps its KV cache",
        path=f"{_WORKER}/rank/worker/sleep.py",
        right="        freed = release_pages(self.model_runner.kv_caches)",
        wrong="        freed = 0",
        tests=(f"{_GROUPS}/test_sleep.py", "-k", "sleep_frees"),
    ),
    PlantedFault(
        name="a level of sleep that drops the weights is taken",
        path=f"{_WORKER}/group/engine_calls.py",
        right="LEVELS = (0, 1)",
        wrong="LEVELS = (0, 1, 2)",
        tests=(f"{_GROUPS}/test_sleep.py", "-k", "sleep_frees"),
    ),
    PlantedFault(
        name="ranks with other block sizes go on",
        path=f"{_WORKER}/group/fingerprint.py",
        right='        "block_size": cache.block_size,\n',
        wrong="",
        tests=(f"{_GROUPS}/test_agreement.py", "-k", "settings_that_differ"),
    ),
    PlantedFault(
        name="ranks with other weights go on",
        path=f"{_WORKER}/group/fingerprint.py",
        right="of_model(Path(model)) if Path(model).is_dir() else model",
        wrong="model",
        tests=(f"{_GROUPS}/test_agreement.py", "-k", "other_model"),
    ),
    PlantedFault(
        name="every tensor-parallel rank goes on with its own sample",
        path=f"{_WORKER}/rank/worker/sampling.py",
        right="    runner._sample = _SharedSamples(runner, bridge, leads=leads)\n",
        wrong="",
        tests=(f"{_GROUPS}/test_tensor.py", "-k", "two_pods_split and shared_memory"),
    ),
    PlantedFault(
        name="collectives of one shape are not kept apart",
        path=f"{_WORKER}/distributed/bridge/header.py",
        right="(*shape, *[0] * (_MAX_DIMS - dims))",
        wrong="(*[0] * _MAX_DIMS,)",
        tests=("tests/unit/bridge",),
    ),
    PlantedFault(
        name="a collective that a rank skipped is not seen",
        path=f"{_WORKER}/distributed/bridge/header.py",
        right="        return self._head + _COUNTS.pack(step, count, history) + self._tail",
        wrong="        return self._head + _COUNTS.pack(0, 0, 0) + self._tail",
        tests=("tests/unit/bridge",),  # the group notices it at its next other collective
    ),
    PlantedFault(
        name="a follower does not look at what it ran",
        path=f"{_WORKER}/rank/worker/following.py",
        right="            if run_tokens != expected:",
        wrong="            if not run_tokens and expected:",
        tests=(f"{_GROUPS}/test_following.py",),
    ),
    PlantedFault(
        name="the load of weights tells each tensor by itself, not their sum",
        path=f"{_WORKER}/rank/worker/weight_loading.py",
        right="                self.done_bytes += tensor.nbytes",
        wrong="                self.done_bytes = tensor.nbytes",
        tests=(f"{_GROUPS}/test_loading.py",),
    ),
    PlantedFault(
        name="threads of a bound rank go where they like",
        path=f"{_WORKER}/launch/environment.py",
        right="        settings[names.ENV_OMP_PLACES] = ",
        wrong='        settings["OMP_NOWHERE"] = ',
        tests=(f"{_GROUPS}/test_platform.py", "-k", "threads_of_a_rank"),
    ),
    PlantedFault(
        name="a killed rank passes for one that lost a peer",
        path=f"{_WORKER}/launch/culprit.py",
        right="            return Weight.OWN_ERROR if -exit_code == Signals.SIGABRT else Weight.OWN_END",
        wrong="            return Weight.LOST_PEER",
        tests=("tests/unit/launch", "tests/integration/launch/test_failures.py", "-k", "killed or culprit"),
    ),
    PlantedFault(
        name="parts of a block that threads share are not added up",
        path=f"{_WORKER}/kernels/source/linear.cpp",
        right="total[i] += c[i];",
        wrong="total[i] += 0 * c[i];",
        tests=(f"{_KERNELS}/test_linear.py", "-k", "default_path"),
    ),
    PlantedFault(
        name="AMX leaves out what is beyond whole units of k",
        path=f"{_WORKER}/kernels/source/linear_amx.cpp",
        right="take = left < kUnit ? left : kUnit;",
        wrong="take = left < kUnit ? 0 : kUnit;",
        tests=(f"{_KERNELS}/test_linear.py", "-k", "every_kernel_path and amx"),
    ),
    PlantedFault(
        name="AVX512-BF16 swaps the two halves of a pair",
        path=f"{_WORKER}/kernels/source/linear_avx512_bf16.cpp",
        right="static_cast<uint32_t>(odd) << 16 | even",
        wrong="static_cast<uint32_t>(even) << 16 | odd",
        tests=(f"{_KERNELS}/test_linear.py", "-k", "every_kernel_path and avx512_bf16"),
    ),
    PlantedFault(
        name="a NaN is stored as infinity",
        path=f"{_WORKER}/kernels/source/linear_avx512.cpp",
        right="_mm512_set1_epi32(0x7fc0)",
        wrong="_mm512_set1_epi32(0x7f80)",
        tests=(f"{_KERNELS}/test_linear.py", "-k", "infinities"),
    ),
    PlantedFault(
        name="denormal FP8 weights are taken for half of what they are",
        path=f"{_WORKER}/kernels/source/linear.h",
        right="for (exponent = 121;",
        wrong="for (exponent = 120;",
        tests=(f"{_KERNELS}/test_experts.py", "-k", "every_fp8_number and avx512_bf16"),
    ),
    PlantedFault(
        name="FP8 ups have the scales of their gates",
        path=f"{_WORKER}/kernels/source/experts.cpp",
        right="row = block % parts * rows + block / parts",
        wrong="row = block / parts",
        tests=(f"{_KERNELS}/test_experts.py", "-k", "every_kernel_path and fp8 and avx512f"),
    ),
    PlantedFault(
        name="a rank of whole experts answers for those of others, too",
        path=f"{_WORKER}/feed_forward/compute.py",
        right="torch.sub(ids, self._own.first, out=",
        wrong="torch.sub(ids, 0, out=",
        tests=(
            "tests/integration/feed_forward/test_groups.py",
            "-k",
            "tokens_of_whole_experts and qwen3_moe",
        ),
    ),
    PlantedFault(
        name="the slowest feed-forward rank has the largest share",
        path="worker_image/src/heteroinfer_contract/column_shares.py",
        right="_RATE_STEPS * rate / most",
        wrong="_RATE_STEPS * min(rates) / rate",
        tests=("tests/unit/contract/test_column_shares.py", "-k", "by_rate"),
    ),
    PlantedFault(
        name="a dashboard asks for a metric that nobody serves",
        path="charts/dashboards/queries.py",
        right='"vllm:num_requests_waiting"',
        wrong='"vllm:num_requests_queueing"',
        tests=("tests/unit/watching",),
    ),
)
