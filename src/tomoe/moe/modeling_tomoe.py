"""A dense decoder turned into a Mixture-of-Experts by ToMoE: one file for all families.

This file imports torch and transformers only. It is copied beside the weights, so that
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where tomoe is not installed. The family's own
code (embeddings, norms, rotary embedding, decoder layer, cache) stays in charge; only each layer's `mlp` and
`self_attn` are replaced, by one class each. The ways to run the experts stand at the end of the file.

Letters: B batch, S sequence, T = B S tokens, D hidden size, N experts, k experts of a token, W width of an expert, U neurons
that some expert uses, H query heads, G key/value heads, C head dim, c kept dims of Q and K, P kept rotary pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple

# What the family's own code calls the cache: transformers renamed argument and output in 5.24. Callers may use either name.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
LAYER_SIZES = ("expert_sizes", "union_sizes", "shared_sizes", "experts_per_token", "rotary_pairs", "qk_dims", "value_dims",
               "value_top_k")  # fmt: skip


class ToMoEConfig(PreTrainedConfig):
    """The dense model's config, flat, plus what the plan chose; lists hold one number per layer.

    dense_model_type: the family; expert_form: overlapping (top-1, experts share neurons) or fine (top-k, experts share
    nothing, added to a shared part of shared_sizes neurons); num_experts: N; experts_per_token: k; num_experts_per_tok:
    `planned_top_k`, or when loading another one (`layer_top_k`); expert_sizes: W; union_sizes: U; rotary_pairs: P; qk_dims:
    c, which is 2 P and the kept dims that RoPE leaves alone; value_dims: kept dims of V and O; value_top_k: how many of them
    a token uses (fewer if a value router chooses); expert_backend: a name in EXPERT_BACKENDS; plan_source: hash of the dense
    weights; output_router_logits, router_aux_loss_coef: as in stock MoEs, for the balance loss (see `balance_loss`).
    Raises ValueError, before anything is allocated, if these numbers contradict each other or the dense sizes.
    """

    model_type = "tomoe"
    # Heads are split over ranks. Experts share rows, which no rule here can slice, so every rank holds the MLPs whole.
    base_model_tp_plan = {f"layers.*.self_attn.{p}_proj": "rowwise" if p == "o" else "colwise" for p in "qkvo"}

    dense_model_type: str | None = None
    expert_form: str = "overlapping"
    num_experts: int = 0
    num_experts_per_tok: int = 0
    experts_per_token: list[int] = field(default_factory=list)
    shared_sizes: list[int] = field(default_factory=list)
    expert_sizes: list[int] = field(default_factory=list)
    union_sizes: list[int] = field(default_factory=list)
    rotary_pairs: list[int] = field(default_factory=list)
    qk_dims: list[int] = field(default_factory=list)
    value_dims: list[int] = field(default_factory=list)
    value_top_k: list[int] = field(default_factory=list)
    value_embedding_size: int = 0
    expert_backend: str = "auto"
    plan_source: str | None = None
    tomoe_version: str | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.1

    def __post_init__(self, **dense_values: Any) -> None:
        super().__post_init__(**dense_values)
        # transformers writes only the class that was saved, and serving engines ask for AutoModel.
        classes = {"AutoConfig": "ToMoEConfig", "AutoModel": "ToMoEModel", "AutoModelForCausalLM": "ToMoEForCausalLM"}
        self.auto_map = {auto: f"modeling_tomoe.{name}" for auto, name in classes.items()}
        # Serving engines read it; with overlapping experts the routing is top-1, whatever a file says.
        if self.expert_form == "overlapping":
            self.num_experts_per_tok = 1
        elif not self.num_experts_per_tok:
            self.num_experts_per_tok = self.planned_top_k or 1
        # transformers makes empty configs to compare with.
        if self.dense_model_type is not None:
            self.check()

    def check(self) -> None:
        """Raises ValueError, in one sentence, for sizes that no conversion of such a dense model can have."""
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
            self._check_size(name, getattr(self, name, None), 1, 2**24 if name.endswith("_size") else 2**16)
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // self.num_attention_heads
        for name, value in (("head_dim", head_dim), ("num_experts", self.num_experts)):
            self._check_size(name, value, 1, 2**16)
        if not isinstance(self.dense_model_type, str) or self.dense_model_type == self.model_type:
            raise ValueError(f"the config names {self.dense_model_type!r} as the dense family, which is none")
        layers = self.num_hidden_layers
        for name in LAYER_SIZES:
            sizes = getattr(self, name)
            if not isinstance(sizes, list) or len(sizes) != layers:
                count = f"{len(sizes)} numbers" if isinstance(sizes, list) else type(sizes).__name__
                raise ValueError(f"the config has {count} under {name}, but {layers} layers")
        if self.expert_form not in ("overlapping", "fine"):
            raise ValueError(f"expert_form is {str(self.expert_form)[:40]!r}; known are overlapping and fine")
        experts = self.num_experts if self.expert_form == "fine" else 1
        self._check_size("num_experts_per_tok", self.num_experts_per_tok, 1, experts)
        for i in range(layers):
            self._check_size(f"union_sizes of layer {i}", self.union_sizes[i], 1, self.intermediate_size)
            self._check_size(f"shared_sizes of layer {i}", self.shared_sizes[i], 0, self.union_sizes[i] - 1)
            self._check_size(f"expert_sizes of layer {i}", self.expert_sizes[i], 1, self.union_sizes[i])
            self._check_size(f"experts_per_token of layer {i}", self.experts_per_token[i], 1, experts)
            held = self.shared_sizes[i] + self.num_experts * self.expert_sizes[i]
            if held != self.union_sizes[i] if self.expert_form == "fine" else held < self.union_sizes[i]:
                raise ValueError(f"the config has {held} expert neurons in layer {i}, not {self.union_sizes[i]}")
            self._check_size(f"qk_dims of layer {i}", self.qk_dims[i], 1, head_dim)
            self._check_size(f"rotary_pairs of layer {i}", self.rotary_pairs[i], 0, self.qk_dims[i] // 2)
            self._check_size(f"value_dims of layer {i}", self.value_dims[i], 1, head_dim)
            self._check_size(f"value_top_k of layer {i}", self.value_top_k[i], 1, self.value_dims[i])
            if self.value_top_k[i] < self.value_dims[i]:
                self._check_size("value_embedding_size", self.value_embedding_size, 1, 2**16)

    @staticmethod
    def _check_size(name: str, value: Any, smallest: int, largest: int) -> None:
        if type(value) is not int or not smallest <= value <= largest:
            raise ValueError(f"the config has {str(value)[:40]!r} as {name}, which must be {smallest} to {largest}")

    @property
    def planned_top_k(self) -> int:
        """The largest k of the layers that leave experts out; N if none does."""
        return max((k for k in self.experts_per_token if k < self.num_experts), default=self.num_experts)

    def layer_top_k(self, layer: int) -> int:
        """k of a layer. Loaded with another `num_experts_per_tok`, layers use more or fewer experts, in proportion to what they
        use or leave out; those that leave none out stay whole. All N are the dense model, if it was not repaired."""
        n, most, k = self.num_experts, self.planned_top_k, self.num_experts_per_tok
        planned = self.experts_per_token[layer]
        if k == most or (planned == n and most < n):
            return planned
        self._check_size("num_experts_per_tok", k, 1, n)
        if k < most:
            return max(1, round(planned * k / most))
        return n - round((n - planned) * (n - k) / (n - most))

    def dense_config(self) -> PreTrainedConfig:
        """The config of the dense model, in its family's own class."""
        dropped = {"model_type", "architectures", "auto_map", "transformers_version", "dtype", "quantization_config"}
        values = {k: v for k, v in self.to_dict().items() if k not in dropped and k not in ToMoEConfig.__annotations__}
        config = AutoConfig.for_model(cast(str, self.dense_model_type), **values)
        config._attn_implementation = self._attn_implementation
        return config


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
        """0/1 mask [.., C] with exactly `top_k` ones."""
        x = x.to(self.project_in.weight.dtype)
        logits = self.project_out(F.gelu(self.norm(self.project_in(x))))
        return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)


