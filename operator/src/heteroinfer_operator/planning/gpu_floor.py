"""The memory that a GPU needs besides weights and KV cache, the same for small and large GPUs. Pure.

Measured on an H100 with torch 2.13 and vLLM 0.32 (2026-11-26, tests/bench/gpu_floor.py): a Llama of 16 layers
with 64 requests in a step held 1.90 GiB besides its weights and 1 GiB of KV cache, and 1.05 GiB without CUDA
graphs.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from heteroinfer_contract.model import LayerKind
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.planning.expert_ring import ExpertRing
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES

BESIDE_ON_GPUS: Final = "the CUDA context, CUDA graphs and the largest batch"
"""Description of this memory in messages."""
BESIDE_WITHOUT_GRAPHS: Final = "the CUDA context and the largest batch"
"""Description of this memory without CUDA graphs (engine.eager: Always)."""
GPU_USABLE: Final = Fraction(9, 10)
"""Largest share of a GPU's memory for weights and KV cache; the rest is for fragments and the driver."""
CONTEXT_BYTES: Final = 704 * 2**20
"""The CUDA context (619 MiB), loaded kernels (68 MiB), and buffers of the model runner (16 MiB)."""
NCCL_BYTES: Final = 960 * 2**20
"""NCCL's buffers on a GPU that shares its stage with other GPUs: 564 MiB for the first process group, 388 MiB
for the second."""
GRAPHS_BYTES: Final = 2**30
"""Memory that a rank keeps free for CUDA graphs before it grants the KV cache
(vllm_heteroinfer/rank/worker/headroom.py). Graphs of up to 128 tokens took 210 to 282 MiB."""
SAMPLING_BYTES: Final = 18
"""Bytes per entry of the vocabulary and request of a step: logits in 16 and in 32 bits, probabilities, and
random numbers (vllm/v1/sample/ops/topk_topp_sampler.py::TopKTopPSampler.forward_native@v0.32.0).
256 requests and 262,144 entries took 16.9 bytes each (H200, 2026-11-26)."""
_HIDDEN_STATES: Final = 4
"""Number of a token's hidden states in memory at the same time, besides the layer's intermediate values."""
_ATTENTION_STATES: Final = 3
"""Size of one token's queries, keys, values and attention output together, in hidden states."""
_RESERVED_PER_USED: Final = Fraction(7, 4)
"""Memory that torch reserves for activations, relative to their size: it reserved 386 MiB for 232 MiB."""
_DEFAULT_COLUMNS: Final = 4
"""Assumed columns of an MLP per element of a hidden state: profiles of earlier versions lack the number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFloor:
    """Memory that a GPU rank needs in addition to weights and KV cache, in bytes.

    Attributes:
        graphs: memory that stays free for CUDA graphs; 0 without graphs.
        activations: activations of the largest batch.
        sampling: memory for sampling the largest batch, on the ranks of the last stage.
        compiling: copy of the embedding on the ranks of the first stage while the model is compiled. torch
            keeps this memory and reuses it for activations.
    """

    graphs: int
    activations: int
    sampling: int
    compiling: int

    @classmethod
    def for_settings(
        cls, profile: ModelProfile, engine: EngineSettings, tensor: int, ring: ExpertRing | None = None
    ) -> "GpuFloor":
        """Returns the memory that a GPU rank needs besides weights and KV cache with these settings.

        Args:
            tensor: number of ranks in a stage.
            ring: memory for experts of feed-forward ranks that the GPU computes, or None. The result contains
                the experts' intermediate values, but not the ring itself.
        """
        layer_elements = (
            _elements_per_token(kind, profile, tensor) for kind in dict.fromkeys(profile.layers)
        )
        element_bytes = ELEMENT_BYTES[engine.dtype]
        layer_bytes = max(layer_elements, default=0) * element_bytes
        if ring is not None:
            layer_bytes = max(layer_bytes, ring.token_bytes)
        token_bytes = _HIDDEN_STATES * profile.hidden_size * element_bytes + layer_bytes
        return cls(
            graphs=0 if engine.eager_gpu else GRAPHS_BYTES,
            activations=int(engine.max_num_batched_tokens * token_bytes * _RESERVED_PER_USED),
            sampling=engine.max_num_seqs * profile.vocab_size * SAMPLING_BYTES,
            compiling=0 if engine.eager_gpu else profile.embedding_bytes // tensor,
        )

    def total(self, *, embeds: bool, samples: bool, gpus: int) -> int:
        """Returns the bytes of this memory on one rank.

        Args:
            embeds: whether the rank is in the first stage, which has the embedding.
            samples: whether the rank is in the last stage, which has the head.
            gpus: number of GPUs that share the stage's layers through NCCL; 1 without NCCL.
        """
        nccl = NCCL_BYTES if gpus > 1 else 0
        sampling, compiling = self.sampling if samples else 0, self.compiling if embeds else 0
        # A rank does not compile, compute and sample at the same time, so the largest counts.
        return CONTEXT_BYTES + nccl + self.graphs + max(self.activations, sampling, compiling)


def _elements_per_token(kind: LayerKind, profile: ModelProfile, tensor: int) -> int:
    """Returns the largest number of intermediate elements that a token needs at one time.

    The number is for one layer on one rank.

    Args:
        tensor: number of ranks that share the layer.
    """
    hidden = profile.hidden_size
    rank_columns = (kind.columns or _DEFAULT_COLUMNS * hidden) // tensor
    if kind.experts:
        # One buffer for gate and up, which also takes the result, and one for the activation.
        feed_forward = kind.experts_per_token * (max(2 * rank_columns, hidden) + rank_columns)
    elif kind.mlp_bytes or not profile.kinds:  # profiles of version 0.1.0 have no kinds
        feed_forward = 3 * rank_columns  # gate, up and activation
    else:
        feed_forward = 0
    return max(feed_forward, _ATTENTION_STATES * hidden // tensor)


def gpu_memory(role: RoleSpec, inventory: Inventory) -> int | None:
    """Returns the memory of one GPU of a role, in bytes, or None if unknown."""
    return (
        parse_bytes(role.device_memory) if role.device_memory else inventory.gpu_memory_bytes.get(role.name)
    )


def usable_gpu_memory(memory: int, gpu_floor: int) -> int:
    """Returns the bytes of a GPU that remain for weights and KV cache.

    Args:
        gpu_floor: bytes that the GPU needs besides weights and KV cache.
    """
    return max(min(int(memory * GPU_USABLE), memory - gpu_floor), 0)
