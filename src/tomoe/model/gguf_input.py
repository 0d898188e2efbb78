"""A .gguf file as input: what it is, and checks that everything in it is used.

transformers reads some keys and tensors of such a file and silently ignores the rest. Whatever affects what the model computes is
added here, or refused in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

from tomoe.errors import UserError, shortened
from tomoe.model.gguf_tensors import FastReader, HeaderReader, LazyTensor, lazy_tensors, names_of, processor_of
from tomoe.model.shape import head_dim

# By architecture, the keys that transformers reads, and what it calls them; None: nothing is made of it.
_READ: Mapping[str, Mapping[str, str | None]] = cast(Any, GGUF_TO_TRANSFORMERS_MAPPING["config"])
ROPE_FACTORS = "rope_freqs.weight"
# Keys of a config that give modules a bias, and the tensors that they have one for.
_BIASES = {
    "attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down"),
}
# Keys of a file that say something of a config that transformers does not take from them.
_SAME = {
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Keys that change nothing in the numbers of a dense model, or that mean it at their only value.
_IDLE = ("tensor_data_layout", "vocab_size", "rope.scaling.finetuned")
_MEANINGLESS: Mapping[str, Any] = {
    "attention.causal": True,
    "pooling_type": 0,
    "expert_count": 0,
    "expert_used_count": 0,
}
# The keys of YaRN that transformers has names for.
_YARN = {"factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"}
_ADVICE = "convert from the original folder of the model (safetensors) instead"


@dataclass(frozen=True)
class GgufFile:
    """The keys and the tensors of one file."""

    path: Path
    keys: dict[str, Any]  # all that are no list
    tensors: dict[str, gguf.ReaderTensor]
    factors: Tensor | None  # [rotary pairs], by which the frequencies of the rotary embedding are divided

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read a file. Raises UserError if it cannot be parsed, or is a part of a model, an adapter or no language model."""
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)

    @property
    def architecture(self) -> str:
        return str(self.keys.get("general.architecture"))

    @property
    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor, by its name in the file."""
        return {name: (t.tensor_type.name, tuple(t.shape.tolist())) for name, t in self.tensors.items()}

    @property
    def _by_table(self) -> bool:
        """Whether transformers reads this architecture by tables, and reports nothing; else it reads and reports all."""
        return self.architecture in (*_READ, "qwen2moe", "qwen3moe")

    @property
    def reader(self) -> type[FastReader]:
        """The reader that transformers needs for its keys: for some architectures it counts the tokens."""
        return HeaderReader if "vocab_size" in _READ.get(self.architecture, {"vocab_size"}) else FastReader

    @property
    def read_by_tensor(self) -> bool:
        """Whether each tensor of the file is one tensor of the model, so that each can be read by itself."""
        return self._by_table and not self.keys.get(f"{self.architecture}.expert_count")

    def lazy_tensors(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, LazyTensor | Tensor]:
        """Return the tensors of a model without weights by name (`read_by_tensor`), as `gguf_tensors.lazy_tensors`, and zeros for
        biases that the file lacks because their neighbors have one."""
        given = any(getattr(model.config, key, False) and self._biases(parts) for key, parts in _BIASES.items())
        biases = {name: t for name, t in model.state_dict().items() if given and name.endswith("_proj.bias")}
        zeros = {name: torch.zeros_like(t, dtype=dtype, device="cpu") for name, t in biases.items()}
        return zeros | lazy_tensors(self.path, self.tensors, self.architecture, model, dtype)

    def complete_config_(self, config: PreTrainedConfig) -> None:
        """Add to the config what transformers did not read from the file. Raises UserError for what no config can express."""
        prefix = f"{self.architecture}."
        own = {k.removeprefix(prefix): v for k, v in self.keys.items() if k.startswith(prefix)}
        scaling = {k.removeprefix("rope.scaling."): v for k, v in own.items() if k.startswith("rope.scaling.")}
        self._stretch_(config, scaling)
        # those that the file lacks are zero (`lazy_tensors`)
        for key, parts in _BIASES.items():
            if self._biases(parts) and getattr(config, key, None) is False:
                setattr(config, key, True)
        read = _READ.get(str(config.model_type).removesuffix("_text"))
        if read is None or not self._by_table:
            return
        # how many dims rotate depends on how many there are
        for name in sorted(own, key=lambda name: name != "attention.key_length"):
            if read.get(name) is None and not name.startswith("rope.scaling.") and name not in _IDLE:
                self._compare_(config, name, own[name], read)

    def _compare_(self, config: PreTrainedConfig, name: str, value: Any, read: Mapping[str, str | None]) -> None:
        """Add to the config a key of the file that transformers does not read."""
        if name in _MEANINGLESS and value == _MEANINGLESS[name]:
            return
        if name == "rope.dimension_count":
            rope = getattr(config, "rope_parameters", None) or {}
            if value == int(head_dim(config) * rope.get("partial_rotary_factor", 1.0)):
                return
        elif same := _SAME.get(name):
            now = head_dim(config) if same == "head_dim" else getattr(config, same, None)
            if now == value or (now is None and not value):
                return
            of_some_layers = same == "sliding_window" and getattr(config, "layer_types", None) is not None
            known = name == "attention.value_length" or same in read.values() or of_some_layers
            if hasattr(config, same) and not known:
                setattr(config, same, value)
                return
        self._refuse(f"{self.architecture}.{name} = {value}")

    def _stretch_(self, config: PreTrainedConfig, scaling: dict[str, Any]) -> None:
        said = {k: v for k, v in scaling.items() if k not in ("type", "finetuned")}
        kind = scaling.get("type", "linear" if said.get("factor", 1.0) != 1.0 else "none")
        rope: Any = getattr(config, "rope_parameters", None)
        stretch: dict[str, Any] = {}
        if kind == "linear" and {*said} == {"factor"}:
            stretch = {"rope_type": "linear", "factor": said["factor"]}
        elif kind == "yarn" and {"factor", "original_context_length"} <= {*said} <= _YARN:
            stretch = {"rope_type": "yarn", "factor": said["factor"]}
            stretch["original_max_position_embeddings"] = said["original_context_length"]
            stretch |= {k.removeprefix("yarn_"): v for k, v in said.items() if k.startswith("yarn_")}
        elif kind != "none" or said.get("attn_factor", 1.0) != 1.0:
            self._refuse(f"{self.architecture}.rope.scaling ({kind}, {said})")
        one_rope = isinstance(rope, dict) and "rope_theta" in rope
        if self.factors is not None and bool((self.factors != 1).any()):
            if stretch or not one_rope:
                self._refuse(ROPE_FACTORS)
            stretch = self._llama3(float(rope["rope_theta"]))
        if stretch and not one_rope:
            self._refuse(f"{self.architecture}.rope.scaling ({kind}, {said})")
        if stretch:
            config.rope_parameters = {"rope_theta": rope["rope_theta"]} | stretch

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Recover the parameters of Llama 3.1 that give these factors; the file holds only the result."""
        assert self.factors is not None
        count = len(self.factors)
        factor = float(self.factors.max())
        waves = 2 * math.pi * theta ** (torch.arange(count, dtype=torch.float64) / count)
        for original in (2**n for n in range(5, 21)):
            low, high = 1.0, 4.0
            smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
            if torch.allclose(1 / ((1 - smooth) / factor + smooth), self.factors.double(), rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        self._refuse(ROPE_FACTORS)

    def _biases(self, parts: tuple[str, ...]) -> bool:
        return any(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in self.tensors)

    def check_used(self, model: PreTrainedModel) -> None:
        """Raise UserError if the file holds a tensor that the model loaded from it does not have."""
        if not self._by_table:
            return
        used = names_of(model, processor_of(self.architecture, {}))
        if left := sorted(self.tensors.keys() - {*used, ROPE_FACTORS}):
            self._refuse(f"{len(left)} tensors, for example {left[0]}")

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.path} holds {what}, which transformers does not read, so the model would compute something else; {_ADVICE}"
        )


