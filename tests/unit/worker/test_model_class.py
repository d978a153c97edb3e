import json
from pathlib import Path

import pytest

from vllm_heteroinfer.rank.imports import architectures


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (json.dumps({"architectures": ["LlamaForCausalLM"]}), ["LlamaForCausalLM"]),
        (json.dumps({"architectures": None}), []),
        (json.dumps({"architectures": ["A", 3]}), ["A"]),
        (json.dumps(["architectures"]), []),
        ("{", []),
        (None, []),
    ],
)
def test_reads_architectures_or_leaves_them_to_vllm(
    tmp_path: Path, text: str | None, expected: list[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert architectures(tmp_path) == expected
