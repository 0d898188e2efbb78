"""The structure of a dense model: where its parts are, their sizes, and whether ToMoE can convert it.

Support goes by structure, not by name. A layer must have `self_attn` with separate q_proj, k_proj, v_proj and an output
projection, `mlp` with an up and a down projection (and a gate projection if gated), and a rotary embedding that rotates
dims (j, j + R/2) of a head together. Everything else stays the family's code.

Shapes: B sequences, S tokens of one, D hidden size, V vocabulary, h heads, C dims of a head.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from tomoe.errors import UserError
from tomoe.model import shape
from tomoe.model.hooks import hooked
from tomoe.model.shape import ModelShape

# (gate, up, down) and output projection, as the families name them
MLP_LAYOUTS = (("gate_proj", "up_proj", "down_proj"), (None, "fc1", "fc2"), (None, "up_proj", "down_proj"))
OUTPUT_NAMES = ("o_proj", "dense", "out_proj")
PROBE_TOKENS = 32
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""What models call the cache among their arguments: transformers renamed it in 5.24. The modeling file, which imports
nothing of tomoe, has the same line."""

# nn.Linear, or a quantized or adapted one in its place: weight, bias, in_features and a call
Linear = Any


@dataclass(frozen=True)
class LayerParts:
    """The modules of one decoder layer that ToMoE masks or replaces."""

    mlp: nn.Module
    gate: Linear | None
    up: Linear
    down: Linear
    activation: nn.Module
    attention: nn.Module
    q: Linear
    k: Linear
    v: Linear
    o: Linear


def _refuse(model: nn.Module, why: str) -> UserError:
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UserError(f"ToMoE cannot convert this {name!r} model: {why}")


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers. Raises UserError if the model is not a causal LM with `model.layers` and `lm_head`."""
    inner: Any = getattr(model, "model", None)
    layers = getattr(inner, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len(layers) == 0 or not hasattr(model, "lm_head"):
        raise _refuse(
            model,
            "it does not keep its decoder layers in `model.layers` and its output matrix in `lm_head`; "
            "llama, mistral, qwen2, qwen3, phi and similar families do",
        )
    if not hasattr(inner, "rotary_emb"):
        raise _refuse(model, "it has no rotary position embedding, and its Q/K dims are pruned by rotary pairs")
    return layers


def layer_parts(model: nn.Module) -> list[LayerParts]:
    """The parts of every decoder layer, in order. Raises UserError with the reason if one does not fit."""
    return [_parts_of(model, layer) for layer in decoder_layers(model)]


def _parts_of(model: nn.Module, layer: nn.Module) -> LayerParts:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None:
        raise _refuse(model, f"its decoder layer has no `self_attn` and `mlp`, but {_children(layer)}")
    if any(hasattr(attention, n) for n in ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj")):
        raise _refuse(model, "it uses multi-head latent attention (MLA), which has no Q, K and V projections per head")
    if any(hasattr(attention, n) for n in ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")):
        raise _refuse(model, "it fuses Q, K and V in one matrix; a version with separate q_proj, k_proj, v_proj fits")
    output = next((n for n in OUTPUT_NAMES if hasattr(attention, n)), None)
    if output is None or any(not hasattr(attention, n) for n in ("q_proj", "k_proj", "v_proj")):
        raise _refuse(
            model, f"its attention has no q_proj, k_proj, v_proj and output projection, but {_children(attention)}"
        )
    if hasattr(mlp, "experts") or hasattr(mlp, "router"):
        raise _refuse(model, "its MLP is already a Mixture-of-Experts; ToMoE starts from a dense model")
    if hasattr(mlp, "gate_up_proj"):
        raise _refuse(model, "it fuses the gate and up projections in one matrix")
    layout = next((names for names in MLP_LAYOUTS if all(n is None or hasattr(mlp, n) for n in names)), None)
    if layout is None:
        raise _refuse(model, f"its MLP has no up and down projections that we know, but {_children(mlp)}")
    gate, up, down = (cast(Linear, getattr(mlp, n) if n else None) for n in layout)
    activation = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None) or getattr(mlp, "act", None)
    if activation is None:
        raise _refuse(model, f"its MLP has no activation module, but {_children(mlp)}")
    return LayerParts(
        mlp=mlp,
        gate=gate,
        up=up,
        down=down,
        activation=activation,
        attention=attention,
        q=attention.q_proj,
        k=attention.k_proj,
        v=attention.v_proj,
        o=getattr(attention, output),
    )


def _children(module: nn.Module) -> str:
    return ", ".join(name for name, _ in module.named_children()) or "no parts at all"


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes read from the config and the weights. Raises UserError if the structure does not fit."""
    parts = layer_parts(model)
    config: Any = model.config
    head_dim = int(getattr(parts[0].attention, "head_dim", 0) or shape.head_dim(config))
    _check_norms(model, parts[0].attention, head_dim)
    sizes = {(p.up.weight.shape[0], p.q.weight.shape[0], p.k.weight.shape[0]) for p in parts}
    if len(sizes) > 1 and not getattr(model, "is_quantized", False):
        raise _refuse(model, f"its layers differ in size ({sorted(sizes)[:3]} ...); ToMoE needs layers of equal size")
    return ModelShape(
        num_layers=len(parts),
        hidden_size=config.hidden_size,
        mlp_size=parts[0].down.in_features,
        num_heads=config.num_attention_heads,
        num_kv_heads=shape.num_kv_heads(config),
        head_dim=head_dim,
        rotary_size=_probe_rotary(model, head_dim),
        gated=parts[0].gate is not None,
    )


