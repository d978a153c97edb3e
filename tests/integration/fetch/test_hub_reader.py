"""Tests plans for a hub's model with the standard library alone: without vLLM, hub client and weights."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.local.worker_python import ENV_WORKER_PYTHON
from tests.cluster.folders import REPOSITORY
from tests.hub_server import HubServer, Repository
from tests.unit.contract.test_model_files import CONFIG, TENSORS, write_model
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.headers import read_hub_profile, time_limit
from vllm_heteroinfer.fetch.hub_reader import FIRST_BYTES, REQUEST_TIMEOUT_S, HubReader

MODEL = "acme/tiny"
TOKEN = "hf_secretTokenThatNobodyMaySee"
PADDING = {f"mtp.{number}.padding": [1] for number in range(2_000)} | {"mtp.large": [1 << 20]}
"""Extra files that a plan drops: a header longer than the first read, and weights longer than both."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    return write_model(tmp_path / "made", config={**CONFIG, "head_dim": 32}, tensors={**TENSORS, **PADDING})


@pytest.fixture
def hub(made: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories[MODEL] = Repository.of_folder(made)
        yield server


def read(hub: HubServer, tmp_path: Path, revision: str = "main", **env: str) -> ModelProfile:
    folder = tmp_path / "hollow"
    folder.mkdir()
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path), **env}
    return read_hub_profile(HubReader(MODEL, revision, env), folder)


def refused(hub: HubServer, tmp_path: Path, revision: str = "main", **env: str) -> FetchError:
    with pytest.raises(FetchError) as found:
        read(hub, tmp_path, revision, **env)
    assert TOKEN not in str(found.value)
    return found.value


