"""The architectures of llama.cpp that a converted model may become, one class each.

llama.cpp's `llama` with experts is Mixtral, and it takes biases of Q, K and V where a file has them; `qwen3moe` normalizes Q
and K. Both make the weight of a single chosen expert exactly 1. (`qwen2moe` does not: it multiplies by the router's
probability.) Fine-grained experts go into `glm4moe`, with the tensors of glm4_moe.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.exporting.gguf.file import Entry
from tomoe.exporting.gguf.verify import Comparison, verify_file_by_parts, verify_file_exactly
from tomoe.exporting.stock import fine_grained, glm4_moe
from tomoe.exporting.stock.fine_grained import (
    FineLayout,
    fine_layout,
    layout_words,
    router_scales,
    router_tensors,
    whole_matrices,
)
from tomoe.exporting.stock.overlapping import QWEN_PROJECTIONS, Layout, expert_tensors, has_copies, widest
from tomoe.exporting.stock.plain_decoder import Places, attention_tensors, dense_problem, sliding_windows, stock_problem
from tomoe.exporting.stock.routers import RouterForm
from tomoe.exporting.verify import Proof
from tomoe.model.shape import num_kv_heads
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.target_rules import MAX_EXPERTS_PER_TOKEN

LayoutT = TypeVar("LayoutT")
MakeEntry = Callable[..., Entry]
"""An entry of a name, a function that makes the tensor, and its shape if that is known."""
ATTENTION_NAMES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
                   "q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}  # fmt: skip


class GgufArch(ABC, Generic[LayoutT]):
    """An architecture, by llama.cpp's name."""

    name: ClassVar[str]

    @property
    def is_dialed(self) -> bool:
        """Whether llama.cpp may use another number of fine-grained experts."""
        return True

    @abstractmethod
    def problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Why it cannot compute what this MoE computes, as half a sentence; None if it can."""

    @abstractmethod
    def dense_problem(self, dense: PreTrainedModel) -> str | None:
        """Why no MoE made from this dense model could become it, judging by its parts; None if one might."""

    def context_length(self, moe: ToMoEForCausalLM) -> int:
        """Longest context, in tokens."""
        return int(moe.config.max_position_embeddings)

    @abstractmethod
    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> LayoutT:
        """The sizes that all layers get."""

    @abstractmethod
    def describe(self, moe: ToMoEForCausalLM, layout: LayoutT) -> tuple[str, bool, int]:
        """The layout in words, whether it copies or pads, and experts of zeros in the layer with most of them."""

    @abstractmethod
    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: LayoutT) -> None:
        """Write the keys of the decoder and of the experts."""

    @abstractmethod
    def entries(self, moe: ToMoEForCausalLM, layout: LayoutT, entry: MakeEntry) -> Iterator[Entry]:
        """Yield every tensor of the file in order."""

    @abstractmethod
    def verify(self, comparison: Comparison) -> Proof:
        """Compare a file with the converted model."""


class PlainArch(GgufArch[LayoutT]):
    """One with the decoder that several stock classes share.

    mlp_norm: name of the norm before an MLP; scaled_frequencies: whether a file may hold such; experts_last: whether those of
    all layers stand behind everything else; other_form: what to say where another experts.form would do.
    """

    places: ClassVar[Places]
    mlp_norm: ClassVar[str] = "ffn_norm"
    scaled_frequencies: ClassVar[bool] = False
    experts_last: ClassVar[bool] = False
    other_form: ClassVar[str] = ""

    def problem(self, moe: ToMoEForCausalLM) -> str | None:
        return stock_problem(moe, self.places) or self.llama_cpp_problem(moe)

    def dense_problem(self, dense: PreTrainedModel) -> str | None:
        return dense_problem(dense, self.places) or self.llama_cpp_problem(dense)

    def context_length(self, moe: ToMoEForCausalLM) -> int:
        """llama.cpp computes no sliding window here, so contexts must fit into one."""
        return min([super().context_length(moe), *(w for w in sliding_windows(moe) if w is not None)])

    def llama_cpp_problem(self, model: PreTrainedModel) -> str | None:
        """Which activation or rotary embedding of this model, dense or converted, llama.cpp does not compute here."""
        if model.config.hidden_act not in ("silu", "swish"):
            return f"its activation is {model.config.hidden_act}, and llama.cpp's experts use silu"
        rotary: Any = model.model.rotary_emb
        if rotary.rope_type in ("dynamic", "longrope") or rotary.attention_scaling != 1.0:
            return f"its rotary embedding ({rotary.rope_type}) scales with the length or the scores"
        if rotary.rope_type == "default" or self.scaled_frequencies:
            return None
        # overlapping experts become a `llama`, or with a norm of Q and K a `qwen3moe`, which takes plain ones only, too
        normed = getattr(model.model.layers[0].self_attn, "q_norm", None) is not None
        other = "" if normed else self.other_form
        return f"llama.cpp's {self.name} takes plain rotary frequencies only, and these are scaled ({rotary.rope_type}){other}"

    @abstractmethod
    def experts(self, moe: ToMoEForCausalLM, layout: LayoutT, entry: MakeEntry) -> Callable[[int], Iterator[Entry]]:
        """For a layer by its number, the tensors of its MLP."""

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: LayoutT) -> None:
        config, head_dim = moe.config, moe.model.layers[0].self_attn.head_dim
        writer.add_embedding_length(config.hidden_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(num_kv_heads(config))
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        self.write_expert_sizes(writer, moe, layout)

    @abstractmethod
    def write_expert_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: LayoutT) -> None:
        """Write the keys of the experts."""

    def entries(self, moe: ToMoEForCausalLM, layout: LayoutT, entry: MakeEntry) -> Iterator[Entry]:
        inner: Any = moe.model
        experts, rotary = self.experts(moe, layout, entry), inner.rotary_emb
        yield entry("token_embd.weight", lambda: inner.embed_tokens.weight)
        yield entry("output_norm.weight", lambda: inner.norm.weight)
        if not moe.config.tie_word_embeddings:
            yield entry("output.weight", lambda: moe.lm_head.weight)
        if rotary.rope_type != "default":
            yield entry("rope_freqs.weight", lambda: _plain_frequencies(moe) / rotary.inv_freq.float())
        for i, layer in enumerate(inner.layers):
            yield from self.layer_entries(layer, f"blk.{i}.", entry)
            if not self.experts_last:
                yield from experts(i)
        if self.experts_last:
            for i in range(len(inner.layers)):
                yield from experts(i)

    def layer_entries(self, layer: Any, prefix: str, entry: MakeEntry) -> Iterator[Entry]:
        """Norms and attention of a layer."""
        yield entry(f"{prefix}attn_norm.weight", lambda: layer.input_layernorm.weight)
        yield entry(f"{prefix}{self.mlp_norm}.weight", lambda: layer.post_attention_layernorm.weight)
        for name, t in self.attention(layer.self_attn).items():
            # made again when it is written: padded copies of all layers would be as large as the dense attention
            yield entry(prefix + name, lambda name=name: self.attention(layer.self_attn)[name], tuple(t.shape))

    def attention(self, attention: Any) -> dict[str, Tensor]:
        """The tensors of a layer's attention by their names in the file."""
        tensors = {}
        for name, t in attention_tensors(attention).items():
            part, _, kind = name.partition(".")
            tensors[f"{ATTENTION_NAMES[part]}.{kind}"] = self.ordered(part, t, attention.head_dim)
        return tensors

    def ordered(self, part: str, t: Tensor, head_dim: int) -> Tensor:
        """A tensor of attention with its rows as llama.cpp wants them; halves of heads are paired, as in transformers."""
        return t


