"""The attention of a dense model, as far as a recipe prunes it: separate projections, RoPE on half-split pairs, known norms.

Only `attention.pruning` other than `off` needs any of this. A conversion with dense attention runs the family's own
code for it and never looks inside.

V and O of a key/value head may be turned by any orthogonal matrix R: v R (W_v' = R^T W_v, the bias with it) and the
output matrices W_o R of all its query heads compute what v and W_o do. Masks of V/O dims then act in the new basis.

Shapes: B sequences, S tokens of one, D hidden size, h heads, H query and G key/value heads, C dims of a head. A rotation is
[G, C, C]; its columns are the new directions.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tomoe.model import shape
from tomoe.model.mlp import Refused, WeightMatrix, check_formula, children, refuse

OUTPUT_NAMES = ("o_proj", "dense", "out_proj")
LATENT_NAMES = ("kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj")
TASK = "prune the attention of"
FUSED_NAMES = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")


@dataclass(frozen=True)
class Attention:
    """The attention of one decoder layer and its four projections."""

    module: nn.Module
    q: WeightMatrix
    k: WeightMatrix
    v: WeightMatrix
    o: WeightMatrix


def _refuse(model: nn.Module, why: str) -> Refused:
    return refuse(model, why, TASK, "; leave attention dense (attention.pruning = off)")


def attention_of(model: nn.Module, layer: nn.Module) -> Attention:
    """Return the attention of one decoder layer. Raises Refused without separate Q, K, V and output projections."""
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        raise _refuse(model, f"its decoder layer has no `self_attn`, but {children(layer)}")
    if any(hasattr(attention, name) for name in LATENT_NAMES):
        raise _refuse(model, "it is multi-head latent attention (MLA), which has no Q, K and V projections per head")
    if any(hasattr(attention, name) for name in FUSED_NAMES):
        raise _refuse(model, "it fuses Q, K and V in one matrix")
    output = next((name for name in OUTPUT_NAMES if hasattr(attention, name)), None)
    if output is None or any(not hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")):
        raise _refuse(model, f"it has no q_proj, k_proj, v_proj and output projection, but {children(attention)}")
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, getattr(attention, output))
    if any(not isinstance(getattr(module, "out_features", None), int) for module in projections):
        raise _refuse(model, "its projections are not plain matrices")
    return Attention(attention, *(WeightMatrix(module) for module in projections))


def attention_sizes(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, int]:
    """Return the sizes of these layers' attention by their names in `ModelShape`. Raises Refused if tomoe cannot prune it."""
    config = shape.text_config(model.config)
    parts = [attention_of(model, layer) for layer in layers]
    head_dim = int(getattr(parts[0].module, "head_dim", 0) or shape.head_dim(config))
    _check_norms(model, parts[0].module, head_dim)
    sizes = {(p.q.out_features, p.k.out_features) for p in parts}
    if len(sizes) > 1:
        raise _refuse(model, f"its layers differ in size ({sorted(sizes)[:3]} ...)")
    return {
        "num_heads": config.num_attention_heads,
        "num_kv_heads": shape.num_kv_heads(config),
        "head_dim": head_dim,
        "rotary_size": _probe_rotary(model, parts[0].module, head_dim),
    }


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
    # A sharded weight is not a plain tensor outside of forward; folding loads the full model and checks it then.
    if weight.device.type != "meta" and not hasattr(weight, "full_tensor"):
        x = torch.linspace(-1, 1, head_dim, device=weight.device, dtype=weight.dtype)
        rms_norm = weight * x * torch.rsqrt(x.float().square().mean() + norm.variance_epsilon).to(x.dtype)
        if not torch.allclose(norm(x), rms_norm, rtol=2e-2, atol=1e-3):
            raise _refuse(model, "its q_norm computes something else than weight * x / rms(x)")


