"""(dense model, plan) -> MoE: apply the masks of the plan for good. Needs no data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from tomoe.errors import UserError
from tomoe.model.attention import Attention, rotate_weights
from tomoe.model.loading import free_on_device
from tomoe.model.mlp import Mlp, named_layers
from tomoe.model.offload import cast_, offload_layers_
from tomoe.model.shape import ModelShape
from tomoe.model.structure import check_output, layer_parts, shape_of
from tomoe.moe.modeling_tomoe import (
    ATTENTION_SIZES,
    MLP_SIZES,
    ToMoEConfig,
    ToMoEForCausalLM,
    column_norms,
    inputs_of,
    matrix_of,
)  # fmt: skip
from tomoe.plans import AnyPlan, InputsPlan, LayerPlan, Plan


def neuron_order(expert_masks: Bool[Tensor, "N F"]) -> Int[Tensor, " U"]:
    """Order the neurons that some expert uses by the Gray code of their membership, ties by index.

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
    """Order all neurons of a layer with fine-grained experts: the shared part, then expert after expert."""
    shared = cast(Tensor, layer.shared_mask).nonzero().squeeze(1)
    return torch.cat([shared, *(row.nonzero().squeeze(1) for row in layer.expert_masks)])


ROOM = 2.2  # what folding and comparing takes on a GPU beside the dense model, of its size
# What the config of a dense model may hold beside its family's own keys, and the converted model must not take over: keys of
# other Mixtures of Experts, which engines and trainers would read as the converted model's.
RESERVED = ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef")


def moe_config(dense: PreTrainedModel, plan: AnyPlan, version: str) -> ToMoEConfig:
    """Make the config of the converted model: the dense one, with the plan's sizes."""
    config: Any = dense.config
    make: Any = ToMoEConfig
    dropped = {"architectures", "auto_map", "model_type", "quantization_config"}
    dropped |= {key for key in RESERVED if key not in type(config).__dataclass_fields__}
    values = {k: v for k, v in config.to_dict().items() if k not in dropped and not k.startswith("tomoe_")}
    mlps = [parts.mlp for parts in layer_parts(dense)]
    sizes = _input_sizes(plan) if isinstance(plan, InputsPlan) else _expert_sizes(plan)
    made: ToMoEConfig = make(
        **values,
        tomoe_dense_type=config.model_type,
        tomoe_dense_class=type(dense).__name__,
        tomoe_mlps=[mlp.name for mlp in mlps],
        tomoe_mlp_parts=asdict(mlps[0].names) | {"activation": mlps[0].activation_name},
        tomoe_expert_form=plan.form,
        **{f"tomoe_{name}": numbers for name, numbers in sizes.items()},
        tomoe_plan_source=plan.source,
        tomoe_version=version,
    )
    return made


def _input_sizes(plan: InputsPlan) -> dict[str, Any]:
    return {
        "projections": {kind: list(names) for kind, names in plan.names.items()},
        "input_path": [
            {"active": point.active} | {kind: list(numbers) for kind, numbers in point.inputs.items()}
            for point in plan.path
        ],
        "active": plan.active,
    }


def _expert_sizes(plan: Plan) -> dict[str, Any]:
    counted = dict(zip(MLP_SIZES, ("expert_size", "union", "shared_size", "top_k"), strict=True))
    if plan.prunes_attention:
        counted |= {name: name for name in ATTENTION_SIZES}
    return {
        "num_experts": plan.num_experts,
        "value_embedding_size": max(layer.value_embedding for layer in plan.counts),
        **{name: [getattr(layer, count) for layer in plan.counts] for name, count in counted.items()},
    }


def _head_rows(t: Tensor, dims: Int[Tensor, " c"], head_dim: int) -> Tensor:
    """Select the kept dims of every head: [heads * C, ..] -> [heads * c, ..]."""
    return t.unflatten(0, (-1, head_dim))[:, dims].flatten(0, 1)


