"""The values of the operator's settings and health."""

import pytest

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.health import Health
from heteroinfer_operator.settings import InstallationSettings


def test_an_empty_environment_gives_the_defaults() -> None:
    assert InstallationSettings.from_env({}) == InstallationSettings()
    assert (
        InstallationSettings.from_env({"HETEROINFER_WATCH_NAMESPACES": "", "HETEROINFER_LOG_LEVEL": " "})
        == InstallationSettings()
    )


def test_every_setting_is_read() -> None:
    env = {
        "WATCH_NAMESPACES": "b, a,b",
        "WORKER_IMAGE_CPU": "cpu:1",
        "WORKER_IMAGE_GPU": "gpu:1",
        "ALLOW_HOST_PATHS": "true",
        "ALLOW_REMOTE_CODE": "true",
        "ALLOWED_ARGUMENTS": "--runner, --api-key",
        "ALLOWED_ENVIRONMENT": "FI_*, NCCL_TOPO_DUMP_FILE",
        "ALLOWED_ANNOTATIONS": "example.com/,cpu-quota.crio.io",
        "HTTP_PORT": "0",
        "WORKERS": "2",
        "RESYNC_SECONDS": "60",
        "WATCH_SILENCE_SECONDS": "90",
        "LEADER_ELECTION": "True",
        "LEASE_NAME": "mine",
        "LEASE_SECONDS": "30",
        "CALIBRATION_CONFIG_MAP": "calibration",
        "NAMESPACE": "sys",
        "IDENTITY": "pod-1",
        "POD_EGRESS": "never",
        "FETCH_EGRESS": '{"ports": [443]}',
        "LOG_LEVEL": "debug",
        "LOG_FORMAT": "json",
        "WORKER_PULL_POLICY": "Always",
        "WORKER_PULL_SECRETS": "b,a.c",
        "ALLOWED_WORKER_IMAGES": "registry.example.com/ml/,docker.io/vllm:1",
        "ALLOWED_HOST_PATHS": "/models",
        "KEY_SECRET": "key",
        "FORMER_KEY_SECRET": "former",
    }
    settings = InstallationSettings.from_env({f"HETEROINFER_{name}": value for name, value in env.items()})
    assert settings == InstallationSettings(
        watch_namespaces=("a", "b"),
        worker_image_cpu="cpu:1",
        worker_image_gpu="gpu:1",
        allow_host_paths=True,
        pod_egress="Never",
        fetch_egress='{"ports": [443]}',
        allow_remote_code=True,
        allowed_arguments=("--api-key", "--runner"),
        allowed_environment=("FI_*", "NCCL_TOPO_DUMP_FILE"),
        allowed_annotations=("cpu-quota.crio.io", "example.com/"),
        http_port=0,
        workers=2,
        resync_s=60,
        watch_silence_s=90,
        leader_election=True,
        lease_name="mine",
        lease_duration_s=30,
        calibration_config_map="calibration",
        namespace="sys",
        identity="pod-1",
        log_level="DEBUG",
        log_format="json",
        worker_pull_policy="Always",
        worker_pull_secrets=("a.c", "b"),
        allowed_worker_images=("docker.io/vllm:1", "registry.example.com/ml/"),
        allowed_host_paths=("/models",),
        key_secret="key",
        former_key_secret="former",
    )


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("ALLOW_HOST_PATHS", "yes", "true or false"),
        ("WORKERS", "0", "a whole number from 1 to 64"),
        ("HTTP_PORT", "http", "a whole number from 0 to 65535"),
        ("LEASE_SECONDS", "-1", "a whole number from 3 to 3600"),
        ("LOG_LEVEL", "LOUD", "one of INFO, DEBUG"),
        ("LOG_FORMAT", "xml", "one of text, json"),
        ("WORKER_PULL_POLICY", "Sometimes", "one of Always, IfNotPresent, Never"),
        ("WORKER_PULL_SECRETS", "A", "names of Secrets"),
        ("ALLOWED_HOST_PATHS", "models", "absolute paths"),
        ("WATCH_NAMESPACES", "a,B_c", "names of namespaces"),
        ("ALLOWED_ARGUMENTS", "runner", "options such as --runner"),
        ("ALLOWED_ENVIRONMENT", "*", "names of variables, or prefixes"),
        ("ALLOWED_ANNOTATIONS", "a b", "keys of annotations, or prefixes"),
    ],
)
def test_an_invalid_value_is_reported(name: str, value: str, expected: str) -> None:
    with pytest.raises(HeteroInferError, match=f"HETEROINFER_{name} must be {expected}.* \\(got "):
        InstallationSettings.from_env({f"HETEROINFER_{name}": value})


def test_leader_election_needs_namespace_and_identity() -> None:
    with pytest.raises(HeteroInferError, match="HETEROINFER_IDENTITY is not set"):
        InstallationSettings.from_env({"HETEROINFER_LEADER_ELECTION": "true", "HETEROINFER_NAMESPACE": "sys"})


def test_calibrations_need_a_namespace() -> None:
    with pytest.raises(HeteroInferError, match=r"HETEROINFER_NAMESPACE is not\. Set HETEROINFER_NAMESPACE"):
        InstallationSettings.from_env({"HETEROINFER_CALIBRATION_CONFIG_MAP": "calibration"})


@pytest.mark.parametrize("duration_s", [3, 15, 3600])
def test_a_holder_stops_before_another_process_starts(duration_s: int) -> None:
    settings = InstallationSettings(lease_duration_s=duration_s)
    assert settings.lease_renew_s * 2 < settings.lease_deadline_s < duration_s


def test_health_distinguishes_a_stuck_operator_from_a_waiting_one() -> None:
    now = 0.0
    health = Health(stale_s=900, clock=lambda: now)
    now = 10_000
    assert health.stuck_reason() == "", "it may wait for the Lease forever"
    health.record_resync()
    now += 900
    assert health.stuck_reason() == ""
    now += 1
    assert health.stuck_reason() == "no resync for 901 s"
    health.stale_caches = ("pods of a", "nodes")
    assert health.stuck_reason() == "no resync for 901 s: no data received about pods of a, nodes"
