"""Assigns user ids from a range of the namespace, as OpenShift's constraint restricted-v2 does for pods.

A webhook gives an id to each container of a pod without one. A ValidatingAdmissionPolicy refuses every pod
that sets an id itself, even an id of the range.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from tests.cluster import processes
from tests.cluster.errors import ClusterError
from tests.cluster.node import NodeCluster
from tests.e2e.admission import changed_pods

USER = 1000680000
"""The first id of the range. Its group is 0."""
REFUSAL = "ids are given by the namespace"
_POLICY = "given-ids"
_MARK = "example.test/ids-given-by"
_STATED = ("runAsUser", "runAsGroup", "fsGroup")
_GIVEN = f"""
  object.metadata.?annotations[?"{_MARK}"].orValue("") == "range" &&
  object.spec.containers.all(c, c.?securityContext.?runAsUser.orValue(0) == {USER})
"""


@contextlib.contextmanager
def assigned_ids(
    cluster: NodeCluster, namespaces: Sequence[str], folder: Path
) -> Iterator[Counter[tuple[str, str]]]:
    """Assigns ids in namespaces until the context ends.

    Yields the number of pods that got ids, by namespace and component.
    """
    given: Counter[tuple[str, str]] = Counter()

    def give(pod: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the patch that adds the ids, or nothing if the pod sets an id itself."""
        spec, metadata = pod["spec"], pod["metadata"]
        contexts = [spec.get("securityContext") or {}]
        contexts += [each.get("securityContext") or {} for each in spec["containers"]]
        if any(field in context for context in contexts for field in _STATED):
            return []
        component = (metadata.get("labels") or {}).get(names.LABEL_COMPONENT, "")
        given[metadata["namespace"], component] += 1
        marked = {**(metadata.get("annotations") or {}), _MARK: "range"}
        patch: list[dict[str, Any]] = [{"op": "add", "path": "/metadata/annotations", "value": marked}]
        values = [("/spec", {**contexts[0], "fsGroup": USER})]
        for index, context in enumerate(contexts[1:]):
            values.append((f"/spec/containers/{index}", {**context, "runAsUser": USER}))
        return patch + [
            {"op": "add", "path": f"{path}/securityContext", "value": value} for path, value in values
        ]

    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(_policy(namespaces)))
    with changed_pods(cluster, _POLICY, namespaces, folder, give):
        processes.wait_until("the policy", lambda: _refuses(cluster, namespaces[0], 65532), timeout_s=30)
        assert _refuses(cluster, namespaces[0], USER)
        try:
            yield given
        finally:
            kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
            cluster.kubectl("delete", kinds, _POLICY)


def _policy(namespaces: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the policy that refuses pods without ids of the range."""
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": _POLICY}}
    where = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": list(namespaces)}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    constraints = {"namespaceSelector": {"matchExpressions": [where]}, "resourceRules": [pods]}
    return [
        {
            **kind,
            "kind": "ValidatingAdmissionPolicy",
            "spec": {
                "matchConstraints": constraints,
                "validations": [{"expression": _GIVEN, "message": REFUSAL}],
            },
        },
        {
            **kind,
            "kind": "ValidatingAdmissionPolicyBinding",
            "spec": {"policyName": _POLICY, "validationActions": ["Deny"]},
        },
    ]


def _refuses(cluster: NodeCluster, namespace: str, user: int) -> bool:
    """Returns whether a pod that sets a user is refused."""
    container = {
        "name": "c",
        "image": "none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    context = {"runAsUser": user, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "fixed", "namespace": namespace},
        "spec": {"securityContext": context, "containers": [container]},
    }
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))
    except ClusterError as error:
        return REFUSAL in str(error)
    return False
