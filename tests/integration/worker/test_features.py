"""Features of vLLM over two CPU stages: each works here, or is refused in words (tests/unit/worker)."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.worker.conftest import Reference
from tests.integration.worker.groups import Group, build_plan, fetch, start_group
from tests.integration.worker.test_serving import ONE_THREAD, answer_all, samples

pytestmark = pytest.mark.timeout(600)

SCHEMA = {
    "type": "object",
    "properties": {
        "device": {"enum": ["CPU", "GPU"]},
        "ready": {"type": "boolean"},
        "ranks": {"type": "array", "items": {"enum": [0, 1, 2, 3]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["device", "ready", "ranks"],
    "additionalProperties": False,
}
CHOICES = ["pipeline", "tensor", "one rank after another"]


def test_structured_output_and_prefix_caching(model: Path, reference: Reference, tmp_path: Path) -> None:
    # Compact, so that a model that knows nothing ends its object within the tokens it has.
    compact = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], extra_args=compact)
    with start_group(plan, tmp_path, env=ONE_THREAD) as group:
        group.wait_ready()
        check_structured_output(group)
        answer_all(group, reference)
        check_prefix_caching(group)


def check_structured_output(group: Group) -> None:
    """JSON of a schema and one of a list, all at once, greedy and not: the last stage masks."""
    questions = [(kind, sampling) for kind in ("json", "choice") for sampling in (0, 1, 2, 3)]
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda question: ask(group, *question), questions))
    for (kind, _), answer in zip(questions, answers, strict=True):
        if kind == "choice":
            assert answer in CHOICES
            continue
        value = json.loads(answer)
        assert set(value) == {"device", "ready", "ranks"}
        assert value["device"] in {"CPU", "GPU"}
        assert isinstance(value["ready"], bool)
        assert 2 <= len(value["ranks"]) <= 3
        assert set(value["ranks"]) <= {0, 1, 2, 3}
    assert ask(group, "json", 0) == answers[0]  # greedy is the same whatever runs beside it
    assert ask(group, "json", 1) == answers[1]  # and so is a seed


def ask(group: Group, kind: str, seed: int) -> str:
    """Returns an answer: greedy for seed 0, else at temperature 1 with that seed."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Which rank is it?"}],
        "max_tokens": 100,
        "temperature": 1 if seed else 0,
        "seed": seed,
    }
    if kind == "json":
        body["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "rank", "schema": SCHEMA, "strict": True},
        }
    else:
        body["structured_outputs"] = {"choice": CHOICES}
    text: str = group.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def check_prefix_caching(group: Group) -> None:
    """A prompt that was read before is taken from the KV cache of every stage, with the same tokens."""
    prompt = [3 + i * 7 % 500 for i in range(200)]
    first = group.complete(prompt)
    before, tokens = cached_tokens(group), [prompt_tokens(group, rank) for rank in (0, 1)]
    assert group.complete(prompt) == first
    assert cached_tokens(group) - before == 192  # six whole blocks of 32
    assert [prompt_tokens(group, rank) - old for rank, old in zip((0, 1), tokens, strict=True)] == [8, 8]


def cached_tokens(group: Group) -> float:
    """Returns how many prompt tokens the engine has found in its cache."""
    text = fetch(group.url + "/metrics")
    assert text is not None
    (value,) = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", text, re.MULTILINE)
    return float(value)


def prompt_tokens(group: Group, rank: int) -> float:
    """Returns how many prompt tokens have passed through a rank."""
    text = fetch(group.metrics_url(rank) + "/metrics")
    assert text is not None
    return samples(text, "heteroinfer_rank_tokens_total").get("prefill", 0.0)
