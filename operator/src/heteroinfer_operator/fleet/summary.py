"""The text and the JSON that `heteroinfer status` prints about one HeteroInference. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.aligned_rows import align_rows
from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    GroupPhase,
    HeteroInferenceStatus,
    ModelPhase,
)
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.fleet.lines import GroupLine, RankLine, ResourceLine
from heteroinfer_operator.fleet.story import failure_text

_WANTED_TRUE: Final = frozenset(
    {
        ConditionType.AVAILABLE,
        ConditionType.READY,
        ConditionType.MODEL_READY,
        ConditionType.PLANNED,
        ConditionType.CAPACITY_AVAILABLE,
    }
)
"""Conditions that are True in a resource without a problem."""
_WANTED_FALSE: Final = frozenset({ConditionType.STALLED, ConditionType.DEGRADED, ConditionType.FAILED})
"""Conditions that are False in a resource without a problem."""
_FALSE_AT_REST: Final = frozenset(
    {
        ConditionType.AVAILABLE,
        ConditionType.MODEL_READY,
        ConditionType.PLANNED,
        ConditionType.CAPACITY_AVAILABLE,
    }
)
"""Conditions that may be False or Unknown while the resource is suspended or has 0 replicas."""
_IMAGE_ERRORS: Final = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")
"""The kubelet's reasons for a pod without its image. The kubelet tries again without a limit."""
_UNBOUND_CLAIM: Final = "is not bound"
"""Words of a message about a pod that waits for a claim (`kube/pending_pods.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceSummary:
    """A stored resource, with the reports of its leaders in `line`."""

    manifest: Manifest
    status: HeteroInferenceStatus
    line: ResourceLine

    @property
    def wants_no_group(self) -> bool:
        """Whether the resource is suspended or has 0 replicas."""
        return bool(self._spec.get("suspend")) or self._spec.get("replicas") == 0

    @property
    def unexpected_conditions(self) -> tuple[Condition, ...]:
        """The conditions that need attention. A resource without a problem has no such condition."""
        return tuple(condition for condition in self.status.conditions if not self._is_expected(condition))

    @property
    def next_steps(self) -> tuple[str, ...]:
        """Commands and actions for the user, the most urgent first."""
        return tuple(_next_steps(self))

    @property
    def _spec(self) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.manifest["spec"]
        return spec

    def dump(self) -> dict[str, Any]:
        """Returns the summary as JSON values, for `heteroinfer status -o json`.

        Values of the status keep the names of their fields.
        """
        return {
            **self.line.dump(),
            "generation": self.manifest["metadata"].get("generation"),
            "observedGeneration": self.status.observed_generation,
            "endpoint": self.status.endpoint,
            "model": {"uri": _uri(self._spec), **(self.status.model.dump() if self.status.model else {})},
            "conditions": [condition.dump() for condition in self.status.conditions],
            "unexpectedConditions": [condition.type for condition in self.unexpected_conditions],
            "nextSteps": list(self.next_steps),
        }

    def render(self, now: datetime, *, verbose: bool) -> list[str]:
        """Returns the summary as lines of text.

        Args:
            verbose: whether to add all conditions, the times and pods of ranks, the plans, and all failures
                that the status contains.
        """
        lines = [f"{names.KIND} {self.line.key}", *_aligned(self._overview(now, verbose=verbose))]
        conditions = self.status.conditions if verbose else self.unexpected_conditions
        shown = _ShownMessages()
        shown.shorten(self._state(), "State")  # later lines with the same message refer to this line
        if conditions:
            title = "Conditions" if verbose else "Conditions that need attention"
            lines += [
                "",
                title,
                *_aligned([_condition_row(condition, now, shown) for condition in conditions]),
            ]
        if self.line.lines:
            lines += ["", "Groups", *_aligned(_group_rows(self.line.lines, shown))]
            lines += [f"  {line}" for line in self._failures(verbose=verbose)]
        if any(group.ranks for group in self.line.lines):
            lines += ["", "Ranks", *_aligned(_rank_rows(self.line.lines, verbose=verbose))]
        if verbose:
            lines += self._plans()
        return [*lines, "", "Next step", *(f"  {step}" for step in self.next_steps)]

    def _is_expected(self, condition: Condition) -> bool:
        """Reports whether a condition is normal for a resource that serves, or that wants no group."""
        if condition.type == ConditionType.PROGRESSING:
            # False with a message means that something blocks the progress.
            return condition.status is ConditionStatus.FALSE and not condition.message
        if condition.status is ConditionStatus.TRUE:
            return condition.type not in _WANTED_FALSE
        may_be_false = self.wants_no_group and condition.type in _FALSE_AT_REST
        return may_be_false or condition.type not in _WANTED_TRUE

    def _overview(self, now: datetime, *, verbose: bool) -> Iterable[tuple[str, ...]]:
        """Yields the name and the value of each line at the top of the text."""
        metadata, status = self.manifest["metadata"], self.status
        created = datetime.fromisoformat(str(metadata["creationTimestamp"]))
        yield "Model", f"{_uri(self._spec)}{_model_state(status)}"
        yield "Endpoint", status.endpoint or "none yet"
        yield "State", self._state()
        summary = status.summary
        groups = f"{status.ready_replicas} of {int(self._spec.get('replicas', 1))} ready"
        if status.updated_replicas != status.replicas:
            groups += f", {status.updated_replicas} of {status.replicas} have the current revision"
        yield "Groups", groups
        if summary is not None and summary.step_ms:
            predicted = f" (predicted {summary.predicted_step_ms} ms)" if summary.predicted_step_ms else ""
            slowest = f", slowest rank {summary.slowest_rank}" if summary.slowest_rank else ""
            yield "Decode step", f"{summary.step_ms} ms{predicted}{slowest}"
        yield "Age", _age(now, created)
        if verbose:
            yield "Generation", f"{metadata.get('generation')} (observed: {status.observed_generation})"
            yield "Revision", f"{status.update_revision or '-'} (current: {status.current_revision or '-'})"

    def _state(self) -> str:
        """Describes in one line whether the resource serves; if not, also the reason."""
        if self.manifest["metadata"].get("deletionTimestamp"):
            return "being deleted"
        if not self.line.has_status:
            return "no operator has acted on this resource yet. Run `heteroinfer check`"
        available = _describe_condition("Available", self.line.available)
        ready = _describe_condition("Ready", self.line.ready)
        message = f": {self.line.message}" if self.line.message and self.line.ready != "True" else ""
        return f"{available}, {ready} ({self.line.reason}){message}"

    def _failures(self, *, verbose: bool) -> Iterable[str]:
        """Yields a line for the last failure of each group; with `verbose`, for all failures."""
        for group in self.status.groups:
            failures = group.failures if verbose else group.failures[-1:]
            for failure in reversed(failures):
                yield f"failure of group {group.index}: {failure_text(failure)}"

    def _plans(self) -> list[str]:
        """Returns the lines about the plans of the groups."""
        lines: list[str] = []
        for plan in self.status.plans:
            lines += ["", f"Plan {plan.hash}"]
            rows = (
                ("Rates", plan.calibration),
                ("Long prompts", plan.long_prompts and f"{plan.long_prompts}, by prediction"),
                *(
                    (f"Group {group.index}", group.long_prompts)
                    for group in self.status.groups
                    if group.plan_hash == plan.hash
                ),
                ("Eager", plan.eager_reason),
                ("Notes", plan.notes),
            )
            lines += _aligned((name, text) for name, text in rows if text)
        return lines


class _ShownMessages:
    """The messages in the text so far. The text refers to an earlier message instead of repeating it."""

    def __init__(self) -> None:
        self._place_by_message: dict[str, str] = {}

    def shorten(self, message: str, place: str) -> str:
        """Returns the message, or a reference to an earlier message that ends with this message.

        Args:
            place: name of the line or the row that shows the message.
        """
        if not message:
            return message
        for shown, earlier_place in self._place_by_message.items():
            if shown.endswith(message):
                return f"(see {earlier_place})"
        self._place_by_message[message] = place
        return message


def _next_steps(summary: ResourceSummary) -> Iterable[str]:
    """Yields the user's next steps for the state of a resource."""
    key, status = summary.line.key, summary.status
    name = f"{key.name} -n {key.namespace}"
    if summary.manifest["metadata"].get("deletionTimestamp"):
        pods = f"kubectl get pods -n {key.namespace} -l {names.LABEL_RESOURCE}={key.name}"
        yield f"wait until the pods of the resource have ended: {pods}"
    elif not summary.line.has_status:
        yield "find out whether an operator runs: heteroinfer check"
    elif summary.manifest["spec"].get("suspend"):
        yield f"start the groups again: heteroinfer resume {name}"
    elif summary.manifest["spec"].get("replicas") == 0:
        yield f"start a group: kubectl scale {names.SHORT_NAME}/{key.name} -n {key.namespace} --replicas=1"
    else:
        steps = list(_problem_steps(status, name))
        yield from steps or [f"watch the ranks: heteroinfer top {name}"]


