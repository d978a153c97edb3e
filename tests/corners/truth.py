"""Compares the conditions of a resource with its pods. Pure."""

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract import names

_SAYS_WHY = {
    "Planned": "False",
    "ModelReady": "False",
    "CapacityAvailable": "False",
    "Stalled": "True",
    "Failed": "True",
}
"""Conditions with this status report why no group serves."""
_REFUSED = ("ObjectRefused", "NameTaken", "NameHeld", "ChangedByOthers", "DeletedByOthers")
_PODS_WAIT = ("Scheduling", "Image")
"""The cluster keeps these pods from running. The status quotes the scheduler or the kubelet."""


class Verdict(enum.StrEnum):
    """The state of a resource by its conditions."""

    SERVES = "serves"
    RESTS = "rests"
    WAITS = "says why not"
    MOVES = "on its way"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A resource and its worker pods at one moment.

    Attributes:
        resource: stored object.
        pods: worker pods by name, including those with damaged labels.
    """

    resource: Mapping[str, Any]
    pods: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def spec(self) -> Mapping[str, Any]:
        return dict(self.resource["spec"])

    @property
    def status(self) -> Mapping[str, Any]:
        return dict(self.resource.get("status") or {})

    @property
    def groups(self) -> Sequence[Mapping[str, Any]]:
        return list(self.status.get("groups", ()))

    @property
    def wanted(self) -> int:
        """Returns how many groups must serve now."""
        return 0 if self.spec.get("suspend", False) else int(self.spec.get("replicas", 1))

    @property
    def fingerprint(self) -> object:
        """Returns a value that changes whenever anything of the resource or its pods changes."""
        pods = {name: pod["metadata"]["resourceVersion"] for name, pod in self.pods.items()}
        return self.resource["metadata"]["resourceVersion"], pods

    def condition(self, kind: str) -> Mapping[str, Any]:
        """Returns a condition, or an empty one if the status has none of this type."""
        conditions = self.status.get("conditions", ())
        return next((dict(each) for each in conditions if each["type"] == kind), {})

    def serving(self) -> set[int]:
        """Returns the groups whose ranks all have ready pods."""
        ready = {name for name, pod in self.pods.items() if _is_ready(pod)}
        by_index = {group["index"]: _pods_of(group) for group in self.groups}
        return {index for index, expected in by_index.items() if expected and expected <= ready}


_NO_NODE: Final = " nodes are available: "


def judge(seen: Seen) -> tuple[Verdict, str]:
    """Returns the state of a resource, and the reason in its conditions."""
    progressing, ready = seen.condition("Progressing"), seen.condition("Ready")
    if not progressing:
        return Verdict.MOVES, "no conditions"
    if ready.get("status") == "True":
        return Verdict.SERVES if seen.wanted else Verdict.RESTS, str(ready["reason"])
    for kind, status in _SAYS_WHY.items():
        found = seen.condition(kind)
        if found.get("status") == status:
            return Verdict.WAITS, f"{kind}: {found['reason']}"
    model = seen.condition("ModelReady")
    # In the scheduler's message: the pod that fetches the model has no node, or its claim does not exist. A
    # claim that is not bound yet will be bound.
    message = model.get("message", "")
    if model.get("status") == "Unknown" and _NO_NODE in message and "unbound" not in message:
        return Verdict.WAITS, f"ModelReady: {model['reason']}"
    reason = str(progressing["reason"])
    refused = progressing["status"] == "False" and reason in _REFUSED
    waits = reason in _PODS_WAIT and progressing.get("message")
    return Verdict.WAITS if refused or waits else Verdict.MOVES, reason


def find_false_conditions(seen: Seen) -> list[str]:
    """Returns false conditions of a stable resource, or [] if all are true."""
    generation = seen.resource["metadata"]["generation"]
    conditions = seen.status.get("conditions", ())
    found = [
        f"{condition['type']} is of generation {condition.get('observedGeneration')}, expected {generation}"
        for condition in conditions
        if condition.get("observedGeneration") != generation
    ]
    if seen.status.get("observedGeneration") != generation:
        found.append(f"observedGeneration is {seen.status.get('observedGeneration')}, expected {generation}")
    serving = seen.serving()
    available = seen.condition("Available").get("status") == "True"
    # If the clients' Service is refused, no client reaches the serving groups.
    unreachable = not available and seen.condition("Available").get("reason") in _REFUSED
    if available != bool(serving and seen.wanted) and not unreachable:
        found.append(
            f"Available is {available}, but groups that serve are {sorted(serving)} of {seen.wanted}"
        )
    if seen.wanted and seen.condition("Ready").get("status") == "True":
        if len(serving) < seen.wanted:
            found.append(f"Ready is True, but groups that serve are {sorted(serving)} of {seen.wanted}")
        if seen.condition("Stalled").get("status") != "False":
            found.append("Ready and Stalled are both True")
    if not seen.wanted and seen.condition("Ready").get("status") == "True" and seen.pods:
        found.append(f"Ready is True and nothing is wanted, but there are {sorted(seen.pods)}")
    return found


def find_two_epochs(seen: Seen) -> list[str]:
    """Returns the groups that have pods of two epochs, by the pods' names."""
    epochs: dict[str, set[str]] = defaultdict(set)
    for name in seen.pods:
        _, group, epoch, _ = name.rsplit("-", 3)
        epochs[group].add(epoch)
    return [f"group {group} has epochs {sorted(found)}" for group, found in epochs.items() if len(found) > 1]


def _pods_of(group: Mapping[str, Any]) -> set[str]:
    return {rank["pod"] for rank in group.get("members", ())}


def _is_ready(pod: Mapping[str, Any]) -> bool:
    if "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") != "Running":
        return False
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def has_run(pod: Mapping[str, Any]) -> bool:
    """Returns whether a pod's container has started. From then on, no other pod may have its name."""
    states = pod["status"].get("containerStatuses", ())
    return any("running" in each["state"] or "terminated" in each["state"] for each in states)


def is_worker(pod: Mapping[str, Any], resource: str) -> bool:
    """Returns whether a pod is a worker of a resource. Reads owner and name, as labels may be damaged."""
    owners = pod["metadata"].get("ownerReferences", ())
    ours = any(owner["kind"] == names.KIND and owner["name"] == resource for owner in owners)
    parts = pod["metadata"]["name"].removeprefix(f"{resource}-").split("-")
    return ours and len(parts) == 3 and all(part.isdecimal() for part in parts)
