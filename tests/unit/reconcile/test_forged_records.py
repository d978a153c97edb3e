"""A user with write access to ConfigMaps does not control the next pods: records are signed or checked."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.group_key import KEY_BYTES, RecordKey
from heteroinfer_contract.plan import plan_text_hash
from heteroinfer_operator.api import parse_spec, parse_status
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.manifests.identity import Owner, longer_revision, revision
from heteroinfer_operator.manifests.revision_record import RevisionRecord
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.reconcile import Allowed
from heteroinfer_operator.reconcile.revisions import find_target
from tests.unit.reconcile.world import OPTIONS, World, cpu_pair

EVENT = "RecordNotSigned"
OTHER_KEY = b"o" * KEY_BYTES
ALL = Allowed(remote_code=True, arguments=None, annotations=None)
REFUSED = {"engine": {"args": ["--nope"]}}
OWNER = Owner(key=ResourceKey(namespace="default", name="demo"), uid="uid-demo")
EVIL_ENGINE: dict[str, Any] = {
    "image": "evil/image:1",
    "args": ["--trust-remote-code", "--middleware", "evil.mw"],
    "env": [
        {"name": "LD_PRELOAD", "value": "/tmp/evil.so"},
        {"name": "AWS", "valueFrom": {"secretKeyRef": {"name": "prod-db", "key": "password"}}},
    ],
}

ALLOWED_EVIL = {
    "image": "evil/image:1",
    "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "prod-db", "key": "password"}}}],
}
"""A spec that every rule and list allows, but that only the resource's own user may choose."""

Stored = dict[str, Any]


def served(**fields: Any) -> World:
    world = World(spec=cpu_pair(), **fields)
    world.serve()
    return world


def config_map(world: World, part: str) -> tuple[str, str]:
    (found,) = [key for key in world.objects if key[0] == "ConfigMap" and f"-{part}-" in key[1]]
    return found


def code(stored: Stored) -> str | None:
    return (stored["metadata"].get("annotations") or {}).get(names.ANNOTATION_CODE)


def with_code(stored: Stored, made: str | None) -> Stored:
    annotations = {} if made is None else {names.ANNOTATION_CODE: made}
    return {**stored, "metadata": {**stored["metadata"], "annotations": annotations}}


def evil(stored: Stored, engine: dict[str, Any] = EVIL_ENGINE) -> Stored:
    """Changes a record or plan to request another image, Secrets, annotations and arguments."""
    ((key, text),) = stored["data"].items()
    kept = json.loads(text)
    if key == names.PLAN_KEY:
        kept["engine"]["extra_args"] = EVIL_ENGINE["args"]
    else:
        kept["spec"]["engine"] = {**kept["spec"].get("engine", {}), **engine}
        for role in kept["spec"]["roles"] if engine is EVIL_ENGINE else ():
            role["template"] = {"annotations": {"vault.hashicorp.com/agent-inject": "true"}}
    return {**stored, "data": {key: json.dumps(kept, sort_keys=True, separators=(",", ":"))}}


def by_another_key(stored: Stored) -> Stored:
    return Signer.for_owner(OTHER_KEY, OWNER).sign(stored)


def for_another_resource(stored: Stored) -> Stored:
    """Copies a record that this operator signed for a resource of the attacker."""
    return Signer.for_owner(OPTIONS.operator_key, replace(OWNER, uid="uid-of-the-attacker")).sign(stored)


def under_another_name(stored: Stored) -> Stored:
    """Copies a signed record of this resource under another name."""
    metadata = {**stored["metadata"], "name": "demo-revision-0123456789"}
    signed = Signer.for_owner(OPTIONS.operator_key, OWNER).sign({**stored, "metadata": metadata})
    return with_code(stored, code(signed))


CODES: dict[str, Callable[[Stored], Stored]] = {
    "the old code": lambda stored: stored,
    "no code": lambda stored: with_code(stored, None),
    "a wrong code": lambda stored: with_code(stored, "0" * 64),
    "no hex": lambda stored: with_code(stored, "\ud800é"),
    "of another key": by_another_key,
    "of another resource": for_another_resource,
    "of another name": under_another_name,
}


def lose_a_pod(world: World) -> None:
    world.end_pod(world.workers()[0])
    world.step()
    world.reap()
    world.advance_time(60)
    world.settle()


def pods_with_nothing_evil(world: World) -> bool:
    text = json.dumps([world.manifests[name] for name in world.workers()])
    return not any(word in text for word in ("evil", "prod-db", "vault.hashicorp.com"))


def test_the_forged_spec_of_these_tests_passes_all_rules_for_specs() -> None:
    spec = parse_spec(cpu_pair(engine=ALLOWED_EVIL))
    assert OPTIONS.allowed.find_forbidden(spec) is None


