"""Restrictions of an installation: a stricter list refuses new specs but does not affect running groups."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.refused_args import PLAN_OWNED, UNSUPPORTED, find_refused
from heteroinfer_operator.api import parse_spec, parse_stored_spec
from heteroinfer_operator.api.env_vars import OWNED_ENV, SECRET_ENV
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests.identity import revision
from heteroinfer_operator.reconcile import Allowed
from heteroinfer_operator.reconcile.allowed_args import ALLOWED_ARGS, KEYS, UNLISTED_OPTIONS, VALUES
from heteroinfer_operator.reconcile.allowed_env import ALLOWED_ENV
from tests.unit.api.test_template import DIGEST
from tests.unit.pages import guide
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

ALL = Allowed(arguments=None, environment=None, annotations=None)


def annotated(*keys: str) -> dict[str, Any]:
    spec = cpu_pair()
    role = {**spec["roles"][0], "template": {"annotations": dict.fromkeys(keys, "x")}}
    return {**spec, "roles": [role, spec["roles"][1]]}


def refusal(*args: str, allowed: Allowed | None = None) -> str:
    """Returns why arguments are not allowed, or ""."""
    problem = (allowed or Allowed()).find_forbidden(parse_spec(cpu_pair(engine={"args": list(args)})))
    return problem.message if problem is not None else ""


def refused_variable(name: str, allowed: Allowed | None = None) -> str:
    """Returns why a variable is not allowed, or ""."""
    spec = parse_spec(cpu_pair(engine={"env": [{"name": name, "value": "/mnt/a"}]}))
    problem = (allowed or Allowed()).find_forbidden(spec)
    assert problem is None or problem.reason == "EnvironmentNotAllowed"
    return problem.message if problem is not None else ""


@pytest.mark.parametrize(
    "key",
    [
        "container.apparmor.security.beta.kubernetes.io/worker",
        "vault.hashicorp.com/agent-inject",
        "cdi.k8s.io/gpu",
        "prometheus.io.example/x",
        "io.kubernetes.cri-o.Devices",
        "io.katacontainers.config.hypervisor.kernel_params",
    ],
)
def test_annotations_with_effects_on_pods_are_refused(key: str) -> None:
    problem = Allowed().find_forbidden(parse_spec(annotated(key)))
    assert problem is not None
    assert (problem.reason, key in problem.message) == ("AnnotationNotAllowed", True)
    prefix = f"{key.partition('/')[0]}/" if "/" in key else key
    assert Allowed(annotations=(prefix,)).find_forbidden(parse_spec(annotated(key))) is None


@pytest.mark.parametrize(
    ("image", "is_allowed"),
    [
        ("registry.example.com/ml/worker:1", True),
        ("registry.example.com/ml-of-others/worker:1", False),
        ("registry.example.com/mlx", False),
        ("docker.io/vllm:1", True),
        ("docker.io/vllm:12", False),
        ("docker.io/cpu:9", True),
        ("evil.example.com/registry.example.com/ml/worker:1", False),
        (None, True),
    ],
)
def test_an_image_must_be_allowed(image: str | None, is_allowed: bool) -> None:
    allowed = Allowed(images=("registry.example.com/ml/", "docker.io/vllm:1", "docker.io/cpu:"))
    spec = parse_spec(cpu_pair(engine={"image": image} if image else {}))
    problem = allowed.find_forbidden(spec)
    assert (problem is None) is is_allowed
    assert is_allowed or (problem is not None and problem.reason == "ImageNotAllowed")
    assert Allowed().find_forbidden(spec) is None


def test_an_image_volume_must_be_allowed() -> None:
    allowed = Allowed(images=("registry.example.com/ml/",))
    spec = cpu_pair(model={"uri": f"oci://evil.example/model@{DIGEST}"})
    assert allowed.find_forbidden(parse_spec(spec)) is None, "weights are not code"
    for image, is_allowed in (("registry.example.com/ml/data:1", True), ("evil.example/any:1", False)):
        volume = {"name": "x", "image": {"reference": image}}
        spec["roles"] = [{**role, "template": {"volumes": [volume]}} for role in spec["roles"]]
        problem = allowed.find_forbidden(parse_spec(spec))
        assert (problem is None) is is_allowed
    assert problem is not None
    assert problem.reason == "ImageNotAllowed"
    assert problem.message.startswith("roles[first].template.volumes[x].image.reference: image evil")


NAMES_OF_CODE = """
    LD_AUDIT LD_LIBRARY_PATH LD_PRELOAD HOME NCCL_CONF_FILE NCCL_NET_PLUGIN PYTHONHOME PYTHONPATH
    PYTHONSTARTUP PYTHONUSERBASE TORCHINDUCTOR_CACHE_DIR TORCH_EXTENSIONS_DIR TRITON_CACHE_DIR
    VLLM_CACHE_ROOT VLLM_LOGGING_CONFIG_PATH XDG_CACHE_HOME HF_HOME HF_MODULES_CACHE PATH
