"""The same MoE as an architecture that transformers, vLLM, SGLang and llama.cpp already know.

A stock architecture has separate weights for every expert, one width for all layers, and whole heads. So neurons that
experts share are copied, narrow experts get neurons of zeros, and dropped Q/K and V/O dims come back as zeros: none of it
changes a logit. What no zero can express (V/O dims chosen for each token, biases that the architecture has no place for)
is refused in one sentence.

Letters: N experts, M width of an expert, S width of the shared expert, D hidden size, C head dim, c kept dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tomoe.errors import UserError
from tomoe.model.hooks import hooked, input_of
from tomoe.model.structure import layer_parts
from tomoe.moe.modeling_tomoe import ToMoEAttention, ToMoEForCausalLM, ToMoEMLP
from tomoe.recipe.conversion import STOCK_MULTIPLE

PROBE_TOKENS = 8


@dataclass(frozen=True)
class StockArch:
    """A stock architecture that can hold a MoE whose chosen experts have the weight 1.

    moe_name: of a layer's MoE in a checkpoint; expert_names: of an expert's gate, up and down projection there; width_key: of
    M in the config; biased: Q, K and V may have biases; normed: Q and K are normalized in each head, None if the config says;
    shared: a shared expert works on every token; fine: for fine-grained experts, else for overlapping ones; windows: tokens
    may see the last ones only.
    """

    name: str
    config_class: type[PreTrainedConfig]
    moe_name: str
    expert_names: tuple[str, str, str]
    width_key: str
    biased: bool = False
    normed: bool | None = False
    shared: bool = False
    fine: bool = False
    windows: bool = True


_QWEN = ("gate_proj", "up_proj", "down_proj")
STOCK_ARCHS = {
    arch.name: arch
    for arch in (
        StockArch("mixtral", MixtralConfig, "block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size"),
        StockArch("qwen2_moe", Qwen2MoeConfig, "mlp", _QWEN, "moe_intermediate_size", biased=True, shared=True),
        StockArch("qwen3_moe", Qwen3MoeConfig, "mlp", _QWEN, "moe_intermediate_size", normed=True),
        StockArch(
            "glm4_moe", Glm4MoeConfig, "mlp", _QWEN, "moe_intermediate_size", biased=True, normed=None, shared=True,
            fine=True, windows=False,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Widths that every layer of the export has: M, and S (0 without a shared expert)."""

    width: int
    shared: int


def incompatibility(moe: ToMoEForCausalLM, arch: StockArch) -> str | None:
    """Why a stock architecture cannot compute what this MoE computes, as half a sentence; None if it can."""
    if problem := form_problem(moe.config.expert_form, arch):
        return problem
    attentions: list[Any] = [layer.self_attn for layer in moe.model.layers]
    mlp: Any = moe.model.layers[0].mlp
    first = attentions[0]
    if any(a.value_router is not None for a in attentions):
        return (
            "it chooses V/O dims for each token (attention.pruning = per_token), and stock attention has no such choice"
        )
    biases = any(bias is not None for bias in (mlp.gate_bias, mlp.up_bias, mlp.down_bias))
    problem = _unsupported_part(
        arch, mlp.gate_proj is not None, biases, first.q_proj, first.o_proj, first.q_norm is not None
    )
    if problem:
        return problem
    if 2 * moe.model.rotary_emb.inv_freq.numel() != first.head_dim:
        return "its rotary embedding turns only a part of each head"
    if abs(first.scaling * first.head_dim**0.5 - 1) > 1e-6:
        return "its attention has a softmax scale of its own"
    windows = {a.sliding_window for a in attentions}
    if arch.fine and moe.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {moe.config.hidden_act}, and engines know this architecture with silu only"
    if not arch.windows and any(w is not None and w < moe.config.max_position_embeddings for w in windows):
        return "its attention has a sliding window"
    if len(windows) > (2 if arch.shared and None in windows else 1):
        return "its layers have sliding windows of different sizes"
    return _nonstandard_residual(moe)


def form_problem(form: str, arch: StockArch) -> str | None:
    """Why an architecture cannot hold experts of this form (experts.form), as half a sentence; None if it can."""
    if arch.fine == (form == "fine"):
        return None
    if arch.fine:
        return "its experts share neurons (experts.form = overlapping), and it has a place for fine-grained ones only"
    return "its experts are fine-grained (experts.form = fine): a token uses several, each with the weight 1"


def dense_incompatibility(dense: PreTrainedModel, name: str, form: str) -> str | None:
    """Why no MoE with experts of this form, made from this dense model, could become the target `name`, judging by its parts;
    None if it might."""
    parts = layer_parts(dense)[0]
    normed = getattr(parts.attention, "q_norm", None) is not None
    arch = gguf_arch(normed, form == "fine") if name == "gguf" else STOCK_ARCHS[name]
    biases = any(p is not None and p.bias is not None for p in (parts.gate, parts.up, parts.down))
    problem = _unsupported_part(arch, parts.gate is not None, biases, parts.q, parts.o, normed)
    return problem or (llama_cpp_problem(dense, arch) if name == "gguf" else None)


