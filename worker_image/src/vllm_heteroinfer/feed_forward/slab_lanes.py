"""Lists the ranks behind the lanes of each slab of a group. PURE.

The asking rank's slab has a lane for each feed-forward rank of its own pod, and a lane for each other pod
with feed-forward ranks. The first feed-forward rank of such a pod has a slab for all ranks of the pod.
"""

from collections.abc import Sequence

from heteroinfer_contract.plan import Plan, RankAssignment


def asking_lanes(plan: Plan, asking: RankAssignment) -> tuple[RankAssignment, ...]:
    """Returns the ranks behind the asking rank's lanes, by lane; for another pod, its first rank."""
    ranks = plan.feed_forward_ranks_of(asking)
    own = tuple(rank for rank in ranks if rank.pod == asking.pod)
    # Reversed, so that the pod's first rank replaces the pod's later ranks.
    first_of_pod = {rank.pod: rank for rank in reversed(ranks) if rank.pod != asking.pod}
    return (*own, *sorted(first_of_pod.values(), key=lambda rank: rank.rank))


def pod_lanes(plan: Plan, rank: RankAssignment) -> tuple[RankAssignment, ...]:
    """Returns the ranks of a feed-forward rank's pod that serve the same rank, by lane of the pod's slab."""
    servers = plan.feed_forward_ranks_of(plan.asking_rank(rank))
    return tuple(each for each in servers if each.pod == rank.pod)


def relayed_lanes(
    lanes: Sequence[RankAssignment], asking: RankAssignment
) -> tuple[tuple[int, RankAssignment], ...]:
    """Returns number and rank of each lane that stands for another pod than the asking rank's."""
    return tuple((lane, rank) for lane, rank in enumerate(lanes) if rank.pod != asking.pod)
