"""(dense model, plan) -> MoE model: the masks of the plan, applied for good. Needs no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from tomoe.errors import UserError
from tomoe.model.heads import rotate_weights
from tomoe.model.offload import LAYERS, cast_, materialized, offload_layers_
from tomoe.model.shape import ModelShape
from tomoe.model.structure import LayerParts, check_output, decoder_layers, layer_parts, shape_of
from tomoe.moe.modeling_tomoe import ToMoEConfig, ToMoEForCausalLM
from tomoe.plan import LayerPlan, Plan


def neuron_order(expert_masks: Bool[Tensor, "N F"]) -> Int[Tensor, " U"]:
    """The neurons that some expert uses, in Gray-code order of membership, ties by index.

    In that order neighbors differ in few memberships, so an expert is few contiguous runs of rows. The busiest column
    comes last in the code: the lowest bit of a Gray code changes most often, so it belongs to the smallest set.
    """
    used = expert_masks.any(0).nonzero().squeeze(1)
    bits = expert_masks[:, used].long()
    code = torch.zeros_like(used)
    running = torch.zeros_like(used)
    for row in bits:  # Gray -> binary, most significant bit first: each bit is the parity of those before it
        running = running ^ row
        code = code * 2 + running
    return used[code.argsort(stable=True)]


def fine_order(layer: LayerPlan) -> Int[Tensor, " U"]:
    """All neurons of a layer with fine-grained experts: the shared part, then expert after expert."""
    shared = cast(Tensor, layer.shared_mask).nonzero().squeeze(1)
    return torch.cat([shared, *(row.nonzero().squeeze(1) for row in layer.expert_masks)])


def moe_config(dense: PreTrainedModel, plan: Plan, version: str) -> ToMoEConfig:
    """The dense config, flat, with the plan's sizes."""
    values = {k: v for k, v in dense.config.to_dict().items() if k not in ("architectures", "auto_map", "model_type")}
    return ToMoEConfig(
        **values,
        dense_model_type=dense.config.model_type,
        num_experts=plan.num_experts,
        expert_form=plan.form,
        expert_sizes=[layer.expert_size for layer in plan.counts],
        shared_sizes=[layer.shared_size for layer in plan.counts],
        experts_per_token=[layer.top_k for layer in plan.counts],
        union_sizes=[layer.union for layer in plan.counts],
        rotary_pairs=[layer.rotary_pairs for layer in plan.counts],
        qk_dims=[layer.qk_dims for layer in plan.counts],
        value_dims=[layer.value_dims for layer in plan.counts],
        value_top_k=[layer.value_top_k for layer in plan.counts],
        value_embedding_size=max(layer.value_embedding for layer in plan.counts),
        plan_source=plan.source,
        tomoe_version=version,
    )


def _head_rows(t: Tensor, dims: Int[Tensor, " c"], head_dim: int) -> Tensor:
    """[heads * C, ..] -> [heads * c, ..]: the kept dims of every head."""
    return t.unflatten(0, (-1, head_dim))[:, dims].flatten(0, 1)


