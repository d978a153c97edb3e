"""The ConfigMap with a revision of a spec, for groups that run with an older spec. Pure.

If the resource has a newer spec, or a spec that is refused, its groups keep running with the older revision.
If such a group restarts, the operator reads the older spec from this ConfigMap.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import is_commit
from heteroinfer_operator.api import ChosenMode, HeteroInferenceSpec, parse_stored_spec, read_chosen_mode
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner

KEY: Final = "revision.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RevisionRecord:
    """A revision: its spec, the commit of its model, and its mode.

    Attributes:
        name: hash of the revision, as in the labels of its pods.
        commit: commit of a hub's model, or None.
        chosen: mode that the planner chose, or None if the spec sets a mode.
    """

    name: str
    spec: HeteroInferenceSpec
    commit: str | None = None
    chosen: ChosenMode | None = None


def build_revision_record(owner: Owner, record: RevisionRecord) -> dict[str, Any]:
    """Returns the immutable ConfigMap of a revision."""
    content = {"spec": record.spec.dump(), "commit": record.commit}
    if record.chosen is not None:
        content["mode"] = record.chosen.dump()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": identity.metadata(
            owner, identity.revision_record(owner, record.name), {names.LABEL_REVISION: record.name}
        ),
        "immutable": True,
        "data": {KEY: json.dumps(content, sort_keys=True, separators=(",", ":"))},
    }


def read_revision_record(owner: Owner, stored: Mapping[str, Any]) -> RevisionRecord | None:
    """Returns the revision in a stored object, or None if the object has none or cannot be read."""
    prefix = identity.revision_record(owner, "")
    name = stored["metadata"]["name"]
    text = (stored.get("data") or {}).get(KEY)
    if stored["kind"] != "ConfigMap" or not name.startswith(prefix) or text is None:
        return None
    try:
        content = json.loads(text)
        spec, commit = parse_stored_spec(content["spec"]), content.get("commit")
        chosen = read_chosen_mode(content["mode"]) if "mode" in content else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SpecError):
        return None
    return RevisionRecord(
        name=name.removeprefix(prefix),
        spec=spec,
        commit=commit if is_commit(commit) else None,
        chosen=chosen if spec.parallelism.mode is None else None,  # a mode in the spec takes precedence
    )
