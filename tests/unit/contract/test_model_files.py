"""A model's sizes, read from files that the tests write byte by byte in safetensors' format."""

import json
import multiprocessing
import os
import re
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.model.weights import INDEX_FILE
from heteroinfer_contract.model_file_content import ModelFilesError
from heteroinfer_contract.model_files import has_tokenizer, read_profile

LAYERS, HIDDEN, VOCAB = 3, 8, 16
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
TENSORS: dict[str, list[int]] = {
    "model.embed_tokens.weight": [VOCAB, HIDDEN],
    **{f"model.layers.{i}.mlp.up_proj.weight": [HIDDEN, HIDDEN + i] for i in range(LAYERS)},
    **{f"model.layers.{i}.input_layernorm.weight": [HIDDEN] for i in range(LAYERS)},
    "model.norm.weight": [HIDDEN],
    "lm_head.weight": [VOCAB, HIDDEN],
}
ELEMENT_BYTES = {"BF16": 2, "F32": 4, "U8": 1}


def write_safetensors(path: Path, tensors: Mapping[str, list[int]], dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        begin, size = end, ELEMENT_BYTES[dtype]
        for length in shape:
            size *= length
        end = begin + size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_model(
    directory: Path,
    *,
    config: Mapping[str, Any] = CONFIG,
    tensors: Mapping[str, list[int]] = TENSORS,
    dtype: str = "BF16",
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors, dtype)
    return directory


def test_reads_a_model_in_a_single_file(tmp_path: Path) -> None:
    profile = read_profile(write_model(tmp_path))
    assert profile.layer_bytes == tuple(2 * (HIDDEN * (HIDDEN + i) + HIDDEN) for i in range(LAYERS))
    assert (profile.embedding_bytes, profile.head_bytes, profile.other_bytes) == (256, 256, 16)
    assert (profile.tied_head, profile.dtype, profile.num_layers) == (False, "bfloat16", LAYERS)
    assert (profile.head_dim, profile.num_kv_heads, profile.vocab_size) == (2, 2, VOCAB)
    assert profile.architecture == "LlamaForCausalLM"
    assert profile.quantization == ""


def test_a_sharded_model_has_the_profile_of_the_whole_file(tmp_path: Path) -> None:
    whole = read_profile(write_model(tmp_path / "whole"))
    sharded = write_model(tmp_path / "sharded", tensors={})
    (sharded / "model.safetensors").unlink()
    shards = {
        "a.safetensors": dict(list(TENSORS.items())[:4]),
        "b.safetensors": dict(list(TENSORS.items())[4:]),
    }
    for name, tensors in shards.items():
        write_safetensors(sharded / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    (sharded / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert read_profile(sharded) == whole


def test_a_tensor_that_two_files_have_counts_once(tmp_path: Path) -> None:
    whole = read_profile(write_model(tmp_path))
    for number in (1, 2):
        shard = f"model-0000{number}-of-00002.safetensors"
        write_safetensors(tmp_path / shard, dict(list(TENSORS.items())[number - 1 :: 2]))
    assert read_profile(tmp_path) == whole


def test_reads_mistrals_own_files_before_others(tmp_path: Path) -> None:
    whole = read_profile(write_model(tmp_path))
    renamed = {name.removeprefix("model."): shape for name, shape in TENSORS.items()}
    write_safetensors(tmp_path / "consolidated.safetensors", renamed)
    assert read_profile(tmp_path) == whole


@pytest.mark.parametrize("keeps_copy", [True, False])
def test_tied_head_counts_once(tmp_path: Path, keeps_copy: bool) -> None:
    tensors = {name: shape for name, shape in TENSORS.items() if keeps_copy or name != "lm_head.weight"}
    profile = read_profile(
        write_model(tmp_path, config={**CONFIG, "tie_word_embeddings": True}, tensors=tensors)
    )
    assert (profile.tied_head, profile.head_bytes, profile.embedding_bytes) == (True, 0, 256)


def test_reads_the_nested_text_config_of_a_model_with_a_vision_tower(tmp_path: Path) -> None:
    text = {key: value for key, value in CONFIG.items() if key != "architectures"}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    tensors = {f"language_model.{name}": shape for name, shape in TENSORS.items()}
    tensors["vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight"] = [100]
    profile = read_profile(write_model(tmp_path, config=config, tensors=tensors))
    assert profile.layer_bytes[0] == 2 * (HIDDEN * HIDDEN + HIDDEN)
    assert (profile.other_bytes, profile.encoder_bytes, profile.encoder) == (16, 200, "images")
    assert profile.head_bytes == 256
    assert profile.architecture == "LlavaForConditionalGeneration"


@pytest.mark.parametrize(
    ("key", "named", "stored", "expected"),
    [
        ("dtype", "float16", "BF16", "float16"),
        ("torch_dtype", "float32", "BF16", "float32"),
        ("torch_dtype", None, "F32", "float32"),
        ("torch_dtype", "auto", "BF16", "bfloat16"),
    ],
)
def test_reads_the_dtype_of_a_config(
    tmp_path: Path, key: str, named: str | None, stored: str, expected: str
) -> None:
    config = {**{k: v for k, v in CONFIG.items() if k != "torch_dtype"}, key: named}
    assert read_profile(write_model(tmp_path, config=config, dtype=stored)).dtype == expected


@pytest.mark.parametrize(
    ("stored", "named", "element_bytes"), [("F32", "bfloat16", 2), ("BF16", "float32", 4)]
)
def test_sizes_are_in_the_dtype_that_the_config_names(
    tmp_path: Path, stored: str, named: str, element_bytes: int
) -> None:
    profile = read_profile(write_model(tmp_path, config={**CONFIG, "torch_dtype": named}, dtype=stored))
    assert profile.layer_bytes[0] == element_bytes * (HIDDEN * HIDDEN + HIDDEN)
    assert profile.embedding_bytes == profile.head_bytes == element_bytes * VOCAB * HIDDEN


def test_scales_stay_in_their_own_dtype(tmp_path: Path) -> None:
    names = ("mlp.up_proj.weight_scale_inv", "mlp.up_proj.weight.absmax", "input_layernorm.weight")
    tensors = {**TENSORS, **{f"model.layers.{i}.{name}": [10] for i in range(LAYERS) for name in names}}
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    sizes = read_profile(write_model(tmp_path, config=config, tensors=tensors, dtype="F32")).layer_bytes
    assert sizes[0] == 2 * (HIDDEN * HIDDEN + 10) + 4 * (10 + 10)


@pytest.mark.parametrize(
    ("whole", "text", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}, "bfloat16"),
        ({"dtype": None}, {"dtype": "float16"}, "float16"),
        ({"vision_config": {"torch_dtype": "float16"}}, {}, "float16"),
        ({"torch_dtype": "auto"}, {}, "bfloat16"),
    ],
)
def test_reads_the_dtype_of_a_nested_config(
    tmp_path: Path, whole: dict[str, Any], text: dict[str, Any], expected: str
) -> None:
    sizes = {key: value for key, value in CONFIG.items() if key not in ("architectures", "torch_dtype")}
    config = {"architectures": ["Some"], **whole, "text_config": {**sizes, **text}}
    assert read_profile(write_model(tmp_path, config=config)).dtype == expected


MIXTURE = {**CONFIG, "num_experts": 4, "num_experts_per_tok": 2}


def _experts(numbers: range) -> dict[str, list[int]]:
    names = [f"model.layers.{i}.mlp.experts.{number}.w1.weight" for i in range(LAYERS) for number in numbers]
    return {**TENSORS, **{name: [HIDDEN] for name in names}}


def test_numbered_experts_are_those_of_the_config(tmp_path: Path) -> None:
    kind = read_profile(write_model(tmp_path, config=MIXTURE, tensors=_experts(range(4)))).layer(0)
    assert (kind.experts, kind.expert_bytes) == (4, 2 * HIDDEN)


@pytest.mark.parametrize("numbers", [range(2), range(1, 4), range(8)])
def test_refuses_another_number_of_experts_than_the_configs(tmp_path: Path, numbers: range) -> None:
    model = write_model(tmp_path, config=MIXTURE, tensors=_experts(numbers))
    said = f"layer 0 has weights of {len(numbers)} experts, but config.json has 4"
    with pytest.raises(ModelFilesError, match=said):
        read_profile(model)


def test_counts_only_the_experts_that_compute_text(tmp_path: Path) -> None:
    config = {**CONFIG, "moe_num_experts": [4, 4], "num_experts_per_tok": 2}
    model = write_model(tmp_path, config=config, tensors=_experts(range(8)))
    assert read_profile(model).layer(0).experts == 4


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("moe.gate_proj.weight", {"moe_num_experts": 4, "moe_top_k": 2}),
        ("ffn.experts.mlp.w1", {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}),
    ],
)
def test_counts_experts_in_one_tensor(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    tensors = {**TENSORS, **{f"model.layers.{i}.{name}": [4 * HIDDEN] for i in range(LAYERS)}}
    kind = read_profile(write_model(tmp_path, config={**CONFIG, **config}, tensors=tensors)).layer(0)
    assert (kind.experts, kind.experts_per_token, kind.expert_bytes) == (4, 2, 2 * HIDDEN)


@pytest.mark.parametrize(
    ("name", "together"),
    [
        ("mlp.experts.gate_up_proj", True),
        ("feed_forward.experts.gate_up_proj.weight", True),
        ("mlp.experts.gate_up_proj_blocks", False),
        ("block_sparse_moe.input_linear.weight", False),
    ],
)
def test_counts_gates_and_ups_in_one_tensor(tmp_path: Path, name: str, together: bool) -> None:
    config = {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2}
    tensors = {**TENSORS, **{f"model.layers.{i}.{name}": [4 * HIDDEN] for i in range(LAYERS)}}
    assert (
        read_profile(write_model(tmp_path, config=config, tensors=tensors)).layer(0).gates_together
        is together
    )


def test_layers_for_speculation_are_not_served(tmp_path: Path) -> None:
    tensors = {**TENSORS, f"model.layers.{LAYERS}.mlp.up_proj.weight": [50]}
    profile = read_profile(write_model(tmp_path, tensors=tensors))
    assert len(profile.layer_bytes) == LAYERS


def test_reads_the_quantization(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    assert read_profile(write_model(tmp_path, config=config)).quantization == "fp8"


def test_missing_numbered_shards_are_found_without_an_index(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00003.safetensors")
    with pytest.raises(ModelFilesError, match=r"model-00002-of-00003\.safetensors, .* are missing\. Finish"):
        read_profile(directory)
    (directory / "model-00001-of-00003.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    assert read_profile(directory).num_layers == LAYERS


@pytest.mark.parametrize(
    ("algorithm", "method", "scheme"),
    [
        ("FP8", "modelopt", SchemeName.FP8_TENSOR),
        ("FP8_PB_WO", "modelopt", SchemeName.FP8_BLOCK),
        ("NVFP4", "modelopt_fp4", SchemeName.NVFP4),
        ("W4A8_AWQ", "modelopt W4A8_AWQ", SchemeName.OTHER),
    ],
)
def test_reads_a_quantization_file_next_to_the_config(
    tmp_path: Path, algorithm: str, method: str, scheme: SchemeName
) -> None:
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algorithm}}
    directory = write_model(tmp_path)
    (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    profile = read_profile(directory)
    assert (profile.quantization, profile.scheme.name) == (method, scheme)
    within = write_model(tmp_path, config={**CONFIG, "quantization_config": {"quant_method": "fp8"}})
    assert read_profile(within).quantization == "fp8"


def test_reports_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"nowhere: no such directory"):
        read_profile(tmp_path / "nowhere")


def test_reports_a_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelFilesError, match=r"must be a directory that contains config.json"):
        read_profile(tmp_path / "file")


def test_reports_a_directory_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelFilesError, match=r"is not a model: config.json is missing \(found notes.txt\)"):
        read_profile(tmp_path)