class ToMoEAttention(nn.Module):
    """Attention on the kept dims (Eq. 4): Q and K on kept rotary pairs, V and O on kept dims or on those a token chooses."""

    q_norm: nn.Parameter | None
    k_norm: nn.Parameter | None
    rotary_ids: Tensor

    def __init__(self, dense: Any, config: ToMoEConfig, layer: int, text_config: PreTrainedConfig):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = text_config, dense.layer_idx, True
        self.head_dim = dense.head_dim
        self.qk_size, self.value_size = config.qk_dims[layer], config.value_dims[layer]
        self.top_k = config.value_top_k[layer]
        # Pruned dims add zero to q.k, so the dense 1/sqrt(C) stays right; 1/sqrt(c) would be wrong.
        self.scaling = dense.scaling
        self.attention_dropout = getattr(dense, "attention_dropout", 0.0)
        self.sliding_window = getattr(dense, "sliding_window", getattr(text_config, "sliding_window", None))
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
        self.register_buffer("rotary_ids", torch.arange(config.rotary_pairs[layer], dtype=torch.int32))
        chooses = self.top_k < self.value_size
        self.value_router = ValueRouter(hidden, config.value_embedding_size, self.value_size) if chooses else None

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
        # out their memory by the config's head_dim. The dense width suits all of them, and trailing zeros change no product.
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa") or not isinstance(cache, Cache | None):
            q, k, v = (F.pad(t, (0, self.head_dim - t.shape[-1])) for t in (q, k, v))
        if cache is not None:
            # a paged cache (continuous batching) writes into `kwargs` what its attention reads
            k, v = cache.update(k, v, self.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        if attend is sdpa_attention_forward:  # and not what somebody registered in its place
            attend = sdpa_attention
        dropout = self.attention_dropout if self.training else 0.0
        kwargs |= dict(dropout=dropout, scaling=self.scaling, sliding_window=self.sliding_window)
        out, weights = attend(self, q, k, v, attention_mask, **kwargs)
        out = out.reshape(*lead, -1, v.shape[-1])[..., : self.value_size]
        if value_mask is not None:
            out = out * value_mask
        return self.o_proj(out.flatten(-2)), weights


def eager_attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, dropout: float = 0.0, **_: Any
) -> tuple[Tensor, Tensor]:
    """Softmax attention written out; grouped key/value heads are repeated."""
    k, v = (t.repeat_interleave(module.num_key_value_groups, 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), p=dropout, training=module.training)
    return (weights @ v).transpose(1, 2).contiguous(), weights