def _probe_rotary(model: Any, attention: nn.Module, head_dim: int) -> int:
    """R, found by running the family's own rotary code on a vector. With cos 0 and sin 1, dim j of a half-split layout of
    size R becomes -x[j + R/2] for j < R/2, else x[j - R/2]. Anything else (interleaved pairs) is refused."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    inv_freq = getattr(getattr(model.base_model, "rotary_emb", None), "inv_freq", None)
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


def attention_checks(model: nn.Module, layers: Mapping[int, nn.Module]) -> Iterator[RemovableHandle]:
    """Hook every attention to compare it with the formula of a pruned one as soon as it has run: some of a family's additions
    have no module to find (sinks, layers without RoPE, soft caps). Raises Refused in the forward pass."""
    # These may have no effect on small activations.
    for name in ("attn_logit_softcapping", "clip_qkv"):
        if getattr(shape.text_config(model.config), name, None) is not None:
            raise _refuse(model, f"its config sets {name}")

    def check(what: str, parts: Attention) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            check_formula(model, what, out[0], _formula(model, parts, args, kwargs), TASK)

        return hook

    for number, layer in layers.items():
        parts = attention_of(model, layer)
        yield parts.module.register_forward_hook(check(f"the attention of layer {number}", parts), with_kwargs=True)


def _formula(
    model: nn.Module, parts: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Float[Tensor, "1 S D"]:
    """Compute attention as a pruned one does, on the arguments that the model passed to its own module."""
    module: Any = parts.module
    inputs = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    inputs |= inputs.get("kwargs", {})
    scale = getattr(module, "scaling", None)
    head_dim = getattr(module, "head_dim", None)
    if inputs.get("position_embeddings") is None or scale is None or head_dim is None:
        raise _refuse(model, "it does not get cos and sin of RoPE in every layer, or has no scaling and head_dim")
    x = inputs["hidden_states"]
    cos, sin = inputs["position_embeddings"]
    mask = inputs.get("attention_mask")
    size = cos.shape[-1]

    def heads(projection: nn.Module, norm: nn.Module | None, rotated: bool) -> Float[Tensor, "1 h S C"]:
        y = projection(x).unflatten(-1, (-1, head_dim))
        y = (y if norm is None else norm(y)).transpose(1, 2)
        if not rotated:
            return y
        half_turned = torch.cat([-y[..., size // 2 : size], y[..., : size // 2]], -1)
        return torch.cat([y[..., :size] * cos + half_turned * sin, y[..., size:]], -1)

    q_norm, k_norm = (getattr(module, name, None) for name in ("q_norm", "k_norm"))
    q = heads(parts.q.module, q_norm, True)
    k = heads(parts.k.module, k_norm, True)
    v = heads(parts.v.module, None, False)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=True)
    return parts.o.module(out.transpose(1, 2).flatten(-2))


def rotate_heads(
    x: Float[Tensor, "*T h_C"], rotation: Float[Tensor, "G C C"], inverse: bool = False
) -> Float[Tensor, "*T h_C"]:
    """Rotate the last dim of x, all key/value or all query heads, by the rotation of their key/value head, or by the inverse; in
    float32, returned in the dtype of x."""
    matrix = rotation.to(x.device, torch.float32)
    heads = x.float().unflatten(-1, (len(matrix), -1, matrix.shape[-1]))
    # a product with a broadcast would copy the rotations for every token, and learning would keep the copies
    rotated = torch.einsum("...gqc,gdc->...gqd" if inverse else "...gqc,gcd->...gqd", heads, matrix)
    return rotated.flatten(-3).to(x.dtype)


def rotate_weights(
    v_weight: Float[Tensor, "G_C D"],
    v_bias: Float[Tensor, " G_C"] | None,
    o_weight: Float[Tensor, "D H_C"],
    rotation: Float[Tensor, "G C C"],
) -> tuple[Float[Tensor, "G_C D"], Float[Tensor, " G_C"] | None, Float[Tensor, "D H_C"]]:
    """Return weight and bias of V and weight of O in the rotated basis, as new tensors of the same dtypes."""
    bias = None if v_bias is None else rotate_heads(v_bias, rotation)
    return rotate_heads(v_weight.mT, rotation).mT.contiguous(), bias, rotate_heads(o_weight, rotation)
