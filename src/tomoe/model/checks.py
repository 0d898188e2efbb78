"""What the files of a model folder claim, held against what they hold, before anything of that size is built.

transformers allocates what config.json asks for and finds out afterwards whether the weights are there. A folder from a
stranger may ask for a billion layers.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from tomoe.errors import UserError
from tomoe.files import plain, read_json, weight_files

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_FREE = 2**22  # parameters that no file need hold: buffers of small models
_PER_BYTE = 8  # parameters in a byte of the closest packing there is


def vet(folder: Path) -> None:
    """Raises UserError, in one sentence, where the folder asks for more than its weights can fill, or points out of it."""
    config, shapes = read_json(folder / "config.json"), _stored(folder)
    for place in (config, *(v for v in config.values() if isinstance(v, dict))):
        for name in _LAYERS:
            layers = place.get(name)
            if isinstance(layers, int) and layers > len(shapes):
                raise UserError(
                    f"{folder} has {layers:,} layers by its config, but only {len(shapes)} tensors of weights"
                )
    named = config.get("transformers_weights")
    if named is not None and not plain(named):
        raise UserError(f"the config of {folder} takes its weights from {named!r}, which is no file of that folder")
    claimed = _claimed(folder)
    stored = sum(math.prod(shape) * size for shape, size in shapes)
    if claimed > _PER_BYTE * stored + _FREE:
        raise UserError(f"{folder} has {claimed:,} parameters by its config, but only {stored:,} bytes of weights")


def _claimed(folder: Path) -> int:
    """Numbers in the model that the config describes, counted on a device that stores none."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return sum(t.numel() for t in (*model.parameters(), *model.buffers()))


def _stored(folder: Path) -> list[tuple[list[int], int]]:
    """Shape and bytes of an element of every tensor, from the headers of the files that transformers would read."""
    found = []
    for file in weight_files(folder):
        if not file.is_file():
            other = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
            hint = (
                f"; {other[0]} may run code when it is read, so it is not: convert it to safetensors" if other else ""
            )
            raise UserError(f"{folder} holds no {file.name}{hint}")
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                found.append((part.get_shape(), _bytes(part.get_dtype())))
    return found


def _bytes(dtype: str) -> int:
    """F32 -> 4; the packed ones count as one."""
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1
