"""A GGUF file for llama.cpp and all that is built on it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.exporting.gguf_archs import GgufArch, arch_of
from tomoe.exporting.gguf_file import FILE_TYPES, Entry, larger_rows, make_entry, write_tensors
from tomoe.exporting.gguf_tokenizer import write_tokenizer
from tomoe.exporting.gguf_verification import Comparison
from tomoe.exporting.llama_cpp import check_quantizer
from tomoe.exporting.plain_decoder import sliding_windows
from tomoe.exporting.target import Options, Precision, Sizes, Target
from tomoe.exporting.verification import Check, Proof
from tomoe.model.loading import load_tokenizer
from tomoe.model.mlp import decoder_layers
from tomoe.model.shape import num_kv_heads
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback, no_stage_progress


class Gguf(Target):
    """One file, in the architecture of llama.cpp that suits the experts."""

    name = "gguf"
    about = "a GGUF file for llama.cpp"

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        return _arch(moe).problem(moe)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        return arch_of(form, _is_normed(dense)).dense_problem(dense)

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        check_quantizer(options.precision)
        arch = _arch(moe)
        words, copies, zeros = arch.describe(moe, arch.layout(moe, options.width_multiple))
        tensors = list(entries(moe, options.precision, options.width_multiple))
        types = f"{options.precision}{larger_rows(tensors, options.precision)}"
        words = f"{words}, {types}, for contexts of up to {context_length(moe):,} tokens"
        return Sizes(sum(entry.nbytes for entry in tensors), words, copies, zeros)

    def write(
        self, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
        on_progress: StageCallback,
    ) -> None:  # fmt: skip
        file = self.file(folder, options)
        write_gguf(moe, tokenizer, file, options.precision, options.width_multiple, on_progress)

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof | None:
        if find_spec("xllamacpp") is None:
            return None
        moe, tokenizer = load_moe(folder, "float32", check.device), load_tokenizer(str(folder))
        comparison = Comparison(self.file(out, options), options.precision, moe, tokenizer, context_length(moe), check)
        return _arch(moe).verify(comparison)

    def how_to_load(self, folder: Path, options: Options) -> str:
        return f"llama-cli -m {shlex.quote(str(self.file(folder, options)))}"

    @staticmethod
    def file(folder: Path, options: Options) -> Path:
        """The path of the file in an export."""
        return folder / f"model-{options.precision}.gguf"


def _arch(moe: ToMoEForCausalLM) -> GgufArch[Any]:
    return arch_of(moe.config.tomoe_expert_form, _is_normed(moe))


def _is_normed(model: PreTrainedModel) -> bool:
    attention = getattr(decoder_layers(model)[0], "self_attn", None)
    return getattr(attention, "q_norm", None) is not None


def context_length(moe: ToMoEForCausalLM) -> int:
    """Longest context, in tokens: llama.cpp computes no sliding window here, so contexts must fit into one."""
    return min([int(moe.config.max_position_embeddings), *(w for w in sliding_windows(moe) if w is not None)])


@torch.no_grad()
def entries(moe: ToMoEForCausalLM, precision: Precision, multiple: int | None) -> Iterator[Entry]:
    """Yield every tensor of the file in order; an entry makes its tensor when it is written."""
    arch, inner = _arch(moe), moe.model

    def entry(name: str, make: Callable[[], Tensor], shape: tuple[int, ...] | None = None) -> Entry:
        return make_entry(name, precision, make, shape)

    def weight(name: str, module: Any) -> Entry:
        return entry(name, lambda: module.weight)

    experts = arch.experts(moe, arch.layout(moe, multiple), entry)
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
        yield weight(f"{prefix}{arch.mlp_norm}.weight", layer.post_attention_layernorm)
        for name, t in arch.attention(layer.self_attn).items():
            # made again when it is written: padded copies of all layers would be as large as the dense attention
            yield entry(prefix + name, partial(_attention_tensor, arch, layer.self_attn, name), tuple(t.shape))
        if not arch.experts_last:
            yield from experts(i)
    if arch.experts_last:
        for i in range(len(inner.layers)):
            yield from experts(i)


def _attention_tensor(arch: GgufArch[Any], attention: Any, name: str) -> Tensor:
    return arch.attention(attention)[name]


def _plain_frequencies(moe: ToMoEForCausalLM) -> Tensor:
    """Rotary frequencies before any scaling; a file holds what they are divided by."""
    size = 2 * moe.model.rotary_emb.inv_freq.numel()
    theta = moe.config.rope_parameters["rope_theta"]
    return 1.0 / theta ** (torch.arange(0, size, 2, device=moe.device).float() / size)


def write_gguf(
    moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, path: Path, precision: Precision,
    multiple: int | None = None, on_progress: StageCallback = no_stage_progress,
) -> None:  # fmt: skip
    """Write one file, tensor by tensor. Raises UserError for a tokenizer that llama.cpp would read otherwise."""
    arch = _arch(moe)
    writer = GGUFWriter(None, arch.name)
    _write_sizes(writer, moe, precision, path)
    arch.write_sizes(writer, moe, arch.layout(moe, multiple))
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, moe.config.vocab_size)
    write_tensors(writer, path, list(entries(moe, precision, multiple)), on_progress)


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
    writer.add_head_count_kv(num_kv_heads(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
