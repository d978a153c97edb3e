"""Tests that a real API server accepts the unchanged output of `heteroinfer new` in a dry run."""

from pathlib import Path

import pytest

from heteroinfer_operator.cli import main
from tests.cluster.running_cluster import Cluster
from tests.shapes.corpus import shape, write_shape

GPU, CPU = ("--gpu-memory", "24Gi"), ("--cpus", "16", "--cpu-memory", "64Gi")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen3-30B-A3B", (*GPU, *CPU)),
        ("Qwen3-30B-A3B", (*GPU, *CPU, "--mode", "Pipeline")),
        ("Qwen3-32B", (*GPU, *CPU)),
        ("Llama-3.1-8B-Instruct", (*GPU, *CPU, "--mode", "Tensor")),
        ("Llama-3.1-8B-Instruct", ("--gpu-memory", "12Gi", "--gpus", "2")),
        ("Qwen3-0.6B", CPU),
    ],
)
@pytest.mark.parametrize("uri", ["", "pvc://models/of-a-claim", "hf://org/Model-1.5"])
def test_the_api_server_accepts_the_written_resource(
    name: str, options: tuple[str, ...], uri: str, cluster: Cluster, tmp_path: Path
) -> None:
    folder = str(write_shape(shape(name), tmp_path / "Model_1.5"))
    file = tmp_path / "resource.yaml"
    model = (uri, "--model-dir", folder) if uri else (folder,)
    assert main(["new", *model, *options, "--calibration", "none", "-o", str(file)]) == 0
    applied = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", str(file))
    assert applied.strip().endswith("created (server dry run)")
