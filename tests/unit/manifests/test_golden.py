"""Manifests of one group against files kept beside this test: a change shows as a diff.

`UPDATE_GOLDEN=1 pytest tests/unit/manifests` writes them anew.
"""

import base64
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.group_key import KEY_BYTES, GroupKey
from heteroinfer_contract.plan import Device, EngineSettings, Mode, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_operator.api import HeteroInferenceSpec, parse_resource, parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.disruption_budget import build_disruption_budget, build_shared_budget
from heteroinfer_operator.manifests.drift import contains_value
from heteroinfer_operator.manifests.group_key_secret import build_group_key_secret
from heteroinfer_operator.manifests.identity import EpochRef, Owner, revision
from heteroinfer_operator.manifests.model_claim import build_model_claim
from heteroinfer_operator.manifests.model_pods import build_model_pod, model_pod_name
from heteroinfer_operator.manifests.network_policy import build_network_policy
from heteroinfer_operator.manifests.plan_config_map import build_plan_config_map
from heteroinfer_operator.manifests.revision_record import RevisionRecord, build_revision_record
from heteroinfer_operator.manifests.service import build_client_service, build_group_service
from heteroinfer_operator.manifests.worker_pods import WorkerImages, WorkerPods

GOLDEN = Path(__file__).parent / "golden"
IMAGES = WorkerImages(cpu="example.test/worker-cpu:1", gpu="example.test/worker:1")
OWNER = Owner(key=ResourceKey(namespace="team", name="llama"), uid="0000-uid")
GROUP = EpochRef(owner=OWNER, index=0, epoch=3)
RESOURCE = parse_resource(yaml.safe_load((GOLDEN / "resource.yaml").read_text()))
ADDRESSING = ClusterAddressing()
KEY = GroupKey.of_group(b"k" * KEY_BYTES, GROUP.uid)
PLAN = Plan(
    mode=Mode.PIPELINE,
    tensor_parallel_size=1,
    pipeline_parallel_size=3,
    ranks=(
        RankAssignment(
            rank=0, local_rank=0, pod=0, role="cpu", device=Device.CPU, stage=0, tensor_rank=0,
            first_layer=0, end_layer=2, kv_cache_bytes=2**30, weight_bytes=2**30, predicted_step_s=0.02,
        ),
        RankAssignment(
            rank=1, local_rank=0, pod=1, role="gpu", device=Device.GPU, stage=1, tensor_rank=0,
            first_layer=2, end_layer=17, kv_cache_bytes=8 * 2**30, weight_bytes=6 * 2**30,
        ),
        RankAssignment(
            rank=2, local_rank=1, pod=1, role="gpu", device=Device.GPU, stage=2, tensor_rank=0,
            first_layer=17, end_layer=32, kv_cache_bytes=8 * 2**30, weight_bytes=7 * 2**30,
        ),
    ),
    engine=EngineSettings(
        model="/model/llama-3-8b", served_name="llama", dtype="bfloat16", max_model_len=8192,
        max_num_batched_tokens=2048, max_num_seqs=64, block_size=32, extra_args=("--max-log-len=0",),
    ),
)  # fmt: skip


def _pods() -> WorkerPods:
    return WorkerPods(
        spec=RESOURCE.spec,
        group=GROUP,
        plan=PLAN,
        revision=revision(RESOURCE.spec),
        addresses=ADDRESSING.pods(RESOURCE.spec, GROUP, PLAN),
        source=ADDRESSING.find_model_source(RESOURCE.spec, OWNER),
        images=IMAGES,
        key=KEY,
    )


def _manifests() -> dict[str, Any]:
    named: dict[str, Any] = {f"pod-{pod.index}": _pods().build_pod(pod) for pod in PLAN.pods}
    named["pod-inspect"] = build_model_pod(
        RESOURCE.spec, OWNER, ADDRESSING.find_model_source(RESOURCE.spec, OWNER), IMAGES
    )
    record = RevisionRecord(name=revision(RESOURCE.spec), spec=RESOURCE.spec)
    for child in (
        build_client_service(OWNER, (RESOURCE.spec.engine.port,)),
        build_group_service(GROUP),
        build_network_policy(RESOURCE.spec, GROUP),
        build_disruption_budget(GROUP, pods=len(PLAN.pods), protects_unready_pods=True),
        build_shared_budget(OWNER, min_available=2 * len(PLAN.pods) - 1),
        build_plan_config_map(OWNER, PLAN),
        build_revision_record(OWNER, record),
    ):
        named[f"{child['kind']}-{child['metadata']['name']}".lower()] = child
    secret = build_group_key_secret(GROUP, KEY)
    return named | {f"secret-{secret['metadata']['name']}": secret}


