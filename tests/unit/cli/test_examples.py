"""Each example plans as it stands, for a published model of the size that it is written for."""

import re
from pathlib import Path

import pytest
import yaml

from heteroinfer_operator.cli import main
from tests.shapes.corpus import shape, write_shape

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
MODELS = {
    "cpu-pair": "Qwen3-0.6B",
    "gpu-and-cpu": "Llama-3.1-8B-Instruct",
    "hub-model": "Llama-3.1-8B-Instruct",
    "moe": "Qwen3-0.6B",
    "moe-nodes": "Qwen3-0.6B",
    "quickstart": "Qwen3-0.6B",
    "small-model": "Qwen3-0.6B",
    "tensor": "Llama-3.1-8B-Instruct",
}
OF_ANY_GPU = {"moe", "moe-nodes", "quickstart"}
"""Those that any machine serves; they do not say how much memory a GPU has."""


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
    assert ("memory is unknown" in out) == (example in OF_ANY_GPU)


def test_the_sizes_in_the_mixture_example_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "moe.yaml").read_text()
    assert "`deviceMemory: 40Gi`," in text
    assert "resources of 4 CPUs and 16Gi, feedForward of 12 CPUs and 32Gi, and maxModelLen 8192." in text
    manifest = yaml.safe_load(text)
    role = manifest["spec"]["roles"][0]
    role["deviceMemory"] = "40Gi"
    role["resources"] = {"requests": {"cpu": "4", "memory": "16Gi"}, "limits": {"memory": "16Gi"}}
    role["feedForward"] |= {"cpu": "12", "memory": "32Gi"}
    manifest["spec"]["engine"]["maxModelLen"] = 8192
    file = tmp_path / "moe.yaml"
    file.write_text(yaml.safe_dump(manifest))
    directory = write_shape(shape("Qwen3-30B-A3B"), tmp_path / "model")
    assert main(["plan", "-f", str(file), "--model-dir", str(directory), "--calibration", "none"]) == 0
    assert "CPUs have the experts of 20 layers" in capsys.readouterr().out


def test_the_resource_of_the_concepts_page_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (manifest,) = re.findall(
        r"(?ms)^```yaml\n(apiVersion: heteroinfer.*?)^```", (ROOT / "docs/user/concepts.md").read_text()
    )
    file = tmp_path / "llama.yaml"
    file.write_text(manifest)
    directory = write_shape(shape("Llama-3.1-8B-Instruct"), tmp_path / "model")
    assert main(["plan", "-f", str(file), "--model-dir", str(directory), "--calibration", "none"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "not needed" not in out
