"""The decoder that several stock classes share: plain RMS norms, separate Q, K and V, RoPE over full heads.

Dropped Q/K and V/O dims return as zeros at their places, which changes no logit. What zeros cannot express (V/O dims chosen
for each token, biases that the class does not support) is refused in one sentence.

Letters: D hidden size, C head dim, c kept dims.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig

from tomoe.errors import UserError
from tomoe.exporting.stock.architecture import Decoder, empty_stock, mlp_problem
from tomoe.model.attention import Attention, attention_checks, attention_of, attention_sizes
from tomoe.model.far_tokens import original_context
from tomoe.model.hooks import hooked, input_of
from tomoe.model.layerwise import held
from tomoe.model.mlp import Refused, decoder_layers
from tomoe.moe.modeling_tomoe import ToMoEAttention, ToMoEForCausalLM, sliding_window

PROBE_TOKENS = 8


@dataclass(frozen=True)
class PlainDecoder(Decoder):
    """What a class with such a decoder supports: biases of Q, K and V; norms of Q and K in each head; windows of the last tokens,
    equal in all layers; other activations than silu, unless `silu_only`; an output matrix tied to the embeddings."""

    biased: bool = False
    normed: bool = False
    windows: bool = True
    silu_only: bool = False
    tied: bool = True

    def problem(self, model: Any) -> str | None:
        if any(getattr(module, "value_router", None) is not None for module in model.modules()):
            return "it chooses V/O dims for each token (attention.pruning = per_token), and stock attention has no such choice"
        if problem := mlp_problem(model):
            return problem
        layers = decoder_layers(model)
        own = {i: x for i, x in enumerate(layers) if not isinstance(getattr(x, "self_attn", None), ToMoEAttention)}
        try:
            first = attention_of(model, layers[0])
            if own:
                attention_sizes(model, list(own.values()))
        except Refused as refused:
            return refused.why
        problem = self._attention_problem(model, first) or self._window_problem(model) or _missing_part(model)
        # a model of a config alone does not run
        if problem or model.device.type == "meta":
            return problem
        # the norms of an offloaded one are compared behind the run
        with held(layers[0]):
            return _otherwise_computed(model, own)

    def _attention_problem(self, model: Any, attention: Attention) -> str | None:
        module: Any = attention.module
        if attention.o.bias is not None:
            return "its attention output has a bias"
        if attention.q.bias is not None and not self.biased:
            return "its Q, K and V projections have biases"
        if getattr(module, "q_norm", None) is not None and not self.normed:
            return "it normalizes Q and K"
        if 2 * model.base_model.rotary_emb.inv_freq.numel() != module.head_dim:
            return "its rotary embedding turns only a part of each head"
        if abs(module.scaling * module.head_dim**0.5 - 1) > 1e-6:
            return "its attention has a softmax scale of its own"
        if self.silu_only and model.config.hidden_act not in ("silu", "swish"):
            return f"its activation is {model.config.hidden_act}, and engines know this architecture with silu only"
        return None

    def _window_problem(self, model: Any) -> str | None:
        windows = set(sliding_windows(model))
        if self.windows:
            return "its layers have sliding windows of different sizes" if len(windows) > 1 else None
        slides = any(w is not None and w < model.config.max_position_embeddings for w in windows)
        return "its attention has a sliding window" if slides else None

    def values(self, moe: ToMoEForCausalLM, config_class: type[PreTrainedConfig]) -> dict[str, Any]:
        kept = {k: v for k, v in super().values(moe, config_class).items() if k != "layer_types"}
        return kept | {"head_dim": moe.model.layers[0].self_attn.head_dim}

    def check(self, moe: ToMoEForCausalLM, config: PreTrainedConfig) -> None:
        """Compare the rotary embeddings at the first positions, and where a longer context changes the frequencies."""
        ours: Any = moe.model.rotary_emb
        theirs = type(empty_stock(config).model.rotary_emb)(config).to(moe.device)
        x = torch.zeros(1, 1, 1, device=moe.device)
        for start in (0, original_context(moe.config) or 0):
            positions = start + torch.arange(PROBE_TOKENS, device=moe.device)[None]
            if not all(torch.equal(a, b) for a, b in zip(ours(x, positions), theirs(x, positions), strict=True)):
                raise UserError(f"{config.model_type} turns heads otherwise, with this config, than the model itself")

    def tensors(self, moe: ToMoEForCausalLM) -> Iterator[tuple[str, Tensor]]:
        inner: Any = moe.model
        yield "model.embed_tokens.weight", inner.embed_tokens.weight
        for i, layer in enumerate(inner.layers):
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{i}.{name}.weight", getattr(layer, name).weight
            for name, t in attention_tensors(layer.self_attn).items():
                yield f"model.layers.{i}.self_attn.{name}", t
        yield "model.norm.weight", inner.norm.weight
        if not self.tied:
            # a tensor of its own: two names of one are refused by safetensors
            yield "lm_head.weight", moe.lm_head.weight.clone()
        elif not moe.config.tie_word_embeddings:
            yield "lm_head.weight", moe.lm_head.weight


def _missing_part(model: Any) -> str | None:
    """Name a part of the stock classes that the model lacks or names differently, as half a sentence; None if there is none."""
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


def sliding_windows(model: Any) -> list[int | None]:
    """Return the sliding window of each layer; None: all tokens."""
    layers: Any = decoder_layers(model)
    return [sliding_window(layer.self_attn, model.config) for layer in layers]


@torch.no_grad()
def _otherwise_computed(model: Any, own: Mapping[int, nn.Module]) -> str | None:
    """Run a few tokens, where scales and frequencies of a longer context apply: is the residual stream plain pre-norm, is the
    attention of the layers `own`, which run the family's code, the plain one, and are logits the output matrix times states?"""
    layer: Any = decoder_layers(model)[0]
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    parts = {
        "layer": layer,
        "norm1": layer.input_layernorm,
        "attention": layer.self_attn,
        "norm2": layer.post_attention_layernorm,
        "mlp": layer.mlp,
        "norm": model.model.norm,
    }

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        seen[name] = (input_of(args, kwargs), out[0] if isinstance(out, tuple) else out)

    def hooks() -> Iterator[RemovableHandle]:
        yield from (part.register_forward_hook(partial(note, name), with_kwargs=True) for name, part in parts.items())
        yield from attention_checks(model, own)

    vocab = model.config.vocab_size
    ids = torch.linspace(vocab // 4, vocab - 1, PROBE_TOKENS, device=model.device).long()[None]
    positions = (original_context(model.config) or 0) + torch.arange(PROBE_TOKENS, device=model.device)[None]
    try:
        with hooked(hooks()):
            logits = model(ids, position_ids=positions, use_cache=False).logits
    except Refused as refused:
        return refused.why
    eps = getattr(model.config, "rms_norm_eps", 0.0)
    middle = seen["layer"][0] + seen["attention"][1]
    pairs = [
        ("its embeddings are scaled", seen["layer"][0], model.get_input_embeddings()(ids)),
        ("its attention does not read the normed residual stream", seen["attention"][0], seen["norm1"][1]),
        ("its attention is not simply added to the residual stream", seen["norm2"][0], middle),
        ("its MLP does not read the normed residual stream", seen["mlp"][0], seen["norm2"][1]),
        ("its MLP is not simply added to the residual stream", seen["layer"][1], middle + seen["mlp"][1]),
        ("its logits are scaled or capped", logits, model.get_output_embeddings()(seen["norm"][1])),
    ]
    for name in ("norm1", "norm2", "norm"):
        x = seen[name][0].float()
        plain = parts[name].weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        pairs.append(("its norms are not plain RMS norms", seen[name][1], plain))
    for problem, actual, plain in pairs:
        if not torch.allclose(actual.float(), plain.float(), rtol=2e-2, atol=1e-2 * float(plain.float().std())):
            return problem
    known = {"embed_tokens.weight", "norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
    others = [n for n, _ in model.model.named_parameters() if ".mlp." not in n and ".self_attn." not in n]
    unknown = [n for n in others if not any(n.endswith(k) for k in known)]
    return f"it has weights beside attention, MLP and norms, for example {unknown[0]}" if unknown else None


def attention_tensors(attention: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of an attention by their names in it, with full heads. A pruned one is padded: kept Q/K dims at their
    places, V/O dims at the first places, zeros elsewhere; a norm averages over all of them, as in the dense model."""
    if not isinstance(attention, ToMoEAttention):
        return attention.state_dict()
    size, half = attention.head_dim, attention.head_dim // 2
    pairs = attention.rotary_ids.long()
    qk = torch.cat([pairs, pairs + half])
    values = torch.arange(attention.value_size, device=qk.device)

    def rows(t: Tensor, kept: int, dims: Tensor) -> Tensor:
        heads = t.unflatten(0, (-1, kept))
        return heads.new_zeros(heads.shape[0], size, *heads.shape[2:]).index_copy_(1, dims, heads).flatten(0, 1)

    state = {"o_proj.weight": rows(attention.o_proj.weight.t(), attention.value_size, values).t().contiguous()}
    for name, kept, dims in (
        ("q", attention.qk_size, qk),
        ("k", attention.qk_size, qk),
        ("v", attention.value_size, values),
    ):
        projection, norm = getattr(attention, f"{name}_proj"), getattr(attention, f"{name}_norm", None)
        state[f"{name}_proj.weight"] = rows(projection.weight, kept, dims)
        if projection.bias is not None:
            state[f"{name}_proj.bias"] = rows(projection.bias, kept, dims)
        if norm is not None:
            state[f"{name}_norm.weight"] = norm.new_ones(size).index_copy_(0, dims, norm.detach())
    return state
