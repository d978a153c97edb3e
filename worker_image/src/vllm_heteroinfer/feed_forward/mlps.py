"""The MLP of a dense layer, recorded like a layer with one expert that all rows choose. Imports vLLM.

A forward pass with known numbers shows the linear layers and the activation of an MLP. So the class of the
MLP does not matter, but the MLP must compute down(act(gate) * up) or down(act(up)).
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.nn import functional
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.model_loader.reload.meta import to_meta_tensor

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.weights import is_of_encoder
from vllm_heteroinfer.feed_forward.recipe import ExpertParameter, LayerRecipe
from vllm_heteroinfer.feed_forward.remote_parts import RecordedParameter

_ROWS: Final = 16
"""Half of the number of test rows."""
_LARGE: Final = 30.0
"""Factor of the second half of the test rows. Large numbers show whether an activation has limits."""
_MAX_DISTANCE: Final = 1e-3
"""Largest allowed difference from an activation's values, relative to the largest value."""
_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda gate: functional.relu(gate).square(),
}
_LinearCall = tuple[Any, torch.Tensor, torch.Tensor]
"""A call of a linear layer: the layer, its input and its output."""


class _NoMlpError(Exception):
    """A module is not an MLP that feed-forward ranks can compute. The message contains the reason."""


class RemoteMlp(torch.nn.Module):
    """Replaces a dense layer's MLP, which feed-forward ranks compute."""

    def __init__(self, layer: int, *, reduces: bool) -> None:
        """Prepares the replacement of a layer's MLP.

        Args:
            layer: number of the decoder layer.
            reduces: whether the replaced MLP adds the outputs of all ranks of the stage.
        """
        super().__init__()
        self._layer, self._reduces = layer, reduces

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the MLP's output for hidden states, [rows, hidden], computed by feed-forward ranks."""
        answer = torch.ops.vllm.heteroinfer_feed_forward(hidden_states, self._layer)
        return tensor_model_parallel_all_reduce(answer) if self._reduces else answer


class RecordedMlp:
    """The MLP of a remote layer while the model is built; its parameters have no memory."""

    @classmethod
    def find(cls, index: int, layer: torch.nn.Module) -> "RecordedMlp | None":
        """Finds the MLP among the modules of a layer. Returns None if no module can be an MLP.

        Args:
            index: number of the layer.

        Raises:
            ContractError: no module is an MLP that feed-forward ranks can compute, or several modules are.
        """
        candidates = [(name, module) for name, module in layer.named_children() if _could_be_mlp(module)]
        recorded, problems = [], []
        for name, module in candidates:
            try:
                recorded.append(cls(index, layer, name, *_find_mlp_parts(module)))
            except _NoMlpError as problem:
                problems.append(f"; {name} ({type(module).__name__}) {problem}")
        if candidates and len(recorded) != 1:
            raise ContractError(
                f"layer {index}: feed-forward ranks need one MLP that computes down(act(gate) * up) or "
                f"down(act(up)) (got {len(recorded)} in {type(layer).__name__}{''.join(problems)}). Lower "
                "feedForward.layers, or use parallelism.mode: Pipeline"
            )
        return recorded[0].move_to_meta() if recorded else None

    def __init__(
        self, index: int, layer: torch.nn.Module, name: str, activation: str, ups: list[Any], down: Any
    ) -> None:
        self._index, self._layer, self._name = index, layer, name
        self._activation, self._ups, self._down = activation, ups, down

    def move_to_meta(self) -> "RecordedMlp":
        """Moves the parameters to the meta device, and sets `targets` to the moved parameters.

        Returns:
            This object.
        """
        for linear in (*self._ups, self._down):
            for name, parameter in list(linear.named_parameters(recurse=False)):
                setattr(linear, name, to_meta_tensor(parameter))
        self.targets = dict(self._find_targets())
        return self

    def _find_targets(self) -> Iterator[tuple[str, RecordedParameter]]:
        """Yields each parameter with the name of an expert's parameter.

        Names of down's parameters begin with `w2_`, names of gate's and up's parameters with `w13_`.
        """
        for name, parameter in self._down.named_parameters(recurse=False):
            if name == "bias" and self._down.tp_rank:
                continue  # only the first rank of a stage adds the bias
            yield f"w2_{name}", RecordedParameter(parts=(parameter,), shape=(1, *parameter.shape))
        for name, parameter in self._ups[0].named_parameters(recurse=False):
            parts = tuple(getattr(linear, name) for linear in self._ups)
            shape = (1, len(parts) * len(parameter), *parameter.shape[1:])  # an MLP is one expert
            yield f"w13_{name}", RecordedParameter(parts=parts, shape=shape)

    def begin(self) -> None:
        """Does nothing, because the MLP is in the model already."""

    def end(self) -> None:
        """Replaces the MLP in the model by a `RemoteMlp`."""
        down = self._down
        # If vLLM's down layer adds the outputs of all ranks of the stage, the replacement must do so, too.
        reduces = isinstance(down, RowParallelLinear) and down.reduce_results and down.tp_size > 1
        setattr(self._layer, self._name, RemoteMlp(self._index, reduces=reduces))

    def describe(self, parameters: Mapping[str, ExpertParameter]) -> LayerRecipe:
        """Returns the layer's recipe with these parameters."""
        # The ranks of a stage may divide the columns. `columns` is the number of this rank's columns.
        columns = getattr(self._down, "input_size_per_partition", self._down.input_size)
        return LayerRecipe(
            experts=1,
            topk=0,
            hidden=int(self._down.output_size),
            inner=int(columns),
            activation=self._activation,
            method=type(self._down.quant_method).__name__,
            parameters=parameters,
        )


