"""What the ranks of a group share of one machine. Pure: plan and addresses in, shares out.

Stdlib only.
"""

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch


def ranks_on_machine(plan: Plan, launch: PodLaunch, device: Device) -> list[RankAssignment]:
    """Returns the ranks of a device on this machine: of every pod with this pod's address.

    In a cluster each pod has an address of its own; under `heteroinfer up` all have one.
    """
    here = launch.address.host
    return [r for r in plan.ranks if r.device is device and launch.addresses[r.pod].host == here]
