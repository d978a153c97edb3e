"""Volumes, users, name resolution and devices that a role's template may ask for, and what it may not."""

from typing import Any

import pytest

from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import HeteroInferenceSpec, ParallelismSpec, parse_spec
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests import identity

DIGEST = f"sha256:{'0' * 64}"
PLATFORM: dict[str, Any] = {
    "serviceAccountName": "models",
    "securityContext": {"runAsUser": 1000, "fsGroup": 2000, "supplementalGroups": [3000]},
    "topologySpreadConstraints": [
        {
            "maxSkew": 1,
            "topologyKey": "topology.kubernetes.io/zone",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {"app": "x"}},
        }
    ],
    "resourceClaims": [{"name": "nic", "resourceClaimTemplateName": "rdma"}],
    "volumes": [
        {"name": "one", "configMap": {"name": "c", "items": [{"key": "a", "path": "b/a"}]}},
        {"name": "two", "secret": {"secretName": "s", "defaultMode": 0o440}},
        {
            "name": "three",
            "projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]},
        },
        {"name": "four", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "five", "image": {"reference": "registry.test/a:1", "pullPolicy": "Always"}},
        {"name": "six", "persistentVolumeClaim": {"claimName": "p", "readOnly": True}},
    ],
    "volumeMounts": [
        {"name": "one", "mountPath": "/mnt/one", "readOnly": True},
        {"name": "six", "mountPath": "/mnt/six", "subPath": "deep/er"},
    ],
    "dnsPolicy": "None",
    "dnsConfig": {"nameservers": ["10.0.0.10"], "options": [{"name": "ndots", "value": "2"}]},
}


def spec(**template: Any) -> HeteroInferenceSpec:
    role = {"name": "cpu", "device": "CPU", "template": template}
    return parse_spec({"model": {"uri": "hf://org/model"}, "roles": [role]})


def volume(**kind: Any) -> dict[str, Any]:
    return {"volumes": [{"name": "v", **kind}]}