"""
OPTIONS_OF_CODE = """
    --middleware --tool-parser-plugin --reasoning-parser-plugin --logging-config --logits-processors
    --worker-extension-cls --worker-cls --io-processor-plugin --download-dir --hf-config-path
    --code-revision
"""


@pytest.mark.parametrize("name", NAMES_OF_CODE.split())
def test_no_environment_variable_runs_code_from_a_mounted_folder(name: str) -> None:
    assert f"{name} is not an allowed variable" in refused_variable(name)


@pytest.mark.parametrize("option", OPTIONS_OF_CODE.split())
@pytest.mark.parametrize("folder", ["/mnt/a", "/etc/heteroinfer/files"])
def test_no_option_runs_code_from_a_mounted_folder(option: str, folder: str) -> None:
    files = [{"name": "a.py", "configMapKeyRef": {"name": "c", "key": "k"}}]
    engine = {"args": [option, f"{folder}/a.py"], "files": files}
    assert Allowed().find_forbidden(parse_spec(cpu_pair(engine=engine))) is not None


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("/models", True),
        ("/models/llama", True),
        ("/models-of-others/llama", False),
        ("/etc", False),
    ],
)
def test_a_node_path_must_be_in_an_allowed_folder(path: str, is_allowed: bool) -> None:
    spec = parse_spec(cpu_pair(model={"uri": f"file://{path}"}))
    problem = Allowed(host_paths=("/models/",)).find_forbidden(spec)
    assert (problem is None) is is_allowed
    assert Allowed(host_paths=("/",)).find_forbidden(spec) is None
    assert Allowed(host_paths=("/models/",)).find_forbidden(parse_spec(cpu_pair())) is None


def test_usual_annotations_are_allowed() -> None:
    spec = parse_spec(annotated("note", "prometheus.io/scrape", "karpenter.sh/do-not-disrupt"))
    assert Allowed().find_forbidden(spec) is None


@pytest.mark.parametrize("arg", ["--trust-remote-code", "--trust_remote_code"])
def test_model_code_needs_a_flag_of_the_operator(arg: str) -> None:
    assert "allowRemoteCode" in refusal(arg)
    assert not refusal(arg, allowed=Allowed(remote_code=True))
    assert not refusal("--no-trust-remote-code")
    assert "allowRemoteCode" in refusal("--no-trust-remote-code", arg), "the last one counts"


@pytest.mark.parametrize(
    "args",
    [
        ["--mm-processor-kwargs", '{"trust_remote_code": true}'],
        ["--mm_processor_kwargs.trust_remote_code=true"],
        ["--media-io-kwargs", '{"a": [{"trust_remote_c\\u006fde": true}]}'],
        ["--mm-processor-kwargs", '{"a": {"trust_remote_code": 1}, "a": 2}'],
    ],
)
def test_model_code_is_found_inside_json(args: list[str]) -> None:
    assert "allowRemoteCode" in refusal(*args)
    assert not refusal(*args, allowed=Allowed(remote_code=True))


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--middleware", "runs code"),
        ("--worker-extension-cls", "runs code"),
        ("--logits-processors", "runs code"),
        ("--io-processor-plugin", "runs code"),
        ("--tool-parser-plugin", "runs code"),
        ("--reasoning-parser-plugin", "runs code"),
        ("--logging-config", "runs code"),
        ("--allowed-local-media-path", "files of the pod"),
        ("--hf-token", "tokenSecretRef"),
        ("--api-key", "VLLM_API_KEY in engine.env from a Secret"),
        ("--runner", "pooling"),
        ("--profiler-config", "allowedArguments"),
        ("--additional-config", "allowedArguments"),
        ("--such-option", "allowedArguments"),
    ],
)
def test_arguments_that_load_code_or_hold_secrets_are_refused(option: str, why: str) -> None:
    for args in ([option, "x"], [f"{option}=x"], [f"{option}.key", "x"], ["--max-log-len", "0", option]):
        assert why in refusal(*args), args
    assert not refusal(option, "x", allowed=Allowed(arguments=(option,))), "an administrator allowed it"


@pytest.mark.parametrize(
    "option",
    [
        "--cpu-offload-gb",
        "--cpu-offload-params",
        "--offload-backend",
        "--offload-group-size",
        "--offload-num-in-group",
        "--offload-prefetch-step",
        "--offload-params",
        "--cpu-off",
    ],
)
def test_weight_offloading_is_always_refused(option: str) -> None:
    for allowed in (Allowed(), ALL, Allowed(arguments=(option,))):
        for args in ([option, "4"], [f"{option}=4"], [option.replace("-", "_").replace("__", "--") + "=4"]):
            found = refusal(*args, allowed=allowed)
            assert "counts neither the host memory nor the time" in found, args
            assert "a role of CPU pods" in found


@pytest.mark.parametrize("allowed", [Allowed(), ALL, Allowed(arguments=("--seed",))])
def test_options_that_no_plan_accepts_are_refused_before_the_model_is_known(allowed: Allowed) -> None:
    spec = parse_spec(cpu_pair(engine={"args": ["--max-log-len", "0", "--seed=1"]}))
    problem = allowed.find_forbidden(spec)
    assert problem is not None
    assert problem.reason == "RefusedArgument"
    assert problem.message.startswith("engine.args: '--seed=1' is refused")


def test_the_end_of_options_marker_is_refused() -> None:
    """After the marker, vLLM would read the plan's own options as positional arguments."""
    assert "allowedArguments" in refusal("--max-log-len", "0", "--")


