"""Tests the fetch of a model from a hub: the real client, a real HTTP server, real files, killed fetches."""

import dataclasses
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_key import KEY_BYTES, CleanupKey
from heteroinfer_contract.model.weights import INDEX_FILE
from heteroinfer_contract.model_cache import damaged_files, read_marker
from heteroinfer_contract.model_fetch import (
    LOCK_FILE,
    MARKER_FILE,
    CompleteModel,
    model_folder,
)
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceObservation, ResourceView
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.model_pods import model_pod_name
from heteroinfer_operator.reconcile.cache_use import find_cleanup, find_token
from tests.cluster.folders import REPOSITORY
from tests.cluster.pki import Pki
from tests.hub_server import SIGNATURE, HubServer, Repository
from tests.integration.fetch.fetching import MODEL, Fetch, fetching
from tests.integration.launch.groups import addresses, pipeline_plan
from tests.unit.contract.test_model_files import CONFIG, TENSORS, write_safetensors
from vllm_heteroinfer.launch.cli import supervise
from vllm_heteroinfer.launch.pod_processes import Commands

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
USELESS = {
    "pytorch_model.bin": b"\0" * 50_000,
    "pytorch_model.bin.index.json": b"{}",
    "original/consolidated.00.pth": b"\0" * 50_000,
    "tiny-q4.gguf": b"\0" * 50_000,
    "consolidated.safetensors": b"\0" * 50_000,
    "README.md": b"a model",
}
RUNNABLE = {**CONFIG, "head_dim": 32}
"""With a number of attention heads for which CPUs have a kernel."""
TOKEN = "hf_secretTokenThatNobodyMaySee"
SLOW_BYTES_PER_S = 900_000.0
CHUNK_BYTES = 10 * 2**20
"""Bytes that the client collects before it writes them: here a tenth of the client's default."""
SHARD_BYTES = 6 * CHUNK_BYTES
PAUSE_BYTES = 3 * CHUNK_BYTES + 100_000
"""Bytes after which the hub stops sending. All but the last piece are on the disk then."""

OPERATOR_KEY = b"k" * KEY_BYTES


