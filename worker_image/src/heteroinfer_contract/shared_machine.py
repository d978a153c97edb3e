"""Which pods of a group are on one machine, and which ranks. Stdlib only; pure.

Pods with one address share a machine: in a cluster each pod has an address of its own, under
`heteroinfer up` all have one.
"""

from collections.abc import Iterable

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch


def share_machine(launch: PodLaunch, pods: Iterable[int]) -> bool:
    """Returns whether these pods of the group are on one machine, as far as their addresses say."""
    return len({launch.addresses[pod].host for pod in pods}) == 1


def ranks_on_machine(plan: Plan, launch: PodLaunch, device: Device | None = None) -> list[RankAssignment]:
    """Returns the ranks on this pod's machine, in rank order; of one device if it is given."""
    return [
        rank
        for rank in plan.ranks
        if device in (None, rank.device) and share_machine(launch, (launch.pod_index, rank.pod))
    ]