def _check_norms(model: nn.Module, attention: Any, head_dim: int) -> None:
    if getattr(attention, "q_layernorm", None) is not None:
        raise _refuse(
            model, "it normalizes Q and K by LayerNorm (qk_layernorm), which does not commute with pruning them"
        )
    norm = getattr(attention, "q_norm", None)
    if norm is None:
        return
    weight = getattr(norm, "weight", None)
    if weight is None or tuple(weight.shape) != (head_dim,) or not hasattr(norm, "variance_epsilon"):
        raise _refuse(model, "its q_norm is not an RMS norm over one head's dims (as in qwen3), so it cannot be folded")
    # a sharded weight is not a plain tensor outside of forward; folding loads the model whole and checks it then
    if weight.device.type != "meta" and not hasattr(weight, "full_tensor"):
        x = torch.linspace(-1, 1, head_dim, device=weight.device, dtype=weight.dtype)
        rms_norm = weight * x * torch.rsqrt(x.float().square().mean() + norm.variance_epsilon).to(x.dtype)
        if not torch.allclose(norm(x), rms_norm, rtol=2e-2, atol=1e-3):
            raise _refuse(model, "its q_norm computes something else than weight * x / rms(x)")


def _probe_rotary(model: nn.Module, head_dim: int) -> int:
    """R, found by running the family's own rotary code on a vector.

    Position embeddings with cos 0 and sin 1 rotate by a right angle: dim j of a half-split layout of size R becomes
    -x[j + R/2] for j < R/2, else x[j - R/2]. Anything else (interleaved pairs) is refused.
    """
    inner: Any = model.model
    module = sys.modules[type(decoder_layers(model)[0].self_attn).__module__]
    apply = getattr(module, "apply_rotary_pos_emb", None)
    inv_freq = getattr(inner.rotary_emb, "inv_freq", None)
    if apply is None or inv_freq is None:
        raise _refuse(model, "its rotary embedding is not the usual `inv_freq` with `apply_rotary_pos_emb`")
    size = 2 * inv_freq.numel()
    x = torch.arange(1.0, size + 1).view(1, 1, 1, size)
    rotated, _ = apply(x, x, torch.zeros(1, 1, size), torch.ones(1, 1, size))
    if not torch.equal(rotated, torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1)) or size > head_dim:
        raise _refuse(
            model, "its rotary embedding pairs neighbouring dims (interleaved); only half-split pairs are supported"
        )
    return size


