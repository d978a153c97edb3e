"""The revision that the spec asks for, and the stored revisions of running groups. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import (
    ChosenMode,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
    infer_mode,
    parse_spec,
    parse_stored_spec,
)
from heteroinfer_operator.cluster import PodView, ResourceObservation
from heteroinfer_operator.errors import HeteroInferError, PlanError, SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.revision_record import RevisionRecord, read_revision_record
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.reconcile.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """The part of a spec that pods are created from.

    Attributes:
        name: hash, as in the labels of the pods.
        spec: the spec as the user wrote it.
        commit: commit of a model from a hub, or None.
        chosen: mode that the plan chose; None if the spec has a mode, or if no plan was made yet.
    """

    name: str
    spec: HeteroInferenceSpec
    source: ModelSource
    commit: str | None = None
    chosen: ChosenMode | None = None

    def spec_of_pods(self, defaults: PodResources) -> HeteroInferenceSpec:
        """Returns the spec with default resources, with the chosen mode and with only its roles."""
        complete = defaults.complete_roles(self.spec)
        return complete if self.chosen is None else self.chosen.apply_to(complete)

    @property
    def has_mode(self) -> bool:
        """Whether the mode is known."""
        return self.chosen is not None or self.spec.parallelism.mode is not None

    def with_mode(self, chosen: ChosenMode | None) -> "Revision":
        """Returns the revision with a mode, if it has none yet."""
        return self if self.has_mode else replace(self, chosen=chosen)

    @property
    def record(self) -> RevisionRecord:
        """The record that the operator stores."""
        return RevisionRecord(name=self.name, spec=self.spec, commit=self.commit, chosen=self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The revision that the resource asks for now.

    Attributes:
        name: name of the revision, or None if the spec cannot be read.
        source: location of the model, or None if the installation does not allow it.
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
    """Determines the revision of the resource's current spec.

    An older version may have accepted a spec that this version refuses. The revision of such a spec gets a
    name too, so that the operator recognizes groups that run with it.
    """
    raw, spec_error = observation.resource.spec, None
    try:
        spec = parse_spec(raw)
    except SpecError as error:
        spec_error = error
        try:
            spec = parse_stored_spec(raw)  # accepts the specs of older versions
        except SpecError:
            return Target(refusal=spec_error)
    name = _choose_name(spec, recorded, _revisions_in_use(observation.pods, status))
    source = None
    refusal: HeteroInferError | None = spec_error or options.allowed.find_forbidden(spec)
    try:
        source = options.addressing.find_model_source(spec, owner)
    except PlanError as error:
        refusal = refusal or error  # the first error is reported
    return Target(name=name, spec=spec, source=source, refusal=refusal)


def _choose_name(
    spec: HeteroInferenceSpec, recorded: Collection[RevisionRecord], in_use: Collection[str]
) -> str:
    """Returns the name for the revision of a spec.

    If a stored revision creates the same pods, the result is the name of that revision. So a change without
    an effect on pods starts no rollout. Otherwise the name is a hash of the spec.

    Args:
        in_use: names of revisions that pods or the status of groups have.
    """
    fields = identity.pod_fields_of_spec(spec)
    with_same_pods = {
        record.name for record in recorded if identity.pod_fields_of_spec(record.spec) == fields
    }
    # A revision in use comes first, because its pods can stay. `sorted`, so that each reconcile chooses the
    # same revision.
    reusable = sorted(with_same_pods & set(in_use)) or sorted(with_same_pods)
    if reusable:
        return reusable[0]
    names_of_others = {record.name for record in recorded} - with_same_pods  # revisions with other pods
    name_in_0_1_0, name = identity.first_revision(spec), identity.revision(spec)
    # Groups from before an upgrade keep their name, so that the upgrade starts no rollout.
    if name_in_0_1_0 in in_use and name_in_0_1_0 not in names_of_others:
        return name_in_0_1_0
    # The hash has 40 bits, so a user can construct a spec with the hash of another revision. With the same
    # name, even a refused spec would replace that revision. So such a spec gets a longer hash as its name.
    return identity.longer_revision(spec) if name in names_of_others else name


def _revisions_in_use(pods: Collection[PodView], status: HeteroInferenceStatus) -> set[str]:
    """Returns the names of the revisions that pods or group statuses name."""
    labels = {pod.labels.get(names.LABEL_REVISION) for pod in pods}
    return {name for name in (*labels, *(group.revision for group in status.groups)) if name}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRecords:
    """The stored revisions that the operator trusts.

    Attributes:
        records: trusted records.
        unsigned: names of the trusted records without a valid code.
        forged: names of ignored ConfigMaps, which another user wrote or damaged.
        any_signed: whether a record has a valid code.
    """

    records: tuple[RevisionRecord, ...] = ()
    unsigned: frozenset[str] = frozenset()
    forged: tuple[str, ...] = ()
    any_signed: bool = False

    def signed_by(
        self, signer: Signer, status: HeteroInferenceStatus, revisions: Collection[str]
    ) -> str | None:
        """Returns the fingerprint of the key that signed all records, for the next status.

        Until all records are signed, returns the fingerprint of the last status, or None.

        Once the status has the fingerprint, the operator ignores records without a valid code. So the
        fingerprint must not be in the status before all stored records have their codes: if the operator died
        before it signed a record, the next process would ignore this record.

        Args:
            revisions: revisions from which pods can be created; the operator signs their records.
        """
        all_signed = self.any_signed and not self.unsigned & set(revisions)
        return signer.fingerprint if all_signed else status.records_signed_by


def read_records(
    observation: ResourceObservation, status: HeteroInferenceStatus, signer: Signer, allowed: Allowed
) -> KeptRecords:
    """Reads the stored revisions that the operator trusts.

    A record with a valid code is trusted, because only the operator can create the code. Version 0.1.0 wrote
    no codes, and an operator with another key wrote other codes. So until all records in use have a valid
    code, the operator also trusts some records without a valid code: the name of the record must be the hash
    of its spec, and the operator must accept this spec today. An operator without a key always trusts such
    records.
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
        record = read_revision_record(signer.owner, stored)
        if signer.is_signed_by_us(stored):
            any_signed = True
            if record is not None:
                records.append(record)
            continue
        may_lack_code = not all_signed and record is not None and _is_named_by_content(record)
        if record is not None and may_lack_code:
            if _is_accepted(record, allowed):
                records.append(record)
                unsigned.add(record.name)
            # Otherwise ignore the record: its spec is forbidden now, but the record is not forged.
        elif signer.key is not None:
            forged.append(name)
    return KeptRecords(
        records=tuple(records), unsigned=frozenset(unsigned), forged=tuple(forged), any_signed=any_signed
    )