@pytest.mark.parametrize("part", ["revision", "plan"])
@pytest.mark.parametrize("signed", CODES.values(), ids=CODES)
@pytest.mark.parametrize("spec", [{}, REFUSED], ids=["spec accepted", "spec refused"])
def test_a_forged_object_has_no_effect(
    part: str, signed: Callable[[Stored], Stored], spec: dict[str, Any]
) -> None:
    world = served()
    key = config_map(world, part)
    own, pods = world.objects[key], world.workers()
    world.change_spec(**spec)
    world.settle()
    world.objects[key] = signed(evil(own))
    world.settle()
    assert world.workers() == pods
    assert not any(pod.deleting for pod in world.pods.values())
    assert world.condition("Available")[0] == "True"
    assert world.events.count(EVENT) == 1
    if not spec and part == "revision":
        assert world.objects[key]["data"] == own["data"], "the current revision's record is restored"
        assert code(world.objects[key]) == code(own)
    else:
        assert "evil" not in json.dumps(world.objects.get(key, {}))
    for _ in range(3):
        world.step()
    assert world.events.count(EVENT) == 1, "it is reported once"
    lose_a_pod(world)
    assert pods_with_nothing_evil(world)
    if not spec:
        assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]


def test_a_repeatedly_forged_record_is_deleted_with_backoff() -> None:
    world = served()
    world.calm = False  # each forgery causes an event
    key = config_map(world, "revision")
    forged = with_code(evil(world.objects[key]), None)
    pods = world.workers()
    world.change_spec(**REFUSED)
    world.meddler = lambda objects: objects.__setitem__(key, forged)
    looks = world.live(600)
    assert looks < 150
    assert world.events.count(EVENT) < 50
    assert world.workers() == pods


def test_a_group_of_an_unknown_revision_keeps_its_children() -> None:
    world = served()
    service = world.objects["Service", "demo-0-ranks"]
    for name, labels in {
        "own": {},
        "epoch": {names.LABEL_EPOCH: "1"},
        "other": {names.LABEL_GROUP: "7"},
    }.items():
        metadata = {**service["metadata"], "name": name}
        metadata["labels"] = {**metadata["labels"], **labels}
        world.objects["Service", name] = {**service, "metadata": metadata}
    world.change_spec(**REFUSED)
    del world.objects[config_map(world, "revision")]
    world.step()
    services = {name for kind, name in world.objects if kind == "Service"}
    assert services >= {"demo-0-ranks", "own"}
    assert services.isdisjoint({"epoch", "other"})


def forget_codes(world: World) -> None:
    """Stores records and plans without codes, as version 0.1.0 did."""
    for key in list(world.objects):
        if key[0] == "ConfigMap":
            world.objects[key] = with_code(world.objects[key], None)
    world.status = {name: value for name, value in world.status.items() if name != "recordsSignedBy"}


def replace_the_key(world: World) -> None:
    world.options = replace(world.options, operator_key=OTHER_KEY)


def lose_the_key(world: World) -> None:
    world.options = replace(world.options, operator_key=None)


BEFORE = {"0.1.0": forget_codes, "another key": replace_the_key, "no key": lose_the_key}


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_records_without_a_valid_code_are_used_and_signed(before: Callable[[World], None]) -> None:
    world = served()
    pods = world.workers()
    before(world)
    world.change_spec(**REFUSED)
    world.settle()
    assert world.workers() == pods
    assert not any(pod.deleting for pod in world.pods.values())
    assert EVENT not in world.events
    key = world.options.operator_key
    if key is not None:
        signer = Signer.for_owner(key, OWNER)
        kept = [stored for (kind, _), stored in world.objects.items() if kind == "ConfigMap"]
        assert len(kept) == 2
        assert all(signer.is_signed_by_us(stored) for stored in kept)
        assert parse_status(world.status).records_signed_by == RecordKey.of_operator(key).fingerprint
    lose_a_pod(world)
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"], "it restarts with its own revision"


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("engine", [EVIL_ENGINE, ALLOWED_EVIL], ids=["refused", "allowed"])
def test_a_record_with_forged_content_is_ignored(
    before: Callable[[World], None], engine: dict[str, Any]
) -> None:
    world = served()
    before(world)
    key = config_map(world, "revision")
    world.objects[key] = with_code(evil(world.objects[key], engine), None)
    world.change_spec(**REFUSED)
    world.settle()
    assert world.condition("Available")[0] == "True"
    lose_a_pod(world)
    assert world.workers() == []


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_an_unsigned_record_must_pass_the_current_rules(
    before: Callable[[World], None],
) -> None:
    """The rules do not apply to a signed record: its spec was allowed once, and its group continues."""
    spec = cpu_pair(engine={"args": ["--trust-remote-code"]})
    for unsigned in (False, True):
        world = World(spec=spec, options=replace(OPTIONS, allowed=ALL))
        world.serve()
        world.options = replace(world.options, allowed=Allowed())
        if unsigned:
            before(world)
        pods = world.workers()
        world.change_spec(**REFUSED)
        world.settle()
        assert world.workers() == pods
        assert world.condition("Available")[0] == "True"
        lose_a_pod(world)
        assert bool(world.workers()) is not unsigned