def _plain_frequencies(moe: ToMoEForCausalLM) -> Tensor:
    """Rotary frequencies before any scaling; a file holds what they are divided by."""
    size = 2 * moe.model.rotary_emb.inv_freq.numel()
    theta = moe.config.rope_parameters["rope_theta"]
    return 1.0 / theta ** (torch.arange(0, size, 2, device=moe.device).float() / size)


class CopiedExperts(PlainArch[Layout]):
    """Overlapping experts, of which a token uses one."""

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> Layout:
        return widest(moe, multiple)

    def describe(self, moe: ToMoEForCausalLM, layout: Layout) -> tuple[str, bool, int]:
        words = f"{moe.config.tomoe_num_experts} experts of {layout.width:,} neurons in each layer"
        return words, has_copies(moe, layout), 0

    def write_expert_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: Layout) -> None:
        writer.add_feed_forward_length(layout.width)
        writer.add_expert_count(moe.config.tomoe_num_experts)
        writer.add_expert_used_count(1)

    def experts(self, moe: ToMoEForCausalLM, layout: Layout, entry: MakeEntry) -> Callable[[int], Iterator[Entry]]:
        return lambda i: self.copies(moe.model.layers[i].mlp, layout, f"blk.{i}.", entry)

    def copies(self, mlp: ToMoEMLP, layout: Layout, prefix: str, entry: MakeEntry) -> Iterator[Entry]:
        """Router and experts of one layer."""
        yield entry(f"{prefix}ffn_gate_inp.weight", lambda: mlp.router.weight)

        @cache
        def copies() -> dict[str, Tensor]:
            return expert_tensors(mlp, layout, QWEN_PROJECTIONS)

        n, d, w = mlp.num_experts, mlp.up_proj.shape[1], layout.width
        shapes = ((n, w, d), (n, w, d), (n, d, w))
        for place, name, shape in zip(("gate", "up", "down"), QWEN_PROJECTIONS, shapes, strict=True):

            def stacked(name: str = name, last: bool = place == "down") -> Tensor:
                tensors = torch.stack([copies()[f"experts.{e}.{name}.weight"] for e in range(n)])
                if last:
                    # the copies of one layer at a time
                    copies.cache_clear()
                return tensors

            yield entry(f"{prefix}ffn_{place}_exps.weight", stacked, shape)

    def verify(self, comparison: Comparison) -> Proof:
        return verify_file_exactly(comparison)


