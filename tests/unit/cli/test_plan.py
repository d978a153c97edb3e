"""`heteroinfer plan` from a file: its output, exit code, and one clear message for each refusal."""

import json
import re
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import codec
from heteroinfer_contract.calibration import Calibration, Versions
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.cli import main
from heteroinfer_operator.local import calibration_file
from heteroinfer_operator.nodes.cpu_features import AVX512_BF16
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.planning.rates import GPU_UNKNOWN, describe_cpu_defaults
from tests.cluster.folders import REPOSITORY
from tests.unit.calibrated import CALIBRATION, NETWORK, calibration
from tests.unit.cli.model_directory import write_model

CPU_ROLE = [{"name": "cpu", "device": "CPU", "resources": {"requests": {"cpu": "1", "memory": "4Gi"}}}]
CPU_ONLY = {"onGPUShortage": {"action": "CPUOnly"}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without a calibration: that of this machine's user says nothing here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "heteroinfer" / "calibration.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def write(tmp_path: Path, directory: Path, **fields: Any) -> str:
    spec = {
        "model": {"uri": f"file://{directory}"},
        "parallelism": {"mode": "Pipeline"},
        "roles": [{"name": "gpu", "device": "GPU"}, {"name": "cpu", "device": "CPU"}],
        **fields,
    }
    file = tmp_path / "llama.yaml"
    body = {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "llama"},
    }
    file.write_text(yaml.safe_dump({**body, "spec": spec}))
    return str(file)


