"""Manifests of one group against files kept beside this test: a change shows as a diff.

`UPDATE_GOLDEN=1 pytest tests/unit/manifests` writes them anew.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract.launch import PodLaunch
from heteroinfer_contract.plan import Device, EngineSettings, Mode, Plan, RankAssignment
from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.identity import GroupRef, Owner, revision
from heteroinfer_operator.manifests.pod import WorkerImages, WorkerPods, build_inspect_pod
from heteroinfer_operator.reconcile.children import build_children, says

GOLDEN = Path(__file__).parent / "golden"
IMAGES = WorkerImages(cpu="example.test/worker-cpu:1", gpu="example.test/worker:1")
OWNER = Owner(key=ResourceKey(namespace="team", name="llama"), uid="0000-uid")
GROUP = GroupRef(owner=OWNER, index=0, epoch=3)
RESOURCE = parse_resource(yaml.safe_load((GOLDEN / "resource.yaml").read_text()))
ADDRESSING = ClusterAddressing()
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
        source=ADDRESSING.model(RESOURCE.spec),
        images=IMAGES,
    )


def _manifests() -> dict[str, Any]:
    named: dict[str, Any] = {f"pod-{pod.index}": _pods().build(pod) for pod in PLAN.pods}
    named["pod-inspect"] = build_inspect_pod(RESOURCE.spec, OWNER, ADDRESSING.model(RESOURCE.spec), IMAGES)
    for child in build_children(RESOURCE.spec, OWNER, [PLAN]):
        named[f"{child['kind']}-{child['metadata']['name']}".lower()] = child
    return named


MANIFESTS = _manifests()


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_manifest_is_as_kept(name: str) -> None:
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(yaml.safe_dump(MANIFESTS[name], sort_keys=False, width=120))
    assert yaml.safe_load(path.read_text()) == MANIFESTS[name]


def test_every_golden_file_is_used() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {*MANIFESTS, "resource"}


def test_the_environment_gives_back_launch_and_plan() -> None:
    for pod in PLAN.pods:
        container = MANIFESTS[f"pod-{pod.index}"]["spec"]["containers"][0]
        env = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
        launch = PodLaunch.from_env(env)
        assert launch.pod_index == pod.index
        assert launch.epoch == GROUP.epoch
        assert launch.address.host.startswith(f"llama-0-3-{pod.index}.")
        assert len(launch.addresses) == len(PLAN.pods)


def test_what_the_plan_owns_wins_over_the_users_template() -> None:
    pod = MANIFESTS["pod-1"]
    assert pod["metadata"]["labels"]["team"] == "search"
    assert pod["spec"]["restartPolicy"] == "Never"
    assert pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_only_the_leader_is_an_endpoint() -> None:
    selector = MANIFESTS["service-llama"]["spec"]["selector"]
    chosen = [name for name in ("pod-0", "pod-1") if says(MANIFESTS[name]["metadata"]["labels"], selector)]
    assert chosen == ["pod-0"]


def test_host_paths_need_the_installations_leave() -> None:
    model = RESOURCE.spec.model.model_copy(update={"uri": "file:///models/llama"})
    spec = RESOURCE.spec.model_copy(update={"model": model})
    with pytest.raises(PlanError, match="allowHostPaths=true"):
        ADDRESSING.model(spec)
    source = ClusterAddressing(allow_host_paths=True).model(spec)
    assert source.volume == {"hostPath": {"path": "/models/llama", "type": "Directory"}}


def test_a_hub_model_is_refused_in_words_until_it_is_fetched() -> None:
    model = RESOURCE.spec.model.model_copy(update={"uri": "hf://org/model"})
    with pytest.raises(PlanError, match="pvc://CLAIM/PATH"):
        ADDRESSING.model(RESOURCE.spec.model_copy(update={"model": model}))
