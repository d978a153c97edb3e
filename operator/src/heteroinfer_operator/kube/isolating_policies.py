"""NetworkPolicies of others that keep pods in: the operator lets its own out beside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import NETWORK_POLICY
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.stored_fields import as_name, as_object, as_objects, as_text_map, as_texts

_NOT_OURS: Final = {"labelSelector": f"!{names.LABEL_RESOURCE}"}
_EGRESS: Final = "Egress"


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolatingPolicy:
    """Which pods of a namespace a policy keeps in."""

    namespace: str
    selector: Manifest


def isolating_policy(stored: Manifest) -> IsolatingPolicy | None:
    """Returns what a policy keeps in, None for one about ingress alone; raises UnreadableError."""
    spec = as_object(stored.get("spec"), "spec")
    types = as_texts(spec.get("policyTypes"), "policyTypes")
    # The API server fills policyTypes in: Egress is among them if there are egress rules.
    if _EGRESS not in types:
        return None
    selector = as_object(spec.get("podSelector"), "podSelector")
    as_text_map(selector.get("matchLabels"), "matchLabels")
    for term in as_objects(selector.get("matchExpressions"), "matchExpressions"):
        as_name(term.get("key"), "matchExpressions.key")
        as_name(term.get("operator"), "matchExpressions.operator")
        as_texts(term.get("values"), "matchExpressions.values")
    namespace = as_name(as_object(stored.get("metadata"), "metadata").get("namespace"), "namespace")
    return IsolatingPolicy(namespace=namespace, selector=selector)


class IsolatingPolicies:
    """The policies of others that keep pods in, in each scope that is kept.

    Args:
        scopes: namespaces; None for all.
        changed: called with a namespace in which other pods are kept in now.
    """

    def __init__(
        self, server: ApiServer, scopes: Sequence[str | None], changed: Callable[[str], None]
    ) -> None:
        def note(before: IsolatingPolicy | None, after: IsolatingPolicy | None) -> None:
            if before != after:
                changed((after or before).namespace)  # type: ignore[union-attr]  # one of them is there

        self._caches: dict[str | None, WatchCache[IsolatingPolicy]] = {
            scope: WatchCache(
                server,
                Collection(
                    label=f"others' policies of {scope or 'all namespaces'}",
                    path=NETWORK_POLICY.path(scope),
                    query=_NOT_OURS,
                    namespace=scope,
                ),
                trim=isolating_policy,
                changed=note,
                index=lambda policy: policy.namespace,
            )
            for scope in scopes
        }

    @property
    def caches(self) -> list[WatchCache[IsolatingPolicy]]:
        """Returns every cache."""
        return list(self._caches.values())

    def selectors(self, namespace: str) -> tuple[Manifest, ...] | None:
        """Returns what the policies of a namespace select; None if they were never listed."""
        cache = self._caches.get(None if None in self._caches else namespace)
        if cache is None or not cache.synced.is_set():
            return None
        return tuple(policy.selector for policy in cache.under(namespace))