@given(
    st.sampled_from(sorted(ALLOWED_ARGS | {o for entry in UNLISTED_OPTIONS for o in entry.options})),
    st.integers(1, 40),
)
def test_abbreviated_options_are_refused(option: str, length: int) -> None:
    """The parser accepts a unique prefix of an option, but the checks would not recognize it."""
    short = option[: 2 + length].replace("-", "_").replace("__", "--", 1)
    name = short.replace("_", "-")
    assert name in ALLOWED_ARGS or next(find_refused([short]), None) or refusal(short, "1")


@pytest.mark.parametrize(
    ("args", "key"),
    [
        (["--compilation-config", '{"backend": "model.compile"}'], "--compilation-config.backend"),
        (["--compilation-config.backend", "model.compile"], "--compilation-config.backend"),
        (["--compilation_config.backend=model.compile"], "--compilation-config.backend"),
        (["-cc.backend=model.compile"], "--compilation-config.backend"),
        (["-cc", '{"mode": 3, "inductor_passes": {"x": "model.f"}}'], "--compilation-config.inductor_passes"),
        (["-cc.inductor_passes.x=model.f"], "--compilation-config.inductor_passes"),
        (["-cc.inductor_compile_config+", "x"], "--compilation-config.inductor_compile_config"),
        (["--structured-outputs-config.reasoning_parser_plugin=/x.py"], "reasoning_parser_plugin"),
        (['--structured-outputs-config={"reasoning_parser_plugin":"/x"}'], "reasoning_parser_plugin"),
        (["--hf-overrides", '{"auto_map": {}}'], "--hf-overrides.auto_map"),
        (["--hf-overrides", "model.overrides"], "JSON"),
    ],
)
def test_json_values_are_checked(args: list[str], key: str) -> None:
    assert key in refusal(*args)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--enable-prefix-caching", "--no-enable-chunked-prefill", "--enable_sleep_mode"],
        ["--max-logprobs", "100", "--stream-interval=2", "--kv-cache-dtype", "fp8"],
        ["-O3", "-cc.mode=0", "-q", "fp8", "--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'],
        ["--cudagraph-capture-sizes", "1", "2", "4", "--compilation-config.custom_ops+", "+rms_norm"],
        ["--structured-outputs-config", '{"backend": "xgrammar"}', "--no-async-scheduling"],
        ["--chat-template", "{% for m in messages %}{{ m.content }}{% endfor %}"],
        ["--allowed-origins", '["https://a.example"]', "--limit-mm-per-prompt", '{"image": 2}'],
    ],
)
def test_usual_arguments_are_allowed(args: list[str]) -> None:
    assert not refusal(*args)