def test_plan_reads_a_hubs_model_without_vllm(hub: HubServer, tmp_path: Path) -> None:
    assert {name for name in ("vllm", "torch", "huggingface_hub") if importlib.util.find_spec(name)} == set()
    role: dict[str, Any] = {
        "name": "cpu",
        "device": "CPU",
        "pods": 1,
        "resources": {"limits": {"memory": "4Gi"}},
    }
    resource = {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "tiny"},
        "spec": {"model": {"uri": f"hf://{MODEL}"}, "roles": [role]},
    }
    file = tmp_path / "resource.json"
    file.write_text(json.dumps(resource))
    done = run_without_vllm(hub, tmp_path, "plan", "-f", str(file), "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["ranks"]


def run_without_vllm(hub: HubServer, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line without a worker's Python."""
    command = [sys.executable, "-m", "heteroinfer_operator.cli", *arguments]
    env = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "HOME": str(tmp_path),
        "HF_ENDPOINT": hub.endpoint,
        "NO_PROXY": "*",
        ENV_WORKER_PYTHON: "/nowhere/python",
    }
    return subprocess.run(
        command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_new_writes_a_resource_for_a_hubs_model_without_vllm(hub: HubServer, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    options = ("--cpus", "2", "--cpu-memory", "4Gi", "--revision", "main", "-o", str(file))
    done = run_without_vllm(hub, tmp_path, "new", f"hf://{MODEL}", *options)
    assert done.returncode == 0, done.stderr
    manifest = yaml.safe_load(file.read_text())
    assert manifest["spec"]["model"] == {
        "uri": f"hf://{MODEL}",
        "revision": "main",
        "cache": {"size": "2Gi", "accessMode": "ReadWriteOnce"},
    }
    done = run_without_vllm(hub, tmp_path, "plan", "-f", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny fits: 1 pod (1 CPU), mode Pipeline\n")
    assert f"# {done.stdout.splitlines()[1]}\n" in file.read_text()
    refused = run_without_vllm(hub, tmp_path, "new", "hf://acme/none", "--cpus", "2", "--cpu-memory", "4Gi")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: model.uri: hf://acme/none: ")


def test_the_profile_equals_the_profile_of_the_files(hub: HubServer, made: Path, tmp_path: Path) -> None:
    assert read(hub, tmp_path) == read_profile(made)
    (weights,) = made.glob("*.safetensors")
    header = int.from_bytes(weights.read_bytes()[:8], "little") + 8
    assert header > FIRST_BYTES
    assert hub.seen.sent_bytes[weights.name] == FIRST_BYTES + header < weights.stat().st_size


def test_reads_a_commit_by_its_hash(hub: HubServer, made: Path, tmp_path: Path) -> None:
    assert read(hub, tmp_path, hub.repositories[MODEL].commit) == read_profile(made)


def test_a_server_without_ranges_sends_only_the_front_of_each_file(made: Path, tmp_path: Path) -> None:
    """The mirror is a plain web server."""
    root, commit = tmp_path / "mirror", "0" * 40
    listing = root / "api/models" / MODEL / "revision/main"
    listing.parent.mkdir(parents=True)
    siblings = [{"rfilename": path.name, "size": path.stat().st_size} for path in made.iterdir()]
    listing.write_text(json.dumps({"sha": commit, "siblings": siblings}))
    (root / MODEL / "resolve").mkdir(parents=True)
    (root / MODEL / "resolve" / commit).symlink_to(made)
    handler = functools.partial(PlainFiles, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            (folder := tmp_path / "hollow").mkdir()
            profile = read_hub_profile(HubReader(MODEL, "main", {"HF_ENDPOINT": endpoint}), folder)
        finally:
            server.shutdown()
            thread.join(10)
    assert profile == read_profile(made)


class PlainFiles(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Logs nothing, so that requests do not fill the tests' output."""


@pytest.mark.parametrize("where", ["environment", "file"])
def test_the_token_gives_access_to_a_private_model_and_is_sent_only_to_the_hub(
    hub: HubServer, made: Path, tmp_path: Path, where: str
) -> None:
    hub.repositories[MODEL].token = TOKEN
    (tmp_path / "token").write_text(f"{TOKEN}\n" if where == "file" else "")
    env = {"HF_TOKEN": TOKEN} if where == "environment" else {}
    assert read(hub, tmp_path, **env) == read_profile(made)
    assert hub.seen.tokens_elsewhere == []
    assert hub.seen.sent_bytes.total() > 0


def test_a_private_model_without_a_token_is_refused_with_the_remedy(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories[MODEL].token = TOKEN
    error = refused(hub, tmp_path)
    assert error.reason is FailureReason.MODEL_NOT_FOUND
    assert f"shows no model {MODEL}. Correct spec.model.uri" in str(error)
    assert "set HF_TOKEN to a token" in str(error)


def test_an_unknown_token_is_refused_as_denied_access(hub: HubServer, tmp_path: Path) -> None:
    error = refused(hub, tmp_path, HF_TOKEN=TOKEN)
    assert error.reason is FailureReason.MODEL_ACCESS_DENIED
    assert "answers 401" in str(error)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_an_unaccepted_licence_is_reported_with_its_page(hub: HubServer, tmp_path: Path, token: str) -> None:
    repository = hub.repositories[MODEL]
    repository.gated, repository.token = True, TOKEN
    error = refused(hub, tmp_path, HF_TOKEN=token)
    assert error.reason is FailureReason.MODEL_ACCESS_DENIED
    assert f"Accept its licence at {hub.endpoint}/{MODEL}" in str(error)
    assert ("set HF_TOKEN to a token" in str(error)) == (not token)


def test_reports_a_missing_revision(hub: HubServer, tmp_path: Path) -> None:
    error = refused(hub, tmp_path, "v9")
    assert error.reason is FailureReason.MODEL_NOT_FOUND
    assert "has no revision v9" in str(error)


def test_a_request_to_a_busy_hub_is_repeated_and_reported(hub: HubServer, tmp_path: Path) -> None:
    hub.refuse_with = 503
    error = refused(hub, tmp_path)
    assert (error.reason, error.is_temporary) == (FailureReason.MODEL_HUB_UNREACHABLE, True)
    assert "answers 503" in str(error)
    assert len(hub.seen.requests) == 3


def test_a_broken_connection_leaves_no_partial_file(hub: HubServer, tmp_path: Path) -> None:
    hub.break_after_bytes = 10  # after the piece that it is sending
    error = refused(hub, tmp_path)
    assert error.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert f"sent only {FIRST_BYTES} of " in str(error)


def test_reports_a_hub_that_does_not_answer(hub: HubServer, tmp_path: Path) -> None:
    hub.close()
    error = refused(hub, tmp_path)
    assert error.reason is FailureReason.MODEL_HUB_UNREACHABLE
    assert f"{hub.endpoint} does not answer" in str(error)


def test_a_redirect_to_another_scheme_is_not_followed(hub: HubServer, tmp_path: Path) -> None:
    hub.content_endpoint = f"ftp://127.0.0.1:{hub.port}"
    assert "redirect to ftp:// refused: a redirect must lead to http or https" in str(refused(hub, tmp_path))


def test_offline_mode_refuses_hubs(hub: HubServer, tmp_path: Path) -> None:
    assert "HF_HUB_OFFLINE forbids requests to" in str(refused(hub, tmp_path, HF_HUB_OFFLINE="1"))
    assert hub.seen.requests == []


def test_the_reader_gives_up_a_hub_that_pauses_every_request(hub: HubServer, tmp_path: Path) -> None:
    hub.pause_after_bytes = 100
    began = time.monotonic()
    with time_limit(0.5):
        error = refused(hub, tmp_path)
    assert "has not sent config.json and the headers of the weight files within 0.5 s" in str(error)
    assert time.monotonic() - began < REQUEST_TIMEOUT_S