def mlp_state(mlp: Mlp, layer: LayerPlan, s: ModelShape) -> dict[str, Tensor]:
    """Return the tensors of one folded MLP by their names in its module. Neurons in several experts are stored once."""
    order = neuron_order(layer.expert_masks) if layer.shared_mask is None else fine_order(layer)
    place = torch.full((s.mlp_size,), -1).index_put_((order,), torch.arange(len(order)))
    members = [place[row.nonzero().squeeze(1)].sort().values for row in layer.expert_masks]
    gate, up, down = mlp.gate, mlp.up, mlp.down
    gate_bias = None if gate is None else gate.bias
    state = {
        # routers are copied, so that whoever trains the model does not change the plan
        "router.weight": layer.router_weight.clone(),
        "router.bias": None if layer.router_bias is None else layer.router_bias.clone(),
        "expert_neurons": torch.stack(members).int(),
        "up_proj": up.weight[order],
        "up_bias": None if up.bias is None else up.bias[order],
        "gate_proj": None if gate is None else gate.weight[order],
        "gate_bias": None if gate_bias is None else gate_bias[order],
        "down_proj": layer.refitted("down", down.weight)[:, order].t().contiguous(),
        "down_bias": down.bias,
    }
    if isinstance(mlp.activation, nn.Module):
        state |= {f"activation.{name}": t for name, t in mlp.activation.state_dict().items()}
    return {name: t.detach() for name, t in state.items() if t is not None}


def choices_state(layer: nn.Module, plan: InputsPlan) -> dict[str, Tensor]:
    """Return the column norms by which tokens choose the inputs of a layer's projections, by their names in the layer."""
    modules: dict[str, Any] = dict(layer.named_modules())
    found = {kind: [modules.get(name) for name in names] for kind, names in plan.names.items()}
    return {
        f"tomoe_choices.{kind}.norms": column_norms([matrix_of(projection) for projection in projections])
        for kind, projections in found.items()
        if all(map(inputs_of, projections))
    }