def _problem_steps(status: HeteroInferenceStatus, name: str) -> Iterable[str]:
    """Yields the commands and actions for the most urgent problem of the resource, if there is one."""
    stalled = status.condition(ConditionType.STALLED.value)
    messages = _waiting_messages(status)
    if _has_condition(status, ConditionType.FAILED, ConditionStatus.TRUE):
        yield f"find the cause: heteroinfer logs {name} --previous"
        yield f"after the fix, start the groups again: heteroinfer restart {name}"
    elif stalled is not None and stalled.status is ConditionStatus.TRUE:
        yield "correct the spec as the condition Stalled describes. Test it: heteroinfer plan -f FILE"
        if stalled.reason.endswith("NotAllowed"):
            yield (
                "for the test, read what the installation allows: helm get values RELEASE -n NAMESPACE --all "
                "-o yaml > VALUES. Then add --chart-values VALUES"
            )
    elif _has_condition(status, ConditionType.CAPACITY_AVAILABLE, ConditionStatus.FALSE):
        yield (
            "add the capacity or remove the obstacle that the condition CapacityAvailable names. For GPUs: "
            "heteroinfer check"
        )
    elif _has_condition(status, ConditionType.MODEL_READY, ConditionStatus.FALSE):
        yield "solve the problem that the condition ModelReady describes"
    elif any(error in message for message in messages for error in _IMAGE_ERRORS):
        yield (
            "a pod waits for its image: correct spec.engine.image or the chart's workerImages, push the "
            "image, or undo the change of the spec"
        )
    elif any(_UNBOUND_CLAIM in message for message in messages):
        yield "a pod waits for its claim: solve the problem that the message describes"
        yield "list the storage classes: kubectl get storageclass"
    elif any(group.phase is GroupPhase.SLEEPING for group in status.groups):
        yield f"wake the sleeping groups: heteroinfer wake {name}"
    elif any(group.failures and group.phase is not GroupPhase.READY for group in status.groups):
        yield f"find the cause of the last failure: heteroinfer logs {name} --previous"


