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
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.reconcile.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """What pods are made with.

    Attributes:
        name: hash, as in the labels of its pods.
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
        source: where its model is, or None if it cannot be had.
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
    others = {record.name for record in recorded} - same
    first, own = identity.first_revision(spec), identity.revision(spec)
    if first in in_use and first not in others:
        return first
    # Hashes of 40 bits can be made to meet: a refused spec must not take the place of what a group had.
    return identity.longer_revision(spec) if own in others else own


def _in_use(pods: Collection[PodView], status: HeteroInferenceStatus) -> set[str]:
    labels = {pod.labels.get(names.LABEL_REVISION) for pod in pods}
    return {name for name in (*labels, *(group.revision for group in status.groups)) if name}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecords:
    """What is kept of revisions, as far as it is believed.

    Attributes:
        records: that are believed.
        unsigned: names of those without a valid code.
        forged: names of the ConfigMaps that are ignored: somebody else wrote them, or damaged them.
        any_signed: whether a record has a valid code.
    """

    records: tuple[RevisionRecord, ...] = ()
    unsigned: frozenset[str] = frozenset()
    forged: tuple[str, ...] = ()
    any_signed: bool = False

    def signed_by(
        self, signer: Signer, status: HeteroInferenceStatus, revisions: Collection[str]
    ) -> str | None:
        """Returns by which key all records are signed, for the next status.

        From then on a record without a valid code is ignored. It is not before records were seen with their
        codes: a status that is written, and a crash before the codes are, would lose them.

        `revisions` are those that pods can be made of, and whose records so get codes.
        """
        done = self.any_signed and not self.unsigned & set(revisions)
        return signer.fingerprint if done else status.records_signed_by


def read_records(
    observation: ResourceObservation, status: HeteroInferenceStatus, signer: Signer, allowed: Allowed
) -> KeptRecords:
    """Reads the revisions that are kept.

    A record with a valid code is believed: the operator wrote it. Version 0.1.0 wrote none, and an operator
    with another key made other codes: until all records in use have a code of this key, those without one
    are checked like a spec. An installation without a key always does that.
    """
    prefix = identity.revision_record(signer.owner, "")
    all_signed = signer.key is not None and status.records_signed_by == signer.fingerprint
    records: list[RevisionRecord] = []
    unsigned: set[str] = set()
    forged: list[str] = []
    any_signed = False
    for stored in observation.objects:
        name = stored["metadata"]["name"]
        if stored["kind"] != "ConfigMap" or not name.startswith(prefix):
            continue
        record, is_signed = read_revision_record(signer.owner, stored), signer.vouches(stored)
        any_signed = any_signed or is_signed
        is_named = record is not None and (is_signed or _is_named_by_content(record))
        if record is not None and (
            is_signed or (not all_signed and is_named and _is_accepted(record, allowed))
        ):
            records.append(record)
            unsigned |= set() if is_signed else {record.name}
        elif signer.key is not None and not is_signed and (all_signed or not is_named):
            forged.append(name)
    return KeptRecords(
        records=tuple(records), unsigned=frozenset(unsigned), forged=tuple(forged), any_signed=any_signed
    )


def _is_named_by_content(record: RevisionRecord) -> bool:
    names_of_content = (identity.revision, identity.first_revision, identity.longer_revision)
    return record.name in {name_of(record.spec) for name_of in names_of_content}


def _is_accepted(record: RevisionRecord, allowed: Allowed) -> bool:
    """Checks whether a spec would be accepted if its user wrote it today."""
    try:
        spec = parse_spec(record.spec.dump())
    except SpecError:
        return False
    return allowed.find_forbidden(spec) is None


def find_revisions(
    recorded: Collection[RevisionRecord], target: Target, commit: str | None, owner: Owner, options: Options
) -> Mapping[str, Revision]:
    """Returns by name the revisions that pods can be made of."""
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
        kept = Revision(
            name=record.name, spec=record.spec, source=source.at(record.commit), commit=record.commit
        )
        current = found.get(record.name, kept)
        if current.commit is None:
            current = replace(current, source=current.source.at(record.commit), commit=record.commit)
        found[record.name] = current
    return found
