"""Why a child is not as it should be, though the API server refuses nothing: what users read of it. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    CreateObject,
    DeleteObject,
    Manifest,
    PatchStatus,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.reconcile.refusals import (
    CHANGED_BY_OTHERS,
    DELETED_BY_OTHERS,
    MADE_BY_OTHERS,
    NAME_HELD,
    NAME_TAKEN,
    NOT_ANSWERED,
    OBJECT_REFUSED,
)

_NAMED_FIELDS: Final = 5


def refused_words(action: Action, said: str) -> str:
    """Returns who refuses what, in the API server's words."""
    return f"the API server refuses {_written(action)}: {said}"


def unanswered_words(action: Action, why: str) -> str:
    """Returns what the API server does not answer, and that the write is tried again."""
    return f"the API server has not answered the write of {_written(action)}, which is tried again: {why}"


def _written(action: Action) -> str:
    match action:
        case CreateObject() | ApplyObject():
            return f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
        case DeleteObject():
            return f"the deletion of {action.kind} {action.name}"
        case PatchStatus():
            return "the status"
    return "the finalizer"


class ChildError(HeteroInferError):
    """A child cannot be as it should; it is tried again later."""


class NameTakenError(ChildError):
    """An object of a child's name exists and belongs to somebody else; it is left alone."""

    reason = NAME_TAKEN

    @classmethod
    def of(cls, what: str) -> "NameTakenError":
        """Returns the error for an object, by its kind and name."""
        return cls(
            f"{what} exists and does not belong to this {names.KIND}: delete it, or give the {names.KIND} "
            "another name"
        )


class NameHeldError(ChildError):
    """An object of a child's name exists, and will go."""

    reason = NAME_HELD

    @classmethod
    def of(cls, what: str, stored: Manifest) -> "NameHeldError":
        """Returns the error for an object, by its kind and name, and as it is stored."""
        return cls(f"{what} {_describe_going(stored)}; its name is needed")


class ChangedByOthersError(ChildError):
    """A child is stored, and not as it was written: a webhook changes it, or somebody who was faster."""

    reason = CHANGED_BY_OTHERS

    @classmethod
    def of(cls, what: str, drift: Manifest) -> "ChangedByOthersError":
        """Returns the error for an object, by its kind and name, and the patch that would mend it."""
        return cls(
            f"{what} is stored with another {_fields(drift)} than was written: a webhook or another "
            "controller changes it; have it leave this object alone"
        )

    @classmethod
    def on_creation(cls, what: str, fields: Sequence[str]) -> "ChangedByOthersError":
        """Returns the error for a pod that is changed while it is created, and so was deleted."""
        return cls(
            f"{what} was created with another {', '.join(fields[:_NAMED_FIELDS])} than was sent, and deleted "
            "again: a mutating webhook changes pods. Exempt the pods of this namespace from the webhook, or "
            "have the webhook leave these fields alone"
        )

    @classmethod
    def each_time(cls, what: str, drift: Manifest) -> "ChangedByOthersError":
        """Returns the error for an object that is written again and again, as `of`."""
        return cls(
            f"{what} is written again and again, and each time gets another {_fields(drift)}: another "
            "controller changes it; have it leave this object alone"
        )


class DeletedByOthersError(ChildError):
    """A child is made again and again, and deleted each time."""

    reason = DELETED_BY_OTHERS

    @classmethod
    def of(cls, what: str) -> "DeletedByOthersError":
        """Returns the error for an object, by its kind and name."""
        return cls(
            f"{what} is made again and again, and deleted each time: have whoever deletes it leave this "
            "object alone"
        )


class MadeByOthersError(ChildError):
    """An object with the labels and the owner of a child is not wanted, and made each time it is deleted."""

    reason = MADE_BY_OTHERS

    @classmethod
    def of(cls, what: str) -> "MadeByOthersError":
        """Returns the error for an object, by its kind and name."""
        return cls(
            f"{what} is not wanted any more, deleted again and again, and made each time: have whoever makes "
            "it leave it out"
        )


def _describe_going(stored: Manifest) -> str:
    metadata = stored["metadata"]
    if "deletionTimestamp" not in metadata:
        return f"belongs to an earlier {names.KIND} of this name, and is not gone yet"
    finalizers = ", ".join(metadata.get("finalizers") or ())
    if not finalizers:
        return "is being deleted"
    return f"is being deleted, and held by {finalizers}: whoever set that must let go of it"


def _fields(drift: Manifest) -> str:
    return ", ".join(_paths(drift)[:_NAMED_FIELDS]) or "content"


def _paths(patch: Manifest, prefix: str = "") -> list[str]:
    """Returns the paths of the fields that a patch writes."""
    found: list[str] = []
    for key, value in patch.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        # Of labels and owners a patch has all, whichever differs.
        whole = prefix == "metadata" or not isinstance(value, Mapping) or not value
        found += [path] if whole else _paths(value, path)
    return found


class RevisionRefusedError(ChildError):
    """What a revision would need is refused; nothing was made."""

    reason = OBJECT_REFUSED


class NotAnsweredError(ChildError):
    """Whether a revision would be taken is not known yet."""

    reason = NOT_ANSWERED

    @classmethod
    def of(cls, what: str) -> "NotAnsweredError":
        """Returns the error, with what is known of why."""
        return cls(
            f"the API server has not said whether it takes pods and ConfigMaps of the new revision ({what}); "
            "nothing is taken down before"
        )
