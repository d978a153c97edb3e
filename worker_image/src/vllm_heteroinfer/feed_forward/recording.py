"""Records which parts of the checkpoint fill the experts and MLPs of remote layers. Imports vLLM.

Feed-forward ranks compute the experts or the MLP of a remote layer. vLLM's own method of the layer creates
the parameters on the meta device (without memory). Then the model's own `load_weights` runs once, with
tensors that share the memory of the files. Its copies to the parameters are recorded, but not done.
"""

import bisect
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from heteroinfer_contract.column_shares import column_unit_of
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.scheme import find_quantization
from vllm_heteroinfer.feed_forward.file_tensors import MappedFile, MappedFiles
from vllm_heteroinfer.feed_forward.recipe import (
    VALUES,
    ExpertParameter,
    LayerRecipe,
    Piece,
    Recipe,
    RecipeFile,
    find_missing_values,
    locate_view,
)
from vllm_heteroinfer.feed_forward.remote_parts import RecordedParameter, RemotePart, layer_of

_logger = logging.getLogger(__name__)

_MAX_RECORDED_VALUES: Final = 4096
"""Maximum number of elements of a tensor that the loader computed.

Larger tensors must be regions of a file."""
_SHOWN: Final = 3
"""Number of unused tensors that a warning names."""
_SMALL: Final = 4
"""A parameter with at most this many values per expert is small."""
_aten = torch.ops.aten


class RemoteExperts:
    """The experts of a remote layer, while vLLM builds the asking rank's model.

    Attributes:
        module: vLLM's RoutedExperts.
        method: vLLM's method for the format, which creates the parameters.
        targets: the recorded parameters, by name.
    """

    def __init__(self, module: Any, method: Any) -> None:
        self.module, self.method = module, method
        self._remote_method: Any = None
        self.targets: dict[str, RecordedParameter] = {}

    def create(self, **sizes: Any) -> None:
        """Creates the parameters on the meta device, but small parameters on the CPU.

        A small parameter has a few values per expert. A loader compares these values, so they need memory.

        Args:
            **sizes: arguments of vLLM's `create_weights`.
        """
        before = set(self.module._parameters)
        with torch.device("meta"):
            self.method.create_weights(layer=self.module, **sizes)
        experts = int(self.module.local_num_experts)
        new_names = [name for name in self.module._parameters if name not in before]
        for name in new_names:
            parameter = self.module._parameters[name]
            if parameter is None:
                continue
            if parameter.numel() <= _SMALL * experts:
                values = torch.ones(parameter.shape, dtype=parameter.dtype, device="cpu")
                # Keep the class, because vLLM's parameter classes find their loader by a property.
                with_memory = torch.Tensor._make_subclass(type(parameter), values, False)
                with_memory.__dict__.update(parameter.__dict__)
                self.module._parameters[name] = parameter = with_memory
            self.targets[name] = RecordedParameter(parts=(parameter,), shape=parameter.shape)

    def begin(self) -> None:
        """Gives the module vLLM's own method, from which the loaders read the format."""
        self._remote_method = self.module.quant_method
        _set_method(self.module, self.method)

    def end(self) -> None:
        """Removes the parameters. If `begin` was called, gives the module its `RemoteMethod` back."""
        if self._remote_method is not None:
            _set_method(self.module, self._remote_method)
        for name in self.targets:
            self.module._parameters.pop(name, None)

    def describe(self, parameters: Mapping[str, ExpertParameter]) -> LayerRecipe:
        """Returns the layer's recipe with these parameters.

        Only the first rank of a stage adds the biases of w2. On the other ranks, loaders overwrite these
        biases with zeros, so the recipe leaves the biases out.
        """
        module, config = self.module, self.module.moe_config
        if config.tp_rank:
            parameters = {name: value for name, value in parameters.items() if name != "w2_bias"}
        return LayerRecipe(
            experts=int(module.local_num_experts),
            topk=int(module.top_k),
            hidden=int(module.hidden_size),
            inner=int(config.intermediate_size_per_partition),
            activation=module.activation.value,
            method=type(self.method).__name__,
            parameters=parameters,
            limit=_first_number(module.swiglu_limit, config.swiglu_limit),
            alpha=_first_number(module.swiglu_alpha, config.swiglu_alpha),
            beta=_first_number(module.swiglu_beta, config.swiglu_beta),
        )


class Recording:
    """Result of `record`.

    Attributes:
        recipe: the recipe by which feed-forward ranks read their experts and MLPs.
        tensors: names of the checkpoint's tensors that only feed-forward ranks read.
    """

    def __init__(self, recipe: Recipe, tensors: Collection[str]) -> None:
        self.recipe, self.tensors = recipe, frozenset(tensors)


def describe_dummy(config: Any, layers: Mapping[int, RemotePart]) -> Recipe:
    """Returns a recipe without files, for random weights.

    Args:
        config: vLLM's configuration.
    """
    return _build_recipe(config, {layer: _describe_part(part) for layer, part in layers.items()}, dummy=True)


