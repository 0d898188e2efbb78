"""A dense decoder converted to an MoE or to sparse inputs by tomoe: one file for all families.

This file imports torch and transformers only. It is copied beside the weights, so that
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where tomoe is not installed.

A converted model is the family's own class with another MLP in its layers. `ToMoEConfig` and `ToMoEForCausalLM` are names
for one class per family, made on first use: each inherits everything from the family's class (forward pass, cache,
generation, initialization, tensor-parallel plan) and adds what is defined here. The expert backends are at the end.

Letters: B batch, S sequence, T = B S tokens, D hidden size, N experts, k experts of a token, W width of an expert, U neurons
that some expert uses, H query heads, G key/value heads, C head dim, c kept dims of Q and K, P kept rotary pairs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import eager_attention_forward as eager_attention
from transformers.pytorch_utils import Conv1D

# What the family's own code calls the cache: transformers renamed it in 5.24.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
FORMAT = 2  # of the checkpoint
MLP_SIZES = ("expert_sizes", "union_sizes", "shared_sizes", "experts_per_token")
# Kinds of projections that read the same input: Q, K and V; the output projection of attention; gate and up; down.
KINDS = ("attention", "output", "up", "down")
FEW_TOKENS = 4  # tokens of a forward pass, in all rows together, up to which it is like decoding
PROMPTS = ("chosen", "whole")
# What families call the modules that a conversion replaces, in the names of their tensor-parallel plans.
MLP_MODULES = {"mlp", "feed_forward", "ffn", "mixer", "shared_mlp"}
ATTENTION_SIZES = ("rotary_pairs", "qk_dims", "value_dims", "value_top_k")


class ToMoEConfig(PreTrainedConfig):
    """The family's own config, extended by the values of the plan under names that begin with `tomoe_`.

    Lists hold one number per converted layer. tomoe_format: of the checkpoint; tomoe_dense_type, tomoe_dense_class:
    the family's config and model; tomoe_mlps: the names of the MLPs that were replaced; tomoe_mlp_parts: what the family
    calls their parts; tomoe_expert_form: overlapping (top-1, experts share neurons) or fine (top-k, experts share nothing,
    added to a shared part of shared_sizes neurons); tomoe_num_experts: N; tomoe_experts_per_token: k; tomoe_expert_sizes:
    W; tomoe_union_sizes: U; tomoe_expert_backend: auto, or one of BACKENDS; tomoe_plan_source: hash of the dense weights.

    The form `inputs` has no experts: every projection is the dense one, and a token uses its largest inputs.
    tomoe_projections: the names of each kind of projection, from the decoder layer on; tomoe_input_path: inputs of a token
    for each kind and layer (0: there is none), at falling fractions of active parameters, the first of which is 1;
    tomoe_active: the fraction to use, which may be chosen when loading (`layer_inputs`). tomoe_prompts: `chosen`, every token
    of every pass chooses, or `whole`, which may be chosen when loading, too: tokens choose in passes of at most FEW_TOKENS
    tokens, and longer prompts and larger batches use all inputs, as the dense model does.

    Only where attention is pruned: tomoe_rotary_pairs: P; tomoe_qk_dims: c, which is 2 P and the kept dims that RoPE leaves
    alone; tomoe_value_dims: kept dims of V and O; tomoe_value_top_k: how many of them a token uses (fewer if a value router
    chooses); tomoe_value_embedding_size: of that router.

    `num_experts_per_tok`, which engines and users know, is the k of the layers that leave experts out, or when loading
    another one (`layer_top_k`). In a family that has such a key itself it is `tomoe_num_experts_per_tok`.
    `output_router_logits` and `router_aux_loss_coef` mean what they mean in stock MoEs (see `balance_loss`).

    Raises ValueError, before anything is allocated, if these numbers contradict each other or the dense sizes.
    """

    model_type = "tomoe"
    tomoe_dense_type: str = ""
    tomoe_dense_class: str = ""
    tomoe_format: int = FORMAT
    tomoe_mlps: list[str] = field(default_factory=list)
    tomoe_mlp_parts: dict[str, Any] = field(default_factory=dict)
    tomoe_expert_form: str = "overlapping"
    tomoe_num_experts: int = 0
    tomoe_experts_per_token: list[int] = field(default_factory=list)
    tomoe_shared_sizes: list[int] = field(default_factory=list)
    tomoe_expert_sizes: list[int] = field(default_factory=list)
    tomoe_union_sizes: list[int] = field(default_factory=list)
    tomoe_rotary_pairs: list[int] = field(default_factory=list)
    tomoe_qk_dims: list[int] = field(default_factory=list)
    tomoe_value_dims: list[int] = field(default_factory=list)
    tomoe_value_top_k: list[int] = field(default_factory=list)
    tomoe_value_embedding_size: int = 0
    tomoe_projections: dict[str, list[str]] = field(default_factory=dict)
    tomoe_input_path: list[dict[str, Any]] = field(default_factory=list)
    tomoe_active: float = 1.0
    tomoe_prompts: str = "chosen"
    tomoe_expert_backend: str = "auto"
    tomoe_plan_source: str | None = None
    tomoe_version: str | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.1

    def __new__(cls, **values: Any) -> ToMoEConfig:
        if cls is ToMoEConfig and values.get("tomoe_dense_type"):
            cls = config_class(known_family(values["tomoe_dense_type"]))
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, with the family's class. Raises ValueError for a folder of another format."""
        if cls is not ToMoEConfig:
            return super().from_dict(config_dict, **kwargs)
        if config_dict.get("tomoe_format") != FORMAT:
            raise ValueError(
                f"the folder has format {str(config_dict.get('tomoe_format'))[:40]!r}, and {FORMAT} is read here"
            )
        return config_class(known_family(config_dict.get("tomoe_dense_type"))).from_dict(config_dict, **kwargs)

    def __reduce__(self) -> Any:
        return _new, (config_class, self.tomoe_dense_type), self.__dict__

    def __post_init__(self, **dense_values: Any) -> None:
        super().__post_init__(**dense_values)
        # transformers writes only the class that was saved, and serving engines ask for AutoModel.
        classes = {"AutoConfig": "ToMoEConfig", "AutoModel": "ToMoEModel", "AutoModelForCausalLM": "ToMoEForCausalLM"}
        self.auto_map = {auto: f"modeling_tomoe.{name}" for auto, name in classes.items()}
        if not self.tomoe_dense_type:
            return
        if self.chooses_inputs:
            # A rank that has a part of the inputs could not tell which are the largest.
            self.__dict__["base_model_tp_plan"] = {}
        elif self.most_top_k == 1 or not getattr(self, self.top_k_key, None):
            # Serving engines read it; where a token can use one expert only it is 1, whatever a file says.
            setattr(self, self.top_k_key, 1 if self.most_top_k == 1 else self.planned_top_k or 1)
        self.check()

    @property
    def top_k_key(self) -> str:
        """The config key of k."""
        own = "num_experts_per_tok" in CONFIG_MAPPING[self.tomoe_dense_type].__dataclass_fields__
        return "tomoe_num_experts_per_tok" if own else "num_experts_per_tok"

    @property
    def num_experts(self) -> int:
        """N, under the name that trainers read. Assignments, from files too, are ignored."""
        return self.tomoe_num_experts

    @num_experts.setter
    def num_experts(self, value: int) -> None:
        pass

    @property
    def prunes_attention(self) -> bool:
        """Whether attention is pruned (`ToMoEAttention`); otherwise it is the family's."""
        return bool(self.tomoe_qk_dims)

    @property
    def chooses_inputs(self) -> bool:
        """Whether the form is `inputs`: tokens choose inputs of projections, and there are no experts."""
        return self.tomoe_expert_form == "inputs"

    def check(self) -> None:
        """Raise ValueError, in one sentence, for sizes that no conversion of this dense model can have."""
        if not isinstance(self.tomoe_mlps, list) or not self.tomoe_mlps:
            raise ValueError("the config names no MLP that was converted")
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
            if type(value := getattr(self, name, None)) is int:
                self._check_size(name, value, 1, 2**24 if name.endswith("_size") else 2**16)
        check_backend(self.tomoe_expert_backend)
        if self.tomoe_prompts not in PROMPTS[: 2 if self.chooses_inputs else 1]:
            known = "chosen or whole" if self.chooses_inputs else "chosen, because prompts use the chosen experts"
            raise ValueError(f"tomoe_prompts is {str(self.tomoe_prompts)[:40]!r}, which must be {known}")
        layers, experts = len(self.tomoe_mlps), self.tomoe_num_experts
        if self.chooses_inputs:
            self._check_path(layers)
            return
        self._check_size("tomoe_num_experts", experts, 1, 2**16)
        for name in MLP_SIZES + (ATTENTION_SIZES if self.prunes_attention else ()):
            sizes = getattr(self, f"tomoe_{name}")
            if not isinstance(sizes, list) or len(sizes) != layers:
                count = f"{len(sizes)} numbers" if isinstance(sizes, list) else type(sizes).__name__
                raise ValueError(f"the config has {count} under tomoe_{name}, but {layers} converted layers")
        if self.tomoe_expert_form not in ("overlapping", "fine"):
            raise ValueError(
                f"tomoe_expert_form is {str(self.tomoe_expert_form)[:40]!r}, not overlapping, fine or inputs"
            )
        most = self.most_top_k
        self._check_size(self.top_k_key, getattr(self, self.top_k_key), 1, most)
        width = getattr(self, "intermediate_size", None)
        for i in range(layers):
            self._check_layer(i, most, width if type(width) is int else 2**24)
            if self.prunes_attention:
                self._check_attention(i)

    def _check_path(self, layers: int) -> None:
        kinds, path = self.tomoe_projections, self.tomoe_input_path
        named = isinstance(kinds, dict) and set(kinds) <= set(KINDS)
        if not named or not kinds or not all(isinstance(names, list) and names for names in kinds.values()):
            raise ValueError("the config names no projections whose inputs a token could choose")
        if not isinstance(path, list) or len(path) < 2 or not all(isinstance(point, dict) for point in path):
            raise ValueError("the config has no tomoe_input_path with two points or more")
        last: dict[str, Any] = {"active": 1}
        for place, point in enumerate(path):
            active: Any = point.get("active")
            falls = type(active) in (int, float) and (0 < active < last["active"] if place else active == 1)
            if not falls:
                raise ValueError(f"tomoe_input_path has {str(active)[:40]!r} where a falling fraction should be")
            for kind in kinds:
                numbers = point.get(kind)
                if not isinstance(numbers, list) or len(numbers) != layers:
                    raise ValueError(f"tomoe_input_path lacks numbers of the {kind} projections of {layers} layers")
                for i, number in enumerate(numbers):
                    # a layer that has no such projection has 0 in every point
                    least, most = (min(1, last[kind][i]), last[kind][i]) if kind in last else (0, 2**24)
                    self._check_size(f"inputs of the {kind} projections of layer {i}", number, least, most)
            last = point
        if type(self.tomoe_active) not in (int, float) or not path[-1]["active"] - 0.01 <= self.tomoe_active <= 1:
            found = str(self.tomoe_active)[:40]
            raise ValueError(f"tomoe_active is {found}, which must be between {path[-1]['active']:.3f} and 1")

    def layer_inputs(self, kind: str, layer: int) -> int:
        """Inputs per token of the projections of one kind in a converted layer: interpolated at `tomoe_active` between the
        two nearest points of the path."""
        for more, fewer in itertools.pairwise(self.tomoe_input_path):
            if self.tomoe_active > fewer["active"]:
                part = min(1.0, (more["active"] - self.tomoe_active) / (more["active"] - fewer["active"]))
                return round(more[kind][layer] + part * (fewer[kind][layer] - more[kind][layer]))
        return cast(int, self.tomoe_input_path[-1][kind][layer])

    def _check_layer(self, i: int, most: int, width: int) -> None:
        union, shared, size = self.tomoe_union_sizes[i], self.tomoe_shared_sizes[i], self.tomoe_expert_sizes[i]
        self._check_size(f"tomoe_union_sizes of layer {i}", union, 1, min(width, 2**24))
        self._check_size(f"tomoe_shared_sizes of layer {i}", shared, 0, union - 1)
        self._check_size(f"tomoe_expert_sizes of layer {i}", size, 1, union)
        self._check_size(f"tomoe_experts_per_token of layer {i}", self.tomoe_experts_per_token[i], 1, most)
        held = shared + self.tomoe_num_experts * size
        if held != union if self.tomoe_expert_form == "fine" else held < union:
            raise ValueError(f"the config has {held} expert neurons in layer {i}, not {union}")

    def _check_attention(self, i: int) -> None:
        heads = self.num_attention_heads
        self._check_size("num_attention_heads", heads, 1, 2**16)
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // heads
        self._check_size("head_dim", head_dim, 1, 2**16)
        self._check_size(f"tomoe_qk_dims of layer {i}", self.tomoe_qk_dims[i], 1, head_dim)
        self._check_size(f"tomoe_rotary_pairs of layer {i}", self.tomoe_rotary_pairs[i], 0, self.tomoe_qk_dims[i] // 2)
        self._check_size(f"tomoe_value_dims of layer {i}", self.tomoe_value_dims[i], 1, head_dim)
        self._check_size(f"tomoe_value_top_k of layer {i}", self.tomoe_value_top_k[i], 1, self.tomoe_value_dims[i])
        if self.tomoe_value_top_k[i] < self.tomoe_value_dims[i]:
            self._check_size("tomoe_value_embedding_size", self.tomoe_value_embedding_size, 1, 2**16)

    @staticmethod
    def _check_size(name: str, value: Any, smallest: int, largest: int) -> None:
        if type(value) is not int or not smallest <= value <= largest:
            raise ValueError(f"the config has {str(value)[:40]!r} as {name}, which must be {smallest} to {largest}")

    @property
    def most_top_k(self) -> int:
        """The largest k that a layer can have."""
        return self.tomoe_num_experts if self.tomoe_expert_form == "fine" else 1

    @property
    def planned_top_k(self) -> int:
        """The largest k of the layers that leave experts out; N if none does."""
        n = self.tomoe_num_experts
        return max((k for k in self.tomoe_experts_per_token if k < n), default=n)

    def layer_top_k(self, layer: int) -> int:
        """k of a converted layer. Another `num_experts_per_tok` scales the k of all layers up or down in proportion; dense layers
        stay dense. With all N experts the model equals the dense one, unless it was repaired."""
        n, most, k = self.tomoe_num_experts, self.planned_top_k, getattr(self, self.top_k_key)
        planned = self.tomoe_experts_per_token[layer]
        if k == most or (planned == n and most < n):
            return planned
        self._check_size(self.top_k_key, k, 1, n)
        if k < most:
            return max(1, round(planned * k / most))
        return n - round((n - planned) * (n - k) / (n - most))

    def dense_config(self) -> PreTrainedConfig:
        """Return the config of the dense model, in its family's own class."""
        dropped = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "quantization_config"}
        dropped.add(self.top_k_key)
        values = {k: v for k, v in self.to_dict().items() if k not in dropped and not k.startswith("tomoe_")}
        config: PreTrainedConfig = CONFIG_MAPPING[self.tomoe_dense_type](**values)
        config._attn_implementation = self._attn_implementation
        return config