def _waiting_messages(status: HeteroInferenceStatus) -> list[str]:
    """Returns the messages of the condition ModelReady and of the groups that do not serve."""
    model_ready = status.condition(ConditionType.MODEL_READY.value)
    groups = [group.message or "" for group in status.groups if group.phase is not GroupPhase.READY]
    return [model_ready.message if model_ready else "", *groups]


def _has_condition(status: HeteroInferenceStatus, kind: ConditionType, state: ConditionStatus) -> bool:
    condition = status.condition(kind.value)
    return condition is not None and condition.status is state


def _describe_condition(kind: str, status: str) -> str:
    """Describes the status of a condition: "Ready", "not Ready" or "Ready unknown"."""
    if status == ConditionStatus.TRUE:
        return kind
    return f"not {kind}" if status == ConditionStatus.FALSE else f"{kind} unknown"


def _uri(spec: Mapping[str, Any]) -> str:
    return str((spec.get("model") or {}).get("uri", "?"))


def _model_state(status: HeteroInferenceStatus) -> str:
    """Returns the state of the model in parentheses, or "" without a model."""
    model = status.model
    if model is None:
        return ""
    parts = [model.phase.value]
    if model.commit:
        parts.append(f"commit {model.commit[:12]}")
    if model.bytes_total and model.phase is ModelPhase.DOWNLOADING:
        parts.append(
            f"{100 * (model.bytes_done or 0) // model.bytes_total} % of {format_bytes(model.bytes_total)}"
        )
    if model.reason and model.phase is not ModelPhase.READY:
        parts.append(model.reason)
    return f" ({', '.join(parts)})"


