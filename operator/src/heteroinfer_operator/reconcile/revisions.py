"""Which revision the spec asks for, and what the revisions of running groups were. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, HeteroInferenceStatus, parse_spec, parse_stored_spec
from heteroinfer_operator.cluster import PodView, ResourceObservation
from heteroinfer_operator.errors import HeteroInferError, PlanError, SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.revision_record import RevisionRecord, read_revision_record
from heteroinfer_operator.reconcile.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What pods are made with.

    Attributes:
        name: hash, as in the labels of its pods.
        spec: that was accepted.
        source: where the model is.
        commit: of a hub's model, or None.
    """

    name: str
    spec: HeteroInferenceSpec
    source: ModelSource
    commit: str | None = None

    @property
    def record(self) -> RevisionRecord:
        """Returns what is kept of it."""
        return RevisionRecord(name=self.name, spec=self.spec, commit=self.commit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the resource asks for now.

    Attributes:
        name: of its revision, or None if the spec cannot be read.
        spec: or None.
        source: where its model is, or None if it cannot be had.
        refusal: why the spec is refused, or None.
    """

    name: str | None = None
    spec: HeteroInferenceSpec | None = None
    source: ModelSource | None = None
    refusal: HeteroInferError | None = None


def find_target(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    owner: Owner,
    options: Options,
    recorded: Collection[RevisionRecord],
) -> Target:
    """Returns what the resource asks for.

    A spec that a rule of this version refuses may be one that an older version has accepted: its
    revision is named all the same, so that its groups are known to be of it.
    """
    raw, refusal = observation.resource.spec, None
    try:
        spec = parse_spec(raw)
    except SpecError as error:
        refusal = error
        try:
            spec = parse_stored_spec(raw)
        except SpecError:
            return Target(refusal=refusal)
    name = _name(spec, recorded, _in_use(observation.pods, status))
    source = None
    problem: HeteroInferError | None = refusal or options.allowed.find_forbidden(spec)
    try:
        source = options.addressing.model(spec, owner)
    except PlanError as error:
        problem = problem or error
    return Target(name=name, spec=spec, source=source, refusal=problem)


def _name(spec: HeteroInferenceSpec, recorded: Collection[RevisionRecord], in_use: Collection[str]) -> str:
    """Returns the name of a spec's revision: of one that is kept and needs the same pods, if there is one."""
    needed = identity.needs_pods(spec)
    same = {record.name for record in recorded if identity.needs_pods(record.spec) == needed}
    found = sorted(same & set(in_use)) or sorted(same)
    if found:
        return found[0]
    first = identity.first_revision(spec)
    return first if first in in_use else identity.revision(spec)


def _in_use(pods: Collection[PodView], status: HeteroInferenceStatus) -> set[str]:
    labels = {pod.labels.get(names.LABEL_REVISION) for pod in pods}
    return {name for name in (*labels, *(group.revision for group in status.groups)) if name}


def read_records(observation: ResourceObservation, owner: Owner) -> list[RevisionRecord]:
    """Returns the revisions that are kept."""
    found = (read_revision_record(owner, stored) for stored in observation.objects)
    return [record for record in found if record is not None]


def find_revisions(
    recorded: Collection[RevisionRecord], target: Target, commit: str | None, owner: Owner, options: Options
) -> Mapping[str, Revision]:
    """Returns by name the revisions that pods can be made of.

    Args:
        recorded: that are kept.
        target: what the resource asks for.
        commit: of the target's model, if it is of a hub and known.
        owner: the resource.
        options: of the installation.
    """
    found: dict[str, Revision] = {}
    if target.name is not None and target.spec is not None and target.source is not None:
        found[target.name] = Revision(
            name=target.name, spec=target.spec, source=target.source.at(commit), commit=commit
        )
    for record in recorded:
        try:
            source = options.addressing.model(record.spec, owner)
        except PlanError:
            continue  # of an installation that allowed it
        current = found.get(record.name)
        if current is None:
            found[record.name] = Revision(
                name=record.name, spec=record.spec, source=source.at(record.commit), commit=record.commit
            )
        elif current.commit is None:
            found[record.name] = replace(
                current, source=current.source.at(record.commit), commit=record.commit
            )
    return found
