"""The results of the checks of a cluster for given objects."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_operator.fleet.cluster_checks import (
    CheckState,
    judge_cpu_labels,
    judge_gpu_labels,
    judge_gpu_plugin,
    judge_kubernetes,
    judge_operators,
    judge_shared_storage,
)
from heteroinfer_operator.fleet.installations import (
    UNKNOWN_VERSION,
    InstalledCrd,
    InstalledOperator,
    skew_warnings,
)
from heteroinfer_operator.kube.paths import NamespacedName


def node(name: str, gpus: int = 0, **labels: str) -> dict[str, Any]:
    allocatable = {"cpu": "8"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    named = {
        {"memory": "nvidia.com/gpu.memory", "amx": "feature.node.kubernetes.io/cpu-cpuid.AMXTILE"}.get(
            key, f"kubernetes.io/{key}"
        ): value
        for key, value in labels.items()
    }
    return {"metadata": {"name": name, "labels": named}, "status": {"allocatable": allocatable}}


def installed_operator(version: str = "0.2.0", ready: int = 1) -> InstalledOperator:
    return InstalledOperator(
        name=NamespacedName(namespace="system", name="heteroinfer"),
        version=version,
        image="operator:1",
        replicas=2,
        ready=ready,
        account="heteroinfer",
        environment={},
    )


@pytest.mark.parametrize(
    ("major", "minor", "state"),
    [("1", "30", "ok"), ("1", "31+", "ok"), ("1", "29", "failed"), ("2", "0", "ok"), ("x", "", "unknown")],
)
def test_the_version_of_kubernetes_is_checked(major: str, minor: str, state: str) -> None:
    assert judge_kubernetes(major, minor, "v")[0].value == state


def test_gpus_are_counted_and_a_cluster_without_gpus_gets_a_note() -> None:
    state, message = judge_gpu_plugin([node("a", gpus=4), node("b", gpus=4), node("c")])
    assert (state, message) == (CheckState.OK, "8 nvidia.com/gpu on 2 nodes")
    state, message = judge_gpu_plugin([node("c")])
    assert state is CheckState.NOTE
    assert "install the NVIDIA device plugin" in message


def test_gpus_of_nodes_that_cannot_run_the_images_do_not_count() -> None:
    arm = node("arm", gpus=4, arch="arm64")
    assert judge_gpu_plugin([node("a", gpus=1), arm])[1] == "1 nvidia.com/gpu on 1 node"
    assert judge_gpu_plugin([arm])[0] is CheckState.NOTE
    assert judge_gpu_labels([arm])[0] is CheckState.OK


def test_gpus_without_a_label_of_their_memory_are_reported() -> None:
    assert judge_gpu_labels([node("c")])[0] is CheckState.OK
    assert judge_gpu_labels([node("a", gpus=1, memory="81920")])[0] is CheckState.OK
    state, message = judge_gpu_labels([node("a", gpus=1, memory="81920"), node("b", gpus=1)])
    assert state is CheckState.WARNING
    assert message.startswith("1 node with GPUs (b) lacks the label nvidia.com/gpu.memory")


def test_only_nodes_that_run_the_images_need_labels_of_cpus() -> None:
    assert judge_cpu_labels([node("a", amx="true"), node("arm", arch="arm64")])[0] is CheckState.OK
    assert judge_cpu_labels([node("arm", arch="arm64")])[0] is CheckState.FAILED
    state, message = judge_cpu_labels([node(name) for name in "abcde"])
    assert state is CheckState.WARNING
    assert "5 nodes (a, b, c and 2 more)" in message


def test_shared_storage_is_proven_by_a_volume_or_likely_by_a_provisioner() -> None:
    volume = {"spec": {"storageClassName": "shared", "accessModes": ["ReadWriteMany"]}}
    disk = {"metadata": {"name": "disk"}, "provisioner": "ebs.csi.aws.com"}
    files = {"metadata": {"name": "files"}, "provisioner": "efs.csi.aws.com"}
    assert judge_shared_storage([volume], [disk]) == (
        CheckState.OK,
        "shared (has volumes with ReadWriteMany)",
    )
    assert judge_shared_storage([], [disk, files])[1].startswith("files (judged by the name")
    assert judge_shared_storage([], [disk])[0] is CheckState.NOTE


def test_an_operator_that_is_down_or_has_another_version_is_reported() -> None:
    assert judge_operators([], "0.2.0")[0] is CheckState.FAILED
    assert judge_operators([installed_operator(ready=0)], "0.2.0")[0] is CheckState.FAILED
    stopped = replace(installed_operator(ready=0), replicas=0)
    assert judge_operators([stopped], "0.2.0") == (
        CheckState.FAILED,
        "system/heteroinfer has 0 replicas. Set the chart's value replicas to 1 or more",
    )
    assert judge_operators([installed_operator()], "0.2.0")[0] is CheckState.OK
    assert judge_operators([installed_operator()], UNKNOWN_VERSION)[0] is CheckState.OK
    assert judge_operators([installed_operator()], "0.1.0")[0] is CheckState.WARNING


def test_each_pair_of_versions_that_differs_is_a_warning() -> None:
    crd = InstalledCrd(version="0.2.0", same_schema=True)
    assert skew_warnings("0.2.0", (installed_operator(),), crd) == ()
    (warning,) = skew_warnings("0.3.0", (installed_operator(),), crd)
    assert warning == (
        "operator system/heteroinfer has version 0.2.0, but this client has version 0.3.0. "
        "Use a client of version 0.2.0"
    )
    old = InstalledCrd(version="0.1.0", same_schema=False)
    (warning,) = skew_warnings("0.2.0", (installed_operator(),), old)
    assert "operator system/heteroinfer has version 0.2.0, but the CRD has version 0.1.0" in warning
    applied = InstalledCrd(version=UNKNOWN_VERSION, same_schema=False)
    assert "its schema differs" in skew_warnings("0.2.0", (), applied)[0]
    assert "not installed" in skew_warnings("0.2.0", (), None)[0]