def attention_state(parts: Attention, layer: LayerPlan, s: ModelShape) -> dict[str, Tensor]:
    """Return the tensors of one pruned attention by their names in its module."""
    qk, values = s.qk_dims(layer.qk_kept), layer.value_kept.nonzero().squeeze(1)
    v, v_bias, o = parts.v.weight, parts.v.bias, layer.refitted("output", parts.o.weight)
    if layer.value_rotation is not None:
        v, v_bias, o = rotate_weights(v, v_bias, o, layer.value_rotation)
    state: dict[str, Tensor | None] = {}
    for name, weight, bias, dims in (
        ("q_proj", parts.q.weight, parts.q.bias, qk),
        ("k_proj", parts.k.weight, parts.k.bias, qk),
        ("v_proj", v, v_bias, values),
    ):
        state[f"{name}.weight"] = _head_rows(weight, dims, s.head_dim)
        state[f"{name}.bias"] = None if bias is None else _head_rows(bias, dims, s.head_dim)
    state["o_proj.weight"] = _head_rows(o.t(), values, s.head_dim).t().contiguous()
    state["o_proj.bias"] = parts.o.bias
    for name in ("q_norm", "k_norm"):
        norm = getattr(parts.module, name, None)
        state[name] = None if norm is None else norm.weight[qk]
    state["rotary_ids"] = layer.qk_kept[: s.rotary_size // 2].nonzero().squeeze(1).int()
    state |= {f"value_router.{name}": t.clone() for name, t in layer.value_router.items()}
    return {name: t.detach() for name, t in state.items() if t is not None}


class FoldedLayers(Mapping[str, Tensor]):
    """The tensors of the MoE's decoder layers by name; a layer is folded when read, and cached until another is read."""

    def __init__(self, dense: PreTrainedModel, plan: AnyPlan):
        self.prefix, self.layers = named_layers(dense)
        self.plan, self.device, self.number, self.state = plan, dense.device, -1, dict[str, Tensor]()
        layers = [] if isinstance(plan, InputsPlan) else list(zip(layer_parts(dense), plan.layers, strict=True))
        self.converted = {parts.mlp.number: (parts, layer) for parts, layer in layers}

    def layer(self, i: int) -> dict[str, Tensor]:
        """Return all tensors of decoder layer i by their names in its modules."""
        if i != self.number:
            # first, so that two layers are never held
            self.state = {}
            with torch.no_grad(), align_module_device(self.layers[i]):
                self.number, self.state = i, {name: t.to(self.device) for name, t in self._folded(i).items()}
        return self.state

    def _folded(self, i: int) -> dict[str, Tensor]:
        # Offloading drops buffers that no checkpoint holds, too.
        state = dict(self.layers[i].named_buffers()) | self.layers[i].state_dict()
        if isinstance(self.plan, InputsPlan):
            return state | choices_state(self.layers[i], self.plan)
        if i not in self.converted:
            return state
        parts, plan = self.converted[i]
        names = parts.mlp.names
        replaced = {parts.mlp.name.rpartition(".")[2]: mlp_state(parts.mlp, plan, self.plan.shape)}
        if names.flat:
            replaced |= {names.down: {}, str(parts.mlp.activation_name): {}}
        if self.plan.prunes_attention:
            replaced["self_attn"] = attention_state(parts.attention, plan, self.plan.shape)
        folded = {name: t for name, t in state.items() if name.partition(".")[0] not in replaced}
        return folded | {f"{module}.{name}": t for module, own in replaced.items() for name, t in own.items()}

    def __getitem__(self, name: str) -> Tensor:
        number, _, inner_name = name.removeprefix(f"{self.prefix}.").partition(".")
        return self.layer(int(number))[inner_name]

    def __iter__(self) -> Iterator[str]:
        return (f"{self.prefix}.{i}.{name}" for i in range(len(self.layers)) for name in self.layer(i))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def has_room(dense: PreTrainedModel) -> bool:
    """Whether the dense model's GPU has room for the MoE and for a copy loaded to compare with it."""
    if dense.device.type == "cpu" or any(p.is_meta for p in dense.parameters()):
        return False
    if empty_cache := getattr(torch.get_device_module(dense.device), "empty_cache", None):
        # what earlier stages no longer use
        empty_cache()
    return free_on_device(dense.device) > ROOM * sum(p.nbytes for p in dense.parameters())


@torch.no_grad()
def fold(dense: PreTrainedModel, plan: AnyPlan, version: str = "", lazily: bool = False) -> ToMoEForCausalLM:
    """Make the MoE that computes what `dense` computes under the plan's masks, in the dense model's dtype and device.

    Experts follow Eqs. 11 to 13 (Appendix A.1), attention Eq. 4 (Section 3.3). Weights outside MLP and pruned attention are
    shared with `dense`, not copied. With `lazily`, a layer is folded again whenever it runs or is saved: the same model in
    the memory of the dense one. Raises UserError if the plan was made for a model of other sizes, or if `dense` computes
    more than the MoE can hold.
    """
    shape = shape_of(dense)
    if shape != plan.shape:
        raise UserError(
            f"the plan was made for {_sizes(plan.shape)}, but this model has {_sizes(shape)}; name the model it was made for"
        )
    check_output(dense, plan.prunes_attention)
    config = moe_config(dense, plan, version)
    config._attn_implementation = dense.config._attn_implementation
    try:
        with torch.device("meta"), no_init_weights():
            moe = ToMoEForCausalLM(config)
    except ValueError as error:
        raise UserError(f"the plan was not made for this model: {error}; name the model it was made for") from None
    cast_(moe, dense.dtype)
    folded = FoldedLayers(dense, plan)
    layers = f"{folded.prefix}."
    state: dict[str, Any] = {name: t for name, t in dense.state_dict().items() if not name.startswith(layers)}
    for i in range(0 if lazily else len(folded.layers)):
        state |= {f"{layers}{i}.{name}": t for name, t in folded.layer(i).items()}
    held = moe.state_dict()
    state = {name: t for name, t in state.items() if name in held or not name.startswith(layers)}
    missing, unexpected = moe.load_state_dict(state, assign=True, strict=False)
    assert not unexpected, unexpected
    assert all(lazily and name.startswith(layers) for name in missing), missing
    _copy_buffers_(moe, dense)
    moe.tie_weights()
    if lazily:
        offload_layers_(moe, folded, dense.device, buffers=True)
    left = [name for name, t in [*moe.named_parameters(), *moe.named_buffers()] if t.is_meta]
    assert all(lazily and name.startswith(layers) for name in left), f"not filled: {left[:3]}"
    moe.generation_config = dense.generation_config
    return moe.eval().requires_grad_(False)


def _copy_buffers_(moe: nn.Module, dense: nn.Module) -> None:
    """Copy buffers that are in no checkpoint (rotary frequencies, embedding scales) from the dense model."""
    held = dict(moe.named_buffers())
    for name, buffer in dense.named_buffers():
        if name in held and held[name].is_meta:
            parent, _, leaf = name.rpartition(".")
            setattr(moe.get_submodule(parent), leaf, buffer)


def _sizes(s: ModelShape) -> str:
    heads = f" with {s.num_heads}/{s.num_kv_heads} heads of {s.head_dim}" if s.num_heads else ""
    return f"{s.num_layers} layers of {s.hidden_size} x {s.mlp_size}{heads}"
