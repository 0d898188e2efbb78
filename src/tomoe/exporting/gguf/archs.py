"""The architectures of llama.cpp that a converted model can be written as: what they share, and those with a plain decoder.

llama.cpp's `llama` with experts is Mixtral, and it takes biases of Q, K and V where a file has them. Fine-grained experts of
such decoders go into `glm4moe`, with the tensors of Glm4Moe.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.exporting.stock.architecture import StockArch, StockLayout
from tomoe.exporting.stock.fine_grained import dense_matrices, router_scales, router_tensors
from tomoe.exporting.stock.plain_decoder import PlainDecoder, attention_tensors, sliding_windows
from tomoe.exporting.stock.table import GLM4_MOE, MIXTRAL, ROUTED_SCALE
from tomoe.model.shape import num_kv_heads
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import MAX_EXPERTS_PER_TOKEN

Part = tuple[str, Callable[[], Tensor], tuple[int, ...] | None]
"""The name of a tensor in the file, a function that makes it, and its shape if making it once more costs something."""
ATTENTION_NAMES = {
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}


class GgufArch(ABC):
    """An architecture of llama.cpp, by its name.

    stock: the class of transformers with the same layout and decoder, and with llama.cpp's router; multiple: of expert
    widths, unless the user sets it; own_target: whose conversions fit.
    """

    name: ClassVar[str]
    stock: ClassVar[StockArch]
    multiple: ClassVar[int | None] = 1
    own_target: ClassVar[str] = ""

    def problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Say why it cannot compute this MoE, as half a sentence; None if it can."""
        return self.stock.decoder.problem(moe) or self._layout_problem(moe) or self.engine_problem(moe)

    def dense_problem(self, dense: PreTrainedModel) -> str | None:
        """Say why it cannot represent any MoE made from this dense model, judging by its parts; None if it may."""
        return self.stock.decoder.problem(dense) or self.engine_problem(dense)

    def _layout_problem(self, moe: ToMoEForCausalLM) -> str | None:
        used = self.layout(moe, 1).top_k
        most = MAX_EXPERTS_PER_TOKEN
        if used <= most:
            return self.stock.layout_problem(moe)
        return f"a token would use {used} experts of a layer, and llama.cpp takes {most}; convert with target = {self.own_target}"

    @abstractmethod
    def engine_problem(self, model: PreTrainedModel) -> str | None:
        """Say what of this model, dense or converted, llama.cpp does not compute, as half a sentence; None if nothing."""

    def context_length(self, moe: ToMoEForCausalLM) -> int:
        """Longest context, in tokens."""
        return int(moe.config.max_position_embeddings)

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> StockLayout:
        """Return the sizes that all layers get."""
        return self.stock.layout(moe, multiple or self.multiple)

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        """Write the keys of the decoder and of the experts; here those that all architectures have."""
        writer.add_embedding_length(moe.config.hidden_size)
        writer.add_head_count(moe.config.num_attention_heads)
        writer.add_rope_freq_base(float(moe.config.rope_parameters["rope_theta"]))
        writer.add_vocab_size(moe.config.vocab_size)
        if layout.experts:
            writer.add_expert_count(layout.experts)
            writer.add_expert_used_count(layout.top_k)

    @abstractmethod
    def decoder_parts(self, moe: ToMoEForCausalLM) -> Iterator[Part]:
        """Yield the tensors outside of the MLPs."""

    def parts(self, moe: ToMoEForCausalLM, layout: StockLayout) -> Iterator[Part]:
        """Yield every tensor of the file in order."""
        yield from self.decoder_parts(moe)
        form = self.stock.form
        mlps = moe.mlps()

        @cache
        def scales() -> list[float]:
            assert form is not None
            return router_scales(moe, form)

        def router(part: int, i: int) -> Tensor:
            if form is None:
                return mlps[i].router.weight
            return router_tensors(mlps[i], layout, scales()[i], form)[part]

        for i, mlp in enumerate(mlps):
            prefix = f"blk.{i}.ffn_"
            f, d = mlp.up_proj.shape
            if i < layout.dense_layers:
                yield from mlp_parts(f"{prefix}{{}}.weight", partial(_whole, mlp), f, d)
                continue
            if not layout.experts:
                yield from mlp_parts(f"{prefix}{{}}.weight", partial(self._only, mlp, layout), layout.width, d)
                continue
            yield f"{prefix}gate_inp.weight", partial(router, 0, i), (layout.experts, d)
            if form is not None and form.corrected:
                yield f"blk.{i}.exp_probs_b.bias", partial(router, 1, i), (layout.experts,)
            yield from self._expert_parts(mlp, layout, prefix)

    def _only(self, mlp: ToMoEMLP, layout: StockLayout, part: int) -> Tensor:
        return self.stock.matrices(mlp, layout, 0)[part]

    def _expert_parts(self, mlp: ToMoEMLP, layout: StockLayout, prefix: str) -> Iterator[Part]:
        hidden = mlp.up_proj.shape[1]

        def stacked(part: int) -> Tensor:
            return torch.stack([self.stock.matrices(mlp, layout, n)[part] for n in range(layout.experts)])

        def shared(part: int) -> Tensor:
            return self.stock.matrices(mlp, layout, None)[part]

        if getattr(self.stock, "shared_gate", None):
            yield f"{prefix}gate_inp_shexp.weight", lambda: mlp.up_proj.new_zeros(hidden), (hidden,)
        yield from mlp_parts(f"{prefix}{{}}_exps.weight", stacked, layout.width, hidden, (layout.experts,))
        if layout.shared:
            yield from mlp_parts(f"{prefix}{{}}_shexp.weight", shared, layout.shared, hidden)