def test_reports_a_model_without_weights(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelFilesError, match=r"has no weights as \*.safetensors"):
        read_profile(tmp_path)


def test_reports_a_missing_shard_of_the_index(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": {"x": "model.safetensors", "y": "model-2.safetensors"}})
    )
    with pytest.raises(ModelFilesError, match=r"model-2.safetensors is missing; .* names 2 files"):
        read_profile(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 20, -1])
def test_reports_an_incomplete_shard(tmp_path: Path, keep: int) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFilesError, match=r"model.safetensors: .* \(.* \d+\b.*\)\. (Download|Finish)"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    "header", [b"{", b"[]", b'{"x": 1}', b'{"x": {"dtype": "F32", "data_offsets": [0]}}']
)
def test_refuses_an_invalid_header(tmp_path: Path, header: bytes) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFilesError, match=r"model.safetensors: .*Download it again"):
        read_profile(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", None, "num_hidden_layers must be a whole number above 0"),
        ("hidden_size", "8", "hidden_size must be a whole number above 0 .got '8'"),
        (
            "num_hidden_layers",
            LAYERS + 2,
            r"weights of layers 3, 4 are missing; config.json has num_hidden_layers 5",
        ),
    ],
)
def test_reports_a_config_that_contradicts_the_weights(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    write_model(tmp_path, config={**CONFIG, field: value})
    with pytest.raises(ModelFilesError, match=message):
        read_profile(tmp_path)


def test_refuses_a_config_that_is_not_json(tmp_path: Path) -> None:
    (write_model(tmp_path) / "config.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"config.json: is not valid JSON"):
        read_profile(tmp_path)


def test_refuses_weights_of_an_unknown_dtype(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "torch_dtype"}
    write_model(tmp_path, config=config, dtype="U8")
    with pytest.raises(
        ModelFilesError, match=r"some weights must be in BF16, F16, F32, .* \(got weights in U8\)"
    ):
        read_profile(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "."])
def test_reports_a_file_that_the_user_cannot_read(tmp_path: Path, name: str) -> None:
    """Reads the model as another user, because root can read all files."""
    path = write_model(tmp_path / "model") / name
    path.chmod(0)
    tmp_path.chmod(0o755)
    try:
        with multiprocessing.get_context("fork").Pool(1, leave_root, (tmp_path,)) as pool:
            message = pool.apply(error_of, (Path("model"),))
    finally:
        path.chmod(0o755)
    assert "cannot be read by user" in message
    assert "chmod -R a+rX" in message


def leave_root(directory: Path) -> None:
    # Only root may enter the parent directories. A relative path does not need them.
    os.chdir(directory)
    if os.getuid() == 0:
        os.setuid(65534)


def error_of(directory: Path) -> str:
    try:
        read_profile(directory)
    except ModelFilesError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "changed",
    [
        {"torch_dtype": []},
        {"model_type": {}},
        {"sliding_window": "abc"},
        {"sliding_window": -5},
        {"head_dim": "x"},
        {"num_attention_heads": 16, "num_key_value_heads": 16},  # each head would have a width of 0
        {"vocab_size": 10**30},
        {"attn_layer_period": 0},
        {"quantization_config": {"quant_method": "gptq", "group_size": "abc"}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": 5}},
    ],
)
def test_refuses_a_config_that_cannot_be_interpreted(tmp_path: Path, changed: Mapping[str, Any]) -> None:
    model = write_model(tmp_path, config={**CONFIG, **changed})
    with pytest.raises(ModelFilesError, match=re.escape(str(tmp_path))):
        read_profile(model)


@pytest.mark.parametrize("name", ["config.json", INDEX_FILE])
def test_refuses_json_that_is_nested_too_deeply(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / name).write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ModelFilesError, match="is not valid JSON"):
        read_profile(tmp_path)


