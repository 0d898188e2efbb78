"""The same MoE as a GGUF file for llama.cpp and all that is built on it.

llama.cpp's `llama` architecture with experts is Mixtral, and it takes biases of Q, K and V where a file has them; `qwen3moe`
normalizes Q and K. Both make the weight of a single chosen expert exactly 1. (`qwen2moe` does not: it multiplies by the
router's probability.) Fine-grained experts go into `glm4moe`, with the tensors of glm4_moe.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    quants,
)
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.exporting import glm4_moe
from tomoe.exporting.engines import quantize
from tomoe.exporting.gguf_tokenizer import write_tokenizer
from tomoe.exporting.stock import (
    Layout,
    StockArch,
    attention_tensors,
    expert_tensors,
    gguf_arch,
    gguf_name,
    incompatibility,
    llama_cpp_problem,
    make_layout,
)
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.conversion import MOST_USED

Precision = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q4_k"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
TYPES = {name: GGMLQuantizationType[name.upper()] for name in PRECISIONS}
FILE_TYPES = {
    "f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "bf16": LlamaFileType.MOSTLY_BF16,
    "q8_0": LlamaFileType.MOSTLY_Q8_0, "q6_k": LlamaFileType.MOSTLY_Q6_K, "q4_k": LlamaFileType.MOSTLY_Q4_K_S,
}  # fmt: skip
# What takes the place of a type if a row is no multiple of the numbers that it quantizes together.
COARSER_ROWS = {
    GGMLQuantizationType.Q4_K: GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q6_K: GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q8_0: GGMLQuantizationType.F16,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    make: Callable[[], Tensor]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape with rows counted in bytes."""
        return tuple(quants.quant_shape_to_byte_shape(self.shape, self.type))

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored_shape)


def _arch(moe: ToMoEForCausalLM) -> StockArch:
    first: Any = moe.model.layers[0]
    return gguf_arch(first.self_attn.q_norm is not None, moe.config.expert_form == "fine")


def gguf_incompatibility(moe: ToMoEForCausalLM) -> str | None:
    """Why llama.cpp cannot compute what this MoE computes, as half a sentence; None if it can."""
    arch = _arch(moe)
    problem = incompatibility(moe, arch)
    if problem:
        return problem
    if arch.fine and (used := glm4_moe.make_layout(moe, 1).top_k) > MOST_USED:
        return (
            f"a token would use {used} experts of a layer, and llama.cpp takes {MOST_USED}; convert with target = gguf"
        )
    return llama_cpp_problem(moe, arch)


def context_length(moe: ToMoEForCausalLM) -> int:
    """Longest context, in tokens: llama.cpp computes no sliding window here, so contexts must fit into one."""
    windows = [layer.self_attn.sliding_window for layer in moe.model.layers]
    return min([int(moe.config.max_position_embeddings), *(int(w) for w in windows if w is not None)])


def interleaved(t: Float[Tensor, " HC *rest"], head_dim: int) -> Float[Tensor, " HC *rest"]:
    """Reorder rows of Q or K for a rotary embedding that pairs neighbors (2 j, 2 j + 1) instead of (j, j + C/2)."""
    return t.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _wanted_type(name: str, shape: tuple[int, ...], precision: Precision) -> GGMLQuantizationType:
    """Routers, norms and biases are small and stay float32; embeddings and output matrix are not made coarser than Q6_K."""
    if len(shape) == 1 or "ffn_gate_inp" in name:
        return GGMLQuantizationType.F32
    return TYPES["q6_k" if precision == "q4_k" and name in ("token_embd.weight", "output.weight") else precision]


def _type_of(name: str, shape: tuple[int, ...], precision: Precision) -> GGMLQuantizationType:
    """The wanted type, or the next that its rows are long enough for."""
    kind = _wanted_type(name, shape, precision)
    while shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = COARSER_ROWS[kind]
    return kind