def known_family(dense_type: Any) -> str:
    """Return `dense_type`. Raises ValueError if this version of transformers does not know it."""
    if not isinstance(dense_type, str) or dense_type == ToMoEConfig.model_type or dense_type not in CONFIG_MAPPING:
        found = str(dense_type)[:40]
        raise ValueError(f"the config names {found!r} as the dense family, which transformers does not have")
    return dense_type


@functools.cache
def config_class(dense_type: str) -> type[ToMoEConfig]:
    """Make and register the config class of a family's converted models: its own, with the fields of `ToMoEConfig`."""
    if not dense_type:
        return ToMoEConfig
    family = CONFIG_MAPPING[dense_type]
    plan = getattr(family, "base_model_tp_plan", None)
    if plan is not None:
        # Experts share rows, which no rule can slice, so MLPs are replicated on every rank. Pruned heads are split.
        plan = {name: how for name, how in plan.items() if not set(name.split(".")) & MLP_MODULES}
        plan |= {f"layers.*.self_attn.{p}_proj": "rowwise" if p == "o" else "colwise" for p in "qkvo"}
    values = {"__module__": __name__, "model_type": ToMoEConfig.model_type, "base_model_tp_plan": plan}
    # The family comes first, so that its fields keep their defaults.
    made = cast(type[ToMoEConfig], type(ToMoEConfig.__name__, (family, ToMoEConfig), values))
    AutoModel.register(made, ToMoEModel, exist_ok=True)
    AutoModelForCausalLM.register(made, ToMoEForCausalLM, exist_ok=True)
    return made


