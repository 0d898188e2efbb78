"""A stored model, as a folder or a .gguf file, and how transformers loads it.

transformers reports what it found while it loads; each entry of the report is handled here or refused in one sentence.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeGuard

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tomoe.errors import Note, UserError
from tomoe.model.checks import Headers, check_claims, check_size, skeleton, stored_tensors
from tomoe.model.dequantization import RUNTIME_SCALES, Packing, prepare_packing_
from tomoe.model.gguf_input import GgufFile
from tomoe.model.gguf_tensors import reading_by
from tomoe.model.library_errors import check_generation_config, usable_config
from tomoe.model.names import check_no_adapter

# Causal masks, which older versions of transformers stored among the weights: GPT-Neo, StarCoder and others have them.
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_STORED_MASKS = re.compile(r"(^|\.)(attn|attention|self_attention)\.(masked_)?bias$")


def is_gguf(place: Path | str) -> TypeGuard[Path]:
    return isinstance(place, Path) and place.suffix == ".gguf"


def location(place: Path | str) -> dict[str, str]:
    """Return `from_pretrained`'s arguments for a folder, file or hub id."""
    if is_gguf(place):
        return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    return {"pretrained_model_name_or_path": str(place)}


def read_config(place: Path | str) -> PreTrainedConfig:
    """Read the config of a folder, file or hub id; attention runs by an installed backend. Raises UserError for a .gguf file that
    is not a model, or that no config can express."""
    file = GgufFile.read(place) if is_gguf(place) else None
    config: PreTrainedConfig
    with nullcontext() if file is None else reading_by(file.reader):
        try:
            config = AutoConfig.from_pretrained(trust_remote_code=False, **location(place))
        except AttributeError:
            # "torch.bfloat16" or "auto", as scripts write them, name no dtype; every load here says which one it takes
            config = AutoConfig.from_pretrained(trust_remote_code=False, dtype="float32", **location(place))
    if file is not None:
        file.complete_config_(config)
    config._attn_implementation = None
    config.return_dict, config.output_attentions, config.output_hidden_states = True, False, False
    return config


@dataclass(frozen=True)
class StoredModel:
    """A folder or a .gguf file, with its config."""

    place: Path
    config: PreTrainedConfig
    packing: Packing
    tensors: Headers = field(default_factory=dict)

    @classmethod
    def open(cls, place: Path) -> Self:
        """Read the config and the headers of the weights. Raises UserError if there is an adapter beside the model, if the config
        claims more than the weights can fill, or if the weights cannot be dequantized."""
        if is_gguf(place):
            return cls(place, read_config(place), Packing("GGUF"), GgufFile.read(place).headers)
        check_no_adapter(place)
        tensors = stored_tensors(place)
        check_claims(place, tensors)
        with usable_config(place):
            config = read_config(place)
            check_size(place, config, tensors)
        check_generation_config(place)
        if getattr(config, "auto_map", None) and type(config).__module__.startswith("transformers."):
            warnings.warn(
                f"{place} brings code of its own, which is not run: transformers' own {config.model_type} computes it",
                Note,
                stacklevel=2,
            )
        packing = prepare_packing_(config, {name: dtype for name, (dtype, _) in tensors.items()})
        return cls(place, config, packing, tensors)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of most of the weights; None if they are packed or quantized."""
        if self.packing.method and self.file is None:
            return None
        sizes = Counter[str]()
        for dtype, shape in self.tensors.values():
            sizes[dtype] += math.prod(shape)
        return _DTYPES.get(max(sizes, key=sizes.__getitem__))

    @property
    def read_by_layer(self) -> bool:
        """Whether layers can be left in the files."""
        return self.file.read_by_tensor if self.file is not None else not self.packing.unpacked_at_once

    @property
    def file(self) -> GgufFile | None:
        """The .gguf file, if it is one."""
        return GgufFile.read(self.place) if is_gguf(self.place) else None

    def load(self, dtype: torch.dtype, **arguments: Any) -> PreTrainedModel:
        """Load the model with weights of `dtype`, plain unless the arguments quantize it. Raises UserError by the report."""
        settings: dict[str, Any] = location(self.place) | {"use_safetensors": True, "trust_remote_code": False}
        loads: Any = AutoModelForCausalLM
        file = self.file
        if file is not None and file.read_by_tensor:
            empty = skeleton(self.place, self.config)
            loads = type(empty)
            tensors = file.lazy_tensors(empty, dtype)
            if arguments.get("device_map") == "meta":
                # transformers would read the numbers to leave them out
                tensors = {n: t if isinstance(t, Tensor) else t.without_numbers() for n, t in tensors.items()}
            settings = {"pretrained_model_name_or_path": None, "state_dict": tensors}
        # Older versions of transformers have no such config: they always dequantize.
        elif file is not None and (gguf := getattr(transformers, "GgufConfig", None)) is not None:
            settings["quantization_config"] = gguf(dequantize=True)
        if self.packing.renames:
            settings["key_mapping"] = dict(self.packing.renames)
        loaded: PreTrainedModel
        report: dict[str, Any]
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True} | arguments
        loaded, report = loads.from_pretrained(config=self.config, dtype=dtype, **settings)
        self._check(report)
        if file is not None:
            file.check_used(loaded)
        return loaded

    def without_weights(self, dtype: torch.dtype) -> PreTrainedModel:
        """Make the model without memory for its tensors, checked as by `load`: only the headers of its files are read."""
        return self.load(dtype, device_map="meta")

    def _check(self, report: Mapping[str, Any]) -> None:
        """Raise UserError unless the model's tensors and those of the files agree in names and shapes."""
        if missing := sorted(report["missing_keys"]):
            raise UserError(
                f"the weights of {self.place} lack {len(missing)} tensors of its config, for example {missing[0]}"
            )
        if mismatched := sorted(report["mismatched_keys"]):
            name, stored, expected = mismatched[0]
            raise UserError(
                f"{len(mismatched)} tensors of {self.place} do not have the shapes of its config: {name} is "
                f"{tuple(stored)}, its config says {tuple(expected)}"
            )
        left = [name for name in sorted(report["unexpected_keys"]) if not _STORED_MASKS.search(name)]
        if self.packing.method:
            left = [name for name in left if not RUNTIME_SCALES.search(name)]
        if left:
            raise UserError(
                f"the weights of {self.place} hold {len(left)} tensors that its config does not have, for example "
                f"{left[0]}; the model would compute something else without them: get the config.json that belongs to them"
            )


def untie_(model: PreTrainedModel) -> None:
    """Untie the config if the files hold two matrices where it ties them: transformers keeps both, but only this time."""
    for config in (model.config, model.config.get_text_config()):
        outputs = model.get_output_embeddings()
        if getattr(config, "tie_word_embeddings", False) and outputs is not None:
            config.tie_word_embeddings = outputs.weight is model.get_input_embeddings().weight


def writable_generation_(model: PreTrainedModel) -> None:
    """Drop generation settings that transformers calls invalid: it reads them with a warning, and does not write them."""
    config = model.generation_config
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        for name in re.findall(r"^- `(\w+)`:", str(error), re.MULTILINE):
            setattr(config, name, None)
