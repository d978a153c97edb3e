"""Tests `heteroinfer up` of examples/moe-nodes.yaml: right tokens on two pods, and a killed rank."""

import os
import re
import signal
from pathlib import Path

import pytest
import yaml

from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.groups import make_model, reference
from tests.integration.up.resources import write
from tests.running_up import READY_TIMEOUT_S, REPOSITORY, RunningUp

NAMED_WITHIN_S = 2.0
ENDED = re.compile(r"Warning RankExited: group 0 epoch 1 ended: rank (?P<rank>\d+): ")
_RANK_PID = re.compile(r"started rank \d+ as process (\d+)")

pytestmark = pytest.mark.timeout(900)


def test_experts_on_two_pods_give_the_tokens_of_the_reference_and_a_killed_rank_is_reported(
    tmp_path: Path, port: str
) -> None:
    model = make_model("qwen3_moe", tmp_path)
    expected = reference(model)
    document = yaml.safe_load((REPOSITORY / "examples/moe-nodes.yaml").read_text())
    document["spec"]["model"]["uri"] = f"file://{model}"
    document["spec"]["engine"] |= {"dtype": "float32", "maxModelLen": 256}
    logs = tmp_path / "logs"
    with RunningUp(["-f", write(tmp_path, document), "--port", port, "--log-dir", logs]) as up:
        url = up.wait_ready()

        def check_tokens() -> None:
            for prompt, tokens in zip(tiny_models.PROMPTS, expected, strict=True):
                assert up.complete(url, list(prompt), len(tokens))["token_ids"] == tokens

        check_tokens()
        pods = [(logs / f"moe-nodes-0-1-{pod}.log").read_text() for pod in (0, 1, 2)]
        assert all("feed-forward rank" in text for text in pods[1:])
        found = _RANK_PID.search(pods[2])
        assert found is not None
        reported = len(up.lines)
        os.kill(int(found[1]), signal.SIGKILL)
        assert up.wait_line(ENDED, NAMED_WITHIN_S + 3.0, after=reported)["rank"] == "2"
        assert up.wait_ready(READY_TIMEOUT_S, after=reported) == url
        check_tokens()
