"""Every right that the operator uses, as data: the chart's roles say the same, and a test compares them.

Why each verb: list and watch keep the caches; get meets an object that the caches do not show
yet; create and delete are of pods; patch is server-side apply, which also needs create for an
object that is not there; status is replaced by update under its resourceVersion; the finalizer
is a patch of the resource.
"""

from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.kube.server import ApiServer

_REVIEW_PATH: Final = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessRule:
    """Verbs on one resource.

    Attributes:
        group: API group; "" for core.
        resource: plural, or plural/subresource.
        name: of the only object; "" for all.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    name: str = ""


_ALL: Final = ("get", "list", "watch", "create", "patch", "delete")
SERVED: Final = (
    AccessRule(group=names.API_GROUP, resource=names.PLURAL, verbs=("get", "list", "watch", "patch")),
    AccessRule(group=names.API_GROUP, resource=f"{names.PLURAL}/status", verbs=("update",)),
    # Children block their owner's deletion, which some clusters (OpenShift) grant only with this.
    AccessRule(group=names.API_GROUP, resource=f"{names.PLURAL}/finalizers", verbs=("update",)),
    AccessRule(group="", resource="pods", verbs=("get", "list", "watch", "create", "delete")),
    AccessRule(group="", resource="services", verbs=_ALL),
    AccessRule(group="", resource="configmaps", verbs=_ALL),
    # Made once, with a group's key, under a name that says which: never read, changed or deleted.
    AccessRule(group="", resource="secrets", verbs=("create",)),
    # Made once, for models of a hub, and never changed.
    AccessRule(
        group="", resource="persistentvolumeclaims", verbs=("get", "list", "watch", "create", "delete")
    ),
    AccessRule(group="networking.k8s.io", resource="networkpolicies", verbs=_ALL),
    AccessRule(group="policy", resource="poddisruptionbudgets", verbs=_ALL),
    # What tells a gang scheduler of a group; used where the cluster serves it.
    AccessRule(group="scheduling.volcano.sh", resource="podgroups", verbs=_ALL),
    AccessRule(group="scheduling.x-k8s.io", resource="podgroups", verbs=_ALL),
    AccessRule(group="scheduling.k8s.io", resource="workloads", verbs=_ALL),
    AccessRule(group="scheduling.k8s.io", resource="podgroups", verbs=_ALL),
    # Listed of a claim that does not bind: its provisioner says there why.
    AccessRule(group="events.k8s.io", resource="events", verbs=("list", "create", "patch")),
)
"""In every namespace that is served."""

CLUSTER: Final = (
    AccessRule(group="", resource="nodes", verbs=("list", "watch")),
    # Which pods the scheduler preempts for a group; without this right, no pod counts as preempted.
    AccessRule(group="scheduling.k8s.io", resource="priorityclasses", verbs=("list", "watch")),
)
"""In cluster scope only: what plans read of the nodes."""


def lease_rules(name: str) -> tuple[AccessRule, ...]:
    """Returns what holding the Lease of this name takes, in the operator's own namespace."""
    group = "coordination.k8s.io"
    return (
        AccessRule(group=group, resource="leases", verbs=("create",)),
        AccessRule(group=group, resource="leases", verbs=("get", "update"), name=name),
    )


def key_rules(name: str, former: str = "") -> tuple[AccessRule, ...]:
    """Returns what keeping the operator's key in the Secret of this name takes, in its own namespace.

    Args:
        former: name of the Secret that the chart made until 0.2.0, or "".
    """
    return (
        AccessRule(group="", resource="secrets", verbs=("create",)),
        *(
            AccessRule(group="", resource="secrets", verbs=("get", "update"), name=each)
            for each in (name, former)
            if each
        ),
    )


async def missing_rights(
    server: ApiServer, rules: tuple[AccessRule, ...], namespace: str | None
) -> list[str]:
    """Returns which of these rights this process lacks, in words.

    Asks about the caller by SelfSubjectAccessReview, which is open to everybody; without a namespace for all.
    """
    missing: list[str] = []
    for rule in rules:
        for verb in rule.verbs:
            if not await _allowed(server, rule, verb, namespace):
                where = f"in namespace {namespace}" if namespace else "in the cluster"
                missing.append(f"{verb} {rule.resource}{'.' * bool(rule.group)}{rule.group} {where}")
    return missing


async def _allowed(server: ApiServer, rule: AccessRule, verb: str, namespace: str | None) -> bool:
    resource, _, subresource = rule.resource.partition("/")
    attributes: dict[str, Any] = {"group": rule.group, "resource": resource, "verb": verb}
    if subresource:
        attributes["subresource"] = subresource
    if namespace:
        attributes["namespace"] = namespace
    if rule.name:
        attributes["name"] = rule.name
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await server.create(_REVIEW_PATH, review)
    return bool(answer["status"]["allowed"])