def interleaved(t: Float[Tensor, " HC *rest"], head_dim: int) -> Float[Tensor, " HC *rest"]:
    """Reorder rows of Q or K for a rotary embedding that pairs neighbors (2 j, 2 j + 1) instead of (j, j + C/2)."""
    return t.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


class Llama(CopiedExperts):
    """Neighboring dims of a head are paired, and frequencies may be scaled."""

    name = "llama"
    places = Places(biased=True)
    scaled_frequencies = True

    def ordered(self, part: str, t: Tensor, head_dim: int) -> Tensor:
        return interleaved(t, head_dim) if part in ("q_proj", "k_proj") else t


class Qwen3Moe(CopiedExperts):
    """Q and K normalized in each head."""

    name = "qwen3moe"
    places = Places(normed=True)

    def write_expert_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: Layout) -> None:
        writer.add_feed_forward_length(layout.width)
        writer.add_expert_feed_forward_length(layout.width)
        writer.add_expert_count(moe.config.tomoe_num_experts)
        writer.add_expert_used_count(1)


class FineExperts(GgufArch[FineLayout]):
    """Fine-grained experts.

    form: of its routers; shared_factor: what undoes how the shared expert is weighed; own_target: whose conversions fit.
    """

    form: ClassVar[RouterForm]
    shared_factor: ClassVar[float] = 1.0
    own_target: ClassVar[str] = "gguf"

    @property
    def is_dialed(self) -> bool:
        return not self.form.normalized

    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> FineLayout:
        return fine_layout(moe, multiple or 1)

    def describe(self, moe: ToMoEForCausalLM, layout: FineLayout) -> tuple[str, bool, int]:
        return layout_words(moe, layout), False, layout.zeros

    def number_problem(self, moe: ToMoEForCausalLM) -> str | None:
        """Why llama.cpp cannot run as many experts for a token, as half a sentence; None if it can."""
        used, most = self.layout(moe, 1).top_k, MAX_EXPERTS_PER_TOKEN
        if used <= most:
            return None
        return f"a token would use {used} experts of a layer, and llama.cpp takes {most}; convert with target = {self.own_target}"

    def experts(self, moe: ToMoEForCausalLM, layout: FineLayout, entry: MakeEntry) -> Callable[[int], Iterator[Entry]]:
        """For a layer by its number, the tensors of its MLP."""

        @cache
        def scales() -> list[float]:
            return router_scales(moe, self.form)

        def of_layer(i: int) -> Iterator[Entry]:
            mlp, prefix = moe.mlps()[i], f"blk.{i}."
            if i < layout.whole:
                return whole_entries(mlp, prefix, entry)
            return self.moe_entries(mlp, layout, prefix, lambda: scales()[i], entry)

        return of_layer

    def moe_entries(
        self, mlp: ToMoEMLP, layout: FineLayout, prefix: str, scale: Callable[[], float], entry: MakeEntry
    ) -> Iterator[Entry]:
        """Router, experts and shared expert of one layer, with what undoes their weights in the down projections."""
        n, d, w, s = layout.experts, mlp.up_proj.shape[1], layout.width, layout.shared
        routed_factor = float(layout.top_k if self.form.normalized else 1)

        def router(part: int) -> Tensor:
            return router_tensors(mlp, layout, scale(), self.form)[part]

        def stacked(part: int, factor: float) -> Tensor:
            # through the module, so that tests can put a wrong one in its place
            return factor * torch.stack([fine_grained.expert_matrices(mlp, layout, e)[part] for e in range(n)])

        def shared(part: int, factor: float) -> Tensor:
            return factor * fine_grained.expert_matrices(mlp, layout, None)[part]

        yield entry(f"{prefix}ffn_gate_inp.weight", partial(router, 0), (n, d))
        if self.form.corrected:
            yield entry(f"{prefix}exp_probs_b.bias", partial(router, 1), (n,))
        for part, place in enumerate(("gate", "up", "down")):
            down = place == "down"
            one, all_shared = ((d, w), (d, s)) if down else ((w, d), (s, d))
            routed, common = (routed_factor, self.shared_factor) if down else (1.0, 1.0)
            yield entry(f"{prefix}ffn_{place}_exps.weight", partial(stacked, part, routed), (n, *one))
            if s:
                yield entry(f"{prefix}ffn_{place}_shexp.weight", partial(shared, part, common), all_shared)

    def verify(self, comparison: Comparison) -> Proof:
        return verify_file_by_parts(comparison, self.form)