def check_output(model: PreTrainedModel) -> None:
    """Raises UserError if the model computes more than the MoE would: folding would silently change it.

    Some of what a family adds has no module to find (attention sinks, layers without RoPE, clipped projections, scaled
    logits). So a few tokens run through the model, and the outputs of its parts are compared with our formulas.
    """
    # these may have no effect on small activations
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv"):
        if getattr(model.config, name, None) is not None:
            raise _refuse(model, f"its config sets {name}, and the MoE computes plain logits and plain attention")
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    ids = torch.linspace(vocabulary // 4, vocabulary - 1, PROBE_TOKENS, device=model.device).long()[None]

    # compared as soon as a part has run: the weights of a sharded model are whole only then
    def check(i: int, what: str, p: LayerParts) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            ours = _mlp(p, args[0]) if what == "MLP" else _attention(model, p, args, kwargs)
            _compare(model, f"the {what} of layer {i}", out if what == "MLP" else out[0], ours)

        return hook

    hooks = (
        module.register_forward_hook(check(i, what, p), with_kwargs=True)
        for i, p in enumerate(layer_parts(model))
        for what, module in (("MLP", p.mlp), ("attention", p.attention))
    )
    with hooked(hooks), torch.no_grad():
        hidden, logits = run_model(model, ids, None, every_logit=True)
        _compare(model, "its output", logits, model.lm_head(hidden))


def run_model(
    model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"] | None, every_logit: bool = False
) -> tuple[Float[Tensor, "B S D"], Float[Tensor, "B s V"]]:
    """Final hidden states, and logits of all tokens if `every_logit` is set, else of none (s = 0).

    The whole model runs, not `model.model`: only that gathers the weights of a sharded one. Without padding no mask is
    passed, which makes attention faster.
    """
    hidden: list[Tensor] = []
    attention_mask = None if mask is None or bool(mask.all()) else mask.long()
    # not 1: for a single token the CPU copies the whole output matrix first, a twentieth of a training step
    keep = 0 if every_logit else ids.new_empty(0)
    with hooked([model.model.register_forward_hook(lambda _, __, out: hidden.append(out.last_hidden_state))]):
        out = model(input_ids=ids, attention_mask=attention_mask, use_cache=False, logits_to_keep=keep)
    return hidden[0], out.logits


def _compare(model: PreTrainedModel, what: str, theirs: Tensor, ours: Tensor) -> None:
    difference = float((theirs.float() - ours.float()).norm() / theirs.float().norm().clamp_min(1e-9))
    if not difference <= (1e-3 if theirs.dtype == torch.float32 else 2e-2):
        raise _refuse(
            model,
            f"{what} is not the usual formula (relative difference {difference:.2g}): it adds a norm, a scale or a sink, "
            "or leaves out RoPE, and the MoE would lose that",
        )


def _mlp(parts: LayerParts, x: Float[Tensor, "1 S D"]) -> Float[Tensor, "1 S D"]:
    h = parts.up(x)
    return parts.down(parts.activation(h) if parts.gate is None else parts.activation(parts.gate(x)) * h)


def _attention(
    model: PreTrainedModel, parts: LayerParts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Float[Tensor, "1 S D"]:
    """Attention as the MoE computes it, on the arguments that the model passed to its own module."""
    inputs = inspect.signature(parts.attention.forward).bind(*args, **kwargs).arguments
    inputs |= inputs.get("kwargs", {})
    scale, head_dim = getattr(parts.attention, "scaling", None), getattr(parts.attention, "head_dim", None)
    if inputs.get("position_embeddings") is None or scale is None or head_dim is None:
        raise _refuse(
            model, "its attention does not get cos and sin of RoPE in every layer, or has no scaling and head_dim"
        )
    x, (cos, sin), mask = inputs["hidden_states"], inputs["position_embeddings"], inputs.get("attention_mask")
    size = cos.shape[-1]

    def heads(projection: nn.Module, norm: nn.Module | None, rotated: bool) -> Float[Tensor, "1 h S C"]:
        y = projection(x).unflatten(-1, (-1, head_dim))
        y = (y if norm is None else norm(y)).transpose(1, 2)
        if not rotated:
            return y
        half_turned = torch.cat([-y[..., size // 2 : size], y[..., : size // 2]], -1)
        return torch.cat([y[..., :size] * cos + half_turned * sin, y[..., size:]], -1)

    q_norm, k_norm = (getattr(parts.attention, name, None) for name in ("q_norm", "k_norm"))
    q, k, v = heads(parts.q, q_norm, True), heads(parts.k, k_norm, True), heads(parts.v, None, False)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return parts.o(out.transpose(1, 2).flatten(-2))
