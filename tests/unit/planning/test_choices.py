"""What `heteroinfer plan` says of a plan: where its bytes are, what bounds it, and what else there is."""

import re
from dataclasses import replace

import pytest

from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.commands.account import (
    describe_bounds,
    describe_capacity,
    describe_memory,
    describe_model,
    kv_blocks,
    sequences_at_once,
)
from heteroinfer_operator.commands.choices import describe_choices, describe_waste
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.prediction import predict
from tests.shapes.page import ask
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import GIB, MIB, cpu, gpu, plan, profile, spec

MIXED = (gpu(deviceMemory="24Gi"), cpu(memory="64Gi"))
LARGE = profile(num_layers=96)


def lines(planned: Planned, word: str) -> list[str]:
    return [line for line in describe_choices(planned) if line.startswith(f"{word}: ")]


@pytest.mark.parametrize(
    "name", ["Qwen3-32B", "gpt-oss-120b", "DeepSeek-V3", "Mistral-Small-3.2-24B-Instruct"]
)
def test_bytes_of_a_rank_add_up_to_what_it_has(name: str) -> None:
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


def test_tables_of_a_stage_are_named() -> None:
    said = describe_memory(ask(recorded_profiles()["DeepSeek-V3"], "B"))
    assert [re.findall(r" layers [0-9.]+ GiB \+ (.*?) [0-9.]+ GiB", line) for line in said] == [
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


def test_stages_that_are_alike_share_a_line() -> None:
    for pods, stages in ((6, "1 to 4"), (4, "1, 2")):
        planned = plan(spec(gpu(pods=pods, deviceMemory="80Gi")), LARGE)
        layers = f"{96 // pods} layers {format_bytes(96 // pods * 416 * MIB)}"
        first, between, last = describe_memory(planned)
        assert first.startswith(f"memory of a rank of stage 0, role gpu: {layers} + embedding ")
        assert between.startswith(f"memory of a rank of stages {stages}, role gpu: {layers} + KV cache ")
        assert last.startswith(f"memory of a rank of stage {pods - 1}, role gpu: {layers} + head ")


def test_what_bounds_requests_and_their_length() -> None:
    tight = plan(spec(*MIXED), LARGE)
    requests, length = describe_bounds(tight)
    limiting = tight.plan.ranks[tight.limiting_rank or 0]
    who = f"the memory of rank {limiting.rank} (role {limiting.role})"
    full = int(sequences_at_once(tight))
    assert full == (kv_blocks(tight) - 1) // 256
    assert requests.endswith(f", {full} of full length, by {who}; a step has 64")
    assert length.startswith("length: 8192 tokens, by default; the model was made for 131072; ")
    # What it says that fits is planned when asked for, with the same layers, and no more is.
    held = int(length.rpartition(" ")[2])
    layers = [rank.num_layers for rank in tight.plan.ranks]
    roles = (cpu(memory="64Gi", layers=layers[:1]), gpu(deviceMemory="24Gi", layers=layers[1:]))
    assert plan(spec(*roles, engine={"maxModelLen": held}), LARGE).plan.engine.max_model_len == held
    with pytest.raises(PlanError, match="missing"):
        plan(spec(*roles, engine={"maxModelLen": held + 32}), LARGE)


def test_bounds_of_plenty_and_of_what_is_not_known() -> None:
    who = "the memory of rank 0 (role gpu)"
    plenty = plan(spec(gpu(deviceMemory="141Gi"), engine={"maxModelLen": 1024}))
    requests, length = describe_bounds(plenty)
    assert requests == f"requests: 256, as many as a step has; {who} holds all of them at full length"
    assert length == (
        f"length: 1024 tokens, as asked for; the model was made for 131072; {who} holds one of 131072"
    )
    requests, length = describe_bounds(plan(spec(gpu()), replace(profile(), max_position_embeddings=4096)))
    who = "a memory that is not known of all ranks"
    assert requests == f"requests: 16 of 1024 tokens, 4 of full length, by {who}; a step has 256"
    assert length == "length: 4096 tokens, by default, and the model was made for no more"


def test_a_pod_less_or_more_is_planned_and_not_guessed() -> None:
    larger = profile(num_layers=160)
    two = spec(gpu(deviceMemory="24Gi", pods=2), cpu(memory="96Gi"))
    planned = plan(two, larger)
    one, three = (
        plan(spec(gpu(deviceMemory="24Gi", pods=pods), cpu(memory="96Gi")), larger) for pods in (1, 3)
    )
    steps = [f"{predict(each.plan, each.rates).step_s * 1e3:.3g}" for each in (planned, one, three)]
    held = [f"{sequences_at_once(each):.1f}" for each in (planned, one, three)]
    less = lines(planned, "cheaper")[0]
    assert less == (
        f"cheaper: with a pod of role gpu less a step takes {steps[1]} ms instead of {steps[0]}, "
        f"and as many sequences of 8192 tokens fit at once ({held[1]})"
    )
    assert held[1] == held[0]
    (more, layer) = lines(planned, "faster")
    assert more.startswith(f"faster: with a pod more of role gpu a step takes {steps[2]} ms instead of")
    assert layer.startswith("faster: each layer that a GPU takes over from rank 0 (CPU) saves ")


def test_a_role_that_is_not_needed_is_named() -> None:
    (without_gpu, without_cpu, spare) = lines(plan(spec(*MIXED)), "cheaper")
    assert without_gpu.startswith("cheaper: without role gpu a step takes ")
    assert without_cpu.startswith("cheaper: without role cpu a step takes ")
    assert " instead of " in without_gpu + without_cpu
    assert spare.startswith("cheaper: with one longest sequence at a time it needs ")


def test_without_explain_a_choice_that_costs_something_is_not_shown() -> None:
    hint = "choices: --explain shows the next cheaper, roomier and faster plans"
    planned = plan(spec(*MIXED), LARGE)
    assert len(describe_choices(planned)) > 2
    assert describe_waste(planned) == (hint,)
    *waste, last = describe_waste(ask(recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"], "B"))
    assert last == hint
    (line,) = waste
    assert line.startswith("cheaper: with a pod of role cpu less a step takes as long (")


def test_a_choice_that_changes_nothing_compares_no_equal_figures() -> None:
    """`plan -f examples/quickstart.yaml --gpus 0` printed "11.8 ms instead of 11.8"."""
    twice = spec(cpu(name="a"), cpu(name="b"))
    for line in describe_choices(plan(twice)):
        for now, other in re.findall(r"takes ([0-9.e+]+) ms instead of ([0-9.e+]+), and", line):
            room = re.search(r"and ([0-9.]+) sequences .* instead of ([0-9.]+)$", line)
            assert room is not None
            assert (now, room[1]) != (other, room[2])


def test_a_layer_less_where_memory_is_short_is_planned() -> None:
    planned = ask(recorded_profiles()["Qwen3-Next-80B-A3B-Instruct"], "B")
    (line,) = lines(planned, "roomier")
    assert line.startswith("roomier: with a layer less in stage 2 (role gpu) a step takes ")
    found = re.search(r"and ([0-9.]+) sequences of 8192 tokens fit at once instead of ([0-9.]+)$", line)
    assert found is not None
    assert found[2] == f"{sequences_at_once(planned):.1f}"
    assert float(found[1]) > 10 * float(found[2])
    # Nothing is roomier where a step has no more requests than fit, or no memory is known.
    assert not lines(plan(spec(gpu(deviceMemory="141Gi"), engine={"maxModelLen": 1024})), "roomier")
    assert not lines(plan(spec(gpu(), cpu())), "roomier")


def test_an_encoder_that_is_not_served_is_left_out() -> None:
    gemma = recorded_profiles()["gemma-3-27b-it"]
    assert "encoder of images 0.79 GiB, on every rank" in describe_model(gemma)
    alone = ask(gemma, "A", engine={"args": ["--language-model-only"]})
    assert "left out" in describe_model(gemma, alone.plan.engine.extra_args)
    assert not any("encoder" in line for line in describe_memory(alone))
    assert describe_capacity(alone).endswith("a step has 64 requests at most")
    assert sum(rank.kv_cache_bytes for rank in alone.plan.ranks) > GIB
