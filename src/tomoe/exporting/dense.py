"""The dense model's own class with narrower MLPs: if all tokens use the same neurons, no routing is needed.

Every engine, quantizer and processor that runs the dense model runs it. Which key of the family's config is the width of an MLP
is found by structure: the one that gives the converted MLPs other sizes, and no other tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from tomoe.exporting.stock.architecture import padded, round_up
from tomoe.exporting.target import Job, Options, Sizes, Target
from tomoe.exporting.writing import write_config
from tomoe.model.mlp import converted_mlps
from tomoe.moe.checkpoint import readable_weights
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, ToMoEMLP

WORDS = ("intermediate", "ffn", "inner", "mlp")  # in the names of keys that are tried first, or that may be None


class Dense(Target):
    """The class of the dense model, with its attention and norms, and MLPs with the neurons that all layers keep."""

    name = "dense"
    about = "the dense model's own class"
    how_well = "exactly"

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        config = moe.config
        if config.tomoe_num_experts > 1:
            return (
                "its tokens choose among experts, and a dense class uses the same neurons for all of them, which method = static "
                "makes"
            )
        if config.prunes_attention:
            return "its attention is pruned (attention.pruning), and this class does not support that"
        sizes = config.tomoe_expert_sizes
        if min(sizes) < max(sizes):
            return (
                f"its layers keep {min(sizes):,} to {max(sizes):,} neurons, and this class has one width for all; convert with "
                "target = dense"
            )
        return None if _narrower(_class_of(moe), config.dense_config(), sizes[0]) is not None else _no_key(moe)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        half = max(1, converted_mlps(dense)[0].down.in_features // 2)
        return None if _narrower(type(dense), dense.config, half) is not None else _no_key(dense)

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        width = _width(moe, options)
        stored = sum(p.numel() for p in _skeleton(moe, width).parameters()) * moe.dtype.itemsize
        kept = moe.config.tomoe_expert_sizes[0]
        filled = f" (filled up from {kept:,} with zeros)" if width > kept else ""
        return Sizes(
            stored, f"{_class_of(moe).__name__} with {width:,} neurons{filled} in each of {len(moe.mlps())} MLPs"
        )

    @torch.no_grad()
    def write(self, job: Job, folder: Path) -> None:
        moe = job.moe
        width = _width(moe, job.options)
        dense = _skeleton(moe, width)
        inside = tuple(f"{name}." for name in moe.config.tomoe_mlps)
        state = {name: t for name, t in moe.state_dict().items() if not name.startswith(inside)}
        for name, mlp in zip(moe.config.tomoe_mlps, moe.mlps(), strict=True):
            state |= _mlp_tensors(moe, name, mlp, width, dense)
        dense.load_state_dict(state, assign=True)
        # each name was given a tensor of its own
        dense.tie_weights()
        dense.config.dtype = moe.dtype
        dense.generation_config = moe.generation_config
        # the family's own code knows what its checkpoints look like
        dense.save_pretrained(folder)
        readable_weights(folder)
        write_config(dense.config, folder)
        job.save_tokenizer(folder)
        written = sum(t.nbytes for t in dense.parameters())
        job.on_progress(written, written)

    def is_adjustable(self, moe: ToMoEForCausalLM) -> bool:
        return False


def _class_of(moe: ToMoEForCausalLM) -> type[PreTrainedModel]:
    """Return the class of the dense model, which the converted config has checked."""
    found: type[PreTrainedModel] = getattr(transformers, moe.config.tomoe_dense_class)
    return found


def _width(moe: ToMoEForCausalLM, options: Options) -> int:
    """Return the number of neurons to write: those kept, rounded up to the requested multiple."""
    return round_up(moe.config.tomoe_expert_sizes[0], options.width_multiple or 1)


def _no_key(model: PreTrainedModel) -> str:
    kind = getattr(model.config, "tomoe_dense_type", model.config.model_type)
    return f"no key of the config of {kind} makes all MLPs that were converted narrower, and nothing else"


def _skeleton(moe: ToMoEForCausalLM, width: int) -> PreTrainedModel:
    found = _narrower(_class_of(moe), moe.config.dense_config(), width)
    assert found is not None
    return found


def _narrower(kind: type[PreTrainedModel], config: PreTrainedConfig, width: int) -> PreTrainedModel | None:
    """Make a model of the class on the meta device whose converted MLPs have `width` neurons, and which is otherwise the same;
    None if no config key does that."""
    whole = _empty(kind, config)
    named, size = _outside_of_mlps(whole)
    for key, value in _keys(config, size, width):
        changed = copy.deepcopy(config)
        setattr(changed.get_text_config(decoder=True), key, value)
        try:
            model = _empty(kind, changed)
            if _outside_of_mlps(model) == (named, width):
                return model
        # a family may refuse sizes that do not fit each other
        except Exception:
            continue
    return None


def _empty(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), no_init_weights():
        model = kind(config).eval()
    # two names of one matrix are counted and stored once
    model.tie_weights()
    return model


def _outside_of_mlps(model: PreTrainedModel) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the shapes of all tensors except the matrices of the converted MLPs, by name, and the neurons of one of these."""
    mlps = converted_mlps(model)
    ours = {id(t) for mlp in mlps for part in (mlp.up, mlp.down, mlp.gate) if part for t in part.module.parameters()}
    outside = {name: tuple(t.shape) for name, t in model.state_dict(keep_vars=True).items() if id(t) not in ours}
    return outside | {mlp.name: () for mlp in mlps}, mlps[0].down.in_features