@torch.no_grad()
def entries(moe: ToMoEForCausalLM, precision: Precision, multiple: int) -> Iterator[Entry]:
    """Yield every tensor of the file in order; an entry makes its tensor when it is written."""
    arch, inner = _arch(moe), moe.model

    def entry(name: str, make: Callable[[], Tensor], shape: tuple[int, ...] | None = None) -> Entry:
        shape = tuple(make().shape) if shape is None else shape
        return Entry(name, shape, _type_of(name, shape, precision), make)

    def weight(name: str, module: Any) -> Entry:
        return entry(name, lambda: module.weight)

    yield weight("token_embd.weight", inner.embed_tokens)
    yield weight("output_norm.weight", inner.norm)
    if not moe.config.tie_word_embeddings:
        yield weight("output.weight", moe.lm_head)
    rotary: Any = inner.rotary_emb
    if rotary.rope_type != "default":
        yield entry("rope_freqs.weight", lambda: _plain_frequencies(moe) / rotary.inv_freq.float())
    for i, layer in enumerate(inner.layers):
        prefix = f"blk.{i}."
        yield weight(f"{prefix}attn_norm.weight", layer.input_layernorm)
        norm = "post_attention_norm" if arch.fine else "ffn_norm"
        yield weight(f"{prefix}{norm}.weight", layer.post_attention_layernorm)
        for name, t in _attention(layer.self_attn, arch).items():
            # made again when it is written: padded copies of all layers would be as large as the dense attention
            yield entry(prefix + name, partial(_attention_tensor, layer.self_attn, arch, name), tuple(t.shape))
        if not arch.fine:
            yield weight(f"{prefix}ffn_gate_inp.weight", layer.mlp.router)
            yield from _experts(layer.mlp, make_layout(moe, arch, multiple), arch, prefix, entry)
    if arch.fine:
        yield from _fine_experts(moe, multiple, entry)


def _attention(attention: Any, arch: StockArch) -> dict[str, Tensor]:
    places = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
    places |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
    tensors = {}
    for name, t in attention_tensors(attention).items():
        part, _, kind = name.partition(".")
        # the others pair halves, as transformers does
        if part in ("q_proj", "k_proj") and gguf_name(arch) == "llama":
            t = interleaved(t, attention.head_dim)
        tensors[f"{places[part]}.{kind}"] = t
    return tensors


def _attention_tensor(attention: Any, arch: StockArch, name: str) -> Tensor:
    return _attention(attention, arch)[name]


def _experts(mlp: Any, layout: Layout, arch: StockArch, prefix: str, entry: Callable[..., Entry]) -> Iterator[Entry]:
    @cache
    def copies() -> dict[str, Tensor]:
        return expert_tensors(mlp, layout, arch.expert_names)

    n, d, w = mlp.num_experts, mlp.up_proj.shape[1], layout.width
    shapes = ((n, w, d), (n, w, d), (n, d, w))
    for place, name, shape in zip(("gate", "up", "down"), arch.expert_names, shapes, strict=True):

        def stacked(name: str = name, last: bool = place == "down") -> Tensor:
            tensors = torch.stack([copies()[f"experts.{e}.{name}.weight"] for e in range(n)])
            if last:
                # the copies of one layer at a time
                copies.cache_clear()
            return tensors

        yield entry(f"{prefix}ffn_{place}_exps.weight", stacked, shape)


def _fine_experts(moe: ToMoEForCausalLM, multiple: int, entry: Callable[..., Entry]) -> Iterator[Entry]:
    """The whole MLPs of the first layers, and routers, experts and shared experts of the others, as in a Glm4Moe."""
    layout = glm4_moe.make_layout(moe, multiple)
    n, d, w, s = layout.experts, moe.config.hidden_size, layout.width, layout.shared

    @cache
    def scales() -> list[float]:
        return glm4_moe.router_scales(moe)

    def router(mlp: Any, i: int, part: int) -> Tensor:
        return glm4_moe.router_tensors(mlp, layout, scales()[i])[part]

    def stacked(mlp: Any, part: int) -> Tensor:
        return torch.stack([glm4_moe.expert_matrices(mlp, layout, e)[part] for e in range(n)])

    def shared(mlp: Any, part: int) -> Tensor:
        return glm4_moe.expert_matrices(mlp, layout, None)[part]

    def whole(mlp: Any, part: int) -> Tensor:
        return glm4_moe.whole_matrices(mlp)[part]

    for i, layer in enumerate(moe.model.layers):
        prefix, mlp = f"blk.{i}.", layer.mlp
        if i < layout.whole:
            for part, place in enumerate(("gate", "up", "down")):
                f = mlp.up_proj.shape[0]
                yield entry(f"{prefix}ffn_{place}.weight", partial(whole, mlp, part), (d, f) if part == 2 else (f, d))
            continue
        yield entry(f"{prefix}ffn_gate_inp.weight", partial(router, mlp, i, 0), (n, d))
        yield entry(f"{prefix}exp_probs_b.bias", partial(router, mlp, i, 1), (n,))
        for part, place in enumerate(("gate", "up", "down")):
            one, all_shared = ((d, w), (d, s)) if place == "down" else ((w, d), (s, d))
            yield entry(f"{prefix}ffn_{place}_exps.weight", partial(stacked, mlp, part), (n, *one))
            yield entry(f"{prefix}ffn_{place}_shexp.weight", partial(shared, mlp, part), all_shared)


