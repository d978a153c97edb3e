"""Every Pod that the manifests build from an example runs here: the two packages agree."""

from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.commands.resource_file import read_resource
from heteroinfer_operator.local.loopback_addressing import LocalAddressing
from heteroinfer_operator.local.pod_process import parse_pod
from heteroinfer_operator.manifests.identity import EpochRef, Owner, revision
from heteroinfer_operator.manifests.model_pods import build_model_pod
from heteroinfer_operator.manifests.plan_config_map import build_plan_config_map
from heteroinfer_operator.manifests.worker_pods import WorkerImages, WorkerPods
from tests.unit.local.plans import plan_of

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
IMAGES = WorkerImages(cpu="none", gpu="none")
OWNER = Owner(key=ResourceKey(namespace="default", name="x"), uid="u")


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_is_valid_and_its_pods_run_here(example: Path, tmp_path: Path) -> None:
    _, resource = read_resource(str(example), model_dir=tmp_path)
    spec, plan = resource.spec, plan_of(resource.spec)
    group = EpochRef(owner=OWNER, index=0, epoch=1)
    addressing = LocalAddressing(api_port=8000, model_cache=tmp_path)
    pods = WorkerPods(
        spec=spec,
        group=group,
        plan=plan,
        revision=revision(spec),
        addresses=addressing.pods(spec, group, plan),
        source=addressing.find_model_source(spec, OWNER),
        images=IMAGES,
    )
    stored = build_plan_config_map(OWNER, plan)
    config_maps = {stored["metadata"]["name"]: stored}
    for pod in plan.pods:
        process = parse_pod(pods.build_pod(pod), config_maps)
        assert process.arguments == ("run",)
        assert Plan.from_env(process.env) == plan
        launch = PodLaunch.from_env(process.env)
        assert launch.address.health_port == process.health_port
        assert process.readiness_path == names.PATH_READYZ
        assert process.num_gpus == sum(rank.device == "GPU" for rank in pod.ranks)
    inspect = parse_pod(build_model_pod(spec, OWNER, addressing.find_model_source(spec, OWNER), IMAGES), {})
    assert inspect.arguments == ("inspect", "--model", str(tmp_path))


def test_a_download_of_up_needs_no_secret(tmp_path: Path) -> None:
    _, resource = read_resource(str(EXAMPLES[0]), model_dir=tmp_path)
    model = {"uri": "hf://org/model", "tokenSecretRef": {"name": "hub"}, "cache": {"size": "1Gi"}}
    spec = parse_spec({**resource.spec.dump(), "model": model})
    addressing = LocalAddressing(api_port=8000, model_cache=tmp_path)
    source = addressing.find_model_source(spec, OWNER)
    process = parse_pod(build_model_pod(spec, OWNER, source, IMAGES), {})
    assert process.arguments[:5] == ("fetch", "--repository", "org/model", "--revision", "main")
    assert names.ENV_HUB_TOKEN not in process.env
    assert source.fetch is not None
    assert process.health_port == source.fetch.health_port