@pytest.mark.parametrize("end", ["1e400", "NaN", '"x"'])
def test_refuses_an_offset_that_is_not_a_number(tmp_path: Path, end: str) -> None:
    write_model(tmp_path)
    header = f'{{"a": {{"dtype": "F32", "shape": [1], "data_offsets": [0, {end}]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelFilesError, match="the header is not in safetensors format"):
        read_profile(tmp_path)


def test_refuses_an_index_with_a_name_too_long_for_a_file(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))
    with pytest.raises(ModelFilesError, match="File name too long"):
        read_profile(tmp_path)


def test_more_layers_than_any_model_has_take_no_memory(tmp_path: Path) -> None:
    config = {**CONFIG, "num_hidden_layers": 4097}
    with pytest.raises(ModelFilesError, match=r"num_hidden_layers must be at most 4096 \(got 4097\)"):
        read_profile(write_model(tmp_path, config=config))


def test_refuses_an_index_that_names_files_outside_its_folder(tmp_path: Path) -> None:
    outside = write_model(tmp_path / "outside")
    model = write_model(tmp_path / "model")
    for name in ("../outside/model.safetensors", str(outside / "model.safetensors")):
        (model / INDEX_FILE).write_text(json.dumps({"weight_map": {"t": name}}))
        with pytest.raises(ModelFilesError, match=r"must name files in its folder only .*\.safetensors"):
            read_profile(model)


