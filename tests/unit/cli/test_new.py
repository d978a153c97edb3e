"""`heteroinfer new`: the resource plans with the figures of its comments; else the nearest that fits."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.cli import main
from heteroinfer_operator.commands.new_layouts import Draft, GivenHardware, choose_layout, layouts
from heteroinfer_operator.commands.new_text import quote_yaml, render
from heteroinfer_operator.commands.plan_text import describe_summary
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.nodes.calibrations import Calibrations
from tests.shapes.corpus import shape, write_shape
from tests.shapes.profiles import recorded_profiles
from tests.unit.cli.model_directory import write_model

MIXTURE, DENSE, SMALL = "Qwen3-30B-A3B", "Llama-3.1-8B-Instruct", "Qwen3-0.6B"


@pytest.fixture(autouse=True)
def _no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in (MIXTURE, DENSE, SMALL):
        write_shape(shape(name), folder / name)
    return folder


def new(*arguments: str, code: int = 0) -> None:
    assert main(["new", *arguments]) == code


def hardware(gpu: str = "", cpu: str = "", cpus: int = 16, gpus: int = 0) -> list[str]:
    given = [("--gpu-memory", gpu), ("--cpu-memory", cpu), ("--cpus", str(cpus) if cpu else "")]
    return [
        word for option, value in [*given, ("--gpus", str(gpus or ""))] for word in (option, value) if value
    ]


CASES: dict[str, tuple[str, list[str], Mode, set[str]]] = {
    "a mixture beside its GPU": (MIXTURE, hardware("24Gi", "64Gi"), Mode.FEED_FORWARD, {"gpu"}),
    "a mixture in a cluster": (
        MIXTURE,
        [*hardware("24Gi", "64Gi"), "--mode", "Pipeline"],
        Mode.PIPELINE,
        {"cpu", "gpu"},
    ),
    "a dense model": (DENSE, hardware("12Gi", "24Gi"), Mode.PIPELINE, {"cpu", "gpu"}),
    "GPUs alone": (DENSE, hardware("24Gi", "24Gi"), Mode.PIPELINE, {"gpu"}),
    "several GPUs": (DENSE, hardware("12Gi", gpus=2), Mode.PIPELINE, {"gpu"}),
    "CPUs alone": (SMALL, hardware(cpu="8Gi", cpus=8), Mode.PIPELINE, {"cpu"}),
    "every layer split": (
        DENSE,
        [*hardware("16Gi", "24Gi"), "--mode", "Tensor"],
        Mode.TENSOR,
        {"cpu", "gpu"},
    ),
    "experts on odd sizes": (MIXTURE, hardware("30G", "50000Mi", cpus=3), Mode.FEED_FORWARD, {"gpu"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_comments_have_the_figures_of_the_resources_plan(
    case: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, options, mode, roles = CASES[case]
    file = tmp_path / "resource.yaml"
    new(str(models / model), *options, "-o", str(file))
    verdict, created = capsys.readouterr().out.splitlines()
    assert created == f"{file} created"
    text = file.read_text()
    resource = parse_resource(yaml.safe_load(text))
    assert resource.spec.parallelism.mode is mode
    assert {role.name for role in resource.spec.roles} == roles
    assert resource.spec.engine.max_model_len == 8192
    assert main(["plan", "-f", str(file)]) == 0
    plan = capsys.readouterr().out.partition("\nMore: ")[0]
    assert plan.startswith(f"{verdict}\n")
    comments = [line[1:].removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
    shown = [line for line in plan.splitlines() if not line.startswith(("note: ", "advice: ")) and line]
    assert [line for line in shown if line not in comments] == []
    for size in options[1::2]:
        if size.endswith(("Gi", "G", "Mi")) and "cpu" in roles:
            assert f"memory: {size}" in text or f"deviceMemory: {size} " in text


def test_reports_unneeded_cpus(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(str(models / DENSE), *hardware("24Gi", "24Gi"))
    out, err = capsys.readouterr()
    assert "# The CPUs are not used: the GPUs hold the whole model" in out
    assert "warning: --cpus: the CPUs are not used, because the GPUs hold the whole model\n" in err
    new(str(models / DENSE), *hardware("24Gi"))
    out, err = capsys.readouterr()
    assert "CPUs are not used" not in out + err


def test_pods_of_gpus_that_are_larger_than_the_given_cpus_are_a_warning(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = (
        "warning: role gpu: each pod requests 4 CPUs and 16Gi of host memory, more than --cpus or "
        "--cpu-memory. Adjust its resources in the file to your nodes\n"
    )
    for memory, cpus, is_larger in (("16Gi", 4, False), ("16Gi", 3, True), ("15Gi", 4, True)):
        new(str(models / DENSE), *hardware("24Gi", memory, cpus))
        assert (larger in capsys.readouterr().err) is is_larger
    new(str(models / MIXTURE), *hardware("30G", "50000Mi", cpus=3))
    assert "--cpus" not in capsys.readouterr().err, "in mode FeedForward, the pod has the given CPUs"


def test_a_shortage_names_options_and_no_fields_of_a_file(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new(str(models / SMALL), *hardware(cpu="2Gi"), code=3)
    error, heading, change, *_ = capsys.readouterr().err.splitlines()
    assert error == (
        "error: qwen3-0-6b does not fit 16 CPUs with 2Gi: role cpu: a pod must have more memory than the "
        "2.00 GiB that 1 rank and vLLM's API server take without a model (got 2.00 GiB)"
    )
    assert heading == "The model fits with any one of these changes:"
    assert change.startswith("  --cpu-memory ")
    new(str(models / DENSE), *hardware("6Gi", "8Gi", cpus=8), code=3)
    error, *_ = capsys.readouterr().err.splitlines()
    assert ". Add pods, raise --cpu-memory or --gpu-memory, or use the model in fewer bits" in error


def test_a_folder_must_be_copied_before_a_cluster_serves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_model(tmp_path / "model"))
    new(folder, *hardware(cpu="4Gi"))
    assert (
        "# Serve it on a cluster:  copy the folder to a claim, set model.uri to pvc://CLAIM/FOLDER, then "
        "kubectl apply -f FILE\n"
    ) in capsys.readouterr().out
    new("pvc://models/llama", *hardware(cpu="4Gi"), "--model-dir", folder)
    assert "# Serve it on a cluster:  kubectl apply -f FILE\n" in capsys.readouterr().out


def test_a_feed_forward_group_uses_the_given_memory_and_cores(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new(str(models / MIXTURE), *hardware("24Gi", "64Gi"))
    out = capsys.readouterr().out
    (role,) = yaml.safe_load(out)["spec"]["roles"]
    assert role["resources"]["requests"] == {"cpu": "4", "memory": "16Gi"}
    assert role["feedForward"] == {"ranks": 1, "cpu": "12", "memory": "48Gi"}
    assert re.search(r"mode: FeedForward +# .* the experts of \d+ of 48 layers\n", out)


def test_reports_the_nearest_hardware_that_fits(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [str(models / MIXTURE), "--mode", "Pipeline"]
    new(*small, *hardware("16Gi", "24Gi"), "-o", str(tmp_path / "x.yaml"), code=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert not (tmp_path / "x.yaml").exists()
    error, heading, *nearest = err.splitlines()
    assert error.startswith("error: qwen3-30b-a3b does not fit 1 GPU of 16Gi and 16 CPUs with 24Gi: ")
    assert "GiB" in error
    assert heading == "The model fits with any one of these changes:"
    found = dict(line.split()[:2] for line in nearest)
    assert {"--cpu-memory", "--gpu-memory", "--gpus"} <= found.keys()
    given = {"--gpu-memory": "16Gi", "--cpu-memory": "24Gi", "--cpus": "16"}
    for option, value in found.items():
        changed = [word for pair in {**given, option: value}.items() for word in pair]
        new(*small, *changed)
        if value.endswith("Gi"):
            less = {**given, option: f"{int(value[:-2]) - 1}Gi"}
            new(*small, *(word for pair in less.items() for word in pair), code=3)
    capsys.readouterr()


def test_suggests_cpu_memory_to_a_user_without_cpus(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new(str(models / DENSE), *hardware("12Gi"), code=3)
    found = re.search(r"\n  --cpus 16 --cpu-memory (\d+Gi)  \d+Gi more\n", capsys.readouterr().err)
    assert found is not None
    new(str(models / DENSE), *hardware("12Gi", found[1]))
    capsys.readouterr()


def test_shorter_requests_are_suggested_if_they_are_the_smallest_change(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new(str(models / SMALL), *hardware(cpu="5Gi"), "--max-model-len", "32768", code=3)
    found = re.search(
        r"  --max-model-len (\d+) +requests of at most [\d,]+ tokens instead of 32,768\n",
        capsys.readouterr().err,
    )
    assert found is not None
    new(str(models / SMALL), *hardware(cpu="5Gi"), "--max-model-len", found[1])
    assert f"maxModelLen: {found[1]} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the hardware is missing. Add --gpu-memory SIZE, or --cpus N and --cpu-memory SIZE, or both"),
        (["--gpus", "1"], "--gpus: the memory of one GPU is missing. Add --gpu-memory SIZE"),
        (["--cpus", "4"], "--cpus and --cpu-memory must be set together. Add --cpu-memory SIZE"),
        (["--cpu-memory", "8Gi"], "--cpus and --cpu-memory must be set together. Add --cpus N"),
        ([*hardware("8Gi"), "--mode", "FeedForward"], "--mode FeedForward needs one GPU (--gpu-memory) and"),
        ([*hardware("8Gi"), "--mode", "Tensor"], "--mode Tensor needs GPUs (--gpu-memory) and CPUs"),
        ([*hardware("8Gi"), "--name", "A_b"], "must consist of lower-case letters"),
        ([*hardware("8Gi"), "--max-model-len", "513"], "engine.maxModelLen: "),
        ([*hardware("8Gi"), "--revision", "main"], "must be an hf:// model if revision"),
    ],
)
def test_each_wrong_option_is_reported_in_one_message(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new(str(write_model(tmp_path / "model")), *arguments, code=1)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


def test_a_missing_folder_and_an_existing_output_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new("org/model", *hardware("8Gi"), code=1)
    assert capsys.readouterr().err == (
        "error: MODEL: org/model is not a folder. Name a folder with the model's files, or hf://ORG/MODEL "
        "for a model of a hub\n"
    )
    output = tmp_path / "here.yaml"
    output.write_text("mine")
    new(str(write_model(tmp_path / "model")), *hardware("8Gi"), "-o", str(output), code=1)
    assert capsys.readouterr().err == (
        f"error: --output: {output} exists already. Remove the file or choose another one\n"
    )
    assert output.read_text() == "mine"


@pytest.mark.parametrize("option", ["--gpu-memory", "--cpu-memory", "--cpus", "--max-model-len"])
@pytest.mark.parametrize("value", ["", "0", "x", "1e3", "-1"])
def test_wrong_values_are_usage_errors(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["new", "model", f"{option}={value}"])
    assert caught.value.code == 2
    reported = capsys.readouterr().err
    assert f"argument {option}: must be " in reported
    assert f"(got {value!r}" in reported


@pytest.mark.parametrize("option", ["--gpu-memory", "--cpu-memory"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("24", "must be at least 1Mi (got '24', which is 24 bytes). Write 24Gi"),
        ("1k", "must be at least 1Mi (got '1k', which is 1000 bytes)\n"),
        ("8GB", "must be a size without B (got '8GB'). Write 8Gi, or 8G for powers of 1,000"),
        ("8GiB", "must be a size without B (got '8GiB'). Write 8Gi, or 8G for powers of 1,000"),
        ("lots", "must be a size such as 80Gi (got 'lots')"),
    ],
)
def test_a_size_without_a_unit_is_refused_with_the_right_size(
    option: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["new", "model", option, value])
    assert caught.value.code == 2
    assert f"argument {option}: {words}" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model")
    new(str(folder), *hardware(cpu="4Gi"), "-o", str(tmp_path / "with.yaml"))
    assert capsys.readouterr().err == ""
    (folder / "tokenizer.json").unlink()
    new(str(folder), *hardware(cpu="4Gi"), "-o", str(tmp_path / "without.yaml"))
    assert capsys.readouterr().err.startswith(f"warning: {folder} has no tokenizer (tokenizer.json, ")


def test_plans_a_claim_from_a_copy_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_model(tmp_path / "model"))
    new("pvc://models/Llama_3.1", *hardware(cpu="4Gi"), "--model-dir", folder)
    manifest = yaml.safe_load(capsys.readouterr().out)
    assert manifest["metadata"]["name"] == "llama-3-1"
    assert manifest["spec"]["model"] == {"uri": "pvc://models/Llama_3.1"}
    new("pvc://models/llama", *hardware(cpu="4Gi"), code=1)
    assert capsys.readouterr().err == (
        "error: model.uri pvc://models/llama is not on this machine. Add --model-dir DIR, a folder with a "
        "copy of the model's files\n"
    )


@pytest.mark.parametrize("name", ["with space: #x", "7b", "ü\x1b[8m", "a" * 60, "quote\"'", "***"])
def test_unusual_folder_names_become_valid_names_and_yaml(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_model(tmp_path / name)
    new(str(folder), *hardware(cpu="4Gi"))
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    parsed = parse_resource(yaml.safe_load(out))
    assert parsed.spec.model.uri == f"file://{folder}"
    assert 0 < len(parsed.metadata.name) <= 40


def test_layouts_are_tried_in_order_of_speed() -> None:
    mixed = GivenHardware(gpus=1, gpu_memory="8Gi", cpus=8, cpu_memory="8Gi")

    def modes(**options: Any) -> list[tuple[str, int]]:
        given = {"mode": None, "has_experts": True, **options}
        mode, has_experts = given["mode"], given["has_experts"]
        return [
            (each.mode.value, each.hardware.cpus) for each in layouts(mixed, mode, has_experts=has_experts)
        ]

    assert modes() == [("Pipeline", 0), ("FeedForward", 8), ("Pipeline", 8)]
    assert modes(has_experts=False) == [("Pipeline", 0), ("Pipeline", 8)]
    assert modes(mode=Mode.FEED_FORWARD, has_experts=False) == [("FeedForward", 8)]
    assert modes(mode=Mode.TENSOR) == [("Tensor", 8)]
    assert str(mixed) == "1 GPU of 8Gi and 8 CPUs with 8Gi"


def test_the_comments_have_the_step_time_of_the_written_file(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "resource.yaml"
    new(str(models / MIXTURE), *hardware("24Gi", "64Gi"), "-o", str(file))
    capsys.readouterr()
    assert main(["plan", "-f", str(file), "-o", "json"]) == 0
    value = json.loads(capsys.readouterr().out)
    row = next(line for line in file.read_text().splitlines() if line.startswith("# 1 "))
    assert f"{value['plan']['ranks'][1]['predicted_step_s'] * 1e3:.1f} ms" in row


@pytest.mark.parametrize(
    "given",
    [
        GivenHardware(gpus=1, gpu_memory="24Gi", cpus=16, cpu_memory="64Gi"),
        GivenHardware(gpus=2, gpu_memory="80Gi", cpus=64, cpu_memory="512Gi"),
    ],
    ids=str,
)
def test_each_published_shape_gets_a_resource_with_its_plan_or_a_refusal(given: GivenHardware) -> None:
    modes, reasons = set(), set()
    for name, profile in recorded_profiles().items():
        draft = Draft(
            name="m",
            model={"uri": "hf://org/model"},
            profile=profile,
            calibrations=Calibrations(),
            max_model_len=None,
        )
        try:
            layout, planned = choose_layout(draft, given, None)
        except PlanError as error:
            reasons.add(error.reason)
            continue
        text = render(draft, layout, planned, given, describe_summary(planned, "m"))
        written = replace(draft, max_model_len=planned.plan.engine.max_model_len)
        assert parse_resource(yaml.safe_load(text)).spec == written.resource(layout).spec, name
        assert written.plan(layout).plan == planned.plan, name
        modes.add(layout.mode)
    assert reasons <= {"InsufficientMemory", "UnsupportedModel"}
    assert Mode.PIPELINE in modes
    assert (Mode.FEED_FORWARD in modes) is (given.gpus == 1)


@pytest.mark.parametrize(
    "revision", ["1.0", "0x10", "12345678", "2026-01-01", "12:30", "yes", "true", "null", "main"]
)
def test_yaml_reads_each_text_as_text(revision: str) -> None:
    assert yaml.safe_load(quote_yaml(revision)) == revision