def gguf_name(arch: StockArch) -> str:
    """llama.cpp's name of the architecture that `gguf_arch` chose."""
    return "glm4moe" if arch.fine else "qwen3moe" if arch.normed else "llama"


def llama_cpp_problem(model: PreTrainedModel, arch: StockArch) -> str | None:
    """Which activation or rotary embedding of this model, dense or converted, llama.cpp does not compute in an architecture
    of `gguf_arch`, as half a sentence; None if all is well."""
    if model.config.hidden_act not in ("silu", "swish"):
        return f"its activation is {model.config.hidden_act}, and llama.cpp's experts use silu"
    rotary: Any = model.model.rotary_emb
    if rotary.rope_type in ("dynamic", "longrope") or rotary.attention_scaling != 1.0:
        return f"its rotary embedding ({rotary.rope_type}) scales with the length or the scores"
    if (arch.normed or arch.fine) and rotary.rope_type != "default":
        # overlapping experts become a `llama` there, or with a norm of Q and K a `qwen3moe`, which takes no more than this
        normed = getattr(model.model.layers[0].self_attn, "q_norm", None) is not None
        other = "; experts.form = overlapping has a place for them" if arch.fine and not normed else ""
        name = gguf_name(arch)
        return (
            f"llama.cpp's {name} takes plain rotary frequencies only, and these are scaled ({rotary.rope_type}){other}"
        )
    return None


def gguf_arch(normed: bool, fine: bool) -> StockArch:
    """The layout of llama.cpp's `llama` (Mixtral, with biases of Q, K and V allowed) or, if `normed`, of its `qwen3moe`;
    for fine-grained experts of its `glm4moe`."""
    if fine:
        return replace(STOCK_ARCHS["glm4_moe"], name="gguf")
    return STOCK_ARCHS["qwen3_moe"] if normed else replace(STOCK_ARCHS["mixtral"], name="gguf", biased=True)


def _unsupported_part(
    arch: StockArch, gated: bool, biases: bool, q: nn.Linear, o: nn.Linear, normed: bool
) -> str | None:
    if not gated:
        return "its MLP has no gate projection"
    if biases:
        return "its MLP has biases"
    if o.bias is not None:
        return "its attention output has a bias"
    if q.bias is not None and not arch.biased:
        return "its Q, K and V projections have biases"
    if arch.normed is not None and normed != arch.normed:
        return "it normalizes Q and K" if normed else "it does not normalize Q and K"
    return None


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


def common_neurons(mlp: ToMoEMLP) -> Tensor:
    """Rows that belong to every expert, ascending."""
    uses = torch.bincount(mlp.expert_rows.flatten().long(), minlength=mlp.up_proj.shape[0])
    return (uses == mlp.num_experts).nonzero().squeeze(1)