def sdpa_attention(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """As in transformers; from one new token a row, the query heads of a key/value head attend on a CPU as its queries.

    PyTorch would repeat keys and values for each query head there: in bfloat16 that takes five times as long.
    """
    grouped = q.shape[1] > k.shape[1] and (mask is None or mask.shape[1] == 1)
    if q.device.type != "cpu" or q.shape[2] > 1 or not grouped:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=scaling, dropout=dropout, **kwargs)
    queries = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
    out = F.scaled_dot_product_attention(queries, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return out.reshape(len(q), 1, q.shape[1], -1), None


def expert_probs(logits: Tensor, top_k: int | None) -> Tensor:
    """How likely each expert is to be used [T, N]: the softmax over overlapping experts (top_k None), of which a token uses
    one; the sigmoid of how far a fine-grained expert is above the middle between the last that is chosen and the next."""
    if top_k is None:
        return logits.softmax(-1)
    if top_k == logits.shape[-1]:
        return torch.ones_like(logits)
    return (logits - logits.topk(top_k + 1, dim=-1).values[:, -2:].mean(-1, keepdim=True).detach()).sigmoid()


def route(logits: Tensor, top_k: int | None = None, trains: bool = False) -> tuple[Tensor, Tensor | None]:
    """The experts of each token [T, k], in any order, from router logits [T, N], and their weights [T, k] or None for 1.

    `top_k` is None for overlapping experts, of which a token uses one. A router that trains gets the weights
    1 + P - stop_gradient(P): exactly 1, with the gradient of P, its `expert_probs`. Only here tokens choose their experts.
    """
    expert_ids = logits.argmax(-1, keepdim=True) if top_k is None else largest(logits, top_k)
    if not trains:
        return expert_ids, None
    chosen_probs = expert_probs(logits, top_k).gather(1, expert_ids)
    return expert_ids, 1 + (chosen_probs - chosen_probs.detach())


class Router(nn.Linear):
    """Logits [T, N] of the experts."""

    def forward(self, input: Tensor) -> Tensor:
        return router_logits(self, input)


def take_rows(weight: Tensor, neurons: slice | Tensor) -> Tensor:
    """Rows of some neurons: a view for a slice, a copy for indices."""
    return weight[neurons] if isinstance(neurons, slice) else weight.index_select(0, neurons)


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
        self.config, self.layer_idx, self.num_experts = config, layer, config.num_experts
        self.shared_size, self.fine = config.shared_sizes[layer], config.expert_form == "fine"
        self._cache: dict[str, Any] = {}
        gate: Any = getattr(dense, "gate_proj", None)
        up, down = (dense.up_proj, dense.down_proj) if hasattr(dense, "up_proj") else (dense.fc1, dense.fc2)
        self.activation = getattr(dense, "act_fn", None) or getattr(dense, "activation_fn", None) or dense.act
        size, hidden = config.union_sizes[layer], up.in_features

        self.router = Router(hidden, config.num_experts, bias=self.fine)
        for name, like, bias_size in (("gate", gate, size), ("up", up, size), ("down", down, hidden)):
            bias = getattr(like, "bias", None)
            for part, tensor, shape in (("proj", like, (size, hidden)), ("bias", bias, (bias_size,))):
                rows = None if tensor is None else nn.Parameter(torch.empty(shape, dtype=up.weight.dtype))
                self.register_parameter(f"{name}_{part}", rows)
        # Checkpoints know the rows of the experts by this name.
        self.register_buffer("expert_neurons", self.default_rows(size, config.expert_sizes[layer]))

    def default_rows(self, union: int, width: int) -> Tensor:
        """Rows [N, W] of experts that no plan chose; overlapping ones are runs of neighbors that together cover all U rows."""
        if self.fine:
            return torch.arange(self.shared_size, union, dtype=torch.int32).view(self.num_experts, width)
        starts = torch.arange(self.num_experts) * (union - width) // max(1, self.num_experts - 1)
        return (starts[:, None] + torch.arange(width)).int()

    @property
    def top_k(self) -> int | None:
        """Experts of a token; None for overlapping experts, which are used one at a time."""
        k = self.config.num_experts_per_tok
        return self.cached("top_k", lambda: self.config.layer_top_k(self.layer_idx), k) if self.fine else None

    @property
    def expert_rows(self) -> Tensor:
        """[N, W], int32: the rows of each expert in the shared matrices, ascending."""
        return cast(Tensor, self.expert_neurons)

    def activations(self, x: Tensor, neurons: slice | Tensor) -> Tensor:
        """Activations [T, n] of some neurons: act(gate x) * up x, or act(up x) without a gate."""

        def project(weight: Tensor, bias: Tensor | None) -> Tensor:
            rows = take_rows(weight, neurons).to(x.dtype)
            return F.linear(x, rows, None if bias is None else take_rows(bias, neurons).to(x.dtype))

        up = project(self.up_proj, self.up_bias)
        if self.gate_proj is None:
            return self.activation(up)
        return self.activation(project(self.gate_proj, self.gate_bias)) * up

    def cached(self, name: str, make: Callable[[], Any], source: Tensor | int = 0) -> Any:
        """What `make` returns, kept outside the state until the tensor, or the number, that it is made from changes."""
        stamp: Any = source
        if isinstance(source, Tensor):
            stamp = (id(source), source.data_ptr(), None if source.is_inference() else source._version)
        if self._cache.get(name, ("",))[0] != stamp:
            self._cache[name] = (stamp, make())
        return self._cache[name][1]

    def runs(self) -> list[list[tuple[int, int, int]]]:
        """For every expert (first, last, start): its neurons first..last are the rows from `start` on; -1 is no run."""

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

        return self.cached("runs", lambda: [runs_of(rows) for rows in self.expert_rows.tolist()], self.expert_rows)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        trains = torch.is_grad_enabled() and self.router.weight.requires_grad
        expert_ids, weights = route(self.router(x), self.top_k, trains)
        if weights is not None and self.fine:
            y = run_masked(self, x, expert_ids, weights)
        else:
            y = EXPERT_BACKENDS[self.config.expert_backend](self, x, expert_ids)
            y = y if weights is None else y * weights.to(y.dtype)
        if self.down_bias is not None:
            y = y + self.down_bias
        return y.view_as(hidden_states)


class ToMoEPreTrainedModel(PreTrainedModel):
    config_class = ToMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = [CACHE]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Near ties of a router must fall as they fell when it was trained, whatever the dtype of the rest. Loading reads the
    # strict list; quantizers skip names that begin as a pattern of the other says: of modules, or (torchao) of weights.
    _keep_in_fp32_modules_strict = ["router"]
    _keep_in_fp32_modules = [".*router"]

    def __init__(self, config: ToMoEConfig):
        super().__init__(config)
        if config.value_embedding_size:
            self._keep_in_fp32_modules_strict = ["router", "value_router"]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ValueError for ids that point outside the matrices, and for NaN in routers or norms."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.check_ids()
        model.check_finite()
        # Loading made new parameters.
        for router in (module for module in model.modules() if isinstance(module, ValueRouter)):
            router.requires_grad_(False)
        return loaded

    def check_ids(self) -> None:
        """Raises ValueError unless neurons and pairs are ascending numbers of what is there: duplicates would count twice."""
        base: Any = self.base_model
        num_pairs = base.rotary_emb.inv_freq.numel()
        for i, layer in enumerate(base.layers):
            # engines that split layers over ranks leave none in its place
            if not hasattr(layer, "mlp"):
                continue
            for what, ids, count in (
                ("neurons of an expert", layer.mlp.expert_rows, self.config.union_sizes[i]),
                ("rotary pairs", layer.self_attn.rotary_ids[None], num_pairs),
            ):
                edges = F.pad(F.pad(ids.long(), (1, 0), value=-1), (0, 1), value=count)
                if not (ids.is_meta or bool((edges.diff() > 0).all())):
                    raise ValueError(f"layer {i} numbers its {what} out of order or outside the {count} that there are")

    def check_finite(self) -> None:
        """Raises ValueError for NaN or inf in a router or a norm: the model would run, and write other text."""
        for name, weight in self.named_parameters():
            if ("router." in name or "norm" in name) and not (weight.is_meta or bool(weight.isfinite().all())):
                raise ValueError(f"{name} holds numbers that are not finite; the weights are damaged, get them again")

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize what transformers does not know: rows, norms of heads, ids. Tensors that were loaded stay."""
        super()._init_weights(module)
        if isinstance(module, ToMoEMLP):
            std = getattr(self.config, "initializer_range", None) or 0.02
            for name, p in module.named_parameters(recurse=False):
                init.zeros_(p) if name.endswith("bias") else init.normal_(p, 0.0, std)
            width, union = module.expert_rows.shape[1], len(module.up_proj)
            init.copy_(module.expert_rows, module.default_rows(union, width))
        elif isinstance(module, ToMoEAttention):
            for p in module.parameters(recurse=False):
                init.ones_(p)
            init.copy_(module.rotary_ids, torch.arange(len(module.rotary_ids)))

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the family's config too: the family's code and `ToMoEAttention` read that one."""
        super().set_attn_implementation(*args, **kwargs)
        cast(Any, self.base_model).family.config._attn_implementation = self.config._attn_implementation


def share_children_(model: nn.Module, family: nn.Module) -> None:
    """Give `model` the children of `family`, so that names read `layers.0.mlp...` and who replaces one replaces it in both."""
    model._modules = family._modules
    # `Module.__setattr__` would make `family` a child, and every parameter would have a second name.
    object.__setattr__(model, "family", family)


@contextmanager
def record_outputs(modules: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """Collect what these modules return inside the `with`, in the order in which they run."""
    outputs: list[Any] = []
    handles = [module.register_forward_hook(lambda _, args, out: outputs.append(out)) for module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class ToMoEModel(ToMoEPreTrainedModel):
    """The decoder without its output matrix: the family's own model, with ToMoE's MLP and attention in its layers."""

    family: Any

    def __init__(self, config: ToMoEConfig, family: Any = None):
        super().__init__(config)
        if config.expert_backend not in EXPERT_BACKENDS:
            raise ValueError(f"there is no expert backend {config.expert_backend!r}; take {', '.join(EXPERT_BACKENDS)}")
        # Loading may have changed some of the numbers.
        config.check()
        family = AutoModel.from_config(config.dense_config()) if family is None else family
        family.config._attn_implementation = config._attn_implementation
        # Caches read from the config what the family derives from other values: which layers slide, and how far.
        config.update({k: v for k, v in family.config.to_dict().items() if k in ("layer_types", "sliding_window")})
        for i, layer in enumerate(family.layers):
            layer.mlp = ToMoEMLP(layer.mlp, config, i)
            layer.self_attn = ToMoEAttention(layer.self_attn, config, i, family.config)
        share_children_(self, family)
        self._no_split_modules = getattr(family, "_no_split_modules", None)
        self.post_init()
        self._pp_plan = dict(getattr(family, "_pp_plan", None) or {})

    def train(self, mode: bool = True) -> ToMoEModel:
        self.family.training = mode
        return super().train(mode)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_router_logits: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        kwargs |= dict(
            attention_mask=attention_mask, position_ids=position_ids, inputs_embeds=inputs_embeds, use_cache=use_cache,
            return_dict=True, **{CACHE: past_key_values if cache is None else cache},
        )  # fmt: skip
        attends = self.config.output_attentions if output_attentions is None else output_attentions
        routes = self.config.output_router_logits if output_router_logits is None else output_router_logits
        if not attends and not routes:
            return self.family(input_ids, **kwargs)
        with (
            record_outputs(layer.mlp.router for layer in self.family.layers) as router_logits,
            record_outputs(layer.self_attn for layer in self.family.layers) as attended,
        ):
            outputs = self.family(input_ids, output_attentions=attends, **kwargs)
        if attends:
            outputs.attentions = tuple(weights for _, weights in attended if weights is not None)
        return MoeModelOutputWithPast(**outputs, router_logits=tuple(router_logits)) if routes else outputs


def balance_loss(
    router_logits: Sequence[Tensor], mask: Tensor | None, top_ks: Sequence[int | None] | None = None
) -> Tensor:
    """N sum_i F_i P_i (Eq. 9) of router logits [T, N], mean over layers: 1 if tokens spread evenly, N if all go one way.

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


class ToMoEForCausalLM(ToMoEPreTrainedModel, GenerationMixin):
    """The converted model, with its output matrix."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _pp_plan: Any = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: ToMoEConfig):
        super().__init__(config)
        dense = AutoModelForCausalLM.from_config(config.dense_config())
        self.model, self.lm_head = ToMoEModel(config, dense.model), dense.lm_head
        self._no_split_modules = self.model._no_split_modules
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        past = past_key_values if cache is None else cache
        outputs: BaseModelOutputWithPast = self.model(
            input_ids, attention_mask, position_ids, past, inputs_embeds, use_cache, return_dict=True, **kwargs
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = cast(Tensor, outputs.last_hidden_state)[:, kept, :]
        # A tensor of its own: for a slice PyTorch copies the whole output matrix on a CPU.
        logits = self.lm_head(hidden.clone(memory_format=torch.contiguous_format))
        routed = getattr(outputs, "router_logits", None)
        loss = balance = None
        if routed is not None:
            balance = balance_loss(routed, attention_mask, [layer.mlp.top_k for layer in self.model.layers])
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss if balance is None else loss + self.config.router_aux_loss_coef * balance.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=balance, logits=logits, hidden_states=outputs.hidden_states,
            attentions=outputs.attentions, router_logits=routed, **{CACHE: getattr(outputs, CACHE)},
        )  # fmt: skip


# Ways to run the experts: x [T, D] and expert_ids [T, k] -> y [T, D], without the bias of `down`.
# Activations that `masked` holds at once; neurons from which on a slice beats gathering; neurons gathered at once.
MASKED_ELEMENTS, LONG_RUN, GATHER_SIZE = 2**22, 128, 512


def run_masked(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor, weights: Tensor | None = None) -> Tensor:
    """Every neuron for every token, then zeros, in the model's dtype: costs what the dense MLP costs.

    `weights` [T, k] multiply what each expert adds, for routers that train.
    """
    tokens = max(1, MASKED_ELEMENTS // len(mlp.up_proj))
    masks = x.new_zeros(mlp.num_experts, len(mlp.up_proj)).scatter_(1, mlp.expert_rows.long(), 1)
    pieces = []
    for first in range(0, max(len(x), 1), tokens):
        some = slice(first, first + tokens)
        h, ids = mlp.activations(x[some], slice(None)), expert_ids[some]
        if mlp.fine:
            ones = torch.ones_like(ids, dtype=x.dtype) if weights is None else weights[some].to(x.dtype)
            mask = x.new_zeros(len(ids), mlp.num_experts).scatter(1, ids, ones) @ masks
            mask[:, : mlp.shared_size] = 1
        else:
            mask = masks[ids[:, 0]]
        pieces.append((h * mask if torch.is_grad_enabled() else h.mul_(mask)) @ mlp.down_proj)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def run_runs(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Expert by expert: its long runs of neurons as slices of the shared rows, the others gathered piece by piece."""
    k, precise = expert_ids.shape[1], torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape, dtype=precise, device=x.device)
    if mlp.shared_size:
        shared = slice(mlp.shared_size)
        out += mlp.activations(x, shared) @ mlp.down_proj[shared]
    order = expert_ids.flatten().argsort()
    counts = torch.bincount(expert_ids.flatten(), minlength=mlp.num_experts).tolist()
    for expert, places in enumerate(order.split(counts)):
        if not len(places):
            continue
        token_ids = places // k
        expert_x = x[token_ids]
        y = torch.zeros(expert_x.shape, dtype=precise, device=x.device)
        for first, last, start in mlp.runs()[expert]:
            run = slice(start, start + last - first)
            neurons = mlp.expert_rows[expert, first:last] if start < 0 else run
            y += mlp.activations(expert_x, neurons) @ take_rows(mlp.down_proj, neurons)
        out.index_add_(0, token_ids, y)
    return out.to(x.dtype)


def choose_backend(mlp: ToMoEMLP, x: Tensor) -> str:
    """The backend that `auto` takes for inputs like `x` [T, D], by device, dtype, shape and gradient, not by values."""
    for choose in BACKEND_CHOICES:
        if name := choose(mlp, x):
            return name
    # Asking which experts got tokens breaks a graph, and asking for the expert's number makes a GPU wait: once for a single
    # token, and for thin experts at hundreds of small products besides.
    if torch.compiler.is_compiling() or (x.device.type != "cpu" and (len(x) == 1 or mlp.fine)):
        return "masked"
    # Expert after expert, a few tokens read all rows more than once; many tokens are worth it.
    return "runs" if len(x) == 1 or len(x) * (mlp.top_k or 1) >= 64 * mlp.num_experts else "masked"


EXPERT_BACKENDS: dict[str, Callable[[ToMoEMLP, Tensor, Tensor], Tensor]] = {
    "masked": run_masked,
    "runs": run_runs,
    "auto": lambda mlp, x, expert_ids: EXPERT_BACKENDS[choose_backend(mlp, x)](mlp, x, expert_ids),
}
# `auto` asks these first, in turn; None passes the question on. `tomoe.moe.kernels.register` enters its kernels here.
BACKEND_CHOICES: list[Callable[[ToMoEMLP, Tensor], str | None]] = []
# `tomoe.moe.kernels.register` puts faster ways in the place of these two: the logits [T, N] of x [T, D], and the k largest of
# each row of them, in any order [T, k].
router_logits: Callable[[Router, Tensor], Tensor] = lambda router, x: F.linear(  # noqa: E731
    x.to(router.weight.dtype), router.weight, router.bias
)
largest: Callable[[Tensor, int], Tensor] = lambda logits, k: logits.topk(k, dim=-1, sorted=False).indices  # noqa: E731

AutoConfig.register("tomoe", ToMoEConfig, exist_ok=True)
AutoModel.register(ToMoEConfig, ToMoEModel, exist_ok=True)
AutoModelForCausalLM.register(ToMoEConfig, ToMoEForCausalLM, exist_ok=True)
# Whoever saves such a model (a fine-tuning script, say) writes auto_map and a copy of this file beside the weights.
ToMoEConfig.register_for_auto_class()
ToMoEModel.register_for_auto_class("AutoModel")
ToMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
