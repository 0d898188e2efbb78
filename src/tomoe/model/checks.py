"""Checks a model folder before anything of its claimed size is allocated.

transformers allocates what config.json asks for and finds out afterwards whether the weights are there. A folder from an
untrusted source may ask for a billion layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe.errors import UserError, shortened
from tomoe.files import is_plain_filename, read_json, weight_files
from tomoe.model.shape import text_config

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
_FREE_ELEMENTS = 2**22  # elements that no file need hold: buffers of small models
_SLICE = 2**24  # elements that are looked at together
_ELEMENTS_PER_BYTE = 8  # of the densest packing there is


Headers = Mapping[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of tensors, by name, as safetensors files say them before the bytes."""


def stored_tensors(folder: Path) -> Headers:
    """Read the headers of the files that transformers would read. Raises UserError if one is missing."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    places: dict[str, list[Path]] = {}
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() and index.is_file():
        shards = [
            file for file in set(read_json(index).get("weight_map", {}).values()) if (folder / str(file)).is_file()
        ]
        if shards and shards != ["model.safetensors"]:
            raise UserError(
                f"{folder} holds model.safetensors and the shards of {index.name} ({min(shards)} ...): two sets of weights, "
                "of which one is older; delete the one that is not the model"
            )
    files = weight_files(folder)
    for path in files:
        if not path.is_file():
            raise UserError(f"{folder} holds no {path.name}{_other_weights(folder)}")
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                header = file.get_slice(name)
                places.setdefault(name, []).append(path)
                _check_same(name, places[name][0], path)
                tensors[name] = (header.get_dtype(), tuple(header.get_shape()))
    if len(files) > 1:
        for name, file in read_json(index)["weight_map"].items():
            if name in places and folder / file not in places[name]:
                raise UserError(
                    f"{index} says that {name} lies in {file}, but it lies in {places[name][0].name}: they are of different "
                    "versions; get them again"
                )
    return tensors


def _check_same(name: str, first: Path, second: Path) -> None:
    """Raise UserError if two shards hold different tensors of one name: which one is read depends on the reader."""
    if first == second:
        return
    with safe_open(first, "pt") as one, safe_open(second, "pt") as other:
        if torch.equal(one.get_tensor(name), other.get_tensor(name)):
            return
    raise UserError(
        f"{first.parent} holds {name} twice, with other numbers in {second.name} than in {first.name}: one of the files is left "
        "over from another version; get them again"
    )


def _other_weights(folder: Path) -> str:
    """Name the other weights in the folder, and what to do with them."""
    unsafe = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if unsafe:
        return f"; {unsafe[0]} may run code when it is read: convert it to safetensors"
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others and not (folder / "model.safetensors.index.json").exists():
        return f", but {others[0]}; if its tensors have the names that transformers gives them, rename it"
    return ""


def check_claims(folder: Path, tensors: Headers) -> None:
    """Raise UserError if config.json, before it is used, has more layers than tensors, or names other folders."""
    config = read_json(folder / "config.json")
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in _LAYERS:
            layers = section.get(name)
            if isinstance(layers, int) and layers > len(tensors):
                raise UserError(
                    f"{folder} has {layers:,} layers by its config, but only {len(tensors)} tensors of weights"
                )
    weights = config.get("transformers_weights")
    if weights is not None and not is_plain_filename(weights):
        raise UserError(
            f"the config of {folder} takes its weights from {weights!r}, which is not a file in that folder"
        )


def skeleton(place: Path | str, config: PreTrainedConfig) -> PreTrainedModel:
    """Make the model of a config without weights. Raises UserError if transformers supports the model type, but not as a causal
    language model, or only half of one."""
    kind = config.model_type
    text = text_config(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "auto_map", None):
        # transformers would load its decoder alone, which was never trained so, with embeddings drawn anew
        if getattr(config, "is_encoder_decoder", False):
            raise UserError(
                f"{place} is a {kind!r} model: its decoder reads the output of an encoder, and tomoe converts decoder-only "
                "models"
            )
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        return model
    if text.model_type == kind:
        raise UserError(
            f"{place} is a {kind!r} model, of which transformers has no causal language model to start from"
        )
    raise UserError(
        f"{place} is a {kind!r} model, which reads more than text, and transformers does not load the language model in it "
        f"({text.model_type!r}) alone; save that one with its tokenizer to a folder of its own and name that"
    )


def check_size(folder: Path, config: PreTrainedConfig, tensors: Headers) -> None:
    """Raise UserError as `skeleton`, and if the config's model is larger than the weights can fill."""
    model = skeleton(folder, config)
    claimed = sum(t.numel() for t in (*model.parameters(), *model.buffers()))
    stored = sum(math.prod(shape) * _element_size(dtype) for dtype, shape in tensors.values())
    if claimed > _ELEMENTS_PER_BYTE * stored + _FREE_ELEMENTS:
        raise UserError(f"{folder} has {claimed:,} parameters by its config, but only {stored:,} bytes of weights")


def nonfinite_tensors(folder: Path) -> list[str]:
    """Name the tensors in the folder's safetensors files that hold NaN or inf, as FILE: TENSOR. Raises UserError if a file cannot
    be read."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in sorted(file.keys()):
                    # a view of the file, read slice by slice
                    slices = file.get_tensor(name).reshape(-1).split(_SLICE)
                    if not all(bool(part.float().isfinite().all()) for part in slices):
                        found.append(f"{path.name}: {name}")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} is damaged ({shortened(error)}); get it again") from None
    return found


def _element_size(dtype: str) -> int:
    """Bytes per element: F32 -> 4; packed types count as 1."""
    bits = "".join(c for c in dtype.partition("_")[0] if c.isdigit())
    return max(1, int(bits) // 8) if bits else 1
