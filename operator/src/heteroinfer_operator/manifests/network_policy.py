"""NetworkPolicy of a group. Pure.

vLLM's message queues carry pickle, and torch's rendezvous accepts every connection. Therefore the ports of a
group are open only to its own pods. The API, the supervisors' health port and the metrics are open to all.
"""

from typing import Any

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef


def build_network_policy(spec: HeteroInferenceSpec, group: GroupRef) -> dict[str, Any]:
    """Returns the policy that closes a group's internal ports to other pods."""
    ranks_per_pod = max(role.pod_ranks for role in spec.roles)  # each rank of a pod has a metrics port
    open_ports = [
        {"protocol": "TCP", "port": spec.engine.port},
        {"protocol": "TCP", "port": names.DEFAULT_HEALTH_PORT},
        {
            "protocol": "TCP",
            "port": names.DEFAULT_METRICS_PORT,
            "endPort": names.DEFAULT_METRICS_PORT + ranks_per_pod - 1,
        },
    ]
    pods = {"matchLabels": identity.group_labels(group)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": identity.group_metadata(group, identity.group_service(group.owner, group.index)),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}, {"ports": open_ports}],
        },
    }