def _could_be_mlp(module: torch.nn.Module) -> bool:
    """Returns whether a module may be a layer's MLP: it has linear layers, no experts, and one input."""
    linears = [each for each in module.modules() if isinstance(each, LinearBase)]
    # An encoder numbers its layers from 0, too (vllm/model_executor/models/whisper.py@v0.32.0). So its
    # MLPs must not be mistaken for those of the decoder.
    if not linears or any(is_of_encoder(each.prefix) for each in linears):
        return False
    has_experts = any(isinstance(each, RoutedExperts) for each in module.modules())
    return _count_required_inputs(module) == 1 and not has_experts


def _count_required_inputs(module: torch.nn.Module) -> int:
    """Returns the number of parameters without a default in a module's `forward`."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]  # without `self`
    variadic_kinds = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return sum(
        parameter.default is inspect.Parameter.empty and parameter.kind not in variadic_kinds
        for parameter in parameters
    )


def _find_mlp_parts(mlp: Any) -> tuple[str, list[Any], Any]:
    """Returns an MLP's activation, its layers before the activation, and its down layer.

    Before the activation, an MLP has a gate and an up layer, one layer with both, or only an up layer.
    Runs the MLP with random numbers as the outputs of its linear layers. The input of its last linear layer
    must then be a known activation of the other layers' outputs.

    Raises:
        _NoMlpError: the module computes something else.
    """
    linears = [module for module in mlp.modules() if isinstance(module, LinearBase)]
    linear_prefixes = {f"{name}." for name, module in mlp.named_modules() if isinstance(module, LinearBase)}
    for name, _ in mlp.named_parameters():
        if not name.startswith(tuple(linear_prefixes)):
            raise _NoMlpError(f"must have parameters only in linear layers (has {name})")
    mlp_input, mlp_output, calls = _run_with_random_outputs(mlp, linears)
    _check_calls(linears, calls, mlp_input, mlp_output)
    *ups, (down, down_input, _) = calls  # in the order of the calls, so down is last
    # With a gate, gate and up together have two columns for each input of down.
    gated = sum(up_output.shape[1] for _, _, up_output in ups) == 2 * down_input.shape[1]
    activation, gate_and_up = _find_activation(down_input, ups, gated=gated)
    # A recipe can join two layers of plain weights, but not two quantized layers with further parameters.
    names = {name for linear in gate_and_up for name, _ in linear.named_parameters()}
    if len(gate_and_up) > 1 and not names <= {"weight", "bias"}:
        raise _NoMlpError("must have gate and up in one linear layer if they are quantized")
    vllm_name = activation if gated else f"{activation}_no_mul"  # as in vLLM's MoEActivation
    return vllm_name, gate_and_up, down


def _check_calls(
    linears: Sequence[Any], calls: Sequence[_LinearCall], mlp_input: torch.Tensor, mlp_output: Any
) -> None:
    """Raises _NoMlpError if the calls of a module's linear layers are not the calls of an MLP.

    In an MLP, the first layers get the MLP's input, and the last layer returns the MLP's output.
    """
    if len(linears) not in {2, 3} or len(calls) != len(linears):
        raise _NoMlpError(
            f"must call each of its 2 or 3 linear layers once (has {len(linears)}, made {len(calls)} calls)"
        )
    *ups, (_, _, down_output) = calls
    begins_with_ups = all(up_input is mlp_input for _, up_input, _ in ups)
    ends_with_down = mlp_output is down_output
    if not begins_with_ups or not ends_with_down:
        raise _NoMlpError("must change its input and output only by linear layers")
    if any(linear.skip_bias_add and linear.has_bias for linear in linears):
        raise _NoMlpError("must not add a bias after a linear layer")


def _find_activation(
    down_input: torch.Tensor, ups: Sequence[_LinearCall], *, gated: bool
) -> tuple[str, list[Any]]:
    """Returns an MLP's activation, and the linear layers before the activation: first the gate, then the up.

    Args:
        down_input: input of the MLP's down layer.
        ups: calls of the linear layers before the activation, in the order of the calls.
        gated: whether the MLP has a gate.

    Raises:
        _NoMlpError: the MLP has another activation.
    """
    # A model may call the up layer before the gate layer.
    possible_orders = [ups, ups[::-1]] if len(ups) > 1 else [ups]
    candidates = [
        (_distance_from_activation(down_input, compute, gate_and_up, gated=gated), name, gate_and_up)
        for name, compute in _ACTIVATIONS.items()
        for gate_and_up in possible_orders
    ]
    distance, activation, gate_and_up = min(candidates, key=lambda candidate: candidate[0])
    if distance > _MAX_DISTANCE or (gated and activation == "relu2"):  # no kernel computes relu2 with a gate
        raise _NoMlpError(f"must have one of the activations {', '.join(_ACTIVATIONS)}")
    return activation, [linear for linear, _, _ in gate_and_up]


def _run_with_random_outputs(mlp: Any, linears: Sequence[Any]) -> tuple[torch.Tensor, Any, list[_LinearCall]]:
    """Runs an MLP, but its linear layers return random numbers instead of products.

    Returns the MLP's input, its output, and the calls of its linear layers in order.
    """
    generator, device = torch.Generator().manual_seed(0), torch.get_default_device()
    calls: list[_LinearCall] = []

    def draw_rows(width: int) -> torch.Tensor:
        """Draws rows of random numbers. The second half is larger, to show an activation's limits."""
        rows = torch.randn((2 * _ROWS, width), generator=generator, device="cpu", dtype=torch.float32)
        rows[_ROWS:] *= _LARGE
        return rows.to(device)

    def answer(linear: Any, x: torch.Tensor) -> Any:
        """Stands in for a linear layer: notes the call, and returns random numbers."""
        output = draw_rows(linear.output_size)
        calls.append((linear, x, output))
        return (output, None) if linear.return_bias else output

    x = draw_rows(linears[0].input_size)
    for linear in linears:
        linear.forward = partial(answer, linear)
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return x, mlp(x), calls
    except Exception as error:
        raise _NoMlpError(f"fails with inputs in float32: {error}") from error
    finally:
        for linear in linears:
            del linear.forward


def _distance_from_activation(
    down_input: torch.Tensor,
    compute: Callable[[torch.Tensor], torch.Tensor],
    ups: Sequence[_LinearCall],
    *,
    gated: bool,
) -> float:
    """Returns the largest difference between the down layer's input and an activation's values.

    The difference is relative to the largest value. It is infinity if the shapes differ.

    Args:
        compute: the activation.
        ups: calls of the linear layers before the activation: first the gate, then the up.
    """
    sums = torch.cat([up_output for _, _, up_output in ups], 1)
    gate, up = sums.chunk(2, 1) if gated else (sums, sums.new_ones(()))  # without a gate: act(sums) * 1
    expected = compute(gate) * up
    if expected.shape != down_input.shape:
        return torch.inf
    # The second half of the rows has larger numbers, so each half is compared with its own largest value.
    differences, values = (down_input - expected).abs().view(2, -1), expected.abs().view(2, -1)
    return float((differences.amax(1) / values.amax(1)).max())