class Glm4Moe(FineExperts, PlainArch[FineLayout]):
    """Experts and a shared one; the first layers may be whole."""

    name = "glm4moe"
    places = glm4_moe.Glm4Moe.places
    form = glm4_moe.Glm4Moe.form
    mlp_norm = "post_attention_norm"
    experts_last = True
    other_form = "; experts.form = overlapping has a place for them"

    def problem(self, moe: ToMoEForCausalLM) -> str | None:
        return stock_problem(moe, self.places) or self.number_problem(moe) or self.llama_cpp_problem(moe)

    def write_expert_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: FineLayout) -> None:
        writer.add_feed_forward_length(moe.config.intermediate_size)
        writer.add_expert_feed_forward_length(layout.width)
        writer.add_expert_count(layout.experts)
        writer.add_expert_used_count(layout.top_k)
        writer.add_expert_shared_count(layout.shared // layout.width)
        writer.add_expert_weights_scale(glm4_moe.ROUTED_SCALE)
        writer.add_expert_weights_norm(False)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(layout.whole)


def whole_entries(mlp: ToMoEMLP, prefix: str, entry: MakeEntry) -> Iterator[Entry]:
    """The MLP of a layer that uses all experts, as a plain one."""
    f, d = mlp.up_proj.shape
    for part, place in enumerate(("gate", "up", "down")):
        shape = (d, f) if place == "down" else (f, d)
        yield entry(f"{prefix}ffn_{place}.weight", lambda part=part: whole_matrices(mlp)[part], shape)
