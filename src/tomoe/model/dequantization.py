"""Quantized weights are dequantized by transformers on loading, or refused with advice.

Whether transformers can turn a method back is asked of its own classes, not of a list: some methods dequantize while the
tensors are read (fp8, compressed-tensors), others a model that was loaded packed (bitsandbytes), most not at all.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING, AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from tomoe.errors import Note, UserError

# The scales of activations and of the cache: how others round while the model runs. Plain weights need none of them.
RUNTIME_SCALES = re.compile(r"\.(input|activation|output|[qkv])(_global)?_(scale|zero_point)$")
# Per-tensor, per-row and per-block scales of float8 weights beside them, as ModelOpt and others name them.
_SCALES = ("_scale_inv", "_scale")
_RENAMED_SCALES = {r"\.weight_scale$": ".weight_scale_inv"}
# Numbers that nothing has packed, and what every method stores beside those that it has.
_PLAIN_DTYPES = ("F16", "BF16", "F32", "F64")
_PACKED = re.compile(r"scale|zero|quant|absmax|packed|codebook|g_idx")
# its weights are stored plain, and rounded by the model itself whenever it runs
_ROUNDED_WHILE_RUNNING = ("bitnet",)


@dataclass(frozen=True)
class Packing:
    """How the weights of a model are stored."""

    method: str = ""  # the method as transformers names it; empty for plain weights
    renames: Mapping[str, str] = field(default_factory=dict)
    """Patterns of tensor names, and what transformers calls them."""
    unpacked_at_once: bool = False  # whether the model is loaded packed and dequantized then


def prepare_packing_(config: PreTrainedConfig, dtypes: Mapping[str, str]) -> Packing:
    """Make transformers dequantize quantized weights; drop an entry of the config that names no method of transformers, or was
    left over beside plain weights. `dtypes`: of the stored tensors, as in their files. Raises UserError for a method that
    transformers cannot dequantize, and whatever it raises if a package is missing."""
    entry = _entry(config)
    method = str(entry.get("quant_method", ""))
    if entry.get("load_in_4bit") or entry.get("load_in_8bit"):
        method = f"bitsandbytes_{4 if entry.get('load_in_4bit') else 8}bit"
    if method and method not in _ROUNDED_WHILE_RUNNING and _are_plain(dtypes):
        message = f"{config.name_or_path}: its config names the quantization {method}, but its weights are plain, and are read so"
        warnings.warn(message, Note, stacklevel=2)
        method = ""
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        drop_entry_(config)
        # float8 weights with scales beside them
        weights = [name for name, dtype in dtypes.items() if dtype.startswith("F8_") and name.endswith(".weight")]
        if not any(name + scale in dtypes for name in weights for scale in _SCALES):
            return Packing()
        config.quantization_config = {"quant_method": "fp8", "dequantize": True}
        return Packing("fp8", _RENAMED_SCALES)
    settings = AUTO_QUANTIZATION_CONFIG_MAPPING[method]
    quantizer = AUTO_QUANTIZER_MAPPING[method]
    while_read = "dequantize" in inspect.signature(settings).parameters
    unpacks_model = getattr(quantizer, "_dequantize", None) is not HfQuantizer._dequantize
    if not while_read and not unpacks_model:
        raise UserError(
            f"the weights of {config.name_or_path} are stored quantized by {method}, and transformers cannot turn them back "
            "into plain ones; name the model that was quantized"
        )
    config.quantization_config = entry | ({"dequantize": True} if while_read else {})
    # whether the packages are there
    AutoHfQuantizer.from_config(dict(config.quantization_config), pre_quantized=True).validate_environment(
        device_map=None, weights_only=True
    )
    return Packing(method, unpacked_at_once=not while_read)


def _are_plain(dtypes: Mapping[str, str]) -> bool:
    """Whether there are tensors, none of them packed or a scale of packed ones."""
    plain = all(dtype in _PLAIN_DTYPES and not _PACKED.search(name) for name, dtype in dtypes.items())
    return bool(dtypes) and plain


def drop_entry_(config: PreTrainedConfig) -> None:
    """Remove the quantization from a config: its weights are plain."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config


def _entry(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config's own entry, or that of its text model; empty if there is none."""
    for part in (config, config.get_text_config()):
        entry = getattr(part, "quantization_config", None)
        if isinstance(entry, dict):
            return entry
    return {}
