"""Defines the fault matrix as data: the faults of a group of two ranks, and their expected outcomes.

A row has a fault and its outcome:

- `Ends`: the epoch ends with a named culprit, and the next epoch serves.
- `GoesOn`: no pod changes, and the group answers requests during the fault.
- `Waits`: a resource that cannot start reports why, and starts nothing.
- `Blocked`: an object of the resource is refused. The running group is not affected: it can end an epoch,
start
  the next one with its own plan, and be suspended.

Bounds are seconds from the fault until the change arrives on a watch of the API server.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from tests.cluster.node import NODE_GRACE_S
from tests.e2e.faults import injections, resources, strangers
from tests.e2e.faults.scene import Scene

RANK_DIES_S = 2.0
"""From a rank's death until Ready is false."""
NEXT_EPOCH_S = 5.0
"""From the end of the old pods until the next epoch's pods are created."""
SILENCE_S = 5.0
"""If a pod becomes silent without dying: 1.5 s of missed heartbeats, a verdict, a probe each second."""

Inject: TypeAlias = Callable[[Scene], AbstractContextManager[float]]
"""Makes the fault happen, yields its Unix time, and reverts what would stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """The epoch ends.

    Attributes:
        reason: reason of the recorded failure, of Ready while it is false, and of the event.
        or_reason: a second allowed reason, for nodes that report more than others.
        ready_false_s: bound, from the fault.
        rank: the culprit, or None if the culprit is no rank.
        exit_code: exit code of the culprit, or None without one.
        counted: whether the failure counts towards restart.maxRestarts.
        words: regular expression for the failure's message.
        old_gone_s: bound, from Ready=False until the last old pod is gone.
    """

    reason: str
    or_reason: str = ""
    ready_false_s: float = RANK_DIES_S
    rank: int | None = None
    exit_code: int | None = None
    counted: bool = True
    words: str = ""
    old_gone_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoesOn:
    """The epoch continues.

    Attributes:
        slowest_rank: beginning of the column SLOWESTRANK before the fault ends. "" is not checked.
        within_s: bound for this column, from the fault.
    """

    slowest_rank: str = ""
    within_s: float = 75.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """A separate resource cannot start.

    Attributes:
        resource: its name.
        condition: condition that reports this by a status other than True.
        reason: of the condition.
        words: regular expression for its message.
        event: reason of the resource's event, or "" if only its pod has an event.
        within_s: bound, from the fault.
    """

    resource: str
    condition: str
    reason: str
    words: str
    event: str = ""
    within_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """An object of the resource is refused all the time. Then the follower's pod is deleted.

    Attributes:
        condition: condition that reports the refusal.
        status: status of the condition.
        reason: reason of the condition.
        words: regular expression for its message.
        within_s: bound for the condition, from the fault.
        available_false_s: bound, from the deletion of the pod.
    """

    condition: str
    status: str
    reason: str
    words: str
    within_s: float = 10.0
    available_false_s: float = RANK_DIES_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of the matrix.

    Attributes:
        name: of the row.
        how: description of the fault, for people.
        inject: makes the fault happen.
        outcome: expected outcome.
        always: whether `make e2e` runs it, too, in addition to `make faults`.
    """

    name: str
    how: str
    inject: Inject
    outcome: Ends | GoesOn | Waits | Blocked
    always: bool = False


MATRIX = (
    Fault(
        name="slow rank",
        how="rank 1's container gets a tenth of a CPU",
        inject=injections.slow_rank(1),
        outcome=GoesOn(slowest_rank="1 "),
    ),
    Fault(
        name="API server restart",
        how="SIGKILL of kube-apiserver, back after 3 s",
        always=True,
        inject=injections.restart_api_server,
        outcome=GoesOn(),
    ),
    Fault(
        name="operator kill",
        how="SIGKILL of the operator's process; kubelet starts it again",
        always=True,
        inject=injections.kill_operator,
        outcome=GoesOn(),
    ),
    Fault(
        name="stranger",
        how="from a node, which no NetworkPolicy stops: a scan of both pods' ports, a reset, 300 idle "
        "connections a port, nonsense, forged and recorded hellos",
        inject=strangers.visit,
        outcome=GoesOn(),
    ),
    Fault(
        name="leader process kill",
        how="SIGKILL of rank 0 in the leader's pod",
        inject=injections.kill_rank(0),
        outcome=Ends(reason="RankExited", rank=0, exit_code=-9, words="rank 0"),
    ),
    Fault(
        name="follower process kill",
        how="SIGKILL of rank 1 in the follower's pod",
        always=True,
        inject=injections.kill_rank(1),
        outcome=Ends(reason="RankExited", rank=1, exit_code=-9, words="rank 1"),
    ),
    Fault(
        name="OOM",
        how="the follower's container goes over its memory limit; the kernel kills rank 1",
        inject=injections.exhaust_memory(1),
        outcome=Ends(reason="RankExited", or_reason="OOMKilled", rank=1, exit_code=-9, words="memory limit"),
    ),
    Fault(
        name="pod delete",
        how="kubectl delete of the follower's pod",
        inject=injections.delete_pod(1),
        outcome=Ends(reason="PodDeleted", words="was deleted"),
    ),
    Fault(
        name="eviction",
        how="the leader's pod is evicted through the eviction API, as kubectl drain does",
        inject=injections.evict_pod(0),
        outcome=Ends(reason="PodDisrupted", counted=False, words="EvictionByEvictionAPI"),
    ),
    Fault(
        name="network cut between ranks",
        how="the node drops every packet between the two pods",
        inject=injections.cut_pods_apart,
        outcome=Ends(reason="PodLost", ready_false_s=SILENCE_S, words="supervisor of pod [01]"),
    ),
    Fault(
        name="node NotReady",
        how="SIGKILL of the kubelet of the follower's node. The follower's pod keeps running",
        always=True,
        inject=injections.lose_kubelet,
        outcome=Ends(
            reason="NodeLost", ready_false_s=NODE_GRACE_S + 10, counted=False, words="node", old_gone_s=60
        ),
    ),
    Fault(
        name="node deleted",
        how="the follower's node is cut off and its Node object deleted, as a cloud does with a dead machine",
        inject=injections.lose_node,
        outcome=Ends(reason="NodeLost", ready_false_s=SILENCE_S, counted=False, words="node", old_gone_s=90),
    ),
    Fault(
        name="refused spec",
        how="`spec.model.uri` edited to a hub's model without a cache; then the follower's pod is deleted",
        always=True,
        inject=injections.refuse_spec,
        outcome=Blocked(condition="Stalled", status="True", reason="ModelCacheNotGiven", words="cache"),
    ),
    Fault(
        name="refused child",
        how="a user's Service named like a second group's, `replicas: 2`; then a pod of the first is deleted",
        inject=injections.take_name,
        outcome=Blocked(condition="Progressing", status="False", reason="NameTaken", words="pair-1-ranks"),
    ),
    Fault(
        name="image pull error",
        how="a resource whose image is nowhere to be pulled from",
        always=True,
        inject=injections.apply_unknown_image,
        outcome=Waits(
            resource=resources.NO_IMAGE,
            condition="ModelReady",
            reason="ImagePullBackOff",
            words="image cannot be pulled",
            event="ImagePullBackOff",
        ),
    ),
    Fault(
        name="model missing",
        how="a resource whose model's folder has no model",
        always=True,
        inject=injections.apply_missing_model,
        outcome=Waits(
            resource=resources.NO_MODEL,
            condition="ModelReady",
            reason="ModelNotReadable",
            words="no such directory",
            event="ModelNotReadable",
        ),
    ),
)