def record(model: Any, loader: Any, config: Any, layers: Mapping[int, RemotePart]) -> Recording:
    """Runs the model's `load_weights` with the files' tensors of remote layers, and records its copies.

    Logs a warning that names tensors which no layer uses.

    Args:
        loader: vLLM's DefaultModelLoader.
        config: vLLM's configuration.
        layers: experts or MLP of each remote layer.

    Raises:
        ContractError: the checkpoint is not in safetensors files, a parameter gets no value, or the loader
            computes values of a parameter instead of copying them.
    """
    files = MappedFiles()
    names: dict[int, str] = {}  # `_yield_tensors` fills it while the model loads
    tensors = _yield_tensors(loader, model, config.model_config, files, frozenset(layers), names)
    recipe, copies = record_load(config, files, layers, lambda: model.load_weights(tensors))
    starts = sorted(names)
    remote_names = _find_names(copies.remote_tensors, starts, names)
    own_names = _find_names(copies.own_tensors, starts, names)
    unused = sorted(set(names.values()) - remote_names - own_names)
    if unused:
        _logger.warning(
            "%s: %d tensors of the checkpoint are not loaded, because no layer uses them (such as %s)",
            config.model_config.model,
            len(unused),
            ", ".join(unused[:_SHOWN]),
        )
    return Recording(recipe, remote_names - own_names)


def record_load(
    config: Any, files: MappedFiles, layers: Mapping[int, RemotePart], load: Callable[[], object]
) -> tuple[Recipe, "Copies"]:
    """Calls `load`, and records its copies from `files` to the remote layers. Returns recipe and copies.

    Args:
        load: calls the model's loader.

    Raises:
        ContractError: as in `record`.
    """
    model, copies = config.model_config.model, Copies(files, layers)
    with contextlib.ExitStack() as stack:
        for part in layers.values():
            part.begin()
            stack.callback(part.end)
        with torch.no_grad(), copies:
            load()
    if copies.problems:
        raise ContractError(f"{model}: {copies.problems[0]}. Use spec.parallelism.mode: Pipeline")
    recipes = {
        layer: _describe_part(part, {name: copies.pieces.get((layer, name), []) for name in part.targets})
        for layer, part in layers.items()
    }
    for number, layer in recipes.items():
        missing_values = find_missing_values(layer)
        if missing_values:
            num_others = len(missing_values) - 1
            others = f" and {num_others} other{'s' if num_others > 1 else ''}" if num_others else ""
            raise ContractError(
                f"{model}: layer {number}: the checkpoint lacks values for {missing_values[0]}{others}. "
                "Download the model again"
            )
    return _build_recipe(config, recipes, files.files), copies


def _describe_part(
    part: RemotePart, pieces: Mapping[str, Sequence[Piece]] = MappingProxyType({})
) -> LayerRecipe:
    """Returns the recipe of one layer's experts or MLP.

    Args:
        pieces: regions of files that fill each parameter, by name; none for random weights.
    """
    return part.describe(
        {
            name: ExpertParameter(
                shape=tuple(target.shape),
                dtype=str(target.parts[0].dtype).removeprefix("torch."),
                pieces=tuple(pieces.get(name, ())),
            )
            for name, target in part.targets.items()
        }
    )


def _build_recipe(
    config: Any, layers: Mapping[int, LayerRecipe], files: Sequence[MappedFile] = (), *, dummy: bool = False
) -> Recipe:
    """Returns the recipe of all remote layers, with the model's sizes and the files' digests."""
    model, root = config.model_config, Path(config.model_config.model)
    return Recipe(
        layers=layers,
        dtype=str(model.dtype).removeprefix("torch."),
        max_rows=config.scheduler_config.max_num_batched_tokens,
        unit=column_unit_of(find_quantization(vars(model.hf_config), vars(model.hf_text_config))),
        files=tuple(
            RecipeFile(name=os.path.relpath(file.path, root), num_bytes=file.num_bytes, digest=file.digest)
            for file in files
        ),
        dummy=dummy,
    )


def _set_method(module: Any, method: Any) -> None:
    """Sets a module's method as a plain attribute, because torch would register it as a child module."""
    object.__setattr__(module, "quant_method", method)


def _find_names(addresses: Collection[int], starts: list[int], names: Mapping[int, str]) -> set[str]:
    """Returns the names of the tensors that contain these addresses.

    Args:
        starts: addresses of the tensors' first bytes, ascending.
        names: name of each tensor, by the address of its first byte.
    """
    return {names[starts[bisect.bisect(starts, address) - 1]] for address in addresses}