def layer_state(parts: LayerParts, layer: LayerPlan, s: ModelShape) -> dict[str, Tensor]:
    """The tensors of one folded layer, named as in its modules. Neurons in several experts are stored once."""
    order = neuron_order(layer.expert_masks) if layer.shared_mask is None else fine_order(layer)
    place = torch.full((s.mlp_size,), -1).index_put_((order,), torch.arange(len(order)))
    members = [place[row.nonzero().squeeze(1)].sort().values for row in layer.expert_masks]
    state = {
        # routers are copied, so that whoever trains the model does not change the plan
        "mlp.router.weight": layer.router_weight.clone(),
        "mlp.router.bias": None if layer.router_bias is None else layer.router_bias.clone(),
        "mlp.expert_neurons": torch.stack(members).int(),
        "mlp.up_proj": parts.up.weight[order],
        "mlp.up_bias": None if parts.up.bias is None else parts.up.bias[order],
        "mlp.gate_proj": None if parts.gate is None else parts.gate.weight[order],
        "mlp.gate_bias": None if parts.gate is None or parts.gate.bias is None else parts.gate.bias[order],
        "mlp.down_proj": layer.refitted("down", parts.down.weight)[:, order].t().contiguous(),
        "mlp.down_bias": parts.down.bias,
    }
    qk, values = s.qk_dims(layer.qk_kept), layer.value_kept.nonzero().squeeze(1)
    v, v_bias, o = parts.v.weight, parts.v.bias, layer.refitted("output", parts.o.weight)
    if layer.value_rotation is not None:
        v, v_bias, o = rotate_weights(v, v_bias, o, layer.value_rotation)
    for name, weight, bias, dims in (
        ("q_proj", parts.q.weight, parts.q.bias, qk),
        ("k_proj", parts.k.weight, parts.k.bias, qk),
        ("v_proj", v, v_bias, values),
    ):
        state[f"self_attn.{name}.weight"] = _head_rows(weight, dims, s.head_dim)
        state[f"self_attn.{name}.bias"] = None if bias is None else _head_rows(bias, dims, s.head_dim)
    state["self_attn.o_proj.weight"] = _head_rows(o.t(), values, s.head_dim).t().contiguous()
    state["self_attn.o_proj.bias"] = parts.o.bias
    for name in ("q_norm", "k_norm"):
        norm = getattr(parts.attention, name, None)
        state[f"self_attn.{name}"] = None if norm is None else norm.weight[qk]
    state["self_attn.rotary_ids"] = layer.qk_kept[: s.rotary_size // 2].nonzero().squeeze(1).int()
    state |= {f"self_attn.value_router.{name}": t.clone() for name, t in layer.value_router.items()}
    state |= {f"mlp.activation.{name}": t for name, t in parts.activation.state_dict().items()}
    return {name: t.detach() for name, t in state.items() if t is not None}


class FoldedLayers(Mapping[str, Tensor]):
    """The tensors of the MoE's layers by name; a layer is folded when it is read, and kept until another one is."""

    def __init__(self, dense: PreTrainedModel, plan: Plan):
        self.layers, self.parts, self.plan = decoder_layers(dense), layer_parts(dense), plan
        self.device, self.number, self.state = dense.device, -1, dict[str, Tensor]()

    def layer(self, i: int) -> dict[str, Tensor]:
        """All tensors of layer i, named as in its modules."""
        if i != self.number:
            # first, so that two layers are never held
            self.state = {}
            with torch.no_grad(), materialized(self.layers[i]):
                around = {n: t for n, t in self.layers[i].state_dict().items() if not _replaced(f".{n}")}
                folded = layer_state(self.parts[i], self.plan.layers[i], self.plan.shape)
                self.number, self.state = i, {name: t.to(self.device) for name, t in (around | folded).items()}
        return self.state

    def __getitem__(self, name: str) -> Tensor:
        number, _, inner_name = name.removeprefix(LAYERS).partition(".")
        return self.layer(int(number))[inner_name]

    def __iter__(self) -> Iterator[str]:
        return (f"{LAYERS}{i}.{name}" for i in range(len(self.layers)) for name in self.layer(i))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@torch.no_grad()
def fold(dense: PreTrainedModel, plan: Plan, version: str = "", lazily: bool = False) -> ToMoEForCausalLM:
    """The MoE that computes what `dense` computes under the plan's masks, in the dense model's dtype and device.

    Experts follow Eqs. 11 to 13 (Appendix A.1), attention Eq. 4 (Section 3.3). Weights outside MLP and attention are shared
    with `dense`, not copied. With `lazily`, a layer is folded again whenever it runs or is saved: the same model in the
    memory of the dense one. Raises UserError if the plan was made for a model of other sizes, or if `dense` computes more
    than the MoE can hold.
    """
    shape = shape_of(dense)
    if shape != plan.shape:
        raise UserError(
            f"the plan was made for {_sizes(plan.shape)}, but this model has {_sizes(shape)}; name the model it was made for"
        )
    check_output(dense)
    config = moe_config(dense, plan, version)
    config._attn_implementation = dense.config._attn_implementation
    with torch.device("meta"), no_init_weights():
        moe = ToMoEForCausalLM(config)
    cast_(moe, dense.dtype)
    folded = FoldedLayers(dense, plan)
    state: dict[str, Any] = {name: t for name, t in dense.state_dict().items() if not name.startswith(LAYERS)}
    for i in range(0 if lazily else shape.num_layers):
        state |= {f"{LAYERS}{i}.{name}": t for name, t in folded.layer(i).items()}
    missing, unexpected = moe.load_state_dict(state, assign=True, strict=False)
    assert not unexpected, unexpected
    assert all(lazily and name.startswith(LAYERS) for name in missing), missing
    _copy_buffers_(moe, dense)
    moe.tie_weights()
    if lazily:
        offload_layers_(moe, folded, dense.device, buffers=True)
    left = [name for name, t in [*moe.named_parameters(), *moe.named_buffers()] if t.is_meta]
    assert all(lazily and name.startswith(LAYERS) for name in left), f"not filled: {left[:3]}"
    moe.generation_config = dense.generation_config
    return moe.eval().requires_grad_(False)


def _replaced(name: str) -> bool:
    return ".mlp." in name or ".self_attn." in name


def _copy_buffers_(moe: nn.Module, dense: nn.Module) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) come from the dense model."""
    for name, buffer in dense.named_buffers():
        if _replaced(name):
            continue
        parent, _, leaf = name.rpartition(".")
        owner = moe.get_submodule(parent)
        if getattr(owner, leaf).device.type == "meta":
            setattr(owner, leaf, buffer)


def _sizes(s: ModelShape) -> str:
    return f"{s.num_layers} layers of {s.hidden_size} x {s.mlp_size} with {s.num_heads}/{s.num_kv_heads} heads of {s.head_dim}"
