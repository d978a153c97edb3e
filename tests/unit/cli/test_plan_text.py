"""The figures, details and choices that `heteroinfer plan` prints."""

import re
from dataclasses import replace

import pytest

from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.commands.plan_choices import describe_choices, describe_waste
from heteroinfer_operator.commands.plan_details import describe_kv_cache, describe_memory, describe_model
from heteroinfer_operator.commands.plan_figures import Figures, full_length_requests
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.commands.plan_words import count, duration
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.concurrency import num_kv_blocks
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.prediction import StepLoad, forecast, forecast_first_token, predict
from tests.shapes.page import ask
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import GIB, MIB, cpu, gpu, plan, profile, spec
from tests.unit.planning.test_feed_forward import feed_forward, mixture

MIXED = (gpu(deviceMemory="24Gi"), cpu(memory="64Gi"))
LARGE = profile(num_layers=96)
MORE = "--explain (bytes, rates, KV cache), --choices (fewer pods, less memory, faster, more concurrency)"


def lines(planned: Planned, word: str) -> list[str]:
    return [line for line in describe_choices(planned) if line.startswith(f"{word}: ")]


def kv_cache(planned: Planned) -> dict[str, str]:
    return dict(describe_kv_cache(planned, Figures.of(planned)))


def model(*arguments: object) -> dict[str, str]:
    return dict(describe_model(*arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["Qwen3-32B", "gpt-oss-120b", "DeepSeek-V3", "Mistral-Small-3.2-24B-Instruct"]
)
def test_bytes_of_a_rank_add_up(name: str) -> None:
    group = "B" if name == "DeepSeek-V3" else "A"
    planned = ask(recorded_profiles()[name], group)
    said = describe_memory(planned)
    assert len(said) == planned.plan.pipeline_parallel_size
    for line, rank in zip(said, planned.plan.ranks, strict=True):
        parts, whole = line.split(": ")[1].split(" = ")
        sizes = re.findall(r"([0-9.]+) GiB", parts)
        assert sum(map(float, sizes)) == pytest.approx(float(whole.split()[0]), abs=0.03)
        assert whole.startswith(format_bytes(rank.weight_bytes + rank.kv_cache_bytes))
        assert f"role {rank.role}: {rank.num_layers} layers" in line
        at_an_end = rank.stage in (0, len(said) - 1)
        assert (" + 2 copies of " in line) is (rank.role == "cpu" and at_an_end)


def test_names_embedding_and_head_of_a_stage() -> None:
    said = describe_memory(ask(recorded_profiles()["DeepSeek-V3"], "B"))
    assert [re.findall(r" layers [0-9.]+ GiB(?: packed)? \+ (.*?) [0-9.]+ GiB", line) for line in said] == [
        ["2 copies of embedding"],
        ["KV cache"],
        ["head"],
    ]
    first, last = describe_memory(
        ask(recorded_profiles()["Qwen3-32B"], "A", parallelism={"stageOrder": "AsListed"})
    )
    assert " + embedding 1.45 GiB + " in first
    assert " + 2 copies of head 2.90 GiB + " in last
    tied = replace(profile(), tied_head=True, head_bytes=0)
    _, last = describe_memory(plan(spec(cpu(memory="64Gi"), gpu(deviceMemory="24Gi")), tied))
    assert " + embedding as the head " in last
    (both,) = describe_memory(plan(spec(gpu(deviceMemory="24Gi")), tied))
    assert " + embedding 0.98 GiB + " in both


def test_stages_with_equal_memory_share_a_line() -> None:
    for pods, stages in ((6, "1 to 4"), (4, "1, 2")):
        planned = plan(spec(gpu(pods=pods, deviceMemory="80Gi")), LARGE)
        layers = f"{96 // pods} layers {format_bytes(96 // pods * 416 * MIB)}"
        first, between, last = describe_memory(planned)
        assert first.startswith(f"stage 0, role gpu: {layers} + embedding ")
        assert between.startswith(f"stages {stages}, role gpu: {layers} + KV cache ")
        assert last.startswith(f"stage {pods - 1}, role gpu: {layers} + head ")


def test_prints_the_limits_of_requests_and_of_their_length() -> None:
    tight = plan(spec(*MIXED), LARGE)
    found = kv_cache(tight)
    limiting = tight.plan.ranks[tight.limiting_rank or 0]
    limit = f"the memory of rank {limiting.rank} (role {limiting.role})"
    full = int(full_length_requests(tight))
    assert full == (num_kv_blocks(tight) - 1) // 256
    each = "request of 8,192 tokens" if full == 1 else "requests of 8,192 tokens each"
    together = "at the same time"
    both = f" requests of 1,024 tokens each {together}, or {full} {each} {together}. Limit: {limit}. "
    assert both in found["requests"]
    assert found["size"].startswith(f"{num_kv_blocks(tight)} blocks of 32 tokens on every rank, about ")
    default = "8,192 tokens (the default of engine.maxModelLen)"
    assert found["length"].startswith(f"{default}. The model supports 131,072; {limit} allows ")
    # A request of the length that memory allows is planned with the same layers; a longer one is not.
    held = int(found["length"].rpartition(" ")[2].replace(",", ""))
    layers = [rank.num_layers for rank in tight.plan.ranks]
    roles = (cpu(memory="64Gi", layers=layers[:1]), gpu(deviceMemory="24Gi", layers=layers[1:]))
    assert plan(spec(*roles, engine={"maxModelLen": held}), LARGE).plan.engine.max_model_len == held
    with pytest.raises(PlanError, match="missing"):
        plan(spec(*roles, engine={"maxModelLen": held + 32}), LARGE)


def test_limits_of_requests_with_plenty_of_memory_and_with_unknown_memory() -> None:
    found = kv_cache(plan(spec(gpu(deviceMemory="141Gi"), engine={"maxModelLen": 1024})))
    assert found["requests"].startswith(
        "256 requests of 1,024 tokens each at the same time. Limit: 256 requests in a step. One request of "
    )
    assert found["length"] == (
        "1,024 tokens (engine.maxModelLen). The model supports 131,072; "
        "the memory of rank 0 (role gpu) allows 131,072"
    )
    found = kv_cache(plan(spec(gpu()), replace(profile(), max_position_embeddings=4096)))
    limit = "an assumed KV cache, because the memory of role gpu is unknown"
    assert found["requests"].startswith(
        "16 requests of 1,024 tokens each at the same time, "
        "or 4 requests of 4,096 tokens each at the same time. "
        f"Limit: {limit}. "
    )
    assert found["length"] == (
        "4,096 tokens (the default of engine.maxModelLen), the most that the model supports"
    )
    found = kv_cache(plan(spec(gpu(deviceMemory="24Gi")), replace(profile(), num_kv_heads=1)))
    assert "Limits: 256 requests in a step; the memory of rank 0 (role gpu). " in found["requests"]


def test_figures_are_those_of_predictions_and_memory() -> None:
    planned = plan(spec(*MIXED), LARGE)
    figures = Figures.of(planned)
    assert figures.step == predict(planned.plan, planned.rates)
    assert planned.plan.ranks[figures.slowest].role == "cpu"
    assert figures.slowest_for_prompt == figures.slowest
    assert figures.first_token == forecast_first_token(planned.plan, planned.sizes, planned.rates, 1024)
    load = StepLoad(requests=figures.short_requests, context=1024)
    step_s = forecast(planned.plan, planned.sizes, planned.rates, load).step_s
    assert figures.tokens_per_s == pytest.approx(figures.short_requests / step_s)
    assert 1 <= figures.full_requests < figures.short_requests


def test_verdict_and_table_come_before_details() -> None:
    planned = plan(spec(*MIXED), LARGE)
    figures = Figures.of(planned)
    text = describe_plan(planned, "llama", ShownParts())
    verdict, speed, together, first, requests, _, heading, cpu_row, gpu_row, *rest = text.splitlines()
    assert verdict == "llama fits: 2 pods (1 CPU, 1 GPU), mode Pipeline"
    assert speed.startswith(f"  speed        {duration(figures.step.step_s)} (")
    assert "tokens/s for one request. Limit: rank 0 (role cpu), " in speed
    load = f"{figures.short_requests} requests of 1,024 tokens"
    assert together.endswith(f" tokens/s for {load} at the same time")
    assert first.startswith("  first token  ")
    assert first.endswith(" after a prompt of 1,024 tokens. Limit: rank 0 (role cpu)")
    assert requests.startswith("  requests     ")
    assert heading.split() == ["RANK", "ROLE", "DEVICE", "LAYERS", "MEMORY", "STEP"]
    assert re.fullmatch(r"0 +cpu +CPU +\d+ \(0-\d+\) +[0-9.]+ of 62.00 GiB \(64Gi\) .* <- slowest", cpu_row)
    assert re.fullmatch(r"1 +gpu +GPU +\d+ \(\d+-95\) +[0-9.]+ of 21.60 GiB \(24Gi\) +[0-9.]+ ms", gpu_row)
    assert rest == ["", f"More: {MORE}, -o yaml"]
    full = describe_plan(planned, "llama", ShownParts(explain=True, choices=True))
    assert full.startswith(text.partition("\nMore: ")[0])
    headings = [line for line in full.splitlines() if line.isupper() and not line.startswith("RANK")]
    assert headings == [
        "MODEL",
        "MEMORY OF EACH RANK",
        "KV CACHE",
        "PREDICTED TIMES",
        "RATES",
        "SETTINGS OF ALL RANKS",
        "CHOICES",
    ]
    assert "More: " not in full


def test_the_table_shows_layers_that_are_spread_over_the_model() -> None:
    def layers_of(moved: int) -> str:
        role = feed_forward(own={"layers": moved}, device_memory="80Gi")
        text = describe_plan(plan(role, mixture()), "llama", ShownParts())
        (line,) = (line for line in text.splitlines() if "(feed-forward)" in line)
        return re.split("  +", line)[3]

    assert layers_of(3) == "3 (7, 15, 23)"
    assert layers_of(6) == "6 (spread over 3-23)"
    assert layers_of(24) == "24 (0-23)"


def test_refusals_and_unknown_memory_change_the_verdict() -> None:
    planned = plan(spec(gpu(), cpu()))
    assert describe_plan(planned, "llama", ShownParts(), refusals=2).splitlines()[0] == (
        "llama has a plan, but the installation refuses 2 settings (see below): 2 pods (1 CPU, 1 GPU), mode "
        "Pipeline. Whether it fits is unknown: set deviceMemory and resources.limits.memory of roles cpu, gpu"
    )


def test_equal_ranks_have_no_slowest_and_counts_have_no_wrong_plural() -> None:
    text = describe_plan(plan(spec(cpu(memory="64Gi"))), "llama", ShownParts(explain=True, choices=True))
    assert "slowest" not in text
    assert text.startswith("llama fits: 1 pod (1 CPU), mode Pipeline\n")
    assert "1 stage\n" in text
    assert not re.search(r"\b1 \w+s\b(?! )", text.replace("1 ms", ""))
    assert (count(1, "pod"), count(2, "pod"), count(1024, "token")) == ("1 pod", "2 pods", "1,024 tokens")
    ranks = describe_plan(plan(spec(gpu(ranksPerPod=2, deviceMemory="24Gi"))), "llama", ShownParts())
    assert ranks.startswith("llama fits: 1 pod (1 GPU, 2 ranks), mode Pipeline\n")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 ms"),
        (0.0021, "2.10 ms"),
        (0.0379, "37.9 ms"),
        (0.373, "373 ms"),
        (0.9999, "1.00 s"),
        (11.2, "11.2 s"),
        (162.0, "162 s"),
        (4567.0, "4,567 s"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_choices_with_another_number_of_pods_are_planned() -> None:
    larger = profile(num_layers=160)
    two = spec(gpu(deviceMemory="24Gi", pods=2), cpu(memory="96Gi"))
    planned = plan(two, larger)
    one, three = (
        plan(spec(gpu(deviceMemory="24Gi", pods=pods), cpu(memory="96Gi")), larger) for pods in (1, 3)
    )
    steps = [duration(predict(each.plan, each.rates).step_s) for each in (planned, one, three)]
    held = [f"{full_length_requests(each):.1f}" for each in (planned, one, three)]
    less = lines(planned, "fewer pods")[0]
    assert less == (
        f"fewer pods: with 1 pod of role gpu instead of 2, a step takes {steps[1]} instead of {steps[0]}, "
        f"and as many requests of 8,192 tokens run at the same time as now ({held[1]})"
    )
    assert held[1] == held[0]
    (more, layer) = lines(planned, "faster")
    assert more.startswith(
        f"faster: with 3 pods of role gpu instead of 2, a step takes {steps[2]} instead of {steps[0]}, and "
    )
    saved = duration(planned.plan.ranks[0].predicted_step_s / planned.plan.ranks[0].num_layers)
    assert layer.startswith(
        f"faster: each layer that you move from role cpu to a GPU saves {saved} per step. The weights and"
    )


def test_names_a_role_that_is_not_needed() -> None:
    planned = plan(spec(*MIXED))
    (without_gpu, without_cpu) = lines(planned, "fewer pods")
    assert without_gpu.startswith("fewer pods: without role gpu, a step takes ")
    assert without_cpu.startswith("fewer pods: without role cpu, a step takes ")
    assert " instead of " in without_gpu + without_cpu
    (of_gpu, of_cpu) = sorted(lines(planned, "save memory"), reverse=True)
    assert re.fullmatch(
        "save memory: if you serve one full-length request at a time, each rank of role gpu needs "
        "[0-9.]+ GiB less",
        of_gpu,
    )
    assert "each rank of role cpu needs" in of_cpu


def test_without_choices_only_waste_is_shown() -> None:
    planned = plan(spec(*MIXED), LARGE)
    assert len(describe_choices(planned)) > 2
    assert describe_waste(planned) == ()
    wasteful = ask(recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"], "B")
    (line,) = describe_waste(wasteful)
    assert line.startswith("fewer pods: with 1 pod of role cpu instead of 2, a step takes as long as now (")
    assert f"\nadvice: {line}\n" in describe_plan(wasteful, "m", ShownParts())
    assert "advice: " not in describe_plan(wasteful, "m", ShownParts(choices=True))


def test_a_choice_that_changes_nothing_compares_no_equal_figures() -> None:
    """`plan -f examples/quickstart.yaml --gpus 0` printed "11.8 ms instead of 11.8"."""
    twice = spec(cpu(name="a"), cpu(name="b"))
    compared = [line for line in describe_choices(plan(twice)) if "a step takes" in line]
    assert compared
    for line in compared:
        for now, other in re.findall(r"takes ([0-9.]+ m?s) instead of ([0-9.]+ m?s), and", line):
            assert now != other
        for now, other in re.findall(r"and ([0-9.]+) requests .* instead of ([0-9.]+)$", line):
            assert now != other


def test_a_choice_must_gain_three_percent() -> None:
    for planned in (plan(spec(*MIXED)), plan(spec(*MIXED), LARGE), plan(spec(cpu(memory="64Gi")))):
        step_s = predict(planned.plan, planned.rates).step_s
        for line in lines(planned, "faster"):
            if " instead of " in line:
                found = re.search(r"takes ([0-9.]+) ms instead of ([0-9.]+) ms", line)
                assert found is not None
                assert float(found[1]) <= 0.975 * float(found[2])
            else:
                on_cpus = [rank for rank in planned.plan.ranks if rank.role == "cpu"]
                assert on_cpus[0].predicted_step_s >= 0.03 * step_s
    filled = describe_plan(plan(spec(cpu(memory="20Gi"))), "m", ShownParts(choices=True))
    assert "CHOICES\n  none of the choices gains 3 % or more\n" in filled


def test_a_layer_moved_from_the_stage_that_is_short_of_memory_is_planned() -> None:
    planned = ask(recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"], "B")
    (line,) = lines(planned, "more concurrency")
    assert line.startswith(
        "more concurrency: with one layer moved from stage 2 (role gpu) to stage 1 (role cpu), a step takes "
    )
    pattern = r"and ([0-9.]+) requests of 8,192 tokens run at the same time instead of ([0-9.]+)$"
    found = re.search(pattern, line)
    assert found is not None
    assert found[2] == f"{full_length_requests(planned):.1f}"
    assert float(found[1]) > 10 * float(found[2])
    # No layer moves if the scheduler is the limit, or if memory is unknown.
    assert not lines(plan(spec(gpu(deviceMemory="141Gi"), engine={"maxModelLen": 1024})), "more concurrency")
    assert not lines(plan(spec(gpu(), cpu())), "more concurrency")


def test_an_encoder_that_is_not_served_is_not_loaded() -> None:
    gemma = recorded_profiles()["gemma-3-27b-it"]
    assert model(gemma)["encoder"] == "0.79 GiB for images, on every rank"
    alone = ask(gemma, "A", engine={"args": ["--language-model-only"]})
    assert model(gemma, alone.plan.engine.extra_args)["encoder"] == "0.79 GiB for images, not loaded"
    assert not any("encoder" in line for line in describe_memory(alone))
    assert sum(rank.kv_cache_bytes for rank in alone.plan.ranks) > GIB
