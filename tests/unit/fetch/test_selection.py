"""The selection of files to fetch, from realistic listings of hubs."""

import pytest

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import MARKER_FILE, FetchedFile
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.selection import describing_files, weight_files

SHARDED = (
    ".gitattributes", "LICENSE", "README.md", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json",
    "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json",
    "original/consolidated.00.pth", "original/params.json", "original/tokenizer.model",
)  # fmt: skip
MISTRAL = (
    "config.json", "params.json", "consolidated.safetensors", "model.safetensors.index.json",
    "model-00001-of-00001.safetensors", "tokenizer.model.v3", "tekken.json",
)  # fmt: skip
OWN_CODE = ("config.json", "modeling_own.py", "model.safetensors", "vocab.txt", "merges.txt", "own.tiktoken")


def listing(paths: tuple[str, ...]) -> list[FetchedFile]:
    return [FetchedFile(path=path, size_bytes=1, digest=f"git:{path}") for path in paths]


def names(files: list[FetchedFile]) -> set[str]:
    return {file.path for file in files}


def test_selects_the_shards_of_a_model() -> None:
    files = listing(SHARDED)
    assert names(describing_files(files)) == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "special_tokens_map.json", "model.safetensors.index.json",
    }  # fmt: skip
    shards = {path for path in SHARDED if path.endswith(".safetensors")}
    index = {"weight_map": {f"t{i}": shard for i, shard in enumerate(sorted(shards))}}
    assert names(weight_files(files, index)) == shards


def test_duplicate_weights_are_selected_once() -> None:
    files = listing(MISTRAL)
    index = {"weight_map": {"t": "model-00001-of-00001.safetensors"}}
    assert names(weight_files(files, index)) == {"model-00001-of-00001.safetensors"}
    assert "tokenizer.model.v3" in names(describing_files(files))
    both = listing(
        ("config.json", "model.safetensors", "consolidated.safetensors", "adapter_model.safetensors")
    )
    assert names(weight_files(both, None)) == {"model.safetensors"}


def test_selects_the_models_own_code_and_vocabularies() -> None:
    assert names(describing_files(listing(OWN_CODE))) == {*OWN_CODE} - {"model.safetensors"}


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (
            {"weight_map": {"t": "gone.safetensors"}},
            "lacks files that model.safetensors.index.json names: gone.safetensors;",
        ),
        (
            {"weight_map": {"t": "../../etc/passwd"}},
            "has invalid file names in model.safetensors.index.json: ../../etc/passwd;",
        ),
        ({"weight_map": {}}, "names no files"),
        ([], "names no files"),
    ],
)
def test_an_index_with_invalid_files_is_refused(index: object, words: str) -> None:
    files = [*listing(SHARDED), *listing(("../../etc/passwd",))]
    with pytest.raises(FetchError, match=words.replace(".", r"\.")) as caught:
        weight_files(files, index)
    assert caught.value.reason is FailureReason.MODEL_NOT_READABLE


def test_reports_the_files_of_a_repository_without_a_model() -> None:
    gguf = listing(("tiny-q4.gguf", "README.md"))
    with pytest.raises(FetchError, match=r"has no config\.json; its files are tiny-q4\.gguf, README\.md"):
        describing_files(gguf)
    with pytest.raises(FetchError, match=r"no weights as \*\.safetensors.*pvc://CLAIM/PATH"):
        weight_files(listing(("config.json", "pytorch_model.bin")), None)


def test_files_with_names_that_the_cache_uses_are_not_selected() -> None:
    """A repository that was filled from one of our caches contains the marker of that cache."""
    files = listing((*SHARDED, MARKER_FILE, ".parts/x.json", ".lock"))
    assert MARKER_FILE not in names(describing_files(files))
    with pytest.raises(FetchError, match=f"has invalid file names in .*: {MARKER_FILE};"):
        weight_files(files, {"weight_map": {"t0": MARKER_FILE}})


@pytest.mark.parametrize(
    "name",
    [
        f"./{MARKER_FILE}",
        f"{MARKER_FILE}/w.safetensors",
        f"{MARKER_FILE}.7",
        f"sub/{MARKER_FILE.upper()}",
        ".parts/w.safetensors",
        ".lock",
        ".//model-00001-of-00002.safetensors",
    ],
)
def test_an_index_must_not_name_files_that_the_cache_uses(name: str) -> None:
    files = listing((*SHARDED, name))
    with pytest.raises(
        FetchError, match=r"has invalid file names in model\.safetensors\.index\.json: "
    ) as refused:
        weight_files(files, {"weight_map": {"t0": "model-00001-of-00002.safetensors", "t1": name}})
    assert refused.value.reason is FailureReason.MODEL_NOT_READABLE


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        (("a.safetensors", "a.safetensors/b"), ("a.safetensors", "a.safetensors/b")),
        (("config.json/x",), ("config.json/x",)),
        (("additional_chat_templates", "additional_chat_templates/a.jinja"), ("additional_chat_templates",)),
    ],
)
def test_a_path_that_is_both_file_and_folder_is_refused(
    listed: tuple[str, ...], named: tuple[str, ...]
) -> None:
    index = {"weight_map": {f"t{i}": name for i, name in enumerate(named)}}
    with pytest.raises(FetchError, match="both as a file and as a folder") as refused:
        weight_files(listing((*SHARDED, *listed)), index)
    assert refused.value.reason is FailureReason.MODEL_NOT_READABLE
