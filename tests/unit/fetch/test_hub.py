"""Checks of data from a hub, before they are used."""

import io
from pathlib import Path

import pytest

from heteroinfer_contract.model_cache import damaged_files
from heteroinfer_contract.model_fetch import CompleteModel, FetchedFile
from vllm_heteroinfer.fetch.hub import BoundedFile
from vllm_heteroinfer.fetch.selection import can_be_a_file, parse_index

FILE = FetchedFile(path="model.safetensors", size_bytes=10, digest=f"sha256:{'0' * 64}")


@pytest.mark.parametrize(
    "path", ["config.json", "sub/a b.safetensors", "..a/b..json", "größe.json", f"{'ö' * 127}/{'a' * 255}"]
)
def test_accepts_names_that_a_file_can_have(path: str) -> None:
    assert can_be_a_file(path)


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "../a.json",
        "a/../../b",
        "/etc/passwd",
        "a\0.json",
        "\ud800.json",
        "e\x1b]0;TITLE\x07.json",
        "a\nerror: forged.json",
        5,
        "ö" * 128,
        "a/" * 1100 + "b",
        "./a.json",
        "a//b.json",
        "a/./b.json",
        "a/",
        ".lock",
        ".parts/a.safetensors",
        "a/.Parts/b",
        ".heteroinfer-complete.json/a",
        ".HeteroInfer-complete.json",
        ".heteroinfer-complete.json.7",
    ],
)
def test_refuses_names_that_no_file_of_a_model_can_have(path: object) -> None:
    assert not can_be_a_file(path)


def test_discards_a_body_longer_than_announced() -> None:
    target = io.BytesIO()
    bounded = BoundedFile(target, FILE)
    assert bounded.write(b"0123456789") == 10
    with pytest.raises(OSError, match="more than the 10 bytes") as refused:
        bounded.write(b"x")
    assert refused.value.errno is None  # an error with an errno would count as an error of the cache
    assert target.getvalue() == b""


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_an_invalid_index_names_no_files(content: bytes) -> None:
    assert parse_index(content) == {}


def test_a_marker_with_an_impossible_file_name_means_a_damaged_model(tmp_path: Path) -> None:
    odd = FetchedFile(path="a\0b", size_bytes=1, digest="")
    assert damaged_files(tmp_path, CompleteModel(repository="o/m", commit="c", files=(odd,))) == [odd]