def error(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 1) -> str:
    assert main(["plan", *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_prints_verdict_figures_and_ranks(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, planning=CPU_ONLY)
    assert main(["plan", "-f", file, "--gpus", "1", "--gpu-memory", "80Gi"]) == 0
    verdict, speed, together, first_token, requests, rates, _, heading, first, last, _, *notes, more = (
        line for line in capsys.readouterr().out.splitlines()
    )
    assert verdict == (
        "llama has a plan: 2 pods (1 CPU, 1 GPU), mode Pipeline. Whether it fits is unknown: set "
        "resources.limits.memory of role cpu"
    )
    assert speed.startswith("  speed        2.")
    assert " tokens/s for one request. Limit: rank " in speed
    assert together.endswith(" tokens/s for 4 requests of 512 tokens at the same time")
    assert first_token.startswith("  first token  ")
    limit = "an assumed KV cache, because the memory of role cpu is unknown"
    assert requests == f"  requests     4 requests of 512 tokens each at the same time. Limit: {limit}"
    assert rates == (
        "  rates        defaults: this machine was not measured. Run `heteroinfer calibrate` (under a minute)"
    )
    assert heading.split() == ["RANK", "ROLE", "DEVICE", "LAYERS", "MEMORY", "STEP"]
    assert first.split()[:5] == ["0", "cpu", "CPU", "1", "(0)"]
    assert last.split()[:5] == ["1", "gpu", "GPU", "3", "(1-3)"]
    assert " of 72.00 GiB" in last
    note, *advice, empty = notes
    assert note.startswith("note: CPU ranks are not needed: ")
    # Either role serves so small a model alone.
    assert [line.split(", a step")[0] for line in advice] == [
        "advice: fewer pods: without role gpu",
        "advice: fewer pods: without role cpu",
    ]
    assert empty == ""
    assert more.startswith("More: --explain (")


def test_explain_adds_details_under_headings(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, planning=CPU_ONLY)
    assert main(["plan", "-f", file, "--gpus", "1", "--gpu-memory", "80Gi", "--explain"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for text in (
        "architecture LlamaForCausalLM, float32",
        "layers 0.1 MiB, by attention: 4 full",
        f"role cpu: {describe_cpu_defaults(AVX512_BF16)}",
        f"role gpu: {GPU_UNKNOWN}",
        "length 512 tokens (the default of engine.maxModelLen), the most that the model supports",
        "step at most 64 requests and 2,048 tokens",
        "model llama, float32, up to 512 tokens",
    ):
        assert text in lines
    assert any(re.match(r"stage 0, role cpu: 1 layer .* of an unknown memory$", line) for line in lines)
    assert any(re.match(r"stage 1, role gpu: 3 layers .* of 72.00 GiB$", line) for line in lines)
    assert "CHOICES" not in lines


@pytest.mark.parametrize("option", ["--choices", "--explain"])
def test_choices_are_shown_on_request(
    option: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, planning=CPU_ONLY)
    arguments = ["plan", "-f", file, "--gpus", "1", "--gpu-memory", "80Gi"]
    assert main([*arguments, "--choices"]) == 0
    shown = capsys.readouterr().out.split("\nCHOICES\n")[1].split("\n\n")[0].splitlines()
    assert main([*arguments, option, "-o", "json"]) == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert [line.strip() for line in shown] == choices
    assert [choice.partition(": ")[0] for choice in choices][:2] == ["fewer pods"] * 2
    assert "save memory: if you serve one full-length request at a time, each rank of role cpu" in shown[2]


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_json_and_yaml_contain_the_plan(
    output: str, parse: Any, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, planning=CPU_ONLY)
    assert main(["plan", "-f", file, "--gpus", "0", "-o", output]) == 0
    value = parse(capsys.readouterr().out)
    plan = codec.from_mapping(Plan, value["plan"])
    assert plan.hash == value["hash"]
    assert "choices" not in value
    assert (value["outcome"], value["exitCode"], value["errors"], value["refused"]) == ("fits", 0, [], [])
    assert [rank.device for rank in plan.ranks] == ["CPU", "CPU"]
    assert "runs on CPUs" in value["notes"][0]


def test_a_model_directory_replaces_the_uri(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, model={"uri": "pvc://models/m"})
    assert error(capsys, "-f", file) == (
        "error: model.uri pvc://models/m is not on this machine. Add --model-dir DIR, a folder with a copy "
        "of the model's files\n"
    )
    assert main(["plan", "-f", file, "--model-dir", str(model)]) == 0


def test_a_folder_without_a_tokenizer_is_noted(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"note: {model} has no tokenizer (tokenizer.json, or a file of another format)"

    def notes(**engine: Any) -> str:
        assert main(["plan", "-f", write(tmp_path, model, roles=CPU_ROLE, **engine)]) == 0
        return capsys.readouterr().out

    assert words not in notes()
    (model / "tokenizer.json").unlink()
    assert words in notes()
    assert words not in notes(engine={"args": ["--tokenizer", "/other"]})


UNITS = "k, M, G, T, P, Ki, Mi, Gi, Ti, Pi"


@pytest.mark.parametrize(
    ("role", "path", "words"),
    [
        (
            {"device": "CPU", "resources": {"limits": {"memory": "3GB"}}},
            "resources.limits.memory",
            f"must be an amount such as 64Gi, 500m or 2 (units: m, {UNITS}) (got '3GB')",
        ),
        (
            {"device": "GPU", "deviceMemory": "24gb"},
            "deviceMemory",
            f"must be a size in bytes such as 80Gi (units: {UNITS}) (got '24gb')",
        ),
    ],
)
def test_the_refusal_of_an_amount_without_a_unit_names_the_units(
    role: dict[str, Any],
    path: str,
    words: str,
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path, model, roles=[{"name": "a", **role}])
    assert error(capsys, "-f", file) == f"error: {file}: spec.roles[0].{path}: {words}\n"


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_memory_in_thousandths_of_bytes_is_refused(
    device: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path,
        model,
        roles=[{"name": "a", "device": device, "resources": {"limits": {"memory": "1500m"}}}],
    )
    assert error(capsys, "-f", file, code=3) == (
        "error: llama does not fit: role a: resources.limits.memory must not have the unit m, which means "
        "thousandths of a byte (got 1500m). Write 1500Mi\n"
    )


def of_this_machine() -> Calibration:
    cpuinfo = Path("/proc/cpuinfo").read_text()
    name = next(line.split(": ")[1] for line in cpuinfo.splitlines() if line.startswith("model name"))
    versions = Versions(heteroinfer=metadata.version("heteroinfer"), vllm="0.32.0", torch="2.13.0")
    return calibration(hardware=replace(CALIBRATION.hardware, cpu=name), versions=versions)


def rates_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--explain", *arguments]) == 0
    return capsys.readouterr().out.split("\nRATES\n")[1].split("\n\n")[0]


def test_this_machines_calibration_is_read_and_named(
    tmp_path: Path, model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = of_this_machine()
    calibration_file.write_calibration_file(own, cache)
    file = write(tmp_path, model)
    line = rates_line(capsys, "-f", file)
    assert (
        f"role cpu: calibration {own.hash} of 2026-11-22 ({own.hardware.cpu}, 16 cores; HeteroInfer" in line
    )
    assert "not measured" not in line
    assert "default rates for CPUs" in rates_line(capsys, "-f", file, "--calibration", "none")


def test_ignores_a_calibration_of_another_version_or_machine(
    tmp_path: Path, model: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, own = write(tmp_path, model), of_this_machine()
    old = replace(own, versions=replace(own.versions, heteroinfer="0.0.1"))
    other = replace(own, hardware=replace(own.hardware, cpu="Another CPU"))
    for text, words in (
        (old.to_json(), "made by HeteroInfer 0.0.1, but this is "),
        (other.to_json(), "it was measured on another CPU (Another CPU)"),
        ("{", "cannot be used: Calibration: must be JSON"),
    ):
        cache.parent.mkdir(parents=True, exist_ok=True)
        cache.write_text(text)
        line = rates_line(capsys, "-f", file)
        assert words in line
        assert "default rates for CPUs" in line


def test_reads_a_named_calibration_of_any_machine(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, measured = write(tmp_path, model), tmp_path / "other.json"
    calibration_file.write_calibration_file(CALIBRATION, measured)
    assert CALIBRATION.hash in rates_line(capsys, "-f", file, "--calibration", str(measured))
    for text in ("{}", "[1]", "nonsense"):
        measured.write_text(text)
        words = error(capsys, "-f", file, "--calibration", str(measured))
        assert f"Create it again with `heteroinfer calibrate -o {measured}`" in words
    assert "No such file" in error(capsys, "-f", file, "--calibration", str(tmp_path / "nowhere"))


def test_reads_the_measurement_of_a_network(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "network.json"
    measured.write_text(NETWORK.to_json())
    gpu = {"name": "gpu", "device": "GPU", "deviceMemory": "24Gi"}
    mode = {"parallelism": {"mode": "FeedForward"}, "engine": {"maxModelLen": 128}}
    file = write(tmp_path, model, roles=[gpu, *CPU_ROLE], **mode)
    given = ("-f", file, "--network", str(measured))
    assert f"network to role cpu: measurement {NETWORK.hash} of " in rates_line(capsys, *given)
    assert "network to role cpu: not measured, default rates" in rates_line(capsys, "-f", file)
    assert main(["plan", "-o", "json", *given]) == 0
    (source,) = json.loads(capsys.readouterr().out)["networks"].values()
    assert source.startswith(f"measurement {NETWORK.hash}")
    for text in ("{}", "nonsense", NETWORK.to_json().replace("0.0003", "NaN")):
        measured.write_text(text)
        words = error(capsys, *given)
        assert words.startswith(f"error: {measured}: ")
        assert f". Create it with `heteroinfer-worker network --connect HOST -o {measured}`" in words
    missing = error(capsys, "-f", file, "--network", str(tmp_path / "nowhere"))
    assert "nowhere: cannot be read (No such file or directory). Create it with" in missing
    assert "network" not in rates_line(capsys, "-f", write(tmp_path, model, roles=CPU_ROLE))


# Bad input: each is one clear message and a non-zero exit code


def test_refuses_ranks_that_do_not_match_the_stages(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, parallelism={"tensor": 1, "pipeline": 3})
    assert error(capsys, "-f", file) == (
        f"error: {file}: spec.parallelism: tensor x pipeline must be the number of ranks, the sum of "
        "pods x ranksPerPod over roles (got tensor 1 x pipeline 3 and roles with 2 ranks). "
        "Change the roles, or remove tensor and pipeline\n"
    )


def test_refuses_layers_that_do_not_add_up(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = [{"name": "a", "device": "CPU", "layers": [1]}, {"name": "b", "device": "CPU", "layers": [2]}]
    file = write(tmp_path, model, roles=roles)
    assert (
        error(capsys, "-f", file)
        == "error: roles: the entries of layers must add up to the model's 4 layers (got 3). Add 1 layer\n"
    )


def test_refuses_an_unknown_field(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, model, engine={"maxModelLenght": 1})
    assert error(capsys, "-f", file) == (
        f"error: {file}: spec.engine.maxModelLenght: unknown field. Remove the field, or write maxModelLen\n"
    )


def test_reports_a_missing_path_of_the_model(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model / "nowhere")
    message = error(capsys, "-f", file)
    assert message.startswith(f"error: model.uri: {model}/nowhere: no such directory")
    assert message.count("\n") == 1


def test_a_path_without_a_model_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").unlink()
    message = error(capsys, "-f", write(tmp_path, model), "--model-dir", str(model))
    assert message.startswith(f"error: --model-dir: {model}: ")
    assert "config.json" in message


def test_an_argument_that_the_plan_sets_is_refused(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, engine={"args": ["--block-size", "16"]})
    assert error(capsys, "-f", file) == (
        "error: engine.args: '--block-size' is refused: only HeteroInfer may set --block-size. "
        "Remove it: the plan sets the same value on GPU and CPU ranks\n"
    )


def test_names_each_argument_and_annotation_that_the_chart_refuses(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is still printed, because an administrator may allow the values. The exit code is 4."""
    file = write(tmp_path, model, engine={"args": ["--middleware", "a.B", "--trust-remote-code", "--foo"]})
    assert main(["plan", "-f", file]) == 4
    out, err = capsys.readouterr()
    assert out.startswith(
        "llama has a plan, but the installation refuses 3 settings (see below): 2 pods (1 CPU, 1 GPU)"
    )
    lines = err.splitlines()
    assert len(lines) == 3
    for line, argument in zip(lines, ("--middleware", "--trust-remote-code", "--foo"), strict=True):
        assert line.startswith("refused by an operator with the chart's default values: engine.args: ")
        assert argument in line
    assert main(["plan", "-f", write(tmp_path, model, engine={"args": ["--max-log-len", "0"]})]) == 0
    assert not capsys.readouterr().err


def test_names_each_argument_that_no_plan_accepts(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--foo", "--tensor-parallel-size=2", "--max-log-len", "5", "-n2"]
    lines = error(capsys, "-f", write(tmp_path, model, engine={"args": args})).splitlines()
    assert [line.partition(" is refused")[0] for line in lines] == [
        "error: engine.args: '--tensor-parallel-size=2'",
        "error: engine.args: '-n2'",
        "refused by an operator with the chart's default values: engine.args: '--foo'",
    ]


@pytest.mark.parametrize(
    ("engine", "arguments", "expected"),
    [
        ({}, [], ("fits", 0, [], [])),
        ({"args": ["--foo"]}, [], ("refused by policy", 4, [], ["ArgumentNotAllowed"])),
        (
            {"args": ["--foo", "--seed=1", "--trust-remote-code"]},
            [],
            (
                "invalid",
                1,
                ["RefusedArgument"],
                ["RefusedArgument", "ArgumentNotAllowed", "RemoteCodeNotAllowed"],
            ),
        ),
        (
            {"args": ["--foo"]},
            ["--gpus", "0"],
            ("does not fit", 3, ["InsufficientGPU"], ["ArgumentNotAllowed"]),
        ),
        ({"maxModelLen": 10**6}, [], ("invalid", 1, ["MaxModelLenTooLong"], [])),
        ({"maxModelLenght": 1}, [], ("invalid", 1, ["InvalidSpec"], [])),
        ({}, ["--model-dir", "/nowhere"], ("invalid", 1, ["ModelNotReadable"], [])),
    ],
)
def test_json_has_the_outcome_and_every_refused_value(
    engine: dict[str, Any],
    arguments: list[str],
    expected: tuple[str, int, list[str], list[str]],
    tmp_path: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main(["plan", "-f", write(tmp_path, model, engine=engine), "-o", "json", *arguments])
    out, err = capsys.readouterr()
    value = json.loads(out)
    errors, refused = ([each["reason"] for each in value[field]] for field in ("errors", "refused"))
    assert (value["outcome"], value["exitCode"], errors, refused) == expected
    assert code == value["exitCode"]
    assert ("plan" in value) == (code in (0, 4))
    assert all(each["message"] in err for each in (*value["errors"], *value["refused"]))


def test_a_model_that_does_not_fit_the_memory_does_not_fit(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = [{"name": "gpu", "device": "GPU", "deviceMemory": "100Ki"}]
    assert "error: " in error(capsys, "-f", write(tmp_path, model, roles=roles), code=3)


def test_values_of_the_chart_decide_which_arguments_are_allowed(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotated = {"template": {"annotations": {"example.org/note": "x"}}}
    roles = [{"name": "cpu", "device": "CPU", **annotated}]
    args = ["--runner", "generate", "--trust-remote-code"]
    file = write(tmp_path, model, engine={"args": args}, roles=roles)
    assert main(["plan", "-f", file]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 3
    values = tmp_path / "values.yaml"
    allowed = {
        "allowRemoteCode": True,
        "allowedArguments": ["--runner"],
        "allowedAnnotations": ["example.org/"],
        "allowHostPaths": True,
        "replicas": 2,
    }
    values.write_text(yaml.safe_dump(allowed))
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 0
    values.write_text(yaml.safe_dump({**allowed, "allowedArguments": []}))
    capsys.readouterr()
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 4
    line = capsys.readouterr().err
    assert line.startswith(f"refused by an operator with the values of {values}: engine.args: '--runner'")
    values.write_text(yaml.safe_dump({**allowed, "allowedHostPaths": ["/elsewhere"]}))
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 4
    assert "must be in /elsewhere" in capsys.readouterr().err
    values.write_text("null")
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 4
    assert len(capsys.readouterr().err.splitlines()) == 4, "with the path of a node"


def _role(**template: Any) -> dict[str, Any]:
    return {"roles": [{"name": "cpu", "device": "CPU", "template": template}]}


RESTRICTIONS: dict[str, tuple[dict[str, Any], Any, Any, str]] = {
    "allowHostPaths": ({}, True, False, "HostPathNotAllowed"),
    "allowedHostPaths": ({}, ["/"], ["/elsewhere"], "HostPathNotAllowed"),
    "allowedWorkerImages": ({"engine": {"image": "a.io/b:1"}}, ["a.io/"], ["c.io/"], "ImageNotAllowed"),
    "allowRemoteCode": ({"engine": {"args": ["--trust-remote-code"]}}, True, False, "RemoteCodeNotAllowed"),
    "allowedArguments": ({"engine": {"args": ["--runner=generate"]}}, ["--runner"], [], "ArgumentNotAllowed"),
    "allowedEnvironment": (
        {"engine": {"env": [{"name": "FI_PROVIDER", "value": "efa"}]}},
        ["FI_*"],
        [],
        "EnvironmentNotAllowed",
    ),
    "allowedAnnotations": (_role(annotations={"a.io/b": "x"}), ["a.io/"], [], "AnnotationNotAllowed"),
    "allowedServiceAccounts": (_role(serviceAccountName="a"), ["a"], ["b"], "ServiceAccountNotAllowed"),
}
"""By value of the chart: a spec, a value that allows it, a value that refuses it, and the reason."""


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_each_restriction_of_the_chart_restricts_the_plan(
    name: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields, allowing, refusing, reason = RESTRICTIONS[name]
    file, values = write(tmp_path, model, **fields), tmp_path / "values.yaml"
    command = ["plan", "-f", file, "--gpus", "1", "--gpu-memory", "80Gi", "-o", "json"]
    for value, refused in ((allowing, []), (refusing, [reason])):
        values.write_text(yaml.safe_dump({"allowHostPaths": True, name: value}))
        assert main([*command, "--chart-values", str(values)]) == (4 if refused else 0)
        assert [each["reason"] for each in json.loads(capsys.readouterr().out)["refused"]] == refused


def test_every_restriction_of_the_chart_has_a_case() -> None:
    values = yaml.safe_load((REPOSITORY / "charts/heteroinfer/values.yaml").read_text())
    assert RESTRICTIONS.keys() == {name for name in values if name.startswith("allow")}


def test_resources_that_the_chart_adds_to_roles_count(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, model, roles=[{"name": "cpu", "device": "CPU"}])
    values = tmp_path / "values.yaml"
    values.write_text("podResources: {worker: {limits: {memory: 1Gi}}}")
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 3
    assert "(got 1.00 GiB)" in capsys.readouterr().err
    values.write_text("{allowHostPaths: true, podResources: {worker: {limits: {memory: 8Gi}}}}")
    assert main(["plan", "-f", file, "--chart-values", str(values)]) == 0
    capsys.readouterr()
    values.write_text("podResources: {workers: {}}")
    assert "must be an object with only the keys fetch, inspect, worker" in error(
        capsys, "-f", file, "--chart-values", str(values)
    )


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "allowedArguments: --runner",
        "a: [",
        "allowRemoteCode: maybe",
        "podResources: {fetch: {limits: {cpu: 2020-01-01}}}",
        "podResources: {fetch: !!binary aGk=}",
        "podResources: &a {fetch: *a}",
        pytest.param("a: " + "[" * 3000 + "]" * 3000, id="deep"),
    ],
)
def test_refuses_a_file_that_does_not_hold_values_of_the_chart(
    text: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(text)
    file = write(tmp_path, model)
    reported = error(capsys, "-f", file, "--chart-values", str(values))
    assert reported.startswith(f"error: --chart-values: {values} does not contain values of the chart (")
    assert "Create the file with `helm get values RELEASE --all -o yaml`" in reported
    assert "No such file" in error(capsys, "-f", file, "--chart-values", str(tmp_path / "none"))


def test_reports_the_line_of_a_yaml_error_in_a_file_of_nodes(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "README.md"
    nodes.write_text("# Title\n\nsome: text: more\n")
    reported = error(capsys, "-f", write(tmp_path, model), "--nodes", str(nodes))
    assert f"--nodes: {nodes} is not a list of Kubernetes objects (line 3: mapping values are not" in reported


def test_a_missing_calibration_file_is_reported_with_the_command_that_creates_it(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nope.json"
    reported = error(capsys, "-f", write(tmp_path, model), "--calibration", str(file))
    assert reported == (
        f"error: --calibration: {file} cannot be read (No such file or directory). Create it with "
        f"`heteroinfer calibrate -o {file}`, which takes under a minute\n"
    )


def test_refuses_a_name_that_is_too_long(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write(tmp_path, model))
    file.write_text(file.read_text().replace("name: llama", f"name: {'a' * 41}"))
    assert "metadata: name must have at most 40 characters" in error(capsys, "-f", str(file))


def test_refuses_a_role_without_pods(tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, model, roles=[{"name": "cpu", "device": "CPU", "pods": 0}])
    assert error(capsys, "-f", file) == (
        f"error: {file}: spec.roles[0].pods: must be greater than or equal to 1 (got 0)\n"
    )


def test_reports_a_gpu_role_without_any_gpu(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert error(capsys, "-f", write(tmp_path, model), "--gpus", "0", code=3) == (
        "error: llama does not fit: needs 1 pod (role gpu) with 1 nvidia.com/gpu; node (--gpus) has no "
        "nvidia.com/gpu; the group waits for GPUs. Add GPUs, or set planning.onGPUShortage.action: CPUOnly "
        "(expected step time on CPUs: 2.1 ms (1.89 to 2.74) instead of 2.1 ms (1.89 to 2.73))\n"
    )


def kubectl(*items: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


def stored_node(name: str, **allocatable: str) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": name, "labels": {**IMAGE_PLATFORM, "nvidia.com/gpu.memory": "81920"}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}
        if len(allocatable) > 2
        else {},
        "status": {
            "allocatable": {"cpu": "16", "memory": "64Gi", "pods": "110", **allocatable},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def table_of(out: str) -> list[str]:
    """Returns the heading and the rows of the table of ranks."""
    lines = out.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("RANK"))
    return lines[begin : lines.index("", begin)]


def test_the_table_shows_the_node_of_each_rank(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes.json"
    gpu_node = stored_node("a", **{"nvidia.com/gpu": "1"})
    nodes.write_text(json.dumps(kubectl(gpu_node, stored_node("b"))))
    file = write(tmp_path, model)
    assert main(["plan", "-f", file, "--nodes", str(nodes)]) == 0
    out = capsys.readouterr().out
    rows = {row.split()[1]: row.removesuffix("<- slowest").split()[-1] for row in table_of(out)[1:]}
    assert table_of(out)[0].split()[-1] == "NODE"
    assert rows == {"cpu": "b", "gpu": "a"}
    assert "CPU ranks are not needed" in out, "the memory of a GPU is labelled"
    taken = {
        "kind": "Pod",
        "metadata": {"name": "x", "namespace": "y"},
        "spec": {"nodeName": "a", "containers": [{"resources": {"requests": {"nvidia.com/gpu": "1"}}}]},
        "status": {"phase": "Running"},
    }
    nodes.write_text(json.dumps(kubectl(gpu_node, stored_node("b"), taken)))
    reported = error(capsys, "-f", file, "--nodes", str(nodes), code=3)
    assert "node a has 0 free of 1 nvidia.com/gpu" in reported


def test_hundreds_of_nodes_take_seconds(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, YAML of 300 nodes and 4,500 pods with realistic sizes (33 MB) took 54 s."""
    env = [{"name": f"NAME_{i}", "value": "value" * 8} for i in range(40)]
    pod = {
        "kind": "Pod",
        "metadata": {"name": "POD", "namespace": "x", "managedFields": [{"fieldsV1": {"f:spec": {}}}]},
        "spec": {
            "nodeName": "NODE",
            "containers": [{"env": env, "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}],
        },
        "status": {"phase": "Running"},
    }
    nodes = [stored_node(f"node-{i}") for i in range(300)]
    text = json.dumps(pod, indent=4)
    pods = [text.replace("POD", f"pod-{i}").replace("NODE", f"node-{i % 300}") for i in range(4500)]
    file = tmp_path / "nodes.json"
    items = ",".join([*map(json.dumps, nodes), *pods])
    file.write_text(f'{{"apiVersion": "v1", "items": [{items}], "kind": "List"}}')
    assert file.stat().st_size > 30e6
    began_s = time.process_time()
    assert main(["plan", "-f", write(tmp_path, model, roles=CPU_ROLE), "--nodes", str(file)]) == 0
    assert time.process_time() - began_s < 5, "CPU time: others may compute meanwhile"
    assert table_of(capsys.readouterr().out)[1].split()[-1].startswith("node-")


def test_names_of_models_and_nodes_write_no_terminal_sequences(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["Llama\x1b]0;TITLE\x07ForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    nodes = tmp_path / "nodes.json"
    for name in ("n\x1b[8m\nerror: forged", "\ud800"):
        nodes.write_text(json.dumps(kubectl(stored_node(name))))
        for output in ("table", "json", "yaml"):
            file = write(tmp_path, model, roles=CPU_ROLE)
            assert main(["plan", "-f", file, "--nodes", str(nodes), "-o", output]) == 0
            out, err = capsys.readouterr()
            assert out.encode().replace(b"\n", b"").decode().isprintable()
            assert "error: forged" not in out.splitlines() + err.splitlines()


def test_counts_preemption_of_pods_with_lower_priority(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placeholder = {
        "kind": "Pod",
        "metadata": {"name": "x", "namespace": "y"},
        "spec": {
            "nodeName": "a",
            "priority": -10,
            "containers": [{"resources": {"requests": {"memory": "62Gi"}}}],
        },
        "status": {"phase": "Running"},
    }
    low = {"kind": "PriorityClass", "metadata": {"name": "low"}, "value": -10}
    high = {"kind": "PriorityClass", "metadata": {"name": "system-node-critical"}, "value": 2_000_001_000}
    nodes, file = tmp_path / "nodes.json", write(tmp_path, model, roles=CPU_ROLE)
    nodes.write_text(json.dumps(kubectl(stored_node("a"), placeholder, low, high)))
    assert main(["plan", "-f", file, "--nodes", str(nodes)]) == 0
    out = capsys.readouterr().out
    assert table_of(out)[1].split()[-1] == "a"
    assert "note: waiting until the scheduler preempts pods of lower priority on node a\n" in out
    of_low = write(tmp_path, model, roles=CPU_ROLE, scheduling={"priorityClassName": "low"})
    assert "PriorityClasses" not in error(capsys, "-f", of_low, "--nodes", str(nodes), code=3)
    nodes.write_text(json.dumps(kubectl(stored_node("a"), placeholder)))
    reported = error(capsys, "-f", write(tmp_path, model, roles=CPU_ROLE), "--nodes", str(nodes), code=3)
    assert (
        "--nodes: the file has no PriorityClasses, so the plan assumes that the scheduler preempts"
        in reported
    )


def test_truncated_json_is_reported_with_its_line(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes.json"
    nodes.write_text(json.dumps(kubectl(stored_node("a")), indent=1)[:-9])
    reported = error(capsys, "-f", write(tmp_path, model), "--nodes", str(nodes))
    assert "is not a list of Kubernetes objects (line " in reported
    assert "kubectl get nodes,pods" in reported


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "kind: List",
        "{kind: List, items: []}",
        pytest.param('{"kind": "List", "items": ' + "[" * 100_000 + "]" * 100_000 + "}", id="deep JSON"),
        pytest.param("items: " + "[" * 2000 + "]" * 2000, id="deep YAML"),
    ],
)
def test_refuses_files_without_nodes(
    text: str, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(text)
    reported = error(capsys, "-f", write(tmp_path, model), "--nodes", str(nodes))
    assert "Create the file with `kubectl get nodes,pods,priorityclasses -A -o json`" in reported
    assert "Error(" not in reported
    assert "No such file" in error(capsys, "-f", write(tmp_path, model), "--nodes", str(tmp_path / "none"))


@pytest.mark.parametrize("arguments", [["--gpus", "-1"], ["--gpus", "x"], ["--gpu-memory", "80GB"]])
def test_a_bad_option_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "-f", "x.yaml", *arguments])
    assert caught.value.code == 2
    reported = capsys.readouterr().err
    assert f"{arguments[0]}: " in reported
    assert repr(arguments[1]) in reported
    assert re.search(r"must be a number of GPUs|must be a size without B .*Write 80Gi, or 80G", reported)
