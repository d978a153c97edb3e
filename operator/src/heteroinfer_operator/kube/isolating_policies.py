"""Caches NetworkPolicies of other owners that restrict egress.

If such a policy selects a pod that the operator creates for a resource, the operator adds a policy that
allows the egress of that pod.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import NETWORK_POLICY
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.stored_fields import as_name, as_object, as_objects, as_text_map, as_texts

_OF_OTHER_OWNERS: Final = {"labelSelector": f"!{names.LABEL_RESOURCE}"}
_EGRESS: Final = "Egress"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatingPolicy:
    """A NetworkPolicy that restricts the egress of the pods that it selects.

    Attributes:
        selector: the policy's podSelector.
    """

    namespace: str
    selector: Manifest


def read_isolating_policy(stored: Manifest) -> IsolatingPolicy | None:
    """Reads a NetworkPolicy that restricts egress; returns None if the policy restricts only ingress.

    Raises:
        UnreadableError: a field has the wrong type.
    """
    spec = as_object(stored.get("spec"), "spec")
    types = as_texts(spec.get("policyTypes"), "policyTypes")
    # A stored policy always has policyTypes: the API server adds Egress if the policy has egress rules.
    if _EGRESS not in types:
        return None
    selector = as_object(spec.get("podSelector"), "podSelector")
    # The selector is kept as a dict, so check the types of the fields that decisions will read.
    as_text_map(selector.get("matchLabels"), "matchLabels")
    for term in as_objects(selector.get("matchExpressions"), "matchExpressions"):
        as_name(term.get("key"), "matchExpressions.key")
        as_name(term.get("operator"), "matchExpressions.operator")
        as_texts(term.get("values"), "matchExpressions.values")
    namespace = as_name(as_object(stored.get("metadata"), "metadata").get("namespace"), "namespace")
    return IsolatingPolicy(namespace=namespace, selector=selector)


class IsolatingPolicies:
    """Caches, per scope, the policies of other owners that restrict egress.

    Args:
        scopes: namespaces; None for all.
        changed: called with the namespace of a policy that begins or ceases to restrict egress, or that now
            selects other pods.
    """

    def __init__(
        self, server: ApiServer, scopes: Sequence[str | None], changed: Callable[[str], None]
    ) -> None:
        def report_change(before: IsolatingPolicy | None, after: IsolatingPolicy | None) -> None:
            """Reports the namespace of a changed policy."""
            if before != after:
                changed((after or before).namespace)  # type: ignore[union-attr]  # at most one is None

        self._caches: dict[str | None, WatchCache[IsolatingPolicy]] = {
            scope: WatchCache(
                server,
                Collection(
                    label=f"NetworkPolicies of other owners in {scope or 'all namespaces'}",
                    path=NETWORK_POLICY.path(scope),
                    query=_OF_OTHER_OWNERS,
                    namespace=scope,
                ),
                trim=read_isolating_policy,
                changed=report_change,
                index=lambda policy: policy.namespace,
            )
            for scope in scopes
        }

    @property
    def caches(self) -> list[WatchCache[IsolatingPolicy]]:
        return list(self._caches.values())

    def selectors(self, namespace: str) -> tuple[Manifest, ...] | None:
        """Returns the podSelectors of a namespace's policies, or None before the first list."""
        scope = None if None in self._caches else namespace
        cache = self._caches.get(scope)
        if cache is None or not cache.synced.is_set():
            return None
        return tuple(policy.selector for policy in cache.values_under(namespace))
