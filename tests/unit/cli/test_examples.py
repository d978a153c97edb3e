"""Each example plans as it stands, for a published model of the size that it is written for."""

import re
from pathlib import Path

import pytest

from heteroinfer_operator.cli import main
from tests.shapes.corpus import shape, write_shape

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MODELS = {
    "cpu-pair": "Qwen3-0.6B",
    "gpu-and-cpu": "Llama-3.1-8B-Instruct",
    "hub-model": "Llama-3.1-8B-Instruct",
    "moe": "Qwen3-30B-A3B",
    "quickstart": "Qwen3-0.6B",
    "tensor": "Llama-3.1-8B-Instruct",
}


def test_every_example_is_planned() -> None:
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == set(MODELS)


@pytest.mark.parametrize(("example", "model"), MODELS.items())
def test_an_example_plans(
    example: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_shape(shape(model), tmp_path / "model")
    arguments = ["plan", "-f", str(EXAMPLES / f"{example}.yaml"), "--model-dir", str(directory)]
    assert main([*arguments, "--calibration", "none"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "not needed" not in out, "an example of what has no use"
    assert example == "quickstart" or "memory is unknown" not in out


def test_the_resource_of_the_readme_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = re.findall(
        r"(?ms)^```yaml\n(apiVersion: heteroinfer.*?)^```", (ROOT / "README.md").read_text()
    )
    file = tmp_path / "llama.yaml"
    file.write_text(manifest)
    directory = write_shape(shape("Llama-3.1-8B-Instruct"), tmp_path / "model")
    assert main(["plan", "-f", str(file), "--model-dir", str(directory), "--calibration", "none"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "not needed" not in out