def _new(class_of: Callable[..., type[Any]], *args: Any) -> Any:
    """Make an empty object, for copying and pickling: classes made on first use cannot be imported by name."""
    return object.__new__(class_of(*args))


class Recording(threading.local):
    """Outputs of modules, recorded on request; per thread, because a server runs one model in several."""

    outputs: dict[type[Any], list[Any]] | None = None

    @contextmanager
    def of(self, *kinds: type[Any]) -> Iterator[dict[type[Any], list[Any]]]:
        """Record the outputs of modules of these classes within the block, in the order in which they run."""
        before, self.outputs = self.outputs, {kind: [] for kind in kinds}
        try:
            yield self.outputs
        finally:
            self.outputs = before


RECORDING = Recording()


def noted(module: nn.Module, output: Any) -> Any:
    """Record a module's output if a recording is active; return it."""
    if (outputs := RECORDING.outputs) is not None and type(module) in outputs:
        outputs[type(module)].append(output)
    return output


class ValueRouter(nn.Module):
    """One logit per V/O dim from a token's input (Eq. 5); all heads share the choice."""

    def __init__(self, hidden_size: int, embedding_size: int, head_dim: int):
        super().__init__()
        self.project_in = nn.Linear(hidden_size, embedding_size)
        self.norm = nn.LayerNorm(embedding_size)
        self.project_out = nn.Linear(embedding_size, head_dim)
        # No gradient passes its choice, and distributed training waits for one of every parameter that could have one.
        self.requires_grad_(False)

    def forward(self, x: Tensor, top_k: int) -> Tensor:
        """Return a 0/1 mask [.., C] with exactly `top_k` ones."""
        x = x.to(self.project_in.weight.dtype)
        logits = self.project_out(F.gelu(self.norm(self.project_in(x))))
        return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)


def sliding_window(attention: nn.Module, config: PreTrainedConfig) -> int | None:
    """Number of last tokens that an attention sees, from the module or its family's config; None: all."""
    own = getattr(config, "sliding_window", None) if "sliding_window" in config.__dataclass_fields__ else None
    return cast("int | None", getattr(attention, "sliding_window", own))


class ToMoEAttention(nn.Module):
    """Attention on the kept dims (Eq. 4): Q and K on kept rotary pairs, V and O on kept dims or on those a token chooses."""

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    rotary_ids: Tensor

    def __init__(self, dense: Any, config: ToMoEConfig, layer: int):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, dense.layer_idx, True
        self.head_dim = dense.head_dim
        self.qk_size, self.value_size = config.tomoe_qk_dims[layer], config.tomoe_value_dims[layer]
        self.top_k = config.tomoe_value_top_k[layer]
        # Pruned dims add zero to q.k, so the dense 1/sqrt(C) stays right; 1/sqrt(c) would be wrong.
        self.scaling = dense.scaling
        self.attention_dropout = getattr(dense, "attention_dropout", 0.0)
        self.sliding_window = sliding_window(dense, config)
        heads = dense.q_proj.out_features // self.head_dim
        kv_heads = dense.k_proj.out_features // self.head_dim
        self.num_key_value_groups = heads // kv_heads

        def linear(like: nn.Linear, inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=like.bias is not None, dtype=like.weight.dtype)

        hidden, output = dense.q_proj.in_features, dense.o_proj if hasattr(dense, "o_proj") else dense.dense
        self.q_proj = linear(dense.q_proj, hidden, heads * self.qk_size)
        self.k_proj = linear(dense.k_proj, hidden, kv_heads * self.qk_size)
        self.v_proj = linear(dense.v_proj, hidden, kv_heads * self.value_size)
        self.o_proj = linear(output, heads * self.value_size, hidden)
        norm = getattr(dense, "q_norm", None)
        self.norm_eps = getattr(norm, "variance_epsilon", 0.0)
        for name in ("q_norm", "k_norm"):
            weight = None if norm is None else nn.Parameter(torch.ones(self.qk_size, dtype=norm.weight.dtype))
            self.register_parameter(name, weight)
        self.register_buffer("rotary_ids", torch.arange(config.tomoe_rotary_pairs[layer], dtype=torch.int32))
        chooses = self.top_k < self.value_size
        self.value_router = ValueRouter(hidden, config.tomoe_value_embedding_size, self.value_size) if chooses else None

    def rms_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        # RMS over all C dims of the dense head: the pruned ones were zero, but they count in the mean.
        f = x.float()
        scale = torch.rsqrt(f.square().sum(-1, keepdim=True) / self.head_dim + self.norm_eps)
        return weight * (f * scale).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply RoPE to dims in the order: first halves of the pairs, second halves, dims that RoPE leaves alone."""
        turned = x[..., : cos.shape[-1]]
        first, second = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-second, first], -1) * sin
        return turned if turned.shape == x.shape else torch.cat([turned, x[..., cos.shape[-1] :]], -1)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        lead, cache = hidden_states.shape[:-1], kwargs.pop(CACHE, None)
        q = self.rms_norm(self.q_proj(hidden_states).view(*lead, -1, self.qk_size), self.q_norm).transpose(1, 2)
        k = self.rms_norm(self.k_proj(hidden_states).view(*lead, -1, self.qk_size), self.k_norm).transpose(1, 2)
        v = self.v_proj(hidden_states).view(*lead, -1, self.value_size)
        value_mask = None
        if self.value_router is not None:
            value_mask = self.value_router(hidden_states, self.top_k).unsqueeze(-2).to(v.dtype)
            v = v * value_mask
        v = v.transpose(1, 2)
        cos, sin = (t.unsqueeze(1) for t in position_embeddings)
        # Ids ascend, so as many as there are frequencies means all of them. Both halves hold the same numbers.
        if 2 * self.rotary_ids.numel() != cos.shape[-1]:
            cos, sin = (t[..., self.rotary_ids.long().repeat(2)] for t in (cos, sin))
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        # FlashAttention needs equal widths in multiples of 8 (and crops a wider V in silence), and engines and paged caches lay
        # out their memory by the config's head_dim. The dense width works for all of them, and trailing zeros change no product.
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa", "tomoe_sdpa") or not isinstance(cache, Cache | None):
            q, k, v = (F.pad(t, (0, self.head_dim - t.shape[-1])) for t in (q, k, v))
        if cache is not None:
            # a paged cache (continuous batching) writes into `kwargs` what its attention reads
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        kwargs |= dict(dropout=dropout, scaling=self.scaling, sliding_window=self.sliding_window)
        out, weights = attend(self, q, k, v, attention_mask, **kwargs)
        out = out.reshape(*lead, -1, v.shape[-1])[..., : self.value_size]
        if value_mask is not None:
            out = out * value_mask
        return self.o_proj(out.flatten(-2)), noted(self, weights)


def expert_probs(logits: Tensor, top_k: int | None) -> Tensor:
    """Probability of each expert to be used [T, N]: for overlapping experts (top_k None) the softmax; for fine-grained ones the
    sigmoid of the logit's distance from the middle between the k-th and the next largest."""
    if top_k is None:
        return logits.softmax(-1)
    if top_k == logits.shape[-1]:
        return torch.ones_like(logits)
    return (logits - logits.topk(top_k + 1, dim=-1).values[:, -2:].mean(-1, keepdim=True).detach()).sigmoid()