def test_an_unsigned_record_is_ignored_once_all_records_are_signed() -> None:
    """A 40-bit hash can be forged, so the name of a record proves nothing about its content."""
    world = served()
    key = config_map(world, "revision")
    world.change_spec(**REFUSED)
    world.settle()
    world.objects[key] = with_code(world.objects[key], None)
    world.settle()
    assert world.events.count(EVENT) == 1
    assert key not in world.objects
    assert world.condition("Available")[0] == "True"


def test_the_status_states_that_records_are_signed_only_after_the_api_server_accepted_it() -> None:
    world = served()
    forget_codes(world)
    world.refuses = {("ConfigMap", "*"): "the API server is away"}
    world.change_spec(**REFUSED)
    for _ in range(5):
        world.step()
    assert "recordsSignedBy" not in world.status
    world.refuses = {}
    world.advance_time(60)
    world.settle()
    assert "recordsSignedBy" in world.status
    lose_a_pod(world)
    assert world.workers() == ["demo-0-2-0", "demo-0-2-1"]


def test_an_older_signed_record_of_the_same_resource_is_used() -> None:
    """The resource's user chose the older record once, so nobody gains a permission."""
    world = served()
    key = config_map(world, "revision")
    old = world.objects[key]
    world.change_spec(engine={"maxModelLen": 512})
    for _ in range(4):
        world.settle()
        world.reap()
        world.all_ready()
    assert key not in world.objects, "it is no longer needed"
    world.objects[key] = old
    world.step()
    assert EVENT not in world.events


@pytest.mark.parametrize("args", [["--middleware", "evil.mw"], ["--trust-remote-code"]])
def test_an_unsigned_plan_may_not_add_arguments(args: list[str]) -> None:
    """A user with access to pod labels and ConfigMaps assigns a group to a forged plan."""
    world = served()
    own = world.objects[config_map(world, "plan")]
    kept = json.loads(own["data"][names.PLAN_KEY])
    kept["engine"]["extra_args"] = args
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    name = f"demo-plan-{plan_text_hash(text)}"
    forged = {**own, "metadata": {**own["metadata"], "name": name}, "data": {names.PLAN_KEY: text}}
    world.objects["ConfigMap", name] = with_code(forged, None)
    for pod in world.workers():
        world.relabel(pod, plan=plan_text_hash(text))
    world.change_spec(**REFUSED)
    world.step()
    lose_a_pod(world)
    texts = [json.dumps(world.manifests[name]) for name in world.workers()]
    assert not any(plan_text_hash(text) in made for made in texts)


def test_pods_carry_the_hash_of_their_plan() -> None:
    world = served()
    plan_hash = config_map(world, "plan")[1].removeprefix("demo-plan-")
    for name in world.workers():
        env = world.manifests[name]["spec"]["containers"][0]["env"]
        assert {"name": names.ENV_PLAN_HASH, "value": plan_hash} in env


def test_a_refused_spec_does_not_take_the_name_of_a_groups_revision() -> None:
    """A user constructed a spec with the hash of another spec."""
    spec = parse_spec(cpu_pair(engine={"args": ["--nope"]}))
    other = RevisionRecord(name=revision(spec), spec=parse_spec(cpu_pair()))
    world = World(spec=cpu_pair(engine={"args": ["--nope"]}))
    target = find_target(world.observe(), parse_status({}), OWNER, OPTIONS, [other])
    assert target.refusal is not None
    assert target.name == longer_revision(spec)


@pytest.mark.parametrize("commit", ["../../other/model", "", "a b", "x" * 64 + "/.."])
def test_a_damaged_commit_is_never_used_in_a_path(commit: str) -> None:
    world = World(spec=cpu_pair(model={"uri": "hf://org/model", "cache": {"size": "10Gi"}}))
    world.settle()
    world.status = {**world.status, "model": {**world.status["model"], "commit": commit}}
    world.settle()
    assert commit == "" or commit not in json.dumps(world.manifests)
    assert "commit" not in world.status["model"]


TEXTS = st.sampled_from(
    ["", "null", "[]", "{}", '{"spec": null}', '{"spec": {}, "commit": 1}', "\ud800", "[" * 5000]
)


@settings(max_examples=60, deadline=None)
@given(
    part=st.sampled_from(["revision", "plan"]),
    text=TEXTS | st.text(max_size=30) | st.none(),
    signed=st.sampled_from(sorted(CODES)),
    is_refused=st.booleans(),
    is_old=st.booleans(),
)
def test_no_config_map_content_ends_a_serving_group_or_the_reconcile(
    part: str, text: str | None, signed: str, *, is_refused: bool, is_old: bool
) -> None:
    world = served()
    pods = world.workers()
    if is_old:
        forget_codes(world)
    key = config_map(world, part)
    stored = world.objects[key]
    changed = evil(stored)["data"] if text is None else dict.fromkeys(stored["data"], text)
    world.objects[key] = CODES[signed]({**stored, "data": changed})
    world.change_spec(**(REFUSED if is_refused else {}))
    world.settle()
    assert world.workers() == pods
    assert not any(pod.deleting for pod in world.pods.values())
    lose_a_pod(world)
    assert pods_with_nothing_evil(world)
