"""Lists the ranks behind the lanes of each slab of a group. Pure.

The asking rank's slab has a lane for each feed-forward rank of its own pod, and a lane for each other pod
with feed-forward ranks. The first feed-forward rank of such a pod has a slab for all ranks of the pod.
"""

from collections.abc import Sequence

from heteroinfer_contract.plan import Plan, RankAssignment


def asking_lanes(plan: Plan, asking: RankAssignment) -> tuple[RankAssignment, ...]:
    """Returns the ranks behind the asking rank's lanes, in the order of the lanes.

    The lanes of the asking rank's own pod come first. Each other pod has one lane, with its first rank.
    """
    ranks = plan.feed_forward_ranks_of(asking)
    in_own_pod = tuple(rank for rank in ranks if rank.pod == asking.pod)
    # Reversed, because the last assignment to a key remains: the pod's first rank.
    first_of_pod = {rank.pod: rank for rank in reversed(ranks) if rank.pod != asking.pod}
    return (*in_own_pod, *sorted(first_of_pod.values(), key=lambda rank: rank.rank))


def pod_lanes(plan: Plan, rank: RankAssignment) -> tuple[RankAssignment, ...]:
    """Returns the ranks behind the lanes of the slab in the pod of `rank`, in the order of the lanes.

    They are the feed-forward ranks of the pod that have the same asking rank as the feed-forward rank `rank`.
    """
    ranks = plan.feed_forward_ranks_of(plan.asking_rank(rank))
    return tuple(each for each in ranks if each.pod == rank.pod)


def relayed_lanes(
    lanes: Sequence[RankAssignment], asking: RankAssignment
) -> tuple[tuple[int, RankAssignment], ...]:
    """Returns the index and the rank of each lane that stands for another pod.

    Args:
        lanes: rank of each lane of the slab of `asking`.
    """
    return tuple((lane, rank) for lane, rank in enumerate(lanes) if rank.pod != asking.pod)
