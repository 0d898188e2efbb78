"""What the stock classes have in common, the architectures that transformers, vLLM and llama.cpp already know.

A stock class has separate weights for every expert, one width for all layers, and whole heads. Dropped Q/K and V/O dims come
back as zeros at their places, which changes no logit. What no zero can express (V/O dims chosen for each token, biases that
the class has no place for) is refused in one sentence.

Letters: D hidden size, C head dim, c kept dims.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting.target import Options, Sizes, Target
from tomoe.exporting.writing import write_checkpoint, write_config, write_tokenizer
from tomoe.model.attention import Attention, attention_of
from tomoe.model.hooks import hooked, input_of
from tomoe.model.mlp import converted_mlps, decoder_layers
from tomoe.moe.modeling_tomoe import ToMoEAttention, ToMoEForCausalLM, ToMoEMLP, sliding_window
from tomoe.progress import StageCallback

PROBE_TOKENS = 8


@dataclass(frozen=True)
class Places:
    """What a stock class has a place for.

    biased: Q, K and V may have biases; normed: Q and K are normalized in each head, None if the config says; windows: whether
    tokens of no layer, of all layers or of some layers may see the last ones only; silu_only: no other activation.
    """

    biased: bool = False
    normed: bool | None = False
    windows: Literal["no layer", "all layers", "some layers"] = "all layers"
    silu_only: bool = False


def dense_problem(dense: PreTrainedModel, places: Places) -> str | None:
    """Why no MoE made from this dense model could become a class with these places, judging by its parts."""
    mlps = converted_mlps(dense)
    if len(mlps) < len(decoder_layers(dense)):
        return "some of its layers have no MLP that is converted"
    try:
        first = attention_of(dense, mlps[0].layer)
    except UserError as error:
        return f"its attention is another ({error})"
    biases = any(p is not None and p.bias is not None for p in (mlps[0].gate, mlps[0].up, mlps[0].down))
    return _unsupported_part(places, mlps[0].gate is not None, biases, first) or _missing_part(dense)


def stock_problem(moe: ToMoEForCausalLM, places: Places) -> str | None:
    """Why a class with these places cannot compute what this MoE computes, as half a sentence; None if it can."""
    mlps, layers = moe.mlps(), decoder_layers(moe)
    if len(mlps) < len(layers):
        return "some of its layers have no MLP that was converted"
    mlp = mlps[0]
    try:
        parts = attention_of(moe, layers[0])
    except UserError as error:
        return f"its attention is another ({error})"
    first: Any = parts.module
    if any(getattr(layer.self_attn, "value_router", None) is not None for layer in layers):
        return (
            "it chooses V/O dims for each token (attention.pruning = per_token), and stock attention has no such choice"
        )
    biases = any(bias is not None for bias in (mlp.gate_bias, mlp.up_bias, mlp.down_bias))
    if problem := _unsupported_part(places, mlp.gate_proj is not None, biases, parts):
        return problem
    if 2 * moe.model.rotary_emb.inv_freq.numel() != first.head_dim:
        return "its rotary embedding turns only a part of each head"
    if abs(first.scaling * first.head_dim**0.5 - 1) > 1e-6:
        return "its attention has a softmax scale of its own"
    if places.silu_only and moe.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {moe.config.hidden_act}, and engines know this architecture with silu only"
    return _unsupported_windows(moe, places) or _missing_part(moe) or _nonstandard_residual(moe)


def _missing_part(model: Any) -> str | None:
    """Which part of the stock classes the model has no place or another name for, as half a sentence; None if none."""
    for name in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(getattr(model, "model", None), name):
            return f"it has no `model.{name}`"
    for name in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp"):
        if any(not hasattr(layer, name) for layer in model.model.layers):
            return f"its layers have no `{name}`, so norms or attention have other places in them"
    first = model.model.layers[0]
    if any(getattr(norm, "weight", None) is None for norm in (first.input_layernorm, model.model.norm)):
        return "its norms have no weights"
    return None


def _unsupported_part(places: Places, gated: bool, biases: bool, attention: Attention) -> str | None:
    normed = getattr(attention.module, "q_norm", None) is not None
    if not gated:
        return "its MLP has no gate projection"
    if biases:
        return "its MLP has biases"
    if attention.o.bias is not None:
        return "its attention output has a bias"
    if attention.q.bias is not None and not places.biased:
        return "its Q, K and V projections have biases"
    if places.normed is not None and normed != places.normed:
        return "it normalizes Q and K" if normed else "it does not normalize Q and K"
    return None


def sliding_windows(moe: ToMoEForCausalLM) -> list[int | None]:
    """How many of the last tokens a token sees in each layer; None: all."""
    return [sliding_window(layer.self_attn, moe.config) for layer in moe.model.layers]


def _unsupported_windows(moe: ToMoEForCausalLM, places: Places) -> str | None:
    windows = set(sliding_windows(moe))
    if places.windows == "no layer":
        slides = any(w is not None and w < moe.config.max_position_embeddings for w in windows)
        return "its attention has a sliding window" if slides else None
    sizes = windows - {None} if places.windows == "some layers" else windows
    return "its layers have sliding windows of different sizes" if len(sizes) > 1 else None


@torch.no_grad()
def _nonstandard_residual(moe: ToMoEForCausalLM) -> str | None:
    """Run a few tokens: is anything around attention and MLP not the plain pre-norm residual stream?"""
    layer: Any = moe.model.layers[0]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    parts = {
        "layer": layer, "norm1": layer.input_layernorm, "attention": layer.self_attn,
        "norm2": layer.post_attention_layernorm, "mlp": layer.mlp, "norm": moe.model.norm,
    }  # fmt: skip

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen[name] = (input_of(args, kwargs), out[0] if isinstance(out, tuple) else out)

    vocab = moe.config.vocab_size
    ids = torch.linspace(vocab // 4, vocab - 1, PROBE_TOKENS, device=moe.device).long()[None]
    with hooked(part.register_forward_hook(partial(note, name), with_kwargs=True) for name, part in parts.items()):
        moe(ids, use_cache=False)
    eps = moe.config.rms_norm_eps if hasattr(moe.config, "rms_norm_eps") else 0.0
    middle = seen["layer"][0] + seen["attention"][1]
    pairs = [
        ("its embeddings are scaled", seen["layer"][0], moe.get_input_embeddings()(ids)),
        ("its attention does not read the normed residual stream", seen["attention"][0], seen["norm1"][1]),
        ("its attention is not simply added to the residual stream", seen["norm2"][0], middle),
        ("its MLP does not read the normed residual stream", seen["mlp"][0], seen["norm2"][1]),
        ("its MLP is not simply added to the residual stream", seen["layer"][1], middle + seen["mlp"][1]),
    ]
    for name in ("norm1", "norm2", "norm"):
        x = seen[name][0].float()
        plain = parts[name].weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        pairs.append(("its norms are not plain RMS norms", seen[name][1], plain))
    for problem, actual, plain in pairs:
        if not torch.allclose(actual.float(), plain.float(), rtol=2e-2, atol=1e-2 * float(plain.float().std())):
            return problem
    known = {"embed_tokens.weight", "norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
    others = [n for n, _ in moe.model.named_parameters() if ".mlp." not in n and ".self_attn." not in n]
    unknown = [n for n in others if not any(n.endswith(k) for k in known)]
    return f"it has weights beside attention, MLP and norms, for example {unknown[0]}" if unknown else None


def check_rotary(moe: ToMoEForCausalLM, config: PreTrainedConfig) -> None:
    """Raises UserError if the architecture's own code makes other rotary frequencies of this config than the MoE has."""
    ours, theirs = moe.model.rotary_emb, type(empty_stock(config).model.rotary_emb)(config)
    same = torch.equal(ours.inv_freq.float().cpu(), theirs.inv_freq) and (
        ours.attention_scaling == theirs.attention_scaling
    )
    if not same:
        raise UserError(f"{config.model_type} makes other rotary frequencies of this config than the model itself")