@lru_cache(maxsize=1)
def _read(path: Path, _changed: int, _size: int) -> GgufFile:
    try:
        reader = HeaderReader(path)
    except (OSError, MemoryError):
        raise
    # from a wrong magic number to an array that ends beyond the file
    except Exception as error:
        raise UserError(
            f"{path} is not a GGUF file, or it is damaged or cut off ({shortened(str(error) or type(error).__name__)}); "
            "get it again"
        ) from None
    plain = (field for field in reader.fields.values() if field.types and field.types[0] != gguf.GGUFValueType.ARRAY)
    keys = {field.name: _value(field) for field in plain}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    _check_kind(path, keys, tensors)
    factors = tensors.get(ROPE_FACTORS)
    return GgufFile(path, keys, tensors, None if factors is None else torch.tensor(factors.data).float().flatten())


def _value(field: gguf.ReaderField) -> Any:
    stored = field.parts[field.data[0]]
    return (
        bytes(stored).decode("utf-8", "replace") if field.types[0] == gguf.GGUFValueType.STRING else stored.tolist()[0]
    )


def _check_kind(path: Path, keys: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    parts = int(keys.get("split.count") or 1)
    if parts > 1:
        raise UserError(
            f"{path} is part {int(keys.get('split.no', 0)) + 1} of {parts} of a split model; merge them first "
            "(llama-gguf-split --merge FIRST_PART WHOLE.gguf) and name the whole file"
        )
    kind = str(keys.get("general.type", "model"))
    if kind == "adapter" or any(key.startswith("adapter.") for key in keys):
        raise UserError(
            f"{path} is an adapter ({keys.get('adapter.type', 'lora')}), not a model; merge it into its model "
            "(llama-export-lora) and name the result"
        )
    if kind != "model" or keys.get("general.architecture") == "clip":
        raise UserError(f"{path} is not a language model but {kind if kind != 'model' else 'an encoder of images'!r}")
    if not tensors:
        raise UserError(f"{path} holds no weights (a vocabulary alone, perhaps); name a file with the model's weights")