def _condition_row(condition: Condition, now: datetime, shown: _ShownMessages) -> tuple[str, ...]:
    age = _age(now, condition.last_transition_time)
    message = shown.shorten(condition.message, condition.type)
    return condition.type, condition.status.value, age, condition.reason, message


def _group_rows(groups: Sequence[GroupLine], shown: _ShownMessages) -> Iterable[tuple[str, ...]]:
    """Yields the rows of the table of groups, the header first."""
    yield "GROUP", "EPOCH", "PHASE", "RESTARTS", "KV CACHE", "WAITS FOR"
    for group in groups:
        used = "" if group.kv_use is None else f"{100 * group.kv_use:.0f} % of "
        cache = "" if group.kv_tokens is None else f"{used}{group.kv_tokens:,} tokens"
        message = shown.shorten(group.message, f"group {group.index}")
        yield str(group.index), str(group.epoch), group.phase, str(group.restarts), cache, message


def _rank_rows(groups: Sequence[GroupLine], *, verbose: bool) -> Iterable[tuple[str, ...]]:
    """Yields the header and the rows of the table of ranks."""
    more = ("COMPUTE", "WAIT", "PREDICTED", "LOCKED MEMORY", "TRANSPORTS", "POD") if verbose else ()
    yield ("GROUP", "RANK", "ROLE", "PHASE", "STEP", "NODE", *more)
    for group in groups:
        for rank in group.ranks:
            detail = _rank_details(rank) if verbose else ()
            yield (
                str(group.index),
                str(rank.rank),
                rank.role,
                rank.phase,
                _ms(rank.step_ms),
                rank.node,
                *detail,
            )


def _rank_details(rank: RankLine) -> tuple[str, ...]:
    """Returns the cells of a rank that only the verbose table has."""
    return (
        _ms(rank.compute_ms),
        _ms(rank.wait_ms),
        _ms(rank.predicted_ms),
        _locked_memory(rank),
        ",".join(rank.transports or ()),
        rank.pod,
    )


def _locked_memory(rank: RankLine) -> str:
    """Describes the memory that a rank has locked, and the limit of locked memory if there is a limit."""
    if rank.locked_memory_bytes is None:
        return ""
    limit = rank.locked_memory_limit_bytes
    of_limit = "" if limit is None else f" of {format_bytes(limit)}"
    return f"{format_bytes(rank.locked_memory_bytes)}{of_limit}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Returns rows as indented lines. An empty cell becomes a dash."""
    return [f"  {line}" for line in align_rows([tuple(cell or "-" for cell in row) for row in rows])]


def _age(now: datetime, then: datetime) -> str:
    """Returns a time span in one unit, as kubectl prints it."""
    seconds = max(int((now - then).total_seconds()), 0)
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"
