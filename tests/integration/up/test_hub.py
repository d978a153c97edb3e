"""Tests `heteroinfer up` with a model of a hub: it is fetched once into this machine's cache, or refused."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import model_folder
from tests.hub_server import HubServer, Repository
from tests.integration.up.resources import resource, write
from tests.running_up import RunningUp

MODEL = "acme/small"
RANKS_START = re.compile(r"rank 1 \(cpu, CPU, layers 4-7\): ")
DEADLINE_S = 90.0


@pytest.fixture
def hub(model_dir: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories[MODEL] = Repository.of_folder(model_dir)
        yield server


def up(folder: Path, hub: HubServer, port: str, uri: str = f"hf://{MODEL}") -> RunningUp:
    file = write(folder, resource(folder, model={"uri": uri}))
    arguments: list[str | Path] = ["-f", file, "--port", port, "--model-cache", folder / "cache"]
    return RunningUp(arguments, env={"HF_ENDPOINT": hub.endpoint, "TMPDIR": str(folder)})


def test_a_model_of_a_hub_is_fetched_once_and_planned_from_the_cache(
    tmp_path: Path, hub: HubServer, port: str
) -> None:
    with up(tmp_path, hub, port) as first:
        first.wait_line(re.compile(r"Normal ModelFetched: hf://acme/small"), DEADLINE_S)
        first.wait_line(RANKS_START, DEADLINE_S)
        assert first.stop() == 0
    folder = tmp_path / "cache" / model_folder(MODEL, hub.repositories[MODEL].commit)
    assert read_marker(folder) is not None
    hub.seen.sent_bytes.clear()
    with up(tmp_path, hub, port) as second:
        second.wait_line(RANKS_START, DEADLINE_S)
        assert second.stop() == 0
    assert hub.seen.sent_bytes == {}


def test_a_missing_model_prints_an_error_and_no_traceback(tmp_path: Path, hub: HubServer, port: str) -> None:
    with up(tmp_path, hub, port, "hf://acme/other") as refused:
        assert refused.wait_exit(DEADLINE_S) == 1
        errors = [line for line in refused.lines if line.startswith("error: ")]
    assert "shows no model acme/other. Correct spec.model.uri" in "\n".join(errors)
    assert "Traceback" not in "\n".join(refused.lines)
