"""Checks what a rank reports about damaged safetensors files. Runs in the worker's Python."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.expert_reader import ExpertReader
from vllm_heteroinfer.feed_forward.file_tensors import MappedFile
from vllm_heteroinfer.feed_forward.recipe import Recipe, RecipeFile

ENTRY = {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
CHANGES: dict[str, dict[str, Any]] = {
    "negative size": {"shape": [-3], "data_offsets": [12, 0]},
    "unknown type": {"dtype": "F4"},
    "past the end": {"shape": [100], "data_offsets": [0, 400]},
    "before the start": {"data_offsets": [-12, 0]},
    "other size": {"shape": [4]},
    "fraction": {"shape": [3.0]},
    "truth value": {"shape": [True, 3]},
    "no shape": {"shape": None},
}


def with_header(header: Any) -> bytes:
    """Returns the content of a file: this header and 56 bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(56)


def main(_: str) -> None:
    """Prints the message about each file, or "" if the rank accepts the file."""
    whole = save({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)})
    contents = {
        "whole": whole,
        "empty": b"",
        "truncated header": whole[:40],
        "truncated data": whole[:-4],
        "huge header": (1 << 62).to_bytes(8, "little") + b"{}",
        "header without length": bytes(8),
        "header is a list": with_header([]),
        "header is no JSON": with_header(b"\xff{"),
        "header is deep": with_header(b"[" * 200_000),
        **{name: with_header({"t": {**ENTRY, **change}}) for name, change in CHANGES.items()},
    }
    answer = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        os.symlink("loop", folder / "loop")
        os.symlink("nothing", folder / "dangling")
        for name in (*contents, "missing", "loop", "dangling"):
            answer[name] = message(lambda: list(MappedFile(folder / name).tensors()))  # noqa: B023 - called now
        os.symlink("whole", folder / "link")
        mapped = MappedFile(folder / "link")
        file = RecipeFile(name="link", num_bytes=mapped.num_bytes, digest=mapped.digest)
        recipe = Recipe(layers={}, dtype="float32", max_rows=1, unit=32, files=(file,))
        reader = ExpertReader(recipe, folder)
        answer["link"] = message(reader.check_unchanged)
        (folder / "whole").write_bytes(whole)
        answer["written to meanwhile"] = message(reader.check_unchanged)
        (folder / "whole").write_bytes(with_header({"t": ENTRY}))
        answer["another model's"] = message(lambda: ExpertReader(recipe, folder))
    print(json.dumps(answer))


def message(call: Any) -> str:
    try:
        call()
    except ContractError as error:
        return str(error)
    return ""