def _whole(mlp: ToMoEMLP, part: int) -> Tensor:
    return dense_matrices(mlp)[part]


def mlp_parts(
    names: str, make: Callable[[int], Tensor], width: int, hidden: int, number: tuple[int, ...] = ()
) -> Iterator[Part]:
    """Return gate, up and down of an MLP, or of a stack of `number` of them; `make` makes the part of that number."""
    for part, place in enumerate(("gate", "up", "down")):
        shape = (hidden, width) if place == "down" else (width, hidden)
        yield names.format(place), partial(make, part), (*number, *shape)


class PlainArch(GgufArch):
    """An architecture with the decoder that several stock classes share; mlp_norm: name of the norm before an MLP;
    scaled_frequencies: whether a file may hold them; other_form: what to say if another experts.form would do."""

    mlp_norm: ClassVar[str] = "ffn_norm"
    scaled_frequencies: ClassVar[bool] = False
    other_form: ClassVar[str] = ""

    def engine_problem(self, model: PreTrainedModel) -> str | None:
        rotary: Any = model.model.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope") or rotary.attention_scaling != 1.0:
            return f"its rotary embedding ({rotary.rope_type}) scales with the length or the scores"
        if rotary.rope_type == "default" or self.scaled_frequencies:
            return None
        # overlapping experts become a `llama`, which has no place for norms of Q and K
        normed = getattr(model.model.layers[0].self_attn, "q_norm", None) is not None
        other = "" if normed else self.other_form
        return f"llama.cpp's {self.name} takes plain rotary frequencies only, and these are scaled ({rotary.rope_type}){other}"

    def context_length(self, moe: ToMoEForCausalLM) -> int:
        """llama.cpp computes no sliding window here, so contexts must fit into one."""
        return min([super().context_length(moe), *(w for w in sliding_windows(moe) if w is not None)])

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        super().write_sizes(writer, moe, layout)
        head_dim = moe.model.layers[0].self_attn.head_dim
        writer.add_head_count_kv(num_kv_heads(moe.config))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_layer_norm_rms_eps(moe.config.rms_norm_eps)

    def decoder_parts(self, moe: ToMoEForCausalLM) -> Iterator[Part]:
        inner: Any = moe.model
        yield "token_embd.weight", lambda: inner.embed_tokens.weight, None
        yield "output_norm.weight", lambda: inner.norm.weight, None
        if not moe.config.tie_word_embeddings:
            yield "output.weight", lambda: moe.lm_head.weight, None
        if inner.rotary_emb.rope_type != "default":
            yield "rope_freqs.weight", lambda: _plain_frequencies(moe) / inner.rotary_emb.inv_freq.float(), None
        for i, layer in enumerate(inner.layers):
            yield from self.layer_parts(layer, f"blk.{i}.")

    def layer_parts(self, layer: Any, prefix: str) -> Iterator[Part]:
        yield f"{prefix}attn_norm.weight", lambda: layer.input_layernorm.weight, None
        yield f"{prefix}{self.mlp_norm}.weight", lambda: layer.post_attention_layernorm.weight, None

        def made_again(name: str) -> Tensor:
            # padded copies of all layers would be as large as the dense attention
            return self.attention(layer.self_attn)[name]

        for name, t in self.attention(layer.self_attn).items():
            yield prefix + name, partial(made_again, name), tuple(t.shape)

    def attention(self, attention: Any) -> dict[str, Tensor]:
        """Return the tensors of a layer's attention by their names in the file."""
        tensors = {}
        for name, t in attention_tensors(attention).items():
            part, _, kind = name.partition(".")
            tensors[f"{ATTENTION_NAMES[part]}.{kind}"] = self.ordered(part, t, attention.head_dim)
        return tensors

    def ordered(self, part: str, t: Tensor, head_dim: int) -> Tensor:
        """Reorder the rows of an attention tensor for llama.cpp; halves of heads are paired, as in transformers."""
        return t


