"""Checks a model folder before anything of the size that it claims is built.

transformers allocates what config.json asks for and finds out afterwards whether the weights are there. A folder from an
untrusted source may ask for a billion layers.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tomoe.errors import UserError
from tomoe.files import is_plain_filename, read_json, weight_files

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
# elements that no file need hold: buffers of small models
_FREE_ELEMENTS = 2**22
# of the densest packing there is
_ELEMENTS_PER_BYTE = 8


def check_model_folder(folder: Path) -> None:
    """Raises UserError, in one sentence, if the config claims more than the weights can fill, or names other folders."""
    config, tensors = read_json(folder / "config.json"), _stored_tensors(folder)
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in _LAYERS:
            layers = section.get(name)
            if isinstance(layers, int) and layers > len(tensors):
                raise UserError(
                    f"{folder} has {layers:,} layers by its config, but only {len(tensors)} tensors of weights"
                )
    weights = config.get("transformers_weights")
    if weights is not None and not is_plain_filename(weights):
        raise UserError(f"the config of {folder} takes its weights from {weights!r}, which is no file of that folder")
    claimed = _param_count_from_config(folder)
    stored = sum(math.prod(shape) * element for shape, element in tensors)
    if claimed > _ELEMENTS_PER_BYTE * stored + _FREE_ELEMENTS:
        raise UserError(f"{folder} has {claimed:,} parameters by its config, but only {stored:,} bytes of weights")


def _param_count_from_config(folder: Path) -> int:
    """Parameters and buffers of the model that the config describes, counted on the meta device."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()))


def _stored_tensors(folder: Path) -> list[tuple[list[int], int]]:
    """Shape and bytes per element of every tensor, from the headers of the files that transformers would read."""
    tensors = []
    for path in weight_files(folder):
        if not path.is_file():
            unsafe = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
            hint = f"; {unsafe[0]} may run code when it is read: convert it to safetensors" if unsafe else ""
            raise UserError(f"{folder} holds no {path.name}{hint}")
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                header = file.get_slice(name)
                tensors.append((header.get_shape(), _element_size(header.get_dtype())))
    return tensors


def _element_size(dtype: str) -> int:
    """Bytes of an element: F32 -> 4; packed types count as 1."""
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1
