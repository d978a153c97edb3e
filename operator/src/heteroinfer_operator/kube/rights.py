"""All RBAC rights that the operator uses, as data. A test compares them with the chart's roles.

The operator needs the verbs for these requests:
- `list` and `watch`: the caches.
- `get`: reads of an object that the caches do not show yet.
- `create` and `delete`: pods.
- `patch`: server-side apply, which also needs `create` if the object does not exist; for a HeteroInference,
  the removal of the finalizer of earlier versions.
- `update`: the status.
"""

from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.kube.server import ApiServer

_REVIEW_PATH: Final = "/apis/authorization.k8s.io/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """Verbs on one API resource.

    Attributes:
        group: API group; "" for core.
        resource: plural, or plural/subresource.
        name: name of the only object that the rule allows; "" for all.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    name: str = ""


_ALL: Final = ("get", "list", "watch", "create", "patch", "delete")
SERVED: Final = (
    AccessRule(group=names.API_GROUP, resource=names.PLURAL, verbs=("get", "list", "watch", "patch")),
    AccessRule(group=names.API_GROUP, resource=f"{names.PLURAL}/status", verbs=("update",)),
    # Children block their owner's deletion (blockOwnerDeletion). Some clusters (OpenShift) require this
    # right.
    AccessRule(group=names.API_GROUP, resource=f"{names.PLURAL}/finalizers", verbs=("update",)),
    AccessRule(group="", resource="pods", verbs=("get", "list", "watch", "create", "delete")),
    AccessRule(group="", resource="services", verbs=_ALL),
    AccessRule(group="", resource="configmaps", verbs=_ALL),
    # The operator creates one Secret for each key of a group, and never reads, changes or deletes it.
    AccessRule(group="", resource="secrets", verbs=("create",)),
    # The operator creates a claim for the cache of a hub model, and never changes it.
    AccessRule(
        group="", resource="persistentvolumeclaims", verbs=("get", "list", "watch", "create", "delete")
    ),
    AccessRule(group="networking.k8s.io", resource="networkpolicies", verbs=_ALL),
    AccessRule(group="policy", resource="poddisruptionbudgets", verbs=_ALL),
    # These objects describe groups to gang schedulers. Used only if the cluster serves these kinds.
    AccessRule(group="scheduling.volcano.sh", resource="podgroups", verbs=_ALL),
    AccessRule(group="scheduling.x-k8s.io", resource="podgroups", verbs=_ALL),
    AccessRule(group="scheduling.k8s.io", resource="workloads", verbs=_ALL),
    AccessRule(group="scheduling.k8s.io", resource="podgroups", verbs=_ALL),
    # list: if a claim is not bound or a volume not mounted, events contain the reason.
    AccessRule(group="events.k8s.io", resource="events", verbs=("list", "create", "patch")),
)
"""Rights in every served namespace."""

CLUSTER: Final = (
    AccessRule(group="", resource="nodes", verbs=("list", "watch")),
    # With this right, the operator knows which pods the scheduler may preempt for a group. Without this
    # right, plans assume that the scheduler preempts no pod.
    AccessRule(group="scheduling.k8s.io", resource="priorityclasses", verbs=("list", "watch")),
)
"""Rights that the operator needs only if it serves all namespaces. Then plans use the capacity of nodes."""


def lease_rules(name: str) -> tuple[AccessRule, ...]:
    """Returns the rights for leader election with the Lease of this name, in the operator's own namespace."""
    group = "coordination.k8s.io"
    return (
        AccessRule(group=group, resource="leases", verbs=("create",)),
        AccessRule(group=group, resource="leases", verbs=("get", "update"), name=name),
    )


def key_rules(name: str, former: str = "") -> tuple[AccessRule, ...]:
    """Returns the rights to keep the operator's key in the Secret of this name, in its own namespace.

    Args:
        former: name of the Secret that charts before 0.2.0 created, or "".
    """
    return (
        AccessRule(group="", resource="secrets", verbs=("create",)),
        *(
            AccessRule(group="", resource="secrets", verbs=("get", "update"), name=secret)
            for secret in (name, former)
            if secret
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccount:
    """A service account whose rights a user checks."""

    namespace: str
    name: str

    @property
    def subject(self) -> dict[str, Any]:
        """The user and the groups as the API server authenticates them."""
        groups = (
            "system:serviceaccounts",
            f"system:serviceaccounts:{self.namespace}",
            "system:authenticated",
        )
        return {"user": f"system:serviceaccount:{self.namespace}:{self.name}", "groups": list(groups)}


async def find_missing_rights(
    server: ApiServer,
    rules: tuple[AccessRule, ...],
    namespace: str | None,
    account: ServiceAccount | None = None,
) -> list[str]:
    """Returns the rights that a user or a service account lacks, as texts such as "create pods in ...".

    Every user may ask about their own rights (SelfSubjectAccessReview). To ask about a service account, the
    user needs the right to create SubjectAccessReviews.

    Args:
        namespace: None for all namespaces.
        account: None for the user who sends these requests.
    """
    missing: list[str] = []
    for rule in rules:
        for verb in rule.verbs:
            if not await _is_allowed(server, rule, verb, namespace, account):
                scope_text = f"in namespace {namespace}" if namespace else "in the cluster"
                resource = f"{rule.resource}.{rule.group}" if rule.group else rule.resource
                missing.append(f"{verb} {resource} {scope_text}")
    return missing


async def _is_allowed(
    server: ApiServer, rule: AccessRule, verb: str, namespace: str | None, account: ServiceAccount | None
) -> bool:
    """Asks the API server whether the user, or a service account, may use a verb on a resource."""
    resource, _, subresource = rule.resource.partition("/")
    attributes: dict[str, Any] = {"group": rule.group, "resource": resource, "verb": verb}
    if subresource:
        attributes["subresource"] = subresource
    if namespace:
        attributes["namespace"] = namespace
    if rule.name:
        attributes["name"] = rule.name
    kind = "SelfSubjectAccessReview" if account is None else "SubjectAccessReview"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": kind,
        "spec": {"resourceAttributes": attributes, **(account.subject if account else {})},
    }
    answer = await server.create(f"{_REVIEW_PATH}/{kind.lower()}s", review)
    return bool(answer["status"]["allowed"])