@pytest.mark.parametrize("value", ["-1", "101", "9" * 30, "0000000005000", "many", ""])
def test_more_log_probabilities_than_the_plan_counts_are_refused(value: str) -> None:
    assert "Set a number from 0 to 100" in refusal(f"--max-logprobs={value}")


@pytest.mark.parametrize("value", ["nvfp4", "fp8_ds_mla", "int4_per_token_head", "turboquant_4bit_nc"])
def test_a_kv_cache_type_that_the_plan_cannot_count_is_refused(value: str) -> None:
    assert "Set one of auto, bfloat16" in refusal("--kv-cache-dtype", value)
    assert "Set one of auto, bfloat16" in refusal(f"--kv_cache_dtype={value}")
    assert "Set one of auto, bfloat16" in refusal("--kv-cache-dtype")


def test_no_list_contains_an_option_that_another_list_refuses() -> None:
    refused = set(PLAN_OWNED) | {option for entry in UNSUPPORTED for option in entry.options}
    taken_back = {"--async-scheduling", "--enable-lora", "--enable-dbo"}
    assert ALLOWED_ARGS & refused == taken_back, "the list contains their form with no-"
    for option in taken_back:
        assert next(find_refused([option]), None)
        assert not refusal(f"--no-{option.removeprefix('--')}")
    assert {*KEYS, *VALUES} <= ALLOWED_ARGS
    assert not ALLOWED_ARGS & {option for entry in UNLISTED_OPTIONS for option in entry.options}


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "NVIDIA_VISIBLE_DEVICES",
        "VLLM_ALLOW_INSECURE_SERIALIZATION",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        "VLLM_LOGGING_CONFIG_PATH",
        "VLLM_NCCL_SO_PATH",
        "VLLM_CACHE_ROOT",
        "NCCL_NET_PLUGIN",
        "NCCL_CONF_FILE",
        "OMP_TOOL_LIBRARIES",
        "TRITON_PTXAS_PATH",
        "PATH",
        "vllm_logging_level",
    ],
)
def test_variables_that_load_code_or_devices_are_refused(name: str) -> None:
    assert f"{name} is not an allowed variable" in refused_variable(name)
    assert "chart's allowedEnvironment" in refused_variable(name)


@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,40}", fullmatch=True))
def test_only_listed_variables_are_allowed(name: str) -> None:
    if name not in (*ALLOWED_ENV, *OWNED_ENV) and not name.startswith("HETEROINFER_"):
        assert refused_variable(name)


@pytest.mark.parametrize(
    ("entry", "name", "is_allowed"),
    [
        ("FI_PROVIDER", "FI_PROVIDER", True),
        ("FI_PROVIDER", "FI_PROVIDER_2", False),
        ("FI_*", "FI_PROVIDER", True),
        ("FI_*", "XFI_PROVIDER", False),
        ("FI_", "FI_PROVIDER", False),
    ],
)
def test_an_administrator_can_allow_variables(entry: str, name: str, is_allowed: bool) -> None:
    assert (refused_variable(name, Allowed(environment=(entry,))) == "") is is_allowed


@pytest.mark.parametrize("name", [*OWNED_ENV, "HETEROINFER_PLAN"])
def test_no_installation_allows_a_variable_of_the_plan(name: str) -> None:
    with pytest.raises(SpecError, match="must not be a variable that HeteroInfer reserves"):
        parse_spec(cpu_pair(engine={"env": [{"name": name, "value": "x"}]}))


@pytest.mark.parametrize("name", ["VLLM_LOGGING_LEVEL", "HTTPS_PROXY", "OMP_NUM_THREADS", *names.USER_ENV])
def test_usual_variables_are_allowed(name: str) -> None:
    assert refused_variable(name) == ""


