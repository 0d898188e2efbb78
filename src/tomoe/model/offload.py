"""A model whose decoder layers stay in their files: one is in memory only while it runs, or while it is looked at.

What lies around the layers (embeddings, last norm, output matrix) is in memory. Layers come and go through accelerate's
hooks, so whatever runs the model, or hooks into its parts, need not know.
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
    """accelerate's hook that brings a module's tensors and takes them away; then what the layer took goes back to the system."""

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        given = super().post_forward(module, output)
        give_back_()
        return given


def give_back_() -> None:
    """glibc keeps freed memory of middling size, in pieces that the next layer finds no use for: some MB a layer add up."""
    if sys.platform == "linux" and (
        trim := getattr(ctypes.CDLL(None), "malloc_trim", None)
    ):  # other C libraries have none
        trim(0)


class CannotStream(UserError):
    """The model can be loaded whole, perhaps, but not read layer by layer."""


class StoredWeights(Mapping[str, Tensor]):
    """The tensors in a folder's safetensors files by name, each read when it is asked for."""

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


def load_streamed(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The model in `folder`, with weights of `dtype`; its layers run on `device`.

    Raises CannotStream where the files do not name their tensors as the model does, or lack some.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    cast_(model, dtype)
    stored, tied = StoredWeights(folder), set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = [name for name in model.state_dict() if name not in stored and name not in tied]
    if missing:
        raise CannotStream(
            f"the weights of {folder} cannot be read layer by layer: {len(missing)} tensors of the model are not there under "
            f"their names, for example {missing[0]}; save the model anew with transformers, or load it whole"
        )
    buffers = {name for name, _ in model.named_buffers()}
    for name, tensor in model.state_dict().items():
        if name in stored and stored.shape(name) != tensor.shape:
            raise ValueError(f"{name} has shape {stored.shape(name)}, its config says {tuple(tensor.shape)}")
        if name in stored and (name in buffers or not name.startswith(LAYERS)):
            _put_(model, name, stored[name].to(device, tensor.dtype))
    for name in buffers - set(model.state_dict()):
        _put_(model, name, model.get_buffer(name).to(device))
    model.tie_weights(
        missing_keys=set(model.state_dict()) - set(stored), recompute_mapping=False
    )  # as in from_pretrained
    stream_layers_(model, stored, device)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def cast_(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Parameters to the dtype, but for those that the model wants in float32; no buffers."""
    for name, parameter in model.named_parameters():
        exact = set(name.split(".")) & set(model._keep_in_fp32_modules_strict or ())
        parameter.data = parameter.data.to(torch.float32 if exact else dtype)


def _put_(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False) if leaf in owner._parameters else tensor)


def stream_layers_(
    model: PreTrainedModel, weights: Mapping[str, Tensor], device: torch.device, buffers: bool = False
) -> None:
    """From now on each layer takes its parameters from `weights` (by their full names) when it runs, and drops them after.

    With `buffers`, its buffers too; else these stay.
    """
    for i, layer in enumerate(decoder_layers(model)):
        own = PrefixedDataset(weights, f"{LAYERS}{i}.")
        add_hook_to_module(
            layer, _LayerHook(device, True, weights_map=own, offload_buffers=buffers, place_submodules=True)
        )
    # by this transformers knows such a model when it saves it
    cast(Any, model).hf_device_map = {"": str(device), "model.layers": "disk"}


def present(layer: nn.Module) -> AbstractContextManager[None]:
    """Inside the block the layer's tensors are in memory, whether the model is streamed or not."""
    held: AbstractContextManager[None] = align_module_device(layer)
    return held


def weights_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, whether it was read for this only) of the whole state dict, sorted by name; one at a time."""
    for name, tensor in sorted(model.state_dict().items()):
        read: Any = tensor.is_meta
        if read:
            number, _, own = name.removeprefix(LAYERS).partition(".")
            hook: Any = decoder_layers(model)[int(number)]._hf_hook
            yield name, hook.weights_map[own].to(tensor.dtype), True
        else:
            packed = (
                type(tensor) not in (Tensor, nn.Parameter)
                and hasattr(tensor, "dequantize")
                and tensor.is_floating_point()
            )
            yield name, tensor.dequantize() if packed else tensor, packed
