"""Profiles and specs that the planner's tests share."""

from typing import Any

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.planning import GroupRequest, Inventory, Planned, make_plan

MIB = 2**20
GIB = 2**30


def profile(**fields: Any) -> ModelProfile:
    """Returns a Llama-8B-shaped profile in bf16, with some fields changed."""
    layers = fields.pop("num_layers", 32)
    return ModelProfile(
        **{
            "architecture": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "num_layers": layers,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 128,
            "vocab_size": 128_256,
            "max_position_embeddings": 131_072,
            "layer_bytes": (416 * MIB,) * layers,
            "embedding_bytes": 1002 * MIB,
            "head_bytes": 1002 * MIB,
            "tied_head": False,
            "other_bytes": 8192,
            **fields,
        }
    )


def cpu(**fields: Any) -> dict[str, Any]:
    """Returns a CPU role; `memory` becomes its memory limit."""
    memory = fields.pop("memory", None)
    resources = {} if memory is None else {"resources": {"limits": {"memory": memory}}}
    return {"name": "cpu", "device": "CPU", **resources, **fields}


def gpu(**fields: Any) -> dict[str, Any]:
    """Returns a GPU role."""
    return {"name": "gpu", "device": "GPU", **fields}


def spec(*roles: dict[str, Any], **fields: Any) -> HeteroInferenceSpec:
    """Returns a spec with these roles, in mode Pipeline, or FeedForward if a role has its ranks."""
    mode = "FeedForward" if any("feedForward" in role for role in roles) else "Pipeline"
    fields["parallelism"] = {"mode": mode, **fields.get("parallelism", {})}
    return parse_spec({"model": {"uri": "hf://org/model"}, "roles": list(roles), **fields})


def plan(
    parsed: HeteroInferenceSpec, model: ModelProfile | None = None, inventory: Inventory | None = None
) -> Planned:
    """Returns the plan of a spec."""
    request = GroupRequest(spec=parsed, profile=model or profile(), served_name="llama", model_path="/model")
    return make_plan(request, inventory or Inventory())


def device_memory(
    usable: int,
    model: ModelProfile | None = None,
    *,
    embeds: bool = False,
    samples: bool = True,
    with_cpus: bool = True,
) -> str:
    """Returns the memory of a GPU that has so many bytes for weights and KV cache, as the planner counts.

    Args:
        embeds: whether the GPU is in the first stage.
        samples: whether it is in the last.
        with_cpus: whether the group has CPU ranks too, and so smaller batches.
    """
    group = spec(gpu(), cpu()) if with_cpus else spec(gpu())
    floor = plan(group, model).sizes.gpu_floor.total(embeds=embeds, samples=samples, gpus=1)
    return str(max(-(-usable * 10 // 9), usable + floor))
