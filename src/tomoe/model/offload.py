"""Offloads decoder layers to disk: a layer stays in its files and is in memory only while it runs or is materialized.

Everything else (embeddings, last norm, output matrix) is in memory. Layers are loaded and dropped by accelerate's hooks, so
code that runs the model, or hooks into its parts, need not know.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import PrefixedDataset, align_module_device
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from tomoe.errors import UserError
from tomoe.files import weight_files
from tomoe.model.structure import decoder_layers

LAYERS = "model.layers."


class _LayerHook(AlignDevicesHook):
    """accelerate's hook, which loads and drops a module's tensors; then the memory of the layer is returned to the system."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        result = super().post_forward(module, output)
        trim_heap()
        return result


def trim_heap() -> None:
    """Return freed memory to the system.

    glibc keeps freed pieces of medium size that the next layer cannot use: some MB per layer add up.
    """
    # other C libraries have no malloc_trim
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class CannotOffload(UserError):
    """The model cannot be read layer by layer, but perhaps loaded whole."""


class StoredWeights(Mapping[str, Tensor]):
    """The tensors in a folder's safetensors files by name, each read on access."""

    def __init__(self, folder: Path):
        self.files: dict[str, Path] = {}
        for path in weight_files(folder):
            with safe_open(path, "pt") as file:
                self.files |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self.files[name], "pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.files[name], "pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def load_offloaded(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in `folder`, with weights of `dtype`; its layers run on `device`.

    Raises CannotOffload if the files name their tensors otherwise than the model does, or lack some.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    cast_(model, dtype)
    stored, tied = StoredWeights(folder), set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = [name for name in model.state_dict() if name not in stored and name not in tied]
    if missing:
        raise CannotOffload(
            f"the weights of {folder} cannot be read layer by layer: {len(missing)} tensors of the model are missing under "
            f"their names, for example {missing[0]}; save the model again with transformers, or load it whole"
        )
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        if name in stored and stored.shape(name) != tensor.shape:
            raise ValueError(f"{name} has shape {stored.shape(name)}, its config says {tuple(tensor.shape)}")
        if name in stored and (name in buffers or not name.startswith(LAYERS)):
            _set_tensor_(model, name, stored[name].to(device, tensor.dtype))
    for name in buffers - set(model.state_dict()):
        _set_tensor_(model, name, model.get_buffer(name).to(device))
    # as in from_pretrained
    model.tie_weights(missing_keys=set(model.state_dict()) - set(stored), recompute_mapping=False)
    offload_layers_(model, stored, device)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def cast_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters to the dtype, except those that the model keeps in float32; buffers stay as they are."""
    for name, parameter in model.named_parameters():
        keeps_fp32 = set(name.split(".")) & set(model._keep_in_fp32_modules_strict or ())
        parameter.data = parameter.data.to(torch.float32 if keeps_fp32 else dtype)


def _set_tensor_(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in module._parameters else tensor)


def offload_layers_(
    model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device, buffers: bool = False
) -> None:
    """Make each layer load its parameters from `weights` (by their full names) when it runs, and drop them afterwards.

    With `buffers`, its buffers too; otherwise these stay in memory.
    """
    for i, layer in enumerate(decoder_layers(model)):
        layer_weights = PrefixedDataset(weights, f"{LAYERS}{i}.")
        hook = _LayerHook(device, True, weights_map=layer_weights, offload_buffers=buffers, place_submodules=True)
        add_hook_to_module(layer, hook)
    # this tells transformers, when it saves the model, where the layers are
    cast(Any, model).hf_device_map = {"": str(device), "model.layers": "disk"}


def materialized(layer: nn.Module) -> AbstractContextManager[None]:
    """A context in which the layer's tensors are in memory, whether the model is offloaded or not."""
    context: AbstractContextManager[None] = align_module_device(layer)
    return context


def iter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, whether the tensor is temporary) of the whole state dict, sorted by name, one in memory at a time.

    Tensors of offloaded layers are read from disk, quantized ones are dequantized.
    """
    for name, tensor in sorted(model.state_dict().items()):
        if cast(Any, tensor).is_meta:
            number, _, leaf = name.removeprefix(LAYERS).partition(".")
            hook: Any = decoder_layers(model)[int(number)]._hf_hook
            yield name, hook.weights_map[leaf].to(tensor.dtype), True
        else:
            subclass = type(tensor) not in (Tensor, nn.Parameter)
            packed = subclass and hasattr(tensor, "dequantize") and tensor.is_floating_point()
            yield name, tensor.dequantize() if packed else tensor, packed
