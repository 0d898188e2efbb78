"""Pico models as others store them: in half precision, quantized by several methods, as GGUF."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from conftest import make_pico
from pico_tokenizer import make_tokenizer
from tomoe.exporting.gguf.tokenizer import write_tokenizer

# Wide enough for blocks of 64 numbers, as bitsandbytes packs them.
SIZES = {"hidden_size": 64, "intermediate_size": 512, "vocab_size": 259, "max_position_embeddings": 256}
FLOAT8 = 448.0


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the tensors of a model in one file."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def write_stored(folder: Path, kind: str) -> PreTrainedModel:
    """Write a pico LLaMA in one of the KINDS and its tokenizer; return the model with the numbers that are stored."""
    dense = make_pico("llama", **SIZES)
    dense.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return KINDS[kind](dense, folder)


def _cast(dtype: torch.dtype) -> Callable[[PreTrainedModel, Path], PreTrainedModel]:
    def store(dense: PreTrainedModel, folder: Path) -> PreTrainedModel:
        edit_tensors(folder, lambda tensors: {name: t.to(dtype) for name, t in tensors.items()})
        for weight in dense.parameters():
            weight.data = weight.to(dtype).float()
        return dense

    return store


def _float8(scale_name: str, block: int, **entry: object) -> Callable[[PreTrainedModel, Path], PreTrainedModel]:
    """Projections in float8 with a scale for each square block, or (0) one for each matrix, or (1) one for each row."""

    def store(dense: PreTrainedModel, folder: Path) -> PreTrainedModel:
        stored: dict[str, Tensor] = {}
        for name, weight in dense.state_dict().items():
            stored[name] = weight
            if "_proj" not in name:
                continue
            rows, columns = {0: weight.shape, 1: (1, weight.shape[1])}.get(block, (block, block))
            blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            scales = blocks.abs().amax((1, 3)) / FLOAT8
            packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
            stored[name] = packed.reshape(weight.shape)
            stored[name.replace(".weight", f".{scale_name}")] = scales if block else scales[0, 0]
            stored[name.replace(".weight", ".input_scale")] = torch.tensor(0.5)
            weight.copy_((packed.float() * scales[:, None, :, None]).reshape(weight.shape))
        edit_tensors(folder, lambda _: stored)
        if entry:
            edit_config(folder, quantization_config=entry)
        return dense

    return store


def _bitsandbytes(bits: int) -> Callable[[PreTrainedModel, Path], PreTrainedModel]:
    def store(dense: PreTrainedModel, folder: Path) -> PreTrainedModel:
        config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        packed = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu")
        packed.save_pretrained(folder)
        return packed.dequantize(torch.float32).float()

    return store


# as llm-compressor writes it
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
        },
    },
}
KINDS = {
    "float32": _cast(torch.float32),
    "bfloat16": _cast(torch.bfloat16),
    "fp8 in blocks": _float8(
        "weight_scale_inv", 16, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[16, 16]
    ),
    "fp8 without a method": _float8("weight_scale", 0),
    "fp8 of another method": _float8("weight_scale", 1, quant_method="modelopt", quant_algo="FP8"),
    "compressed-tensors": _float8("weight_scale", 1, **_COMPRESSED),
    "bitsandbytes 8": _bitsandbytes(8),
    "bitsandbytes 4": _bitsandbytes(4),
}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    more: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    **split: int,
) -> None:
    """A LLaMA as llama.cpp stores it: its own names, and query and key rows in pairs. `more` adds keys and tensors."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama", **split)
    writer.add_name("A Title")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)

    def stored(name: str, tensor: Tensor) -> Tensor:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        return (
            tensor
            if heads is None
            else tensor.view(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        )

    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), stored(name, tensor).contiguous().numpy())
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_random_gguf(config: PreTrainedConfig, path: Path, architecture: str) -> None:
    """A file with the keys and tensors that transformers reads for this config, and with weights of all types."""
    rng = np.random.default_rng(0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(config.model_type)
    for key, name in GGUF_CONFIG_MAPPING[architecture].items():
        value = getattr(config, str(name), None)
        if isinstance(value, int | float) and key not in ("vocab_size", "expert_count", "expert_used_count"):
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{architecture}.{key}", value)
    if architecture == "lfm2":
        writer.add_head_count_kv([config.num_key_value_heads * (k != "conv") for k in config.layer_types])
        writer.add_rope_freq_base(1e4)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    kinds = itertools.cycle(
        gguf.GGMLQuantizationType[k] for k in ("Q4_K", "Q6_K", "Q8_0", "F16", "BF16", "Q4_1", "F32")
    )
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={})
    state = model.state_dict()
    for name, target in sorted(get_gguf_hf_weights_map(model, processor).items()):
        if target not in state or (name == "output.weight" and config.tie_word_embeddings):
            continue
        shape = [n for i, n in enumerate(state[target].shape) if i != 1 or "conv.conv" not in target]
        kind = next(kinds) if len(shape) == 2 and shape[1] % 256 == 0 else gguf.GGMLQuantizationType.F32
        numbers = rng.standard_normal(shape).astype(np.float32)
        if kind.name.endswith("_K"):
            # whose scales are finite whatever these bytes are
            numbers = rng.integers(0, 60, gguf.quant_shape_to_byte_shape(shape, kind), np.uint8)
        writer.add_tensor(name, numbers if numbers.dtype == np.uint8 else gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