def _keys(config: PreTrainedConfig, size: int, width: int) -> Iterator[tuple[str, Any]]:
    """Yield config keys that may be the width of the MLPs, with the values that would change it from `size` to `width`."""
    values = config.get_text_config(decoder=True).to_dict()
    for key in sorted(values, key=lambda key: not any(word in key for word in WORDS)):
        value = values[key]
        if value == size or (value is None and any(word in key for word in WORDS)):
            yield key, width
        elif isinstance(value, list) and size in value:
            yield key, [width if n == size else n for n in value]


def _mlp_tensors(
    moe: ToMoEForCausalLM, name: str, mlp: ToMoEMLP, width: int, dense: PreTrainedModel
) -> dict[str, Tensor]:
    """Return the tensors of one MLP by their names in the dense model, padded with neurons of zeros."""
    parts = moe.config.tomoe_mlp_parts
    prefix = name.rpartition(".")[0] if parts["flat"] else name
    rows = mlp.expert_rows[0].long()

    def neurons(t: Tensor) -> Tensor:
        return padded(t[rows].view(len(rows), -1), width, 0).view(width, *t.shape[1:])

    # a fused projection holds the rows of the gate, then those of the up projection
    stacked: dict[str, list[tuple[Tensor, Tensor | None]]] = {}
    if mlp.gate_proj is not None:
        stacked.setdefault(parts["up" if parts["fused"] else "gate"], []).append((mlp.gate_proj, mlp.gate_bias))
    stacked.setdefault(parts["up"], []).append((mlp.up_proj, mlp.up_bias))
    made: dict[str, tuple[Tensor, Tensor | None]] = {parts["down"]: (neurons(mlp.down_proj).t(), mlp.down_bias)}
    for part, matrices in stacked.items():
        biases = [neurons(bias) for _, bias in matrices if bias is not None]
        made[part] = torch.cat([neurons(weight) for weight, _ in matrices]), torch.cat(biases) if biases else None
    state = {}
    for part, (weight, bias) in made.items():
        transposed = isinstance(dense.get_submodule(f"{prefix}.{part}"), Conv1D)
        state[f"{prefix}.{part}.weight"] = (weight.t() if transposed else weight).contiguous()
        if bias is not None:
            state[f"{prefix}.{part}.bias"] = bias
    if isinstance(mlp.activation, torch.nn.Module) and parts["activation"]:
        state |= {f"{prefix}.{parts['activation']}.{key}": t for key, t in mlp.activation.state_dict().items()}
    return state