def model_files(folder: Path) -> dict[str, bytes]:
    """Returns a model in two shards, one of them large, and the other files of a hub's repository."""
    folder.mkdir()
    tensors_by_name = sorted(TENSORS)
    halves = {SHARDS[0]: tensors_by_name[:3], SHARDS[1]: tensors_by_name[3:]}
    for shard, tensors in halves.items():
        write_safetensors(folder / shard, {name: TENSORS[name] for name in tensors})
    # Padding as an unused tensor, so that a kill hits the middle of the file.
    shapes = {name: TENSORS[name] for name in halves[SHARDS[1]]}
    write_safetensors(folder / SHARDS[1], {**shapes, "padding": [SHARD_BYTES // 2]})
    weight_map = {name: shard for shard, tensors in halves.items() for name in tensors}
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return files | {
        "config.json": json.dumps(RUNNABLE).encode(),
        "tokenizer.json": b'{"model": 1}',
        "chat_template.jinja": b"{{ messages }}",
        INDEX_FILE: json.dumps({"weight_map": weight_map}).encode(),
        **USELESS,
    }


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories[MODEL] = Repository(files=model_files(tmp_path / "made"))
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def folder_of(hub: HubServer, cache: Path) -> Path:
    return cache / model_folder(MODEL, hub.repositories[MODEL].commit)


def check_folder(hub: HubServer, cache: Path) -> None:
    """Checks that the folder has only the files that serving needs, complete and readable for everybody."""
    folder, repository = folder_of(hub, cache), hub.repositories[MODEL]
    marker = read_marker(folder)
    assert marker is not None
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {path for path in repository.files if path not in USELESS} | {MARKER_FILE, LOCK_FILE}
    for file in marker.files:
        path = folder / file.path
        assert path.read_bytes() == repository.files[file.path]
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert stat.S_IMODE(folder.stat().st_mode) == 0o775
    # A later fetch by another user of the group changes this file when it confirms the commit.
    for name in (MARKER_FILE, LOCK_FILE):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o664
    assert damaged_files(folder, marker) == []


def test_a_file_above_the_limit_of_content_networks_is_fetched_in_parts(
    hub: HubServer, cache: Path, tmp_path: Path
) -> None:
    limit_bytes = SHARD_BYTES // 2
    preset = tmp_path / "preset"
    preset.mkdir()
    # The client's own limit, which it reads at each request.
    (preset / "sitecustomize.py").write_text(
        f"from huggingface_hub import constants\nconstants.MAX_HTTP_DOWNLOAD_SIZE = {limit_bytes}\n"
    )
    env = {"PYTHONPATH": f"{preset}:{os.environ.get('PYTHONPATH', '')}"}
    hub.pause_after_bytes = limit_bytes // 2 - 1_000_000
    with fetching(hub, cache, **env) as fetch:
        begun = fetch.wait_for(lambda progress: progress.done_bytes > limit_bytes // 4)
        fetch.kill()
    hub.pause_after_bytes = None
    with fetching(hub, cache, **env) as fetch:
        fetch.model()
    check_folder(hub, cache)
    assert begun.done_bytes < hub.seen.sent_bytes[SHARDS[1]] < SHARD_BYTES * 1.2, (
        "the received bytes are kept"
    )
    large = hub.repositories[MODEL].files[SHARDS[1]]
    asked = [request for request in hub.seen.requests if sha256(large).hexdigest() in request]
    assert len(asked) >= 5, "one broken request, and four parts"

    hub.refuse_ranges = True
    shutil.rmtree(cache)
    with fetching(hub, cache, **env) as fetch:
        failure = fetch.failure()
    assert f"hf download {MODEL} --local-dir DIR" in failure.message
    assert "pvc://CLAIM/PATH" in failure.message


def test_only_files_that_serving_needs_are_fetched(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache) as fetch:
        model = fetch.model()
    check_folder(hub, cache)
    assert model.commit == hub.repositories[MODEL].commit
    assert model.profile == read_profile(folder_of(hub, cache))
    assert set(hub.seen.sent_bytes) & set(USELESS) == set()
    assert model.size_bytes == sum(hub.seen.sent_bytes.values())


def test_a_model_in_the_cache_is_not_fetched_again(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache) as fetch:
        commit = fetch.model().commit
    hub.seen.sent_bytes.clear()
    with fetching(hub, cache) as fetch:
        fetch.model()
    assert hub.seen.sent_bytes == {}
    hub.seen.requests.clear()
    with fetching(hub, cache, "--revision", commit) as fetch:  # a commit needs no hub at all
        fetch.model()
    assert hub.seen.requests == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_interrupted_download_continues_where_it_stopped(hub: HubServer, cache: Path, how: int) -> None:
    hub.pause_after_bytes = PAUSE_BYTES
    with fetching(hub, cache) as fetch:
        # The small shard has its final name then. The process loses downloads that are still in memory.
        small = folder_of(hub, cache) / SHARDS[0]
        seen = fetch.wait_for(lambda progress: progress.done_bytes > 3 * CHUNK_BYTES and small.exists())
        assert seen.total_bytes > SHARD_BYTES
        fetch.process.send_signal(how)
        assert fetch.process.wait(10) != 0
        left = fetch.process.returncode
    assert left == (-9 if how == signal.SIGKILL else 143)
    folder = folder_of(hub, cache)
    assert read_marker(folder) is None
    (part,) = [path for path in (folder / ".parts").iterdir() if path.name.startswith(SHARDS[1])]
    kept_bytes = part.stat().st_size
    assert kept_bytes == 3 * CHUNK_BYTES
    hub.pause_after_bytes = None
    hub.seen.sent_bytes.clear()
    with fetching(hub, cache) as fetch:
        fetch.model()
    # Nothing was sent twice: only the rest of the large shard, and no other file.
    assert hub.seen.sent_bytes == {SHARDS[1]: len(hub.repositories[MODEL].files[SHARDS[1]]) - kept_bytes}
    check_folder(hub, cache)


def test_a_download_continues_after_each_broken_connection(hub: HubServer, cache: Path) -> None:
    hub.break_after_bytes = CHUNK_BYTES * 3 // 2  # of each connection
    with fetching(hub, cache) as fetch:
        fetch.model()
    check_folder(hub, cache)
    total = sum(
        len(content) for path, content in hub.repositories[MODEL].files.items() if path not in USELESS
    )
    assert sum(hub.seen.sent_bytes.values()) < total + SHARD_BYTES, "bytes before a break were sent again"


def test_a_busy_hub_is_reported_and_the_download_waits(hub: HubServer, cache: Path) -> None:
    hub.refuse_with = 503
    with fetching(hub, cache) as fetch:
        progress = fetch.wait_for(lambda progress: "trying again" in progress.message)
        assert "503" in progress.message
        assert hub.endpoint in progress.message
        hub.refuse_with = None
        fetch.model()
    check_folder(hub, cache)


def test_a_fetch_fails_after_its_stall_limit(hub: HubServer, cache: Path) -> None:
    hub.refuse_with = 503
    with fetching(hub, cache, "--patience", "1") as fetch:
        failure = fetch.failure()
    assert failure.reason is FailureReason.MODEL_HUB_UNREACHABLE


def test_the_fetch_gives_up_a_hub_that_keeps_a_silent_connection_open(hub: HubServer, cache: Path) -> None:
    """Without this limit, the client would wait for its own time-out and ask again without end."""
    hub.pause_after_bytes = PAUSE_BYTES
    with fetching(hub, cache, "--patience", "3") as fetch:
        failure = fetch.failure()
        assert "got no new byte for" in fetch.output
    assert failure.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert "got no new byte for" in failure.message
    hub.pause_after_bytes = None
    with fetching(hub, cache) as fetch:  # and continues where it stopped
        fetch.model()
    check_folder(hub, cache)


@pytest.mark.parametrize(
    "option", [("--health-port", "99999"), ("--health-port", "0"), ("--patience", "0"), ("--patience", "nan")]
)
def test_refuses_invalid_options_of_a_fetch(hub: HubServer, cache: Path, option: tuple[str, str]) -> None:
    with fetching(hub, cache, *option) as fetch:
        assert fetch.process.wait(60) == 2
    assert f"argument {option[0]}: must be " in fetch.output
    assert f"got {option[1]!r}" in fetch.output


def test_reports_a_hub_without_a_server(tmp_path: Path, cache: Path) -> None:
    with HubServer() as gone:
        pass
    with fetching(gone, cache, "--patience", "1") as fetch:
        failure = fetch.failure()
    assert failure.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert gone.endpoint in failure.message


def test_only_a_truncated_file_is_fetched_again(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache) as fetch:
        fetch.model()
    os.truncate(folder_of(hub, cache) / SHARDS[0], 10)
    hub.seen.sent_bytes.clear()
    with fetching(hub, cache) as fetch:
        fetch.model()
    assert set(hub.seen.sent_bytes) == {SHARDS[0]}
    check_folder(hub, cache)


def test_a_part_damaged_by_a_crash_is_found_by_its_hash(hub: HubServer, cache: Path) -> None:
    hub.pause_after_bytes = PAUSE_BYTES
    with fetching(hub, cache) as fetch:
        fetch.wait_for(lambda progress: progress.done_bytes > 3 * CHUNK_BYTES)
        fetch.kill()
    (part,) = [
        path for path in (folder_of(hub, cache) / ".parts").iterdir() if path.name.startswith(SHARDS[1])
    ]
    with part.open("r+b") as file:  # as a file system that has stored the file's size but not its content
        file.write(b"\xff" * 1000)
    hub.pause_after_bytes = None
    with fetching(hub, cache) as fetch:
        fetch.model()
    check_folder(hub, cache)


def test_a_mirror_that_changes_a_file_is_reported(hub: HubServer, cache: Path) -> None:
    hub.corrupt = {SHARDS[0]}
    with fetching(hub, cache) as fetch:
        failure = fetch.failure()
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert SHARDS[0] in failure.message
    assert read_marker(folder_of(hub, cache)) is None


def test_a_permanently_refused_file_ends_the_fetch_during_other_downloads(
    hub: HubServer, cache: Path
) -> None:
    hub.corrupt = hub.held = {SHARDS[0]}
    hub.pause_after_bytes = PAUSE_BYTES  # the download of the large shard hangs
    with fetching(hub, cache) as fetch:
        fetch.wait_for(lambda progress: progress.done_bytes > 3 * CHUNK_BYTES)
        hub.held = set()
        failure = fetch.failure()  # long before the limit of 600 s
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert SHARDS[0] in failure.message
    hub.corrupt, hub.pause_after_bytes = set(), None
    hub.seen.sent_bytes.clear()
    with fetching(hub, cache) as fetch:  # and continues where it stopped
        fetch.model()
    check_folder(hub, cache)
    assert hub.seen.sent_bytes[SHARDS[1]] < len(hub.repositories[MODEL].files[SHARDS[1]])


def test_two_fetches_of_one_model_download_it_once(hub: HubServer, cache: Path) -> None:
    hub.pause_after_bytes = PAUSE_BYTES
    with fetching(hub, cache) as first:
        first.wait_for(lambda progress: progress.done_bytes > 3 * CHUNK_BYTES)
        with fetching(hub, cache) as second:
            second.wait_for(lambda progress: "another fetch" in progress.message)
            hub.pause_after_bytes = None
            assert first.model() == second.model()
    check_folder(hub, cache)
    total = sum(
        len(content) for path, content in hub.repositories[MODEL].files.items() if path not in USELESS
    )
    assert sum(hub.seen.sent_bytes.values()) < total + CHUNK_BYTES


def created_pod(in_use: str = "") -> PodView:
    """Returns the fetch pod that the operator creates for a resource that uses a commit."""
    key = ResourceKey(namespace="team", name="tiny")
    spec = {
        "model": {"uri": f"hf://{MODEL}", "cache": {"claimName": "shared", "keep": 1}},
        "roles": [{"name": "cpu", "device": "CPU"}],
    }
    resource = ResourceView(
        key=key,
        uid="uid",
        generation=1,
        resource_version="1",
        finalizers=(),
        deleting=False,
        spec=spec,
        status={"model": {"commit": in_use}} if in_use else {},
    )
    observation = ResourceObservation(resource=resource, other_cache_users=())
    now, parsed = datetime.now(UTC), parse_spec(spec)
    cleanup = find_cleanup(parsed, observation, now, CleanupKey.of_operator(OPERATOR_KEY))
    name = model_pod_name(parsed, Owner(key=key, uid="uid"))
    labels = {names.LABEL_COMPONENT: names.COMPONENT_FETCH}
    return PodView(name=name, uid="pod", labels=labels, created=now, started=True, cleanup=cleanup)


def test_a_new_commit_reuses_unchanged_files(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache) as fetch:
        first = fetch.model()
    repository = hub.repositories[MODEL]
    repository.files = {**repository.files, "config.json": json.dumps({**RUNNABLE, "new": 1}).encode()}
    hub.seen.sent_bytes.clear()
    with fetching(hub, cache) as fetch:
        second = fetch.model()
    assert first.commit != second.commit
    assert not set(SHARDS) & set(hub.seen.sent_bytes)
    check_folder(hub, cache)
    marker = cache / model_folder(MODEL, first.commit) / MARKER_FILE
    assert marker.exists()

    def clean(pod: PodView, strangers: Sequence[str] | None = None) -> str:
        assert pod.cleanup is not None
        env = {names.ENV_CACHE_CLEANUP: pod.cleanup.to_json()}
        with fetching(hub, cache, "--revision", second.commit, **env) as fetch:
            if strangers is not None:
                fetch.confirm_removal(pod, OPERATOR_KEY, strangers)
            fetch.model()
            return fetch.output

    clean(created_pod())
    assert marker.exists(), "it was fetched lately"
    hours_ago_s = time.time() - 7200
    os.utime(marker, (hours_ago_s, hours_ago_s))
    clean(created_pod(in_use=first.commit))
    assert marker.exists(), "it is in use"
    # The stranger knows the pod's environment, and has tokens for another question and for another pod.
    pod, earlier_pod = created_pod(), created_pod()
    assert pod.cleanup is not None
    assert pod.name == earlier_pod.name
    key = CleanupKey.of_operator(OPERATOR_KEY)
    replayed = [find_token(key, "uid", pod, 1), find_token(key, "uid", earlier_pod, 0)]
    assert None not in replayed
    guesses = ["0", *(f"HeteroInfer {text}" for text in ("0", pod.cleanup.token_hashes[0], *replayed))]
    output = clean(pod, guesses)
    assert output.count("refused a confirmation without the token of question 0") == 1
    assert not marker.parent.exists()
    check_folder(hub, cache)


def refuse(hub: HubServer, cache: Path, *arguments: str, **env: str) -> Fetch:
    """Runs a fetch that must fail, and checks that its output has no token."""
    with fetching(hub, cache, *arguments, **env) as fetch:
        fetch.failure()
    assert TOKEN not in fetch.output
    assert SIGNATURE not in fetch.output
    return fetch


def test_reports_a_model_that_the_hub_does_not_have(hub: HubServer, cache: Path) -> None:
    hub.repositories["acme/other"] = hub.repositories.pop(MODEL)
    failure = refuse(hub, cache).failure()
    assert failure.reason is FailureReason.MODEL_NOT_FOUND
    assert "spec.model.uri" in failure.message
    assert "tokenSecretRef" in failure.message, "it may be private"


def test_reports_spec_model_uri_for_an_invalid_model_name(hub: HubServer, cache: Path) -> None:
    failure = refuse(hub, cache, "--repository", "acme/ti--ny").failure()
    assert failure.reason is FailureReason.MODEL_NOT_FOUND
    assert "spec.model.uri" in failure.message


def test_reports_spec_model_revision_for_a_missing_revision(hub: HubServer, cache: Path) -> None:
    failure = refuse(hub, cache, "--revision", "v9").failure()
    assert failure.reason is FailureReason.MODEL_NOT_FOUND
    assert "v9" in failure.message
    assert "spec.model.revision" in failure.message


def test_the_token_for_a_private_model_is_sent_only_to_the_hub(hub: HubServer, cache: Path) -> None:
    hub.repositories[MODEL].token = TOKEN
    assert refuse(hub, cache).failure().reason is FailureReason.MODEL_NOT_FOUND
    with fetching(hub, cache, HF_TOKEN=TOKEN) as fetch:
        fetch.model()
    assert hub.seen.tokens_elsewhere == []
    assert TOKEN not in fetch.output


def test_an_unknown_token_names_the_field(hub: HubServer, cache: Path) -> None:
    failure = refuse(hub, cache, HF_TOKEN=TOKEN).failure()
    assert failure.reason is FailureReason.MODEL_ACCESS_DENIED
    assert "tokenSecretRef" in failure.message


@pytest.mark.parametrize("token", ["", TOKEN])
def test_an_unaccepted_licence_is_reported_with_its_page(hub: HubServer, cache: Path, token: str) -> None:
    hub.repositories[MODEL].token = TOKEN
    hub.repositories[MODEL].gated = True
    failure = refuse(hub, cache, HF_TOKEN=token).failure()
    assert failure.reason is FailureReason.MODEL_ACCESS_DENIED
    assert f"Accept its licence at {hub.endpoint}/{MODEL}" in failure.message
    assert ("tokenSecretRef" in failure.message) == (not token)


def test_a_server_that_is_not_a_hub_is_reported(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache, HF_ENDPOINT=f"{hub.endpoint}/elsewhere") as fetch:
        failure = fetch.failure()
    assert "HF_ENDPOINT" in failure.message or "404" in failure.message


class Outside(Repository):
    """A model whose commit names a folder outside the cache."""

    @property
    def commit(self) -> str:
        """Returns a path instead of a commit."""
        return "../../outside"


def test_a_commit_with_a_path_writes_nothing_outside_the_cache(hub: HubServer, cache: Path) -> None:
    hub.repositories[MODEL] = Outside(files=hub.repositories[MODEL].files)
    failure = refuse(hub, cache).failure()
    assert failure.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert "its answer must name a commit" in failure.message
    assert not (cache.parent / "outside").exists()


def test_a_hub_cannot_create_the_marker_of_a_complete_commit(hub: HubServer, cache: Path) -> None:
    """A file with another spelling of the marker's name would create the marker before the weights exist."""
    files = hub.repositories[MODEL].files
    planted = CompleteModel(repository=MODEL, commit="0" * 40, files=()).to_json().encode()
    index = {"weight_map": {"a": SHARDS[0], "b": f"./{MARKER_FILE}"}}
    files |= {INDEX_FILE: json.dumps(index).encode(), MARKER_FILE: planted, f"./{MARKER_FILE}": planted}
    failure = refuse(hub, cache).failure()
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert f"has invalid file names in {INDEX_FILE}: ./{MARKER_FILE};" in failure.message
    assert not (folder_of(hub, cache) / MARKER_FILE).exists()


def test_slow_downloads_count_as_progress(hub: HubServer, cache: Path) -> None:
    hub.bytes_per_s = SLOW_BYTES_PER_S
    with fetching(hub, cache, "--patience", "6") as fetch:
        fetch.wait_for(lambda progress: progress.done_bytes > 8 * SLOW_BYTES_PER_S)


def test_refuses_a_model_without_safetensors(hub: HubServer, cache: Path) -> None:
    files = hub.repositories[MODEL].files
    hub.repositories[MODEL].files = {
        path: content for path, content in files.items() if not re.search(r"safetensors", path)
    }
    failure = refuse(hub, cache).failure()
    assert failure.reason is FailureReason.MODEL_NOT_READABLE
    assert "*.safetensors" in failure.message


def test_an_unwritable_cache_is_reported(hub: HubServer, cache: Path) -> None:
    blocked = cache.parent / "blocked"
    blocked.mkdir()
    (blocked / MODEL.replace("/", "--")).write_text("in the way")
    failure = refuse(hub, blocked).failure()
    assert failure.reason is FailureReason.MODEL_CACHE_NOT_WRITABLE


def test_a_cache_without_space_is_refused_before_it_is_full(hub: HubServer, cache: Path) -> None:
    shard = hub.repositories[MODEL].files[SHARDS[1]]

    class Claimed(bytes):
        """Content whose stated size is larger than any disk."""

        def __len__(self) -> int:
            return 10**17

    hub.repositories[MODEL].files[SHARDS[1]] = Claimed(shard)
    failure = refuse(hub, cache).failure()
    assert failure.reason is FailureReason.MODEL_CACHE_FULL
    assert "spec.model.cache.size" in failure.message


@pytest.fixture
def private_hub(tmp_path: Path) -> Iterator[HubServer]:
    """Runs the hub under TLS with a certificate of an unknown CA: `tmp_path`/pki/ca.crt."""
    pki = Pki(folder=tmp_path / "pki")
    pki.folder.mkdir()
    pki.create_authority("ca", "Company")
    pki.issue("hub", "/CN=hub", server_names=("IP:127.0.0.1", "DNS:localhost"))
    with HubServer(certificate=(pki.path("hub.crt"), pki.path("hub.key"))) as server:
        server.repositories[MODEL] = Repository(files=model_files(tmp_path / "made"))
        yield server


def test_a_hub_with_a_private_authority_needs_its_bundle(
    private_hub: HubServer, cache: Path, tmp_path: Path
) -> None:
    scratch = {"TMPDIR": str(tmp_path)}
    with fetching(private_hub, cache, **scratch) as fetch:
        failure = fetch.failure()
    assert failure.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert "has a certificate of an authority that this process does not trust" in failure.message
    assert "set spec.model.caBundle" in failure.message
    bundle = tmp_path / "bundle"
    bundle.write_text("not yet")
    with fetching(private_hub, cache, HETEROINFER_CA_BUNDLE=str(bundle), **scratch) as fetch:
        failure = fetch.failure()
    assert "model.caBundle: the key must contain certificates" in failure.message
    trusted = str(tmp_path / "pki" / "ca.crt")
    with fetching(private_hub, cache, HETEROINFER_CA_BUNDLE=trusted, **scratch) as fetch:
        fetch.model()
    check_folder(private_hub, cache)


def test_a_pod_without_its_model_reports_this_before_it_starts_a_rank(hub: HubServer, cache: Path) -> None:
    with fetching(hub, cache) as fetch:
        fetch.model()
    folder = folder_of(hub, cache)
    plan = pipeline_plan([1])
    plan = dataclasses.replace(plan, engine=dataclasses.replace(plan.engine, model=str(folder)))
    launch = PodLaunch(group="n/x/0", group_uid="u", epoch=1, pod_index=0, addresses=addresses(1))
    os.truncate(folder / SHARDS[1], 100)
    message = cache.parent / "message"
    env = {
        **launch.to_env(),
        names.ENV_PLAN: plan.to_json(),
        names.ENV_MODEL_FETCHED: "1",
        names.ENV_TERMINATION_MESSAGE_PATH: str(message),
    }
    assert supervise(env, Commands()) == names.EXIT_USAGE
    failure = Failure.from_json(message.read_text())
    assert failure is not None
    assert (failure.reason, failure.pod) == (FailureReason.MODEL_NOT_READABLE, 0)
    assert SHARDS[1] in failure.message
    (folder / MARKER_FILE).unlink()
    assert supervise(env, Commands()) == names.EXIT_USAGE
    assert MARKER_FILE in message.read_text()


def test_a_plan_needs_no_weights(hub: HubServer, tmp_path: Path) -> None:
    resource: dict[str, Any] = {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"hf://{MODEL}"},
            "roles": [
                {"name": "cpu", "device": "CPU", "pods": 1, "resources": {"limits": {"memory": "4Gi"}}}
            ],
        },
    }
    file = tmp_path / "resource.json"
    file.write_text(json.dumps(resource))
    command = [sys.executable, "-m", "heteroinfer_operator.cli", "plan", "-f", str(file), "-o", "json"]
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": hub.endpoint, "NO_PROXY": "*"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["plan"]["ranks"]
    weights = sum(len(hub.repositories[MODEL].files[shard]) for shard in SHARDS)
    assert rank["weight_bytes"] > weights - 10_000
    assert hub.seen.sent_bytes[SHARDS[1]] < 100_000
    resource["spec"]["model"]["uri"] = "hf://acme/other"
    file.write_text(json.dumps(resource))
    done = subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "shows no model acme/other" in done.stderr