def _yield_tensors(
    loader: Any,
    model: Any,
    model_config: Any,
    files: MappedFiles,
    layers: Collection[int],
    names: dict[int, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that may belong to remote layers, each with its name in the checkpoint.

    Args:
        names: gets the name of each yielded tensor, by the address of its first byte.

    Raises:
        ContractError: the checkpoint is not in safetensors files.
    """
    primary = loader.Source(
        model_config.model,
        model_config.revision,
        fall_back_to_pt=getattr(model, "fall_back_to_pt_during_load", True),
        allow_patterns_overrides=getattr(model, "allow_patterns_overrides", None),
    )
    for source in (primary, *getattr(model, "secondary_weights", ())):
        _, paths, in_safetensors, _ = loader._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )
        if not in_safetensors:
            raise ContractError(
                f"{source.model_or_path}: the weights must be in safetensors files for mode FeedForward (got "
                f"{sorted(paths)[:1]}). Convert the weights, or use spec.parallelism.mode: Pipeline"
            )
        for path in sorted(paths):
            for name, tensor in files.add(Path(path)).tensors():
                if tensor.numel() and _may_be_remote(source.prefix + name, layers):
                    names[tensor.data_ptr()] = source.prefix + name
                    yield source.prefix + name, tensor


def _may_be_remote(name: str, layers: Collection[int]) -> bool:
    """Returns whether a tensor of the checkpoint may belong to a remote layer, judged by its name."""
    layer = layer_of(name)
    if layer is not None:
        return layer in layers
    # Some checkpoints have other names than `layers.N`, so each number in the name may be a layer.
    return any(part.isdecimal() and int(part) in layers for part in name.split("."))


class Copies(TorchDispatchMode):
    """Records copies to the parameters of remote parts, and skips copies to all other parameters.

    Attributes:
        pieces: the pieces that fill each parameter, by layer and name of the parameter.
        remote_tensors: addresses of tensors that are copied to remote parts.
        own_tensors: addresses of tensors that are copied to this rank's own parameters.
        problems: values that feed-forward ranks could not read from the files, as messages.
    """

    def __init__(self, files: MappedFiles, layers: Mapping[int, RemotePart]) -> None:
        """Notes the memory of each parameter of the remote layers, to recognize copies to it."""
        super().__init__()
        self._files = files
        # For each storage: layer, name and shape of the parameter, and the number of the parameter's element
        # that is the storage's first element.
        self._targets: dict[int, tuple[int, str, Sequence[int], int]] = {}
        for layer, part in layers.items():
            for name, target in part.targets.items():
                first_element = 0
                for part_of_target in target.parts:
                    storage = part_of_target.untyped_storage()._cdata
                    self._targets[storage] = (layer, name, target.shape, first_element)
                    first_element += part_of_target.numel()
        self.pieces: dict[tuple[int, str], list[Piece]] = {}
        self.remote_tensors: set[int] = set()
        self.own_tensors: set[int] = set()
        self.problems: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs torch's operation, but records copies and replaces clones of a file's tensors by views.

        A clone would have its own address, from which its place in the file could not be found.
        """
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in (_aten.clone.default, _aten._to_copy.default):
            dtype = kwargs.get("dtype")
            if dtype in (None, args[0].dtype) and self._files.find(args[0]) is not None:
                return _aten.alias.default(args[0])
        return func(*args, **kwargs)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Records a copy to a remote part. For another target, only notes that this rank uses the tensor.

        Returns the target, as torch's `copy_` does.
        """
        recorded = self._targets.get(target.untyped_storage()._cdata)
        place_in_file = self._files.find(source)
        if recorded is None:
            if place_in_file is not None:
                self.own_tensors.add(source.data_ptr())
            return target
        layer, name, shape, first_element = recorded
        # As `copy_` does, gives the source the target's shape.
        expanded = (
            source.expand(target.shape) if source.dim() <= target.dim() else source.reshape(target.shape)
        )
        start, size, strides = locate_view(
            shape, first_element + target.storage_offset(), target.shape, target.stride(), expanded.stride()
        )
        dtype = str(source.dtype).removeprefix("torch.")
        pieces = self.pieces.setdefault((layer, name), [])
        if place_in_file is not None:
            self.remote_tensors.add(source.data_ptr())
            file, file_offset = place_in_file
            pieces.append(Piece(start, size, file, file_offset, dtype, strides))
        elif source.device.type == "cpu" and source.numel() <= _MAX_RECORDED_VALUES:
            pieces.append(Piece(start, size, VALUES, 0, dtype, strides, _hex_digits(expanded)))
        else:
            self.problems.append(
                f"layer {layer}: the model's loader computes parameter {name}, so feed-forward ranks cannot "
                "read this parameter from the checkpoint"
            )
        if target.device.type != "meta":  # small parameters have memory, because loaders compare their values
            target.copy_(source)
        return target


def _hex_digits(values: torch.Tensor) -> str:
    """Returns the bytes of all values, in hexadecimal digits."""
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def _first_number(*values: Any) -> float | None:
    """Returns the first value that is not None, as a float; None if all values are None."""
    return next((float(value) for value in values if value is not None), None)
