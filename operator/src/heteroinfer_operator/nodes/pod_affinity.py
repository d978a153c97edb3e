"""Required pod affinity between the pods of one group, by the rules of kube-scheduler. Pure.

The rules of `pkg/scheduler/framework/plugins/interpodaffinity/filtering.go@v1.35.4`:
- A node satisfies a pod's affinity if, for each term, it has the same value of the topology key as the node
  of another pod. Only pods that match all terms of the pod count (`podMatchesAllAffinityTerms`).
- While no pod counts, a pod that matches all its own terms may run on any node with the topology keys. This
  pod is the first of a series (`satisfyPodAffinity`).
- Two pods must not share a value if an anti-affinity term of one pod matches the other pod.

The scheduler places pods in any order. So the operator places a group only if every order ends with all pods
placed. Otherwise a part of the group could occupy its nodes forever without serving. The operator does not
know pods outside the group. A term that matches no pod of the group is about pods outside, so only the
scheduler checks this term.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from heteroinfer_operator.nodes.demand import Manifest, PodDemand, selects_pod

_NAMESPACE_NAME: Final = "kubernetes.io/metadata.name"
"""Label of every namespace, with its name as the value."""

NodeLabels = Mapping[str, str]
"""Labels of a node."""
Values = tuple[str, ...]
"""Values of a series' topology keys, in the order of its terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSeries:
    """Pods that must share one value of each topology key. All have the same terms, which each pod matches.

    Attributes:
        kinds: indexes into `GroupTerms.kinds`.
        keys: topology keys of the terms.
    """

    kinds: frozenset[int]
    keys: tuple[str, ...]

    def values(self, labels: NodeLabels) -> Values | None:
        """Returns a node's values of the keys; None if the node lacks a key."""
        values = tuple(labels[key] for key in self.keys if key in labels)
        return values if len(values) == len(self.keys) else None


@dataclass(frozen=True, kw_only=True)
class GroupTerms:
    """Affinity between the pods of a group.

    Attributes:
        kinds: demand of one pod of each kind. Pods of one kind have the same demand.
    """

    kinds: Sequence[PodDemand]

    @cached_property
    def peers(self) -> tuple[frozenset[int], ...]:
        """For each kind of pod, the kinds of the group that match all its affinity terms.

        Empty if only pods outside the group match, or if the kind has no terms.
        """
        return tuple(
            frozenset(
                other
                for other, demand in enumerate(self.kinds)
                if own.near and all(selects(term, own, demand) for term in own.near)
            )
            for own in self.kinds
        )

    @cached_property
    def away(self) -> tuple[tuple[frozenset[str], ...], ...]:
        """For each pair of kinds, the topology keys whose values must differ between their pods."""
        return tuple(
            tuple(_keys_that_differ(one, other) | _keys_that_differ(other, one) for other in self.kinds)
            for one in self.kinds
        )

    @cached_property
    def series(self) -> tuple[PodSeries, ...]:
        """Series of the group: kinds with the same terms, which all these kinds and no other kind match."""
        found = []
        for kind, peers in enumerate(self.peers):
            if kind != min(peers, default=None):  # the first kind of a series stands for all its kinds
                continue
            if all(self.kinds[peer].near == self.kinds[kind].near for peer in peers):
                keys = tuple(dict.fromkeys(term["topologyKey"] for term in self.kinds[kind].near))
                found.append(PodSeries(kinds=peers, keys=keys))
        return tuple(found)

    @property
    def has_no_terms(self) -> bool:
        """Whether no pod of the group must be near another pod."""
        return not any(self.peers)

    def is_placed_in_any_order(self, pods: Sequence[int], labels: Sequence[NodeLabels]) -> bool:
        """Checks whether the scheduler places all pods on these nodes, whichever pod it places first.

        Args:
            pods: kind of each pod.
            labels: labels of each pod's node.
        """
        if self.has_no_terms:
            return True
        keys = sorted({term["topologyKey"] for demand in self.kinds for term in demand.near})
        places = {
            (kind, tuple(node.get(key) for key in keys)) for kind, node in zip(pods, labels, strict=True)
        }
        classes = [
            _PodClass(kind=kind, values=dict(zip(keys, values, strict=True)))
            for kind, values in sorted(places, key=repr)
        ]
        return all(self._all_fit([first, *classes]) for first in classes)

    def _all_fit(self, order: Sequence["_PodClass"]) -> bool:
        """Reports whether the scheduler places all pods if it tries the pods in this order.

        Like the scheduler, this method tries a pod that does not fit yet again later.

        Args:
            order: classes of pods. If a class occurs twice, only the first place counts.
        """
        waiting, placed = list(dict.fromkeys(order)), list[_PodClass]()
        while waiting:
            accepted = next((each for each in waiting if self._is_affinity_met(each, placed)), None)
            if accepted is None:
                return False
            placed.append(accepted)
            waiting.remove(accepted)
        return True

    def _is_affinity_met(self, candidate: "_PodClass", placed: Sequence["_PodClass"]) -> bool:
        """Reports whether the placed pods satisfy the required pod affinity of a pod of this class.

        Does not check anti-affinity (`away`): node_search does.
        """
        peers, terms = self.peers[candidate.kind], self.kinds[candidate.kind].near
        if not peers:  # the terms are about pods outside the group
            return True
        keys = [term["topologyKey"] for term in terms]
        if any(candidate.values[key] is None for key in keys):  # the node lacks a topology key
            return False
        counted = [
            each
            for each in placed
            if each.kind in peers and any(each.values[key] is not None for key in keys)
        ]
        if not counted:  # only a pod that matches its own terms may be the first of a series
            return candidate.kind in peers
        # Different pods may satisfy different topology keys.
        return all(any(each.values[key] == candidate.values[key] for each in counted) for key in keys)


@dataclass(frozen=True, kw_only=True, eq=False)
class _PodClass:
    """Pods of one kind on nodes with equal values of all topology keys.

    The scheduler treats these pods equally, so a check of one pod is valid for all.

    Attributes:
        values: value of each topology key on these nodes; None if the nodes lack the label.
    """

    kind: int
    values: Mapping[str, str | None]


def selects(term: Manifest, own: PodDemand, other: PodDemand) -> bool:
    """Checks whether an affinity term of a pod matches another pod of the group, or the pod itself."""
    return _is_about_own_namespace(term, own.namespace) and selects_pod(
        term.get("labelSelector"), other.labels
    )


def _is_about_own_namespace(term: Manifest, namespace: str) -> bool:
    """Checks whether a term matches pods of the group's namespace.

    The operator knows the name of a namespace but not its other labels. The operator assumes that a selector
    of other labels matches. So a group may wait for nodes that it does not need, but it never starts with
    only a part of its pods.
    """
    listed, selector = term.get("namespaces") or (), term.get("namespaceSelector")
    if not listed and selector is None:  # such a term is about the pod's own namespace
        return True
    if namespace in listed:
        return True
    if selector is None:
        return False
    exact = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    known = {
        "matchLabels": {key: value for key, value in exact.items() if key == _NAMESPACE_NAME},
        "matchExpressions": [
            expression for expression in expressions if expression["key"] == _NAMESPACE_NAME
        ],
    }
    return selects_pod(known, {_NAMESPACE_NAME: namespace})


def _keys_that_differ(own: PodDemand, other: PodDemand) -> frozenset[str]:
    """Returns the topology keys whose values `own` requires to differ from those of `other`."""
    return frozenset(term["topologyKey"] for term in own.away if selects(term, own, other))