def _plain_frequencies(moe: ToMoEForCausalLM) -> Tensor:
    """Rotary frequencies before any scaling; a file holds their divisors."""
    size = 2 * moe.model.rotary_emb.inv_freq.numel()
    theta = moe.config.rope_parameters["rope_theta"]
    return 1.0 / theta ** (torch.arange(0, size, 2, device=moe.device).float() / size)


def interleaved(t: Float[Tensor, " HC *rest"], head_dim: int) -> Float[Tensor, " HC *rest"]:
    """Reorder rows of Q or K for a rotary embedding that pairs neighbors (2 j, 2 j + 1) instead of (j, j + C/2)."""
    return t.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


class Llama(PlainArch):
    """Overlapping experts, one per token, or plain MLPs if all tokens share one expert. Adjacent dims of a head are paired, and
    frequencies may be scaled."""

    name = "llama"
    stock = replace(MIXTRAL, decoder=PlainDecoder(biased=True, silu_only=True))
    multiple = None
    scaled_frequencies = True

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> StockLayout:
        layout = super().layout(moe, multiple)
        return replace(layout, experts=0, top_k=0) if layout.experts == 1 else layout

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        super().write_sizes(writer, moe, layout)
        writer.add_feed_forward_length(layout.width)

    def ordered(self, part: str, t: Tensor, head_dim: int) -> Tensor:
        return interleaved(t, head_dim) if part in ("q_proj", "k_proj") else t


class Glm4Moe(PlainArch):
    """Routed experts and a shared one; the first layers may be dense."""

    name = "glm4moe"
    stock = GLM4_MOE
    own_target = "gguf"
    mlp_norm = "post_attention_norm"
    other_form = "; experts.form = overlapping has a place for them"

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        super().write_sizes(writer, moe, layout)
        writer.add_expert_feed_forward_length(layout.width)
        writer.add_feed_forward_length(moe.config.intermediate_size)
        writer.add_expert_shared_count(layout.shared // layout.width)
        writer.add_expert_weights_scale(ROUTED_SCALE)
        writer.add_expert_weights_norm(False)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(layout.dense_layers)