MANIFESTS = _manifests()


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_each_manifest_equals_its_golden_file(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(yaml.safe_dump(MANIFESTS[name], sort_keys=False, width=120))
    assert yaml.safe_load(path.read_text()) == MANIFESTS[name]


def test_every_golden_file_is_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {*MANIFESTS, "resource"}


def test_launch_and_plan_are_read_back_from_the_environment() -> None:
    for pod in PLAN.pods:
        container = MANIFESTS[f"pod-{pod.index}"]["spec"]["containers"][0]
        env = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        launch = PodLaunch.from_env(env)
        assert launch.pod_index == pod.index
        assert launch.epoch == GROUP.epoch
        assert launch.address.host.startswith(f"llama-0-3-{pod.index}.")
        assert len(launch.addresses) == len(PLAN.pods)


def test_fields_of_the_plan_override_the_users_template() -> None:
    pod = MANIFESTS["pod-1"]
    assert pod["metadata"]["labels"]["team"] == "search"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_only_the_leader_is_an_endpoint() -> None:
    selector = MANIFESTS["service-llama"]["spec"]["selector"]
    chosen = [
        name for name in ("pod-0", "pod-1") if contains_value(MANIFESTS[name]["metadata"]["labels"], selector)
    ]
    assert chosen == ["pod-0"]


def test_host_paths_need_the_installations_permission() -> None:
    model = RESOURCE.spec.model.model_copy(update={"uri": "file:///models/llama"})
    spec = RESOURCE.spec.model_copy(update={"model": model})
    with pytest.raises(PlanError, match="allowHostPaths=true"):
        ADDRESSING.find_model_source(spec, OWNER)
    source = ClusterAddressing(allow_host_paths=True).find_model_source(spec, OWNER)
    assert source.volume == {"hostPath": {"path": "/models/llama", "type": "Directory"}}


def _hub_spec(**model: Any) -> HeteroInferenceSpec:
    asked = {"uri": "hf://acme/llama", "revision": "v1", **model}
    return parse_spec({**RESOURCE.spec.dump(), "model": asked})


def test_a_hubs_model_needs_a_cache() -> None:
    with pytest.raises(PlanError, match=r"cache.claimName .* or cache.size"):
        ADDRESSING.find_model_source(_hub_spec(), OWNER)


def test_only_the_fetch_writes_the_cache_and_sees_the_token() -> None:
    spec = _hub_spec(cache={"size": "100Gi"}, tokenSecretRef={"name": "hub"})
    source = ADDRESSING.find_model_source(spec, OWNER)
    fetch = build_model_pod(spec, OWNER, source, IMAGES)
    env = {variable["name"]: variable for variable in fetch["spec"]["containers"][0]["env"]}
    assert env["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert env["HF_HUB_OFFLINE"]["value"] == "0"
    claim = build_model_claim(spec, OWNER)
    assert claim is not None
    mounted = {"claimName": claim["metadata"]["name"]}
    assert fetch["spec"]["volumes"][-1] == {"name": "model", "persistentVolumeClaim": mounted}
    assert fetch["spec"]["containers"][0]["volumeMounts"][-1] == {"name": "model", "mountPath": "/model"}
    pods = replace(_pods(), spec=spec, source=source.at_commit("abc"))
    for assignment in PLAN.pods:
        worker = pods.build_pod(assignment)["spec"]
        env = {variable["name"]: variable for variable in worker["containers"][0]["env"]}
        assert "HF_TOKEN" not in env
        assert env["HF_HUB_OFFLINE"]["value"] == "1"
        assert worker["volumes"][-1]["persistentVolumeClaim"] == {**mounted, "readOnly": True}
        assert worker["containers"][0]["volumeMounts"][-1]["readOnly"] is True
    assert pods.source.path == "/model/acme--llama/abc"


def test_another_token_causes_a_new_fetch_but_no_new_revision() -> None:
    without, with_one = (
        _hub_spec(cache={"claimName": "models"}, **token)
        for token in ({}, {"tokenSecretRef": {"name": "hub"}})
    )
    assert revision(without) == revision(with_one)
    assert model_pod_name(without, OWNER) != model_pod_name(with_one, OWNER)


def test_other_settings_of_a_cache_get_another_claim() -> None:
    small, large = (build_model_claim(_hub_spec(cache={"size": size}), OWNER) for size in ("1Gi", "2Gi"))
    assert small is not None
    assert large is not None
    assert small["metadata"]["name"] != large["metadata"]["name"]
    assert small["spec"]["accessModes"] == ["ReadWriteMany"]
    assert build_model_claim(_hub_spec(cache={"claimName": "models"}), OWNER) is None


def test_only_the_secret_contains_the_groups_key() -> None:
    """The name of the Secret changes with the key, so an existing Secret has the right key."""
    secret = MANIFESTS[f"secret-llama-0-key-{KEY.fingerprint}"]
    assert base64.b64decode(secret["data"][names.GROUP_KEY_KEY]).decode() == KEY.text
    others = [yaml.safe_dump(manifest) for name, manifest in MANIFESTS.items() if manifest is not secret]
    assert not any(KEY.text in text or secret["data"][names.GROUP_KEY_KEY] in text for text in others)
    for name in ("pod-0", "pod-1"):
        env = {v["name"]: v for v in MANIFESTS[name]["spec"]["containers"][0]["env"]}
        reference = {"name": secret["metadata"]["name"], "key": names.GROUP_KEY_KEY}
        assert env[names.ENV_GROUP_KEY]["valueFrom"] == {"secretKeyRef": reference}
    next_epoch = build_group_key_secret(replace(GROUP, epoch=4), KEY)
    assert next_epoch == secret