def test_refuses_files_without_an_end(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
        (model / name).symlink_to("/dev/zero")
        with pytest.raises(ModelFilesError, match=rf"{name}: must be a regular file"):
            read_profile(model)


def test_refuses_a_config_larger_than_any_models(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    with (model / "config.json").open("ab") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(ModelFilesError, match=r"must be at most 16777216 bytes \(got 16777217\)"):
        read_profile(model)


def test_files_may_be_links_as_in_a_hubs_own_cache(tmp_path: Path) -> None:
    expected = read_profile(write_model(tmp_path / "blobs"))
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (linked / path.name).symlink_to(path)
    assert read_profile(linked) == expected


def test_reports_a_link_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    """A copy of a hub's snapshot folder without the blobs that its links lead to."""
    for missing in ("config.json", "model.safetensors", "shard"):
        folder = tmp_path / missing
        path = write_model(folder) / missing
        if missing == "shard":
            (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"x": missing}}))
        path.unlink(missing_ok=True)
        path.symlink_to("../../blobs/0123abcd")
        message = error_of(folder)
        assert f"{path}: is a link to ../../blobs/0123abcd, which does not exist here" in message
        assert "cp -rL" in message
        assert "chmod" not in message


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_reports_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4976698672\n"
    (write_model(tmp_path) / name).write_text(pointer)
    message = error_of(tmp_path)
    assert f"{tmp_path / name}: is a Git LFS pointer, not the file itself. Run `git lfs" in message


def test_reports_a_byte_order_mark(tmp_path: Path) -> None:
    """Python's json accepts a byte order mark, but transformers does not.

    Without this check, all ranks of a planned group would fail.
    """
    path = write_model(tmp_path) / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    message = error_of(tmp_path)
    assert "config.json: begins with a byte order mark" in message
    command = message.partition("(")[2].rpartition(")")[0]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert read_profile(tmp_path) == read_profile(write_model(tmp_path / "plain"))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "x.tiktoken", "vocab.txt"]
)
def test_finds_a_tokenizer_of_each_kind(tmp_path: Path, name: str) -> None:
    write_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    (tmp_path / name).symlink_to("left-out")
    assert not has_tokenizer(tmp_path)
    (tmp_path / "left-out").touch()
    assert has_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).touch()
    assert has_tokenizer(tmp_path)