@pytest.mark.parametrize("name", SECRET_ENV)
def test_a_secret_variable_must_come_from_a_secret(name: str) -> None:
    for bad in ({"value": "x"}, {"valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}}):
        with pytest.raises(SpecError, match=r"Store the value in a Secret, and set valueFrom\.secretKeyRef"):
            parse_spec(cpu_pair(engine={"env": [{"name": name, **bad}]}))
    good = {"valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    parse_spec(cpu_pair(engine={"env": [{"name": name, **good}]}))


def test_examples_use_only_allowed_values() -> None:
    """Values in the documentation and examples are allowed."""
    text = guide()
    found = re.findall(r"args: \[(--[^\]]+)\]", text)
    assert found
    assert not [args for args in found if refusal(*args.split(", "))]


STRICTER = [
    pytest.param(annotated("vault.hashicorp.com/agent-inject"), id="annotation"),
    pytest.param(cpu_pair(engine={"args": ["--trust-remote-code"]}), id="remote code"),
    pytest.param(cpu_pair(engine={"args": ["--middleware", "a.B"]}), id="argument"),
    pytest.param(cpu_pair(engine={"args": ["--kv-cache-dtype", "nvfp4"]}), id="value"),
    pytest.param(cpu_pair(engine={"env": [{"name": "LD_PRELOAD", "value": "x"}]}), id="variable"),
]


def check_group_lives_on(world: World) -> None:
    """Checks that the group restarts with its plan, suspends and resumes, with the refusal reported."""
    assert world.condition("Planned")[0] == "False"
    assert world.condition("Available")[0] == "True"
    world.end_pod("demo-0-1-1")
    world.step()
    assert world.condition("Available")[0] == "False", "the status is written immediately"
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]
    world.all_ready()
    world.settle()
    assert world.condition("Available")[0] == "True"
    assert world.condition("Planned")[0] == "False"


@pytest.mark.parametrize("spec", STRICTER)
def test_a_stricter_list_does_not_affect_running_groups(spec: dict[str, Any]) -> None:
    world = World(spec=spec, options=replace(OPTIONS, allowed=ALL))
    world.serve()
    world.options = OPTIONS
    world.settle()
    assert world.condition("Ready")[0] == "True", "it serves the spec of this generation"
    check_group_lives_on(world)
    world.change_spec(suspend=True)
    world.settle()
    world.reap()
    world.settle()
    assert world.workers() == []


@pytest.mark.parametrize("spec", STRICTER)
def test_a_relaxed_list_clears_the_refusal(spec: dict[str, Any]) -> None:
    world = World(spec=spec)
    world.settle()
    assert world.pods == {}, "no pod that downloads or reads the model either"
    assert world.condition("Stalled")[0] == "True"
    world.options = replace(OPTIONS, allowed=ALL)
    world.serve()
    assert world.condition("Ready")[0] == "True"
    assert world.condition("Stalled")[0] != "True"


def as_an_older_version_stored_it(world: World, word: str, older_word: str) -> None:
    """Stores another word in the spec and its objects, without codes, as version 0.1.0 did."""
    older_spec = json.loads(json.dumps(world.spec).replace(word, older_word))
    old, new = (revision(parse_stored_spec(spec)) for spec in (world.spec, older_spec))

    def rewritten(value: Any) -> Any:
        return json.loads(json.dumps(value).replace(word, older_word).replace(old, new))

    world.spec, world.status = older_spec, rewritten(world.status)
    world.status.pop("recordsSignedBy")
    world.objects = {
        (kind, name.replace(old, new)): rewritten(stored) for (kind, name), stored in world.objects.items()
    }
    for stored in world.objects.values():
        stored["metadata"].pop("annotations", None)
    world.pods = {name: replace(pod, labels=rewritten(pod.labels)) for name, pod in world.pods.items()}


def test_a_stricter_schema_does_not_affect_running_groups() -> None:
    """An older schema accepted these variables; running groups may still restart with them."""
    world = World(spec=cpu_pair(engine={"env": [{"name": "VLLM_LOGGING_LEVEL", "value": "/model/x.so"}]}))
    world.serve()
    as_an_older_version_stored_it(world, "VLLM_LOGGING_LEVEL", "LD_PRELOAD")
    world.settle()
    planned = next(c for c in world.status["conditions"] if c["type"] == "Planned")
    assert "LD_PRELOAD is not an allowed variable" in planned["message"]
    check_group_lives_on(world)
    env = world.manifests["demo-0-2-0"]["spec"]["containers"][0]["env"]
    assert {"name": "LD_PRELOAD", "value": "/model/x.so"} in env