def make_layout(moe: ToMoEForCausalLM, arch: StockArch, multiple: int = STOCK_MULTIPLE) -> Layout:
    """The widths that take the fewest weights: what every expert has, a shared expert stores once instead of N times."""
    mlps: list[ToMoEMLP] = [layer.mlp for layer in moe.model.layers]
    widths = [mlp.expert_rows.shape[1] for mlp in mlps]

    def up(size: int) -> int:
        return max(multiple, -(-size // multiple) * multiple)

    if not arch.shared:
        return Layout(up(max(widths)), 0)
    common = [len(common_neurons(mlp)) for mlp in mlps]
    choices = [
        Layout(up(max(w - min(c, shared) for w, c in zip(widths, common, strict=True))), shared)
        for shared in range(multiple, up(max(common)) + 1, multiple)
    ]
    return min(choices, key=lambda layout: (mlps[0].num_experts * layout.width + layout.shared, layout.shared))


def stock_config(moe: ToMoEForCausalLM, arch: StockArch, layout: Layout) -> PreTrainedConfig:
    """The config of the export: the keys that the architecture shares with the dense model's, and the sizes."""
    windows = [layer.self_attn.sliding_window for layer in moe.model.layers]
    window = next((w for w in windows if w is not None), None)
    kept = kept_values(moe, arch) | {
        arch.width_key: layout.width,
        "num_experts_per_tok": 1,
        "sliding_window": window,
        ("num_experts" if arch.moe_name == "mlp" else "num_local_experts"): moe.config.num_experts,
    }
    if arch.moe_name == "mlp":
        kept |= {
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": bool(window),
        }
    if arch.shared:
        types = ["full_attention" if w is None else "sliding_attention" for w in windows]
        kept |= {"shared_expert_intermediate_size": layout.shared, "layer_types": types}
    config: PreTrainedConfig = arch.config_class(**kept)
    config.dtype = moe.dtype
    check_rotary(moe, config)
    return config


def kept_values(moe: ToMoEForCausalLM, arch: StockArch) -> dict[str, Any]:
    """What the config of the export has in common with the dense model's, and names that are the same for every layout."""
    values = moe.config.dense_config().to_dict()
    known = {f.name for f in fields(arch.config_class)} - {"layer_types", "dtype", "transformers_version"}
    return {k: v for k, v in values.items() if k in known} | {
        "head_dim": moe.model.layers[0].self_attn.head_dim,
        "architectures": [arch.config_class.__name__.replace("Config", "ForCausalLM")],
    }


def check_rotary(moe: ToMoEForCausalLM, config: PreTrainedConfig) -> None:
    """Raises UserError if the architecture's own code makes other rotary frequencies of this config than the MoE has."""
    ours, theirs = moe.model.rotary_emb, type(empty_stock(config).model.rotary_emb)(config)
    same = torch.equal(ours.inv_freq.float().cpu(), theirs.inv_freq) and (
        ours.attention_scaling == theirs.attention_scaling
    )
    if not same:
        raise UserError(f"{config.model_type} makes other rotary frequencies of this config than the model itself")


def empty_stock(config: PreTrainedConfig) -> Any:
    """A model of this config on the meta device, to read names and sizes from."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def padded(t: Float[Tensor, "n m"], size: int, dim: int) -> Float[Tensor, "_ _"]:
    """Append zeros along `dim`, up to `size`."""
    shape = list(t.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([t, t.new_zeros(shape)], dim).contiguous()


def expert_tensors(mlp: ToMoEMLP, layout: Layout, names: tuple[str, str, str]) -> dict[str, Tensor]:
    """A copy of its neurons for every expert; what all experts have goes to the shared expert, as far as that is wide.

    The shared expert's output is multiplied by sigmoid(gate x). A gate of zeros makes that exactly 1/2 for every token,
    and down weights that are doubled undo it exactly: powers of two round nothing.
    """
    assert mlp.gate_proj is not None
    shared = common_neurons(mlp)[: layout.shared]
    inside = torch.zeros(mlp.up_proj.shape[0], dtype=torch.bool, device=shared.device)
    inside[shared] = True

    def matrices(rows: Tensor, width: int, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        assert mlp.gate_proj is not None
        gate, up = (padded(t[rows], width, 0) for t in (mlp.gate_proj, mlp.up_proj))
        return gate, up, padded(factor * mlp.down_proj[rows].t(), width, 1)

    tensors: dict[str, Tensor] = {"gate.weight": mlp.router.weight.to(mlp.up_proj.dtype)}
    for n, rows in enumerate(mlp.expert_rows.long()):
        expert = matrices(rows[~inside[rows]], layout.width)
        tensors |= {f"experts.{n}.{name}.weight": t for name, t in zip(names, expert, strict=True)}
    if layout.shared:
        expert = matrices(shared, layout.shared, 2.0)
        tensors |= {f"shared_expert.{name}.weight": t for name, t in zip(names, expert, strict=True)}
        tensors["shared_expert_gate.weight"] = mlp.up_proj.new_zeros(1, mlp.up_proj.shape[1])
    return tensors


def attention_tensors(attention: ToMoEAttention) -> dict[str, Tensor]:
    """Fill whole heads: kept Q/K dims at their places, V/O dims at the first places, zeros elsewhere.

    A norm over a head takes its mean over all C dims, of which the dropped ones are zero: as in the dense model.
    """
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


def zero_biases(attention: dict[str, Tensor]) -> dict[str, Tensor]:
    """Biases of Q, K and V that change nothing, for the weights in `attention`."""
    weights = {name: attention[f"{name}.weight"] for name in ("q_proj", "k_proj", "v_proj")}
    return {f"{name}.bias": weight.new_zeros(len(weight)) for name, weight in weights.items()}


@torch.no_grad()
def stock_tensors(moe: ToMoEForCausalLM, arch: StockArch, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of every tensor of the checkpoint, layer by layer: only one layer's copies are alive at a time."""
    inner: Any = moe.model
    yield "model.embed_tokens.weight", inner.embed_tokens.weight
    for i, layer in enumerate(inner.layers):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", getattr(layer, name).weight
        attention = attention_tensors(layer.self_attn)
        if arch.biased:
            attention = zero_biases(attention) | attention
        for name, t in attention.items():
            yield f"{prefix}self_attn.{name}", t
        for name, t in expert_tensors(layer.mlp, layout, arch.expert_names).items():
            yield f"{prefix}{arch.moe_name}.{name}", t
    yield "model.norm.weight", inner.norm.weight
    if not moe.config.tie_word_embeddings:
        yield "lm_head.weight", moe.lm_head.weight
