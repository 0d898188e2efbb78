"""Offloads decoder layers to disk: a layer stays in its files and is in memory only while it runs or is materialized.

Everything else (embeddings, last norm, output matrix) is in memory. Layers are loaded and dropped by accelerate's hooks, so
code that runs the model or hooks its parts is unaffected.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import PrefixedDataset, set_module_tensor_to_device
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe.errors import UserError
from tomoe.model.gguf_input import GgufFile
from tomoe.model.gguf_tensors import LazyTensor
from tomoe.model.mlp import named_layers
from tomoe.model.stored import StoredModel


class _LayerHook(AlignDevicesHook):
    """accelerate's hook, which loads and drops a module's tensors; then returns the layer's memory to the system."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        result = super().post_forward(module, output)
        # glibc keeps pieces that the next layer cannot use, some MB per layer; other C libraries have no such function
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)
        return result


def load_offloaded(stored: StoredModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load the model with weights of `dtype`; its layers stay on disk, or, where transformers has to dequantize or join them, in
    a temporary folder that is deleted with the model, and run on `device`; those of a .gguf file are dequantized each time.
    Raises UserError if a layer cannot be read by itself, and as `StoredModel.load`."""
    if not stored.read_by_layer:
        raise UserError(
            f"{stored.place} cannot be read layer by layer: {stored.packing.method} is unpacked as a whole; load it whole, "
            "without offload"
        )
    bare = stored.without_weights(dtype)
    if stored.file is not None:
        return _left_in(stored.file, bare, dtype, device)
    scratch = tempfile.mkdtemp(prefix="tomoe-layers-")
    try:
        model = stored.load(dtype, device_map=_device_map(bare, device), offload_folder=scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    hooks: list[Any] = [module._hf_hook for module in named_layers(model)[1].modules() if hasattr(module, "_hf_hook")]
    weights = next(hook.weights_map.dataset for hook in hooks if getattr(hook, "weights_map", None) is not None)
    weakref.finalize(weights, shutil.rmtree, scratch, ignore_errors=True)
    # transformers would cast every tensor to one dtype, those that a family keeps in float32 too
    for name, tensor in bare.named_parameters():
        if name in weights.index:
            weights.index[name]["dtype"] = str(tensor.dtype).removeprefix("torch.")
            model.get_parameter(name).data = tensor.data
    remove_hook_from_module(model, recurse=True)
    offload_layers_(model, weights, device)
    return model


class _Dequantized(Mapping[str, Tensor]):
    """Tensors of a .gguf file, each dequantized on every read."""

    def __init__(self, tensors: Mapping[str, LazyTensor | Tensor]):
        self.tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name][...]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _left_in(file: GgufFile, bare: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return the model `bare`, which has no weights, with its layers left in the file."""
    weights = _Dequantized(file.lazy_tensors(bare, dtype))
    # unlike those of `bare`, its buffers hold numbers
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = type(bare)._from_config(bare.config, dtype=dtype)
    model.generation_config = bare.generation_config
    layers = f"{named_layers(model)[0]}."
    tied = {*(model.all_tied_weights_keys or ())}
    for name, parameter in bare.named_parameters():
        if name.startswith(layers):
            model.get_parameter(name).data = parameter.data
        elif name not in tied:
            set_module_tensor_to_device(model, name, device, weights[name])
    for name, buffer in model.named_buffers():
        if not name.startswith(layers):
            set_module_tensor_to_device(model, name, device, buffer)
    model.tie_weights()
    offload_layers_(model, weights, device)
    return model


def _device_map(model: PreTrainedModel, device: torch.device) -> dict[str, str]:
    """Map the decoder layers to `disk`, every other part to the device."""
    path = named_layers(model)[0]
    places = {path: "disk"}
    parent = ""
    for step in path.split("."):
        module = model.get_submodule(parent)
        parts = [n for n, _ in (*module.named_children(), *module.named_parameters(recurse=False))]
        parts += [n for n, _ in module.named_buffers(recurse=False)]
        places |= {f"{parent}.{name}".lstrip("."): str(device) for name in parts if name != step}
        parent = f"{parent}.{step}".lstrip(".")
    return places


def cast_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters to the dtype, except those that the model keeps in float32; buffers are unchanged. Offloaded parameters are
    cast on every read."""
    for name, parameter in model.named_parameters():
        keeps_fp32 = any(f".{module}." in f".{name}." for module in model._keep_in_fp32_modules_strict or ())
        parameter.data = parameter.data.to(torch.float32 if keeps_fp32 else dtype)


def offload_layers_(
    model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device, buffers: bool = False
) -> None:
    """Make each layer load its parameters, and with `buffers` its buffers, from `weights` (by their full names) when it runs, and
    drop them afterwards."""
    prefix, layers = named_layers(model)
    for i, layer in enumerate(layers):
        layer_weights = PrefixedDataset(weights, f"{prefix}.{i}.")
        hook = _LayerHook(device, True, weights_map=layer_weights, offload_buffers=buffers, place_submodules=True)
        with _persistent(layer):
            add_hook_to_module(layer, hook)
    # this tells transformers, when it saves the model, where the layers are
    cast(Any, model).hf_device_map = {"": str(device), prefix: "disk"}


class _Changed(Mapping[str, Tensor]):
    """Tensors, one of which is changed on every read."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, change: Callable[[Tensor], Tensor]):
        self.tensors, self.name, self.change = tensors, name, change

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        return self.change(tensor) if name == self.name else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


@torch.no_grad()
def change_(layer: nn.Module, weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Change a parameter of a decoder layer in place or, if offloaded, on every read."""
    hook: Any = getattr(layer, "_hf_hook", None)
    if hook is None:
        weight.copy_(change(weight))
        return
    name = next(name for name, own in layer.named_parameters() if own is weight)
    hook.weights_map = _Changed(hook.weights_map, name, change)


@contextmanager
def _persistent(layer: nn.Module) -> Iterator[None]:
    """Inside the block the layer has no non-persistent buffers, which accelerate (1.15) looks up by their name in their own
    module; afterwards they have their previous values."""
    left_out = {module: module._non_persistent_buffers_set for module in layer.modules()}
    values = {(module, name): module._buffers[name] for module, names in left_out.items() for name in names}
    for module in left_out:
        module._non_persistent_buffers_set = set()
    try:
        yield
    finally:
        for module, names in left_out.items():
            module._non_persistent_buffers_set = names
        for (module, name), value in values.items():
            module._buffers[name] = value


def iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield (name, tensor, whether the tensor is temporary) of the complete state dict, sorted by name, one in memory at a time:
    offloaded ones are read from disk, as before `cast_`, quantized ones are dequantized."""
    prefix, layers = named_layers(model)
    for name, tensor in sorted(model.state_dict().items()):
        if cast(Any, tensor).is_meta:
            number, _, leaf = name.removeprefix(f"{prefix}.").partition(".")
            hook: Any = layers[int(number)]._hf_hook
            yield name, hook.weights_map[leaf], True
        else:
            subclass = type(tensor) not in (Tensor, nn.Parameter)
            packed = subclass and hasattr(tensor, "dequantize") and tensor.is_floating_point()
            yield name, tensor.dequantize() if packed else tensor, packed