def _is_named_by_content(record: RevisionRecord) -> bool:
    """Reports whether the name of a record is a hash of its spec. An edit of the spec changes the hash."""
    hash_functions = (identity.revision, identity.first_revision, identity.longer_revision)
    return record.name in {hash_name(record.spec) for hash_name in hash_functions}


def _is_accepted(record: RevisionRecord, allowed: Allowed) -> bool:
    """Reports whether the operator would accept the record's spec if its user wrote it today."""
    try:
        spec = parse_spec(record.spec.dump())
    except SpecError:
        return False
    return allowed.find_forbidden(spec) is None


def find_revisions(
    recorded: Collection[RevisionRecord], target: Target, commit: str | None, owner: Owner, options: Options
) -> Mapping[str, Revision]:
    """Finds the revisions from which pods can be created, by name.

    These are the revision of the current spec and all stored revisions. If the current spec's revision is
    stored too, its spec and source come from the resource. Its record adds the mode and the commit if these
    are unknown.
    """
    revisions: dict[str, Revision] = {}
    if target.name is not None and target.spec is not None and target.source is not None:
        revisions[target.name] = Revision(
            name=target.name, spec=target.spec, source=target.source.at_commit(commit), commit=commit
        )
    for record in recorded:
        try:
            source = options.addressing.find_model_source(record.spec, owner)
        except PlanError:
            continue  # the installation no longer allows this model
        stored = Revision(
            name=record.name,
            spec=record.spec,
            source=source.at_commit(record.commit),
            commit=record.commit,
            chosen=record.chosen,
        )
        revision = revisions.get(record.name, stored).with_mode(record.chosen)
        if revision.commit is None:
            source_at_commit = revision.source.at_commit(record.commit)
            revision = replace(revision, source=source_at_commit, commit=record.commit)
        revisions[record.name] = revision
    return revisions


def with_modes_of_plans(
    revisions: Mapping[str, Revision],
    pods: Iterable[PodView],
    plans: Mapping[str, Plan],
    defaults: PodResources,
) -> Mapping[str, Revision]:
    """Adds the modes of revisions whose record is lost, from the plans of their pods.

    The plan in the status may belong to another revision: between epochs the status has the next revision and
    the last plan.
    """
    with_modes = dict(revisions)
    for pod in pods:
        revision = with_modes.get(pod.labels.get(names.LABEL_REVISION, ""))
        plan = plans.get(pod.labels.get(names.LABEL_PLAN, ""))
        if revision is None or plan is None or revision.has_mode:
            continue
        roles = {rank.role for rank in plan.ranks}
        chosen = infer_mode(defaults.complete_roles(revision.spec), sorted(roles), plan.mode)
        with_modes[revision.name] = revision.with_mode(chosen)
    return with_modes
