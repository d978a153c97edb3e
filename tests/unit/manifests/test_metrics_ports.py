"""The policy of a group opens the metrics port of each rank to all, so that Prometheus can read it."""

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.identity import EpochRef, Owner, revision
from heteroinfer_operator.manifests.network_policy import build_network_policy
from heteroinfer_operator.manifests.worker_pods import WorkerImages, WorkerPods
from tests.unit.planning.planned_models import cpu, gpu, plan, spec
from tests.unit.planning.test_feed_forward import feed_forward, mixture

GROUP = EpochRef(
    owner=Owner(key=ResourceKey(namespace="default", name="llama"), uid="uid-1"), index=0, epoch=3
)


@pytest.mark.parametrize(
    "asked",
    [spec(cpu(ranksPerPod=3), gpu(deviceMemory="80Gi")), feed_forward(own={"ranks": 2})],
    ids=["ranks of two roles", "feed-forward ranks"],
)
def test_the_metrics_port_of_every_rank_is_open(asked: HeteroInferenceSpec) -> None:
    asked = parse_spec({**asked.dump(), "model": {"uri": "pvc://models/m"}})
    planned = plan(asked, mixture()).plan
    addressing = ClusterAddressing()
    pods = WorkerPods(
        spec=asked,
        group=GROUP,
        plan=planned,
        revision=revision(asked),
        addresses=addressing.pods(asked, GROUP, planned),
        source=addressing.find_model_source(asked, GROUP.owner),
        images=WorkerImages(cpu="cpu", gpu="gpu"),
    )
    served = {
        port["containerPort"]
        for pod in planned.pods
        for port in pods.build_pod(pod)["spec"]["containers"][0]["ports"]
        if port["name"].startswith(names.PORT_METRICS)
    }
    rules = build_network_policy(asked, GROUP)["spec"]["ingress"][1]["ports"]
    is_open = {n for rule in rules for n in range(rule["port"], rule.get("endPort", rule["port"]) + 1)}
    assert len(served) > 1
    assert served <= is_open
