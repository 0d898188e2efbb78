"""The architectures of llama.cpp with a family's own attention: everything except the MLP is copied by name.

Letters: D hidden size, K key heads of a linear attention, V value heads, C dims of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from gguf import MODEL_ARCH, ExpertGatingFuncType, GGUFWriter, get_tensor_name_map
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.exporting.gguf.archs import GgufArch, Part
from tomoe.exporting.stock.architecture import StockLayout
from tomoe.exporting.stock.routers import NormalizedSigmoid
from tomoe.exporting.stock.table import LFM2_MOE, QWEN3_5_MOE
from tomoe.model.shape import ceil_div
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM


class FamilyArch(GgufArch):
    """An architecture with the attention of a family; arch: as the package gguf names it."""

    arch: ClassVar[MODEL_ARCH]

    def dense_problem(self, dense: PreTrainedModel) -> str | None:
        # the layout of target = gguf is for a plain llama: it counts no experts of a shared part, and its routers have biases
        own = f"llama.cpp's {self.name} wants the experts of target = {self.own_target}, which an export to gguf then writes"
        return super().dense_problem(dense) or own

    def engine_problem(self, model: PreTrainedModel) -> str | None:
        kind = model.config.get_text_config().rope_parameters["rope_type"]
        if kind == "default":
            return None
        return f"llama.cpp takes plain rotary frequencies only here, and these are scaled ({kind})"

    def decoder_parts(self, moe: ToMoEForCausalLM) -> Iterator[Part]:
        config: Any = moe.config
        names = get_tensor_name_map(self.arch, config.num_hidden_layers)
        for name, t in self.stock.decoder.tensors(moe):
            stored = names.get_name(self.renamed(name), try_suffixes=(".weight", ".bias"))
            assert stored is not None, name
            yield stored, partial(self.stored, name, t, config), tuple(self.stored(name, t, config).shape)

    def renamed(self, name: str) -> str:
        """Map a tensor name of transformers to that of the package gguf."""
        return name

    def stored(self, name: str, t: Tensor, config: Any) -> Tensor:
        """Return a tensor as llama.cpp expects it."""
        return t


class Lfm2MoeArch(FamilyArch):
    """Convolutions and attention; expert weights are normalized, and the shared part is stored in experts."""

    name = "lfm2moe"
    stock = replace(LFM2_MOE, form=NormalizedSigmoid())
    arch = MODEL_ARCH.LFM2MOE
    own_target = "lfm2_moe"

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        super().write_sizes(writer, moe, layout)
        config: Any = moe.config
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_head_count_kv([config.num_key_value_heads if attention else 0 for attention in attends])
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_expert_feed_forward_length(layout.width)
        writer.add_feed_forward_length(len(moe.mlps()[0].up_proj))
        writer.add_leading_dense_block_count(layout.dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)

    def stored(self, name: str, t: Tensor, config: Any) -> Tensor:
        return t.squeeze(1) if name.endswith("conv.conv.weight") else t


class Qwen35MoeArch(FamilyArch):
    """Linear and full attention; expert weights are normalized, and that of the shared expert is 1/2."""

    name = "qwen35moe"
    stock = QWEN3_5_MOE
    arch = MODEL_ARCH.QWEN35MOE
    own_target = "qwen3_5_moe"

    def write_sizes(self, writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout) -> None:
        super().write_sizes(writer, moe, layout)
        config: Any = moe.config
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        turned = int(config.head_dim * config.rope_parameters["partial_rotary_factor"])
        writer.add_rope_dimension_count(turned)
        # pairs that turn by time, height and width take turns; in a text all three are the same
        writer.add_rope_dimension_sections([*(ceil_div(turned // 2 - i, 3) for i in range(3)), 0])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        attends = [kind == "full_attention" for kind in config.layer_types]
        writer.add_full_attention_interval(attends.index(True) + 1)
        writer.add_expert_feed_forward_length(layout.width)
        writer.add_expert_shared_feed_forward_length(layout.shared)

    def engine_problem(self, model: PreTrainedModel) -> str | None:
        attends = [kind == "full_attention" for kind in model.config.get_text_config().layer_types]
        interval = attends.index(True) + 1 if True in attends else 0
        if not interval or attends != [(i + 1) % interval == 0 for i in range(len(attends))]:
            return "its layers of full attention are not evenly spaced, as llama.cpp requires"
        return super().engine_problem(model)

    def renamed(self, name: str) -> str:
        return name.replace("dt_bias", "dt_proj.bias")

    def stored(self, name: str, t: Tensor, config: Any) -> Tensor:
        part = name.rpartition("linear_attn.")[2]
        if part == name:
            # norms there multiply by 1 + w
            return t + 1 if "norm" in name else t
        heads = config.linear_num_key_heads
        of_each = config.linear_num_value_heads // heads
        queries_and_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        if part == "A_log":
            return tiled(-t.exp(), 0, heads, of_each)
        if part in ("conv1d.weight", "in_proj_qkv.weight"):
            rows = t.squeeze(1) if part == "conv1d.weight" else t
            return torch.cat([rows[:queries_and_keys], tiled(rows[queries_and_keys:], 0, heads, of_each)])
        if part == "out_proj.weight":
            return tiled(t, 1, heads, of_each)
        return t if part == "norm.weight" else tiled(t, 0, heads, of_each)


def tiled(t: Float[Tensor, ...], dim: int, heads: int, of_each: int) -> Float[Tensor, ...]:
    """Reorder value heads: transformers puts those of one key head side by side, llama.cpp the first of all key heads, then the
    second, and so on. `of_each`: value heads per key head."""
    return t.unflatten(dim, (heads, of_each, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2).contiguous()


FAMILY_ARCHS: dict[str, FamilyArch] = {"lfm2": Lfm2MoeArch(), "qwen3_5_text": Qwen35MoeArch()}