def mounted(path: str, **fields: Any) -> dict[str, Any]:
    return {**volume(emptyDir={}), "volumeMounts": [{"name": "v", "mountPath": path, **fields}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (volume(hostPath={"path": "/"}), "hostPath"),
    (volume(csi={"driver": "d"}), "csi"),
    (volume(), "must set exactly one of configMap, secret"),
    (volume(emptyDir={}, secret={"secretName": "s"}), "must set exactly one of configMap, secret"),
    (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "unknown field"),
    (volume(projected={"sources": [{}]}), "must set exactly one of configMap and secret"),
    (volume(configMap={"name": "c", "items": [{"key": "k", "path": "../k"}]}), "path"),
    ({"volumes": [{"name": "model", "emptyDir": {}}]}, "must not be model, scratch"),
    (
        {"volumeMounts": [{"name": "v", "mountPath": "/mnt/v"}]},
        "the name of each entry must be the name of an entry of volumes",
    ),
    (mounted("/"), "mountPath"),
    (mounted("mnt/a"), "mountPath"),
    (mounted("/mnt/../etc"), "mountPath"),
    (mounted("/mnt/a/.."), "mountPath"),
    (mounted("/mnt/v", subPath="../up"), "subPath"),
    *(
        (mounted(path), "must be below /mnt, /data or /srv, because")
        for path in (
            "/mnt",
            "/mnt-of-others",
            "/database/a",
            "/model",
            "/model/adapters",
            "/etc",
            "/etc/ld.so.preload",
            "/etc/ssl/private-ca",
            "/etc/heteroinfer/files",
            "/usr/local/bin",
            "/usr/local/lib/python3.11/sitecustomize.py",
            "/opt/heteroinfer/lib",
            "/home/user/.local",
            "/root",
            "/tmp/.local/lib",
            "/dev/shm",
            "/var/run/secrets/kubernetes.io/serviceaccount",
        )
    ),
    ({"securityContext": {"runAsUser": 0}}, "runAsUser"),
    ({"securityContext": {"supplementalGroups": [0]}}, "supplementalGroups"),
    ({"securityContext": {"privileged": True}}, "unknown field"),
    ({"automountServiceAccountToken": True}, "unknown field"),
    ({"hostNetwork": True}, "unknown field"),
    ({"resourceClaims": [{"name": "c"}]}, "either resourceClaimName or resourceClaimTemplateName"),
    ({"dnsPolicy": "None"}, "must not be None unless dnsConfig.nameservers lists servers"),
    ({"dnsPolicy": "Default"}, "dnsPolicy"),
    ({"dnsConfig": {"nameservers": ["fe80::1%eth0"]}}, "each entry must be an IP address"),
    ({"dnsConfig": {"nameservers": ["10.0.0.010"]}}, "each entry must be an IP address"),
    ({"serviceAccountName": "a..b"}, "serviceAccountName"),
    (volume(secret={"secretName": "s", "items": [{"key": "k", "path": "..data/k"}]}), "path"),
    (
        {
            "topologySpreadConstraints": [
                {"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway", "minDomains": 2}
            ]
        },
        "must be unset unless whenUnsatisfiable is DoNotSchedule",
    ),
]
"""By models and CRD, with words of both."""


def test_fields_that_platforms_need_are_accepted() -> None:
    parsed = spec(**PLATFORM).roles[0].template
    assert parsed is not None
    dumped = parsed.dump()
    assert {key: dumped[key] for key in PLATFORM} == PLATFORM


def test_an_unset_field_causes_no_new_revision() -> None:
    stored = spec(nodeSelector={"a": "b"}).changed(parallelism=ParallelismSpec(mode=Mode.PIPELINE))
    assert identity.revision(stored) == "0200e8941a", "as 5ba4481 named it, with the CRD's default mode"


@pytest.mark.parametrize(("template", "words"), REFUSED)
def test_fields_that_give_more_rights_are_refused(template: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as refused:
        spec(**template)
    assert words in refused.value.message


def test_names_of_volumes_must_be_unique() -> None:
    with pytest.raises(SpecError, match="each name must be unique"):
        spec(volumes=[{"name": "v", "emptyDir": {}}] * 2)


@pytest.mark.parametrize("path", ["/mnt/a", "/data/model/adapters", "/srv/.a"])
def test_volumes_may_be_mounted_below_data_folders(path: str) -> None:
    spec(**mounted(path))


def engine(args: list[str], *files: str) -> HeteroInferenceSpec:
    named = [{"name": name, "configMapKeyRef": {"name": "c", "key": "k"}} for name in files]
    return parse_spec(
        {
            "model": {"uri": "hf://org/model"},
            "engine": {"args": args, "files": named},
            "roles": [{"name": "cpu", "device": "CPU"}],
        }
    )


def test_an_argument_may_name_a_file_of_the_mounted_folder_only_if_engine_files_lists_it() -> None:
    engine(["--chat-template", "/etc/heteroinfer/files/a.jinja"], "a.jinja")
    engine(["--chat-template=/etc/heteroinfer/files/a.jinja"], "b", "a.jinja")
    engine(["--chat-template", "/opt/templates/a.jinja"])
    for names in ((), ("b.jinja",), ("jinja",)):
        with pytest.raises(
            SpecError, match=r"args: must not name a file in .* that engine\.files lacks \(got .*/etc/hetero"
        ):
            engine(["--chat-template", "/etc/heteroinfer/files/a.jinja"], *names)


@pytest.mark.parametrize(
    "bundle", [{}, {"configMapKeyRef": {"name": "a", "key": "b"}, "secretKeyRef": {"name": "a", "key": "b"}}]
)
def test_a_ca_bundle_must_name_exactly_one_object(bundle: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="caBundle: must set exactly one"):
        parse_spec(
            {
                "model": {"uri": "hf://org/model", "caBundle": bundle},
                "roles": [{"name": "cpu", "device": "CPU"}],
            }
        )


@pytest.mark.parametrize(
    ("uri", "refusal"),
    [
        (f"oci://registry.test:5000/org/model:1@{DIGEST}", ""),
        (f"oci://registry.test/model@{DIGEST}#models/llama", ""),
        ("oci://registry.test:5000/org/model:1", "an image must have a digest"),
        ("oci://registry.test/model", "an image must have a digest"),
        ("oci://registry.test/model@sha256:abc#models", "an image must have a digest"),
        (f"oci://registry.test/model:1#a@{DIGEST}", "an image must have a digest"),
        (f"oci://registry.test/model@{DIGEST}#", "uri: must be"),
        (f"oci://registry.test/model@{DIGEST}#../up", "uri: must be"),
        (f"oci://registry.test/a/../b@{DIGEST}", "uri: must be"),
        (f"oci:///model@{DIGEST}", "uri: must be"),
    ],
)
def test_an_oci_model_must_have_a_digest(uri: str, refusal: str) -> None:
    value = {"model": {"uri": uri}, "roles": [{"name": "cpu", "device": "CPU"}]}
    if not refusal:
        parse_spec(value)
        return
    with pytest.raises(SpecError, match=refusal):
        parse_spec(value)