def expert_mlps(moe: ToMoEForCausalLM) -> list[ToMoEMLP]:
    """The MLPs that hold experts, in the order of their layers."""
    return [layer.mlp for layer in moe.model.layers]


def empty_stock(config: PreTrainedConfig) -> Any:
    """A model of this config on the meta device, to read names and sizes from."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def padded(t: Float[Tensor, "n m"], size: int, dim: int) -> Float[Tensor, "_ _"]:
    """Append zeros along `dim`, up to `size`."""
    shape = list(t.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([t, t.new_zeros(shape)], dim).contiguous()


def attention_tensors(attention: nn.Module) -> dict[str, Tensor]:
    """The tensors of an attention by their names in it, with whole heads.

    A pruned one is filled: kept Q/K dims at their places, V/O dims at the first places, zeros elsewhere.

    A norm over a head takes its mean over all C dims, of which the dropped ones are zero: as in the dense model.
    """
    if not isinstance(attention, ToMoEAttention):
        state: dict[str, Tensor] = attention.state_dict()
        return state
    size, half = attention.head_dim, attention.head_dim // 2
    pairs = attention.rotary_ids.long()
    qk = torch.cat([pairs, pairs + half])
    values = torch.arange(attention.value_size, device=qk.device)

    def rows(t: Tensor, kept: int, dims: Tensor) -> Tensor:
        heads = t.unflatten(0, (-1, kept))
        return heads.new_zeros(heads.shape[0], size, *heads.shape[2:]).index_copy_(1, dims, heads).flatten(0, 1)

    weights = {
        "q_proj": rows(attention.q_proj.weight, attention.qk_size, qk),
        "k_proj": rows(attention.k_proj.weight, attention.qk_size, qk),
        "v_proj": rows(attention.v_proj.weight, attention.value_size, values),
        "o_proj": rows(attention.o_proj.weight.t(), attention.value_size, values).t().contiguous(),
    }
    state = {f"{name}.weight": t for name, t in weights.items()}
    for name, kept, dims in (
        ("q", attention.qk_size, qk),
        ("k", attention.qk_size, qk),
        ("v", attention.value_size, values),
    ):
        bias = getattr(attention, f"{name}_proj").bias
        if bias is not None:
            state[f"{name}_proj.bias"] = rows(bias, kept, dims)
        norm = getattr(attention, f"{name}_norm", None)
        if norm is not None:
            state[f"{name}_norm.weight"] = norm.new_ones(size).index_copy_(0, dims, norm.detach())
    return state


LayoutT = TypeVar("LayoutT")


class Stock(Target, Generic[LayoutT]):
    """A class of transformers: a config and tensors by name; how_well: it holds a model that it supports."""

    config_class: ClassVar[type[PreTrainedConfig]]
    places: ClassVar[Places]
    how_well: ClassVar[str] = "exactly"

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        return self.form_problem(moe.config.tomoe_expert_form) or stock_problem(moe, self.places)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        return self.form_problem(form) or dense_problem(dense, self.places)

    @abstractmethod
    def form_problem(self, form: str) -> str | None:
        """Why the class has no place for experts of this form (experts.form), as half a sentence; None if it has."""

    @abstractmethod
    def layout(self, moe: ToMoEForCausalLM, multiple: int | None) -> LayoutT:
        """The sizes that all layers get; expert widths are multiples of `multiple`."""

    @abstractmethod
    def config(self, moe: ToMoEForCausalLM, layout: LayoutT) -> PreTrainedConfig:
        """The config of the export."""

    @abstractmethod
    def mlp_tensors(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Callable[[int], Iterable[tuple[str, Tensor]]]:
        """For a layer by its number, name (behind that of the layer) and value of every tensor of its MLP."""

    def make_config(self, moe: ToMoEForCausalLM, **sizes: Any) -> PreTrainedConfig:
        """What the class has in common with the dense model's config, and the sizes given.

        Raises UserError if the class makes other rotary frequencies of it than the model has.
        """
        values = moe.config.dense_config().to_dict()
        known = {f.name for f in fields(self.config_class)} - {"layer_types", "dtype", "transformers_version"}
        kept = {k: v for k, v in values.items() if k in known} | {
            "head_dim": moe.model.layers[0].self_attn.head_dim,
            "architectures": [f"{self.about}ForCausalLM"],
        }
        config = self.config_class(**kept | sizes)
        config.dtype = moe.dtype
        check_rotary(moe, config)
        return config

    @torch.no_grad()
    def tensors(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Iterator[tuple[str, Tensor]]:
        """Yield name and value of every tensor of the checkpoint, layer by layer: only one layer's copies are alive at a time."""
        inner: Any = moe.model
        mlp_tensors = self.mlp_tensors(moe, layout)
        yield "model.embed_tokens.weight", inner.embed_tokens.weight
        for i, layer in enumerate(inner.layers):
            prefix = f"model.layers.{i}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"{prefix}{name}.weight", getattr(layer, name).weight
            for name, t in self.attention_tensors(layer.self_attn).items():
                yield f"{prefix}self_attn.{name}", t
            yield from ((prefix + name, t) for name, t in mlp_tensors(i))
        yield "model.norm.weight", inner.norm.weight
        yield from self.output_tensors(moe)

    def attention_tensors(self, attention: nn.Module) -> dict[str, Tensor]:
        """The tensors of a layer's attention."""
        return attention_tensors(attention)

    def output_tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        """The output matrix, unless it is that of the embeddings."""
        if not moe.config.tie_word_embeddings:
            yield "lm_head.weight", moe.lm_head.weight

    def bytes(self, moe: ToMoEForCausalLM, layout: LayoutT) -> int:
        """Of the weights."""
        return sum(p.numel() for p in empty_stock(self.config(moe, layout)).parameters()) * moe.dtype.itemsize

    @abstractmethod
    def describe(self, moe: ToMoEForCausalLM, layout: LayoutT) -> Sizes:
        """The sizes of an export with this layout."""

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        return self.describe(moe, self.layout(moe, options.width_multiple))

    def write(
        self, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
        on_progress: StageCallback,
    ) -> None:  # fmt: skip
        layout = self.layout(moe, options.width_multiple)
        write_config(self.config(moe, layout), folder)
        write_tokenizer(moe, tokenizer, folder)
        write_checkpoint(self.tensors(moe, layout), folder, self.bytes(moe, layout), on_progress)