def route(logits: Tensor, top_k: int | None = None, trains: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the experts of each token [T, k], in any order, from router logits [T, N], and their weights [T, k]; None for 1.

    `top_k` is None for overlapping experts, of which a token uses one. A router that trains gets the weights
    1 + P - stop_gradient(P): exactly 1, with the gradient of P, its `expert_probs`. Tokens choose experts nowhere else.
    """
    expert_ids = logits.argmax(-1, keepdim=True) if top_k is None else compute("largest logits", logits, top_k)
    if not trains:
        return expert_ids, None
    chosen_probs = expert_probs(logits, top_k).gather(1, expert_ids)
    return expert_ids, 1 + (chosen_probs - chosen_probs.detach())


class Router(nn.Linear):
    """Computes the logits [T, N] of the experts."""

    def forward(self, input: Tensor) -> Tensor:
        return noted(self, compute("router logits", self, input))


def take_rows(weight: Tensor, neurons: slice | Tensor) -> Tensor:
    """Select the rows of some neurons: a view for a slice, a copy for indices."""
    return weight[neurons] if isinstance(neurons, slice) else weight.index_select(0, neurons)


def learns(x: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Whether this pass needs gradients."""
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters))


def keep(kept: dict[str, Any], name: str, source: Any, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, cached under a name until the value or tensor `source` that it depends on changes."""
    last = kept.get(name)
    if last is None or not (torch.equal(last[0], source) if isinstance(source, Tensor) else last[0] == source):
        # a copy: a version counter does not count what is written through `.data`
        last = kept[name] = source.clone() if isinstance(source, Tensor) else source, make()
    return last[1]


class ToMoEMLP(nn.Module):
    """N experts (Eqs. 2, 13). Each neuron is stored once, as one row of every matrix, whether experts share it or not.

    The rows of a shared part, if there is one, are the first.
    """

    gate_proj: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_proj: nn.Parameter
    up_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_bias: nn.Parameter | None

    def __init__(self, dense: Any, config: ToMoEConfig, layer: int):
        super().__init__()
        self.config, self.layer_idx, self.num_experts = config, layer, config.tomoe_num_experts
        self.shared_size, self.fine = config.tomoe_shared_sizes[layer], config.tomoe_expert_form == "fine"
        self._cache: dict[str, Any] = {}
        parts = config.tomoe_mlp_parts
        up, down = getattr(dense, parts["up"]), getattr(dense, parts["down"])
        gate = up if parts["fused"] else getattr(dense, parts["gate"]) if parts["gate"] else None
        self.activation = getattr(dense, parts["activation"]) if parts["activation"] else nn.SiLU()
        size, hidden = config.tomoe_union_sizes[layer], up.nx if isinstance(up, Conv1D) else up.in_features

        self.router = Router(hidden, self.num_experts, bias=self.fine)
        for name, like, bias_size in (("gate", gate, size), ("up", up, size), ("down", down, hidden)):
            bias = getattr(like, "bias", None)
            for part, tensor, shape in (("proj", like, (size, hidden)), ("bias", bias, (bias_size,))):
                rows = None if tensor is None else nn.Parameter(torch.empty(shape, dtype=up.weight.dtype))
                self.register_parameter(f"{name}_{part}", rows)
        # Checkpoints know the rows of the experts by this name.
        self.register_buffer("expert_neurons", self.default_rows(size, config.tomoe_expert_sizes[layer]))

    def default_rows(self, union: int, width: int) -> Tensor:
        """Return rows [N, W] of experts without a plan: runs of adjacent rows that together cover all after the shared ones."""
        room, steps = union - self.shared_size - width, max(1, self.num_experts - 1)
        # PyTorch takes milliseconds to divide whole numbers on meta
        starts = torch.tensor([n * room // steps for n in range(self.num_experts)])
        return (self.shared_size + starts[:, None] + torch.arange(width)).int()

    @property
    def top_k(self) -> int | None:
        """Experts per token; None for overlapping experts, of which a token uses one."""
        k = getattr(self.config, self.config.top_k_key)
        return keep(self._cache, "top_k", k, lambda: self.config.layer_top_k(self.layer_idx)) if self.fine else None

    @property
    def expert_rows(self) -> Tensor:
        """Rows of each expert in the shared matrices, ascending [N, W], int32."""
        return cast(Tensor, self.expert_neurons)

    def activations(self, x_TD: Tensor, neurons: slice | Tensor) -> Tensor:
        """Compute activations [T, n] of some neurons: act(gate x) * up x, or act(up x) without a gate."""

        def project(weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
            rows_nD = take_rows(weight_FD, neurons).to(x_TD.dtype)
            return F.linear(x_TD, rows_nD, None if bias_F is None else take_rows(bias_F, neurons).to(x_TD.dtype))

        up_Tn = project(self.up_proj, self.up_bias)
        if self.gate_proj is None:
            return self.activation(up_Tn)
        return self.activation(project(self.gate_proj, self.gate_bias)) * up_Tn

    def runs(self) -> list[list[tuple[int, int, int]]]:
        """Return (first, last, start) per expert: neurons first..last are the rows starting at `start`, or no run if -1."""

        def gathered(first: int, last: int) -> list[tuple[int, int, int]]:
            return [(i, min(i + GATHER_SIZE, last), -1) for i in range(first, last, GATHER_SIZE)]

        def runs_of(rows: list[int]) -> list[tuple[int, int, int]]:
            edges = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
            runs, done = [], 0
            for first, last in itertools.pairwise(edges):
                if last - first >= LONG_RUN or last - first == len(rows):
                    runs += [*gathered(done, first), (first, last, rows[first])]
                    done = last
            return runs + gathered(done, len(rows))

        all_rows = self.expert_rows
        return keep(self._cache, "runs", all_rows, lambda: [runs_of(rows) for rows in all_rows.tolist()])

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return y, shaped as the hidden states; families that pass the residual get the sum."""
        x = hidden_states.flatten(0, -2)
        trains = torch.is_grad_enabled() and self.router.weight.requires_grad
        top_k = self.top_k
        expert_ids, weights = route(self.router(x), top_k, trains)
        if weights is not None and top_k is not None:
            y = run_masked(self, x, expert_ids, weights)
        else:
            y = BACKENDS["experts"][choose_backend(self, x)].run(self, x, expert_ids)
            y = y if weights is None else y * weights.to(y.dtype)
        if self.down_bias is not None:
            y = y + self.down_bias
        y = y.view_as(hidden_states)
        return y if residual is None else y + residual


def which_inputs(x: Tensor, norms: Tensor, count: int) -> Tensor:
    """Mask [.., D] of the `count` entries per token of x [.., D] with the largest |x_i| norms_i; ties go by position."""
    # 0 times inf is chosen, so that what comes out is no number either
    scores = (x.abs().float() * norms).nan_to_num(nan=torch.inf, posinf=torch.inf)
    # sorting them takes longer than finding them
    least = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    larger, equal = scores > least, scores == least
    return larger | (equal & (equal.cumsum(-1) <= count - larger.sum(-1, keepdim=True)))


def chosen_inputs(x: Tensor, norms: Tensor, count: int) -> Tensor:
    """Set the entries of x [.., D] that a token does not choose to zero."""
    return x * which_inputs(x, norms, count)


def matrix_of(projection: Any) -> Tensor:
    """Return the matrix [out, in] of a projection."""
    weight: Tensor = projection.weight
    return weight.t() if isinstance(projection, Conv1D) else weight


def inputs_of(module: Any) -> int:
    """Number of inputs that tokens could choose from; 0 if the module has no matrix."""
    weight = getattr(module, "weight", None)
    return matrix_of(module).shape[1] if isinstance(weight, Tensor) and weight.dim() == 2 else 0


def few(x: Tensor) -> bool:
    """Whether a pass has as few tokens as decoding."""
    return x.numel() <= FEW_TOKENS * x.shape[-1]


@torch.no_grad()
def column_norms(matrices: Sequence[Tensor]) -> Tensor:
    """Norms [D] of the columns of stacked matrices [n, D]; summed in float64, independent of memory layout, and rounded to
    bfloat16 values, which every dtype represents."""
    # squares of bfloat16 numbers would be as coarse; norms in float64 take twice as long, a twentieth of a training step
    precise = (matrix.to(torch.promote_types(matrix.dtype, torch.float32)) for matrix in matrices)
    squares = [matrix.square().sum(0, dtype=torch.float64) for matrix in precise]
    return torch.stack(squares).sum(0).sqrt().bfloat16().float()


class Choice(nn.Module):
    """Selects each token's inputs x [.., D] of the projections of one kind in one layer, which all read the same x.

    A token uses those with the largest |x_i| c_i, with c_i the norm of column i of their stacked matrices. The norms are stored
    with the weights and date from the conversion or `tomoe finetune`: if the weights are changed afterwards, the choice is not.
    """

    norms: Tensor

    def __init__(self, config: ToMoEConfig, kind: str, layer: int, width: int):
        super().__init__()
        self.config, self.kind, self.layer, self.kept = config, kind, layer, dict[str, Any]()
        self.register_buffer("norms", torch.full((width,), torch.nan))

    @property
    def count(self) -> int:
        config = self.config
        made = keep(self.kept, "count", config.tomoe_active, lambda: config.layer_inputs(self.kind, self.layer))
        return cast(int, made)

    def applies(self, x: Tensor) -> bool:
        """Whether the tokens of x choose inputs, or use all of them."""
        return self.count < x.shape[-1] and (self.config.tomoe_prompts == "chosen" or few(x))

    def forward(self, x: Tensor) -> Tensor:
        """Set the entries of x that a token does not use to zero."""
        if not self.applies(x):
            return x
        if x.device.type == "cpu" and few(x) and not (torch.compiler.is_compiling() or learns(x, ())):
            note_obstacle("largest inputs", x, self.norms, self.count)
        return compute("largest inputs", x, self.norms, self.count)

    def before(self, projection: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Forward pre-hook of the projections."""
        return self(args[0]), *args[1:]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # weights of the dense model leave the norms as they are
        state_dict.setdefault(f"{prefix}norms", self.norms)
        super()._load_from_state_dict(state_dict, prefix, *args)


def choices_of(model: nn.Module) -> list[Choice]:
    """Return the `Choice` modules of a model of the form `inputs`, layer by layer; empty for other models."""
    return [module for module in model.modules() if isinstance(module, Choice)]


class ToMoEPreTrainedModel(PreTrainedModel):
    """Adds the MLPs of a converted model, and their loading, to its family's class."""

    config_class = ToMoEConfig
    # Engines ask the class, before a family is known.
    _supports_attention_backend = True

    def __new__(cls, config: Any, *_: Any, **__: Any) -> Any:
        return super().__new__(_family_class(cls, config.tomoe_dense_type, config.tomoe_dense_class))

    def __init__(self, config: ToMoEConfig, *inputs: Any, **kwargs: Any):
        # Loading may have changed some of the numbers.
        config.check()
        super().__init__(config, *inputs, **kwargs)
        if config.chooses_inputs:
            self._choose_inputs(config)
        else:
            self._replace_mlps(config)

    def _choose_inputs(self, config: ToMoEConfig) -> None:
        for i, name in enumerate(config.tomoe_mlps):
            layer = self.get_submodule(self.own_name(name).rpartition(".")[0])
            choices: dict[str, nn.Module] = {}
            modules, taken = dict(layer.named_modules()), set[str]()
            for kind, names in config.tomoe_projections.items():
                width = config.tomoe_input_path[0][kind][i]
                for own in names if width else ():
                    has = 0 if own in taken else inputs_of(modules.get(own))
                    if has != width:
                        found = f"{str(own)[:40]!r} of layer {i}, one of the {kind} projections,"
                        raise ValueError(f"{found} has {has} inputs that can be chosen, not {width}")
                    taken.add(own)
                    choices[kind] = Choice(config, kind, i, width)
            layer.tomoe_choices = nn.ModuleDict(choices)
        self._initialize_parts(["tomoe_choices"])
        for choice, projections in self.choices():
            if not any(projection.weight.is_meta for projection in projections):
                choice.norms = column_norms([matrix_of(projection) for projection in projections])
        self.let_choose()

    def choices(self) -> Iterator[tuple[Choice, list[Any]]]:
        """Yield each choice of a model of the form `inputs` with its projections, layer by layer."""
        for name in self.config.tomoe_mlps if self.config.chooses_inputs else ():
            layer: Any = self.get_submodule(self.own_name(name).rpartition(".")[0])
            for kind, choice in layer.tomoe_choices.items():
                yield choice, [layer.get_submodule(own) for own in self.config.tomoe_projections[kind]]

    def let_choose(self) -> None:
        """Register the choices as hooks of the projections, which quantizers replace while loading."""
        for choice, projections in self.choices():
            for projection in projections:
                if choice.before not in projection._forward_pre_hooks.values():
                    projection.register_forward_pre_hook(choice.before)

    def _replace_mlps(self, config: ToMoEConfig) -> None:
        parts = config.tomoe_mlp_parts
        for i, name in enumerate(config.tomoe_mlps):
            layer_name, _, mlp_name = self.own_name(name).rpartition(".")
            layer: Any = self.get_submodule(layer_name)
            dense: Any = layer if parts["flat"] else getattr(layer, mlp_name)
            setattr(layer, mlp_name, ToMoEMLP(dense, config, i))
            if parts["flat"]:
                # What came after the up projection, in the layer itself.
                setattr(layer, parts["down"], nn.Identity())
                setattr(layer, parts["activation"], nn.Identity())
            if config.prunes_attention:
                layer.self_attn = ToMoEAttention(layer.self_attn, config, i)
        # Near ties of a router must fall as they fell when it was trained, whatever the dtype of the rest. Loading reads the
        # strict list; quantizers skip names that begin as a pattern of the other says: of modules, or (torchao) of weights.
        names = [self.own_name(name) for name in config.tomoe_mlps]
        routers = [f"{name}.router" for name in names]
        if config.tomoe_value_embedding_size:
            routers += [f"{name.rpartition('.')[0]}.self_attn.value_router" for name in names]
        self._initialize_parts(routers)

    def _initialize_parts(self, precise: Sequence[str]) -> None:
        """Initialize modules that the family does not know; those named in `precise` stay in float32."""
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *precise}
        self._keep_in_fp32_modules = {*(self._keep_in_fp32_modules or ()), *(f".*{name}" for name in precise)}
        # Each model within initializes its own modules, and the family's decoder does not know these.
        for inner in self.modules():
            if isinstance(inner, PreTrainedModel) and inner is not self:
                inner.__dict__["_init_weights"] = functools.partial(_init_weights, inner)
        self.post_init()

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: otherwise transformers skips the family's initialization of buffers that are in no checkpoint."""
        return False

    def own_name(self, name: str) -> str:
        """Map a module name of the causal language model to this model."""
        return name

    def __reduce__(self) -> Any:
        names = self.config.tomoe_dense_type, self.config.tomoe_dense_class
        return _new, (_family_class, self.entry, *names), self.__dict__

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers. Raises ValueError for ids that point outside the matrices, and for NaN in routers or norms."""
        if not hasattr(config, "tomoe_dense_type"):
            config, kwargs = ToMoEConfig.from_pretrained(config or path, return_unused_kwargs=True, **kwargs)
        family: Any = super(ToMoEPreTrainedModel, _family_class(cls, config.tomoe_dense_type, config.tomoe_dense_class))
        loaded = family.from_pretrained(path, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.check_ids()
        model.check_finite()
        model.let_choose()
        # Loading made new parameters.
        for router in (module for module in model.modules() if isinstance(module, ValueRouter)):
            router.requires_grad_(False)
        return loaded

    def mlps(self) -> list[ToMoEMLP]:
        """Return the converted MLPs in the order of their layers."""
        return [module for module in self.modules() if isinstance(module, ToMoEMLP)]

    def check_ids(self) -> None:
        """Raise ValueError unless neuron and pair ids are in range and strictly ascending: duplicates would count twice."""
        for mlp in self.mlps():
            # Fine-grained experts stand one after the other, behind the shared rows.
            rows = (mlp.expert_rows - mlp.shared_size).view(1, -1) if mlp.fine else mlp.expert_rows
            what = f"layer {mlp.layer_idx} numbers its neurons of an expert"
            self._check_ids(what, rows, len(mlp.up_proj) - mlp.shared_size)
        for module in self.modules():
            if isinstance(module, ToMoEAttention):
                name = f"layer {module.layer_idx} numbers its rotary pairs"
                rotary: Any = self.base_model.rotary_emb
                self._check_ids(name, module.rotary_ids[None], rotary.inv_freq.numel())

    @staticmethod
    def _check_ids(what: str, ids: Tensor, count: int) -> None:
        edges = F.pad(F.pad(ids.long(), (1, 0), value=-1), (0, 1), value=count)
        if not (ids.is_meta or bool((edges.diff() > 0).all())):
            raise ValueError(f"{what} out of order or outside the {count} that there are")

    def check_finite(self) -> None:
        """Raise ValueError for NaN or inf in a router or norm: the model would run and generate other text."""
        for name, weight in itertools.chain(self.named_parameters(), self.named_buffers()):
            if ("router." in name or "norm" in name) and not (weight.is_meta or bool(weight.isfinite().all())):
                raise ValueError(f"{name} holds numbers that are not finite; the weights are damaged, get them again")

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        _init_parts(module, self.config)


def _init_weights(model: PreTrainedModel, module: nn.Module) -> None:
    """Initialize a module as the model's class does, and the parts that tomoe added."""
    type(model)._init_weights(model, module)
    _init_parts(module, model.config)


@torch.no_grad()
def _init_parts(module: nn.Module, config: PreTrainedConfig) -> None:
    """Initialize the parts that tomoe added: expert rows, head norms, ids. Loaded tensors are kept."""
    if isinstance(module, Choice):
        # what a file lacks is found by `check_finite`
        init.constant_(module.norms, torch.nan)
    elif isinstance(module, ToMoEMLP):
        std = getattr(config, "initializer_range", None) or 0.02
        for name, p in module.named_parameters(recurse=False):
            init.zeros_(p) if name.endswith("bias") else init.normal_(p, 0.0, std)
        width, union = module.expert_rows.shape[1], len(module.up_proj)
        init.copy_(module.expert_rows, module.default_rows(union, width))
    elif isinstance(module, ToMoEAttention):
        for p in module.parameters(recurse=False):
            init.ones_(p)
        init.copy_(module.rotary_ids, torch.arange(len(module.rotary_ids)))


def recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the family's forward pass to also return, on request, router logits [T, N] of every layer and the weights of
    pruned attention; with labels, the balance loss is added to the loss."""
    signature = inspect.signature(forward).parameters

    @functools.wraps(forward)
    def recording(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, asked = self.config, kwargs.get("output_attentions")
        attends = config.prunes_attention and (config.output_attentions if asked is None else asked)
        routes = False
        if "output_router_logits" not in signature:
            asked = kwargs.pop("output_router_logits", None)
            routes = config.output_router_logits if asked is None else asked
        if not attends and not routes:
            return forward(self, *args, **kwargs)
        tuples, kwargs = kwargs.get("return_dict") is False, kwargs | {"return_dict": True}
        with RECORDING.of(Router, ToMoEAttention) as seen:
            outputs = forward(self, *args, **kwargs)
        if routes:
            outputs = _routed(outputs, self, seen[Router], args, kwargs)
        if attends:
            outputs["attentions"] = tuple(weights for weights in seen[ToMoEAttention] if weights is not None)
        return outputs.to_tuple() if tuples else outputs

    return recording


def _routed(outputs: Any, model: Any, routed: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Add router logits to the outputs and, with labels, the balance loss to the loss. It is 0 without routers."""
    if "logits" not in outputs:
        return MoeModelOutputWithPast(**outputs, router_logits=cast(Any, tuple(routed)))
    mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
    balance = (
        balance_loss(routed, mask, [mlp.top_k for mlp in model.mlps()]) if routed else outputs.logits.new_zeros(())
    )
    if (loss := outputs.get("loss")) is not None:
        outputs["loss"] = loss + model.config.router_aux_loss_coef * balance.to(loss.device)
    return MoeCausalLMOutputWithPast(**outputs, aux_loss=balance, router_logits=cast(Any, tuple(routed)))


def balance_loss(
    router_logits: Sequence[Tensor], mask: Tensor | None, top_ks: Sequence[int | None] | None = None
) -> Tensor:
    """N sum_i F_i P_i (Eq. 9) of router logits [T, N], mean over layers: 1 if tokens spread evenly, N if all use one expert.

    F_i is the share of choices that fell on expert i, P_i its mean probability (divided by k, where a token uses k experts;
    `top_ks` as in `route`, one per layer). A mask [B, S] leaves padding out.
    """
    terms = []
    for logits, top_k in zip(router_logits, top_ks or [None] * len(router_logits), strict=True):
        real = slice(None) if mask is None or mask.numel() != len(logits) else mask.flatten().bool()
        probs = expert_probs(logits[real].float(), top_k)
        shares = F.one_hot(route(logits[real], top_k)[0], probs.shape[-1]).float().mean((0, 1))
        terms.append((probs.shape[-1] * (shares * probs.mean(0) / (top_k or 1)).sum()).to(router_logits[0].device))
    return torch.stack(terms).mean()


class ToMoEModel(ToMoEPreTrainedModel):
    """The decoder without its output matrix."""

    def own_name(self, name: str) -> str:
        return name.removeprefix(f"{self.base_model_prefix}.")


class ToMoEForCausalLM(ToMoEPreTrainedModel):
    """The converted model, with its output matrix."""

    def __init__(self, config: ToMoEConfig, *inputs: Any, **kwargs: Any):
        super().__init__(config, *inputs, **kwargs)
        head = self.get_output_embeddings()
        # by the family's own module, or by a faster one's
        head.forward = functools.partial(compute, "logits", head)
        if self.base_model is not self:
            self.base_model.forward = functools.partial(_decode, self.base_model)


def _decode(decoder: Any, *args: Any, output_router_logits: bool = False, **kwargs: Any) -> Any:
    """Run the family's decoder, and return router logits if a trainer that computes the loss itself asks for them."""
    forward = type(decoder).forward
    if not output_router_logits:
        return forward(decoder, *args, **kwargs)
    with RECORDING.of(Router) as seen:
        outputs = forward(decoder, *args, **kwargs)
    return _routed(outputs, decoder, seen[Router], args, kwargs)


def run_output(head: Any, x: Tensor) -> Tensor:
    """Compute the logits by the family's own output matrix."""
    # Given a slice of the hidden states, as generation does, PyTorch on a CPU copies the whole matrix.
    return cast(Tensor, type(head).forward(head, x.clone(memory_format=torch.contiguous_format)))


def _family_class(entry: Any, dense_type: str, dense_class: str) -> type[Any]:
    """The class of a family's converted models: the family's own class, extended by `entry`. Raises ValueError for a family
    that this version of transformers does not know."""
    if "entry" in entry.__dict__:
        return entry
    return _make_family_class(entry, dense_type, str(dense_class))


# Each is made once: what is saved and loaded again has the same class.
@functools.cache
def _make_family_class(entry: type[Any], dense_type: str, dense_class: str) -> type[Any]:
    config = config_class(dense_type)
    if entry is ToMoEModel:
        found = MODEL_MAPPING[CONFIG_MAPPING[dense_type]]
        family = found[0] if isinstance(found, tuple) else found
    else:
        family = getattr(transformers, dense_class, None)
    if not (isinstance(family, type) and issubclass(family, PreTrainedModel)):
        raise ValueError(f"the config names {dense_class[:40]!r} as the dense model, which transformers does not have")
    values = {
        "__module__": __name__, "entry": entry, "config_class": config, "forward": recorded(family.forward),
        "_supports_attention_backend": family._supports_attention_backend,
    }  # fmt: skip
    # transformers reads in the source or the name of a class what it can do, and the family's says it.
    for name in ("_can_set_attn_implementation", "_can_set_experts_implementation", "_supports_default_dynamic_cache"):
        if asked := getattr(family, name, None):
            values[name] = staticmethod(asked)
    return type(entry.__name__, (entry, family), values)


# Expert backends: x [T, D] and expert_ids [T, k] -> y [T, D], without the bias of `down`. Letters at the ends of names are
# shapes: T tokens, t some of them, k experts of a token, N experts, F neurons, n some of them, D hidden size.
# Activations that `masked` holds at once, on a CPU and elsewhere; neurons whose slice beats gathering, and gathered at once.
MASKED_ELEMENTS, MASKED_ELEMENTS_ON_DEVICE, LONG_RUN, GATHER_SIZE = 2**22, 2**28, 128, 512


def sum_rows(h_Tn: Tensor, rows_nD: Tensor) -> Tensor:
    """Compute h [T, n] @ rows [n, D] with float32 sums."""
    # On processors without 16-bit matrix products PyTorch takes 4 to 20 times as long for this as for h @ rows.t(): so a few
    # tokens add up rows, and many take products of float32, a part of the rows at a time.
    if learns(h_Tn, [rows_nD]) or h_Tn.device.type != "cpu" or torch.compiler.is_compiling() or multiplies(h_Tn.dtype):
        return h_Tn @ rows_nD
    if len(h_Tn) <= FEW_TOKENS:
        neurons = torch.arange(len(rows_nD)).expand(len(h_Tn), -1)
        return F.embedding_bag(neurons, rows_nD.to(h_Tn.dtype), per_sample_weights=h_Tn, mode="sum")
    y_TD = torch.zeros(len(h_Tn), rows_nD.shape[1])
    for first in range(0, len(rows_nD), GATHER_SIZE):
        some = slice(first, first + GATHER_SIZE)
        y_TD.addmm_(h_Tn[:, some].float(), rows_nD[some].float())
    return y_TD.to(h_Tn.dtype)


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch has fast matrix products of this dtype on this processor, for any memory layout."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return name is None or (ask is not None and bool(ask()))


def run_masked(mlp: ToMoEMLP, x_TD: Tensor, expert_ids_Tk: Tensor, weights_Tk: Tensor | None = None) -> Tensor:
    """Compute every neuron for every token, times 0 or 1 or the weights of routers that train: the cost of the dense MLP, in its
    dtype."""
    on_cpu, graded = x_TD.device.type == "cpu", torch.is_grad_enabled()
    tokens = max(1, (MASKED_ELEMENTS if on_cpu else MASKED_ELEMENTS_ON_DEVICE) // len(mlp.up_proj))
    masks_NF = (
        None if mlp.fine else x_TD.new_zeros(mlp.num_experts, len(mlp.up_proj)).scatter_(1, mlp.expert_rows.long(), 1)
    )
    # Rows of a few numbers save a mask as large as h; a CPU is slow at them, but for a few tokens making the mask is slower.
    narrow = mlp.fine and not graded and (not on_cpu or len(x_TD) <= FEW_TOKENS)
    pieces = []
    for first in range(0, max(len(x_TD), 1), tokens):
        # A piece of the tokens, t of them: all activations at once would be the largest tensor of the model.
        some = slice(first, first + tokens)
        h_tF, ids_tk = mlp.activations(x_TD[some], slice(None)), expert_ids_Tk[some]
        own = h_tF[:, mlp.shared_size :].unflatten(1, (mlp.num_experts, -1)) if narrow else h_tF
        if masks_NF is None:
            mask = x_TD.new_zeros(len(ids_tk), mlp.num_experts)
            mask = mask.scatter(1, ids_tk, 1 if weights_Tk is None else weights_Tk[some].to(x_TD.dtype))
            if not narrow:
                # From experts to their neurons, and ones for the shared part, which stands first.
                mask = F.pad(mask.repeat_interleave(mlp.expert_rows.shape[1], 1), (mlp.shared_size, 0), value=1.0)
        else:
            mask = masks_NF[ids_tk[:, 0]]
        # In place where no gradient needs the activations as they were; `own` is a view of h then.
        own = own * mask if graded else own.mul_(mask[..., None] if narrow else mask)
        pieces.append(sum_rows(own if graded else h_tF, mlp.down_proj))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def run_runs(mlp: ToMoEMLP, x_TD: Tensor, expert_ids_Tk: Tensor) -> Tensor:
    """Run expert by expert: long runs of neurons as slices of the shared rows, the others gathered in chunks."""
    k = expert_ids_Tk.shape[1]
    # Sums of several experts and pieces: rounded once, at the end.
    precise = torch.promote_types(x_TD.dtype, torch.float32)
    out_TD = torch.zeros(x_TD.shape, dtype=precise, device=x_TD.device)
    if mlp.shared_size:
        shared = slice(mlp.shared_size)
        out_TD += sum_rows(mlp.activations(x_TD, shared), mlp.down_proj[shared])
    # Sorted by expert, its tokens stand together.
    order = expert_ids_Tk.flatten().argsort()
    counts = torch.bincount(expert_ids_Tk.flatten(), minlength=mlp.num_experts).tolist()
    for expert, places in enumerate(order.split(counts)):
        if not len(places):
            continue
        token_ids_t = places // k
        x_tD = x_TD[token_ids_t]
        y_tD = torch.zeros(x_tD.shape, dtype=precise, device=x_TD.device)
        for first, last, start in mlp.runs()[expert]:
            run = slice(start, start + last - first)
            neurons = mlp.expert_rows[expert, first:last] if start < 0 else run
            y_tD += sum_rows(mlp.activations(x_tD, neurons), take_rows(mlp.down_proj, neurons))
        out_TD.index_add_(0, token_ids_t, y_tD)
    return out_TD.to(x_TD.dtype)


def supports_runs(mlp: ToMoEMLP, x: Tensor) -> bool:
    """Whether `runs` pays off: for overlapping experts, few and wide. Fine-grained ones are hundreds of small products."""
    # Asking which experts got tokens breaks a graph, and makes a GPU wait, for a single token in vain.
    if mlp.fine or torch.compiler.is_compiling() or (x.device.type != "cpu" and len(x) == 1):
        return False
    # A few tokens read all rows more than once; many tokens are worth it.
    return len(x) == 1 or len(x) >= 64 * mlp.num_experts


def always(*_: Any) -> bool:
    """Support everything: for the last backend of a step."""
    return True


@dataclass(frozen=True)
class Backend:
    """One implementation of a step. `supports` tells from the step's arguments whether `auto` takes it: by device, dtype, shape
    and gradient, not by values. `obstacle` returns what the user could change to make it available, or None."""

    run: Callable[..., Tensor]
    supports: Callable[..., bool] = always
    obstacle: Callable[..., str | None] = lambda *_: None


# The steps with several backends, by name; the first that supports the arguments is taken. The steps:
# experts: of (mlp, x [T, D], expert_ids [T, k]), y [T, D] without the bias of `down`; its names are what a config may ask for
# router logits: of (router, x [T, D]), logits [T, N]
# largest logits: of (logits [T, N], k), the k largest of each row, in any order [T, k]
# logits: of (output module, x [.., D]), [.., V]
# largest inputs: of (x [.., D], norms [D], count), x with zeros but for the `count` largest |x_i| norms_i of each token
BACKENDS: dict[str, dict[str, Backend]] = {
    "experts": {"runs": Backend(run_runs, supports_runs), "masked": Backend(run_masked)},
    "router logits": {
        "pytorch": Backend(lambda router, x: F.linear(x.to(router.weight.dtype), router.weight, router.bias))
    },
    "largest logits": {"pytorch": Backend(lambda logits, k: logits.topk(k, dim=-1, sorted=False).indices)},
    "logits": {"pytorch": Backend(run_output)},
    "largest inputs": {"pytorch": Backend(chosen_inputs)},
}


def register(step: str, **backends: Backend) -> None:
    """Register backends, tried in this order before those that are registered already."""
    BACKENDS[step] = backends | {name: known for name, known in BACKENDS[step].items() if name not in backends}


def choose(step: str, *args: Any) -> str:
    """Return the name of the first backend that supports the step's arguments; the last one always does."""
    return next(name for name, backend in BACKENDS[step].items() if backend.supports(*args))


def compute(step: str, *args: Any) -> Tensor:
    """Compute a step with the first backend that supports it."""
    return BACKENDS[step][choose(step, *args)].run(*args)


def choose_backend(mlp: ToMoEMLP, x: Tensor) -> str:
    """Return the expert backend that the model's config asks for; if it is `auto`, the one for inputs like `x` [T, D]."""
    asked: str = mlp.config.tomoe_expert_backend
    if asked != "auto":
        check_backend(asked)
        return asked
    name = choose("experts", mlp, x)
    if x.device.type == "cpu" and name in ("runs", "masked") and not torch.compiler.is_compiling():
        note_obstacle("experts", mlp, x)
    return name


def check_backend(name: Any) -> None:
    """Raise ValueError if this is not the name of an expert backend."""
    if name != "auto" and not (isinstance(name, str) and name in BACKENDS["experts"]):
        known = ", ".join(["auto", *BACKENDS["experts"]])
        raise ValueError(f"there is no expert backend {str(name)[:40]!r} here; take {known}")


NOTED: set[str] = set()


def note_obstacle(step: str, *args: Any) -> None:
    """Log, once per process, what keeps a step on a CPU from its compiled kernel, if the user could change it."""
    obstacle = NO_KERNELS if (native := BACKENDS[step].get("native")) is None else native.obstacle(*args)
    if obstacle is not None and obstacle not in NOTED:
        NOTED.add(obstacle)
        logging.getLogger(__name__).warning(
            "tomoe: note: the model runs in PyTorch, not faster than the dense one, and not by tomoe's kernel: %s",
            obstacle,
        )


NO_KERNELS = (
    "tomoe is not installed in this Python; install it as its README says, with a C++ compiler (`apt install g++`)"
)

AutoConfig.register("tomoe", ToMoEConfig, exist_ok=True)
AutoModel.register(ToMoEConfig, ToMoEModel, exist_ok=True)
AutoModelForCausalLM.register(ToMoEConfig, ToMoEForCausalLM, exist_ok=True)
# Whoever saves such a model (a fine-tuning script, say) writes auto_map and a copy of this file beside the weights.
ToMoEConfig.register_for_auto_class()
ToMoEModel.register_for_auto_class("AutoModel")
ToMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