def _plain_frequencies(moe: ToMoEForCausalLM) -> Tensor:
    """Rotary frequencies before any scaling; a file holds what they are divided by."""
    size = 2 * moe.model.rotary_emb.inv_freq.numel()
    theta = moe.config.rope_parameters["rope_theta"]
    return 1.0 / theta ** (torch.arange(0, size, 2, device=moe.device).float() / size)


def gguf_layout(moe: ToMoEForCausalLM, multiple: int) -> tuple[int, str, int]:
    """Width of every expert in the file, the layout in words, and experts of zeros in the layer with most of them."""
    arch = _arch(moe)
    if arch.fine:
        fine = glm4_moe.make_layout(moe, multiple)
        return fine.width, glm4_moe.layout_words(moe, fine), fine.zeros
    width = make_layout(moe, arch, multiple).width
    return width, f"{moe.config.num_experts} experts of {width:,} neurons in each layer", 0


def gguf_bytes(moe: ToMoEForCausalLM, precision: Precision, multiple: int) -> int:
    """Bytes of the tensors."""
    return sum(entry.nbytes for entry in entries(moe, precision, multiple))


def larger_rows(moe: ToMoEForCausalLM, precision: Precision, multiple: int) -> str:
    """How many of the numbers need a larger type, in words; empty if none do."""
    numbers: Counter[str] = Counter()
    total, wanted = 0, TYPES[precision]
    for entry in entries(moe, precision, multiple):
        total += math.prod(entry.shape)
        if entry.type != _wanted_type(entry.name, entry.shape, precision):
            numbers[entry.type.name.lower()] += math.prod(entry.shape)
    if not numbers:
        return ""
    shares = " and ".join(f"{count / total:.0%} of the numbers {kind}" for kind, count in numbers.most_common())
    return f" ({shares}: rows that are no multiple of {GGML_QUANT_SIZES[wanted][0]})"


def write_gguf(
    moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, path: Path, precision: Precision, multiple: int,
    on_progress: StageCallback = no_stage_progress,
) -> None:  # fmt: skip
    """Write one file, tensor by tensor. Raises UserError for a tokenizer that llama.cpp would read otherwise."""
    writer = GGUFWriter(None, gguf_name(_arch(moe)))
    _write_sizes(writer, moe, precision, path)
    _write_expert_sizes(writer, moe, multiple)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, moe.config.vocab_size)
    tensors = list(entries(moe, precision, multiple))
    for entry in tensors:
        # the writer takes the shape in bytes of types that numpy does not have
        plain = {GGMLQuantizationType.F32: "float32", GGMLQuantizationType.F16: "float16"}.get(entry.type)
        kind = np.dtype(plain or "uint8")
        shape = entry.shape if plain else entry.stored_shape
        writer.add_tensor_info(entry.name, shape, kind, entry.nbytes, raw_dtype=entry.type)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    total, written = sum(entry.nbytes for entry in tensors), 0
    for entry in tensors:
        data = quantize(entry.make().detach().float().cpu().contiguous().numpy(), entry.type)
        writer.write_tensor_data(data)
        written += data.nbytes
        on_progress(written, total)
    writer.close()


def _write_sizes(writer: GGUFWriter, moe: ToMoEForCausalLM, precision: Precision, path: Path) -> None:
    config, first = moe.config, moe.model.layers[0].self_attn
    head_dim = first.head_dim
    writer.add_type("model")
    writer.add_name(path.stem)
    writer.add_file_type(FILE_TYPES[precision])
    writer.add_quantization_version(2)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(context_length(moe))
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(first.k_proj.out_features // first.qk_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_expert_sizes(writer: GGUFWriter, moe: ToMoEForCausalLM, multiple: int) -> None:
    arch = _arch(moe)
    if not arch.fine:
        width = make_layout(moe, arch, multiple).width
        writer.add_feed_forward_length(width)
        if arch.normed:
            writer.add_expert_feed_forward_length(width)
        writer.add_expert_count(moe.config.num_experts)
        writer.add_expert_used_count(1)
        return
    layout = glm4_moe.make_layout(moe, multiple)
    writer.add_feed_forward_length(moe.config.intermediate_size)
    writer.add_expert_feed_forward_length(layout.width)
    writer.add_expert_count(layout.experts)
    writer.add_expert_used_count(layout.top_k)
    writer.add_expert_shared_count(layout.shared // layout.width)
    writer.add_expert_weights_scale(glm4_moe.ROUTED_SCALE)
    writer.add_expert_weights_norm(False)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(layout.whole)
