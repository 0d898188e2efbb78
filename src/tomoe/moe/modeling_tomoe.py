"""A dense decoder turned into a Mixture-of-Experts by ToMoE: one file for all families.

This file imports torch and transformers only. It is copied beside the weights, so that
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where tomoe is not installed. The family's own
code (embeddings, norms, rotary embedding, decoder layer, cache) stays in charge; only each layer's `mlp` and
`self_attn` are replaced, by one class each.

Letters: B batch, S sequence, T = B S tokens, D hidden size, N experts, W width of an expert, U neurons that some expert
uses, H query heads, G key/value heads, C head dim, c kept dims of Q and K, P kept rotary pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

OWN_KEYS = (
    "dense_model_type", "num_experts", "expert_sizes", "union_sizes", "rotary_pairs", "qk_dims", "value_dims",
    "value_top_k", "value_embedding_size", "expert_backend", "plan_source", "tomoe_version", "output_router_logits",
    "router_aux_loss_coef",
)  # fmt: skip
AUTO_CLASSES = {"AutoConfig": "ToMoEConfig", "AutoModel": "ToMoEModel", "AutoModelForCausalLM": "ToMoEForCausalLM"}


class ToMoEConfig(PreTrainedConfig):
    """The dense model's config, flat, plus one number per layer for whatever the plan made unequal.

    expert_sizes: W, union_sizes: U, rotary_pairs: P, qk_dims: c = 2 P + kept dims that RoPE leaves alone, value_dims: dims of V
    and O, value_top_k: dims of one token (fewer than value_dims where a value router chooses).
    output_router_logits, router_aux_loss_coef: as in stock MoEs, the balance loss for who trains it (see `balance_loss`).
    Raises ValueError, before anything is allocated, where these numbers contradict each other or the dense sizes.
    """

    model_type = "tomoe"
    # Heads are shared out. The experts share rows, which no rule here can slice, so every rank holds the MLPs whole.
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
    }

    def __init__(self, **kwargs: Any):
        own = {name: kwargs.pop(name, None) for name in OWN_KEYS}
        own["expert_backend"] = own["expert_backend"] or "auto"
        own["output_router_logits"] = bool(own["output_router_logits"])
        own["router_aux_loss_coef"] = 0.1 if own["router_aux_loss_coef"] is None else own["router_aux_loss_coef"]
        super().__init__(**kwargs)
        # transformers writes only the class that was saved, and serving engines ask for AutoModel
        self.auto_map = {auto: f"modeling_tomoe.{name}" for auto, name in AUTO_CLASSES.items()}
        for name, value in own.items():
            setattr(self, name, value)
        self.num_experts_per_tok = 1  # engines look for it wherever there is num_experts
        if self.dense_model_type is not None:  # transformers makes empty configs to compare with
            self.check()

    def check(self) -> None:
        """Raises ValueError, in one sentence, for sizes that no conversion of such a dense model can have."""
        most = {"hidden_size": 2**24, "intermediate_size": 2**24}
        for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"):
            self._between(name, getattr(self, name, None), 1, most.get(name, 2**16))
        heads = self.num_attention_heads
        head_dim = getattr(self, "head_dim", None) or self.hidden_size // heads
        for name, value in (("head_dim", head_dim), ("num_experts", self.num_experts)):
            self._between(name, value, 1, 2**16)
        if not isinstance(self.dense_model_type, str) or self.dense_model_type == self.model_type:
            raise ValueError(f"the config names {self.dense_model_type!r} as the dense family, which is none")
        layers = self.num_hidden_layers
        for name in ("expert_sizes", "union_sizes", "rotary_pairs", "qk_dims", "value_dims", "value_top_k"):
            sizes = getattr(self, name)
            if not isinstance(sizes, list) or len(sizes) != layers:
                count = f"{len(sizes)} numbers" if isinstance(sizes, list) else type(sizes).__name__
                raise ValueError(f"the config has {count} under {name}, but {layers} layers")
        embedded = self.value_embedding_size
        for i in range(layers):
            self._between(f"union_sizes of layer {i}", self.union_sizes[i], 1, self.intermediate_size)
            self._between(f"expert_sizes of layer {i}", self.expert_sizes[i], 1, self.union_sizes[i])
            self._between(f"qk_dims of layer {i}", self.qk_dims[i], 1, head_dim)
            self._between(f"rotary_pairs of layer {i}", self.rotary_pairs[i], 0, self.qk_dims[i] // 2)
            self._between(f"value_dims of layer {i}", self.value_dims[i], 1, head_dim)
            self._between(f"value_top_k of layer {i}", self.value_top_k[i], 1, self.value_dims[i])
            if self.value_top_k[i] < self.value_dims[i]:
                self._between("value_embedding_size", embedded, 1, 2**16)

    @staticmethod
    def _between(name: str, value: Any, least: int, most: int) -> None:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"the config has {str(value)[:40]!r} as {name}, where {least} to {most} can be")

    def dense_config(self) -> PreTrainedConfig:
        """The config of the family that this model came from."""
        values = {k: v for k, v in self.to_dict().items() if k not in OWN_KEYS}
        ours = ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "num_experts_per_tok")
        for key in (*ours, "quantization_config"):
            values.pop(key, None)
        config = AutoConfig.for_model(self.dense_model_type, **values)
        config._attn_implementation = self._attn_implementation
        return config


def members_of(mlp: ToMoEMLP, expert_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, U]: 1 where a neuron belongs to a token's expert."""
    members = torch.zeros(mlp.num_experts, mlp.up_proj.shape[0], dtype=dtype, device=expert_ids.device)
    return members.scatter_(1, mlp.expert_neurons.long(), 1)[expert_ids]


def run_reference(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Every neuron for every token in float32, then zeros: slow and exact."""
    exact = torch.promote_types(x.dtype, torch.float32)
    h = mlp.hidden(x.to(exact), slice(None)) * members_of(mlp, expert_ids, exact)
    return (h @ mlp.down_proj.to(exact)).to(x.dtype)


def run_masked(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Every neuron for every token, then zeros, in the model's dtype: costs what the dense MLP costs."""
    tokens = max(1, MASKED_ELEMENTS // mlp.up_proj.shape[0])
    pieces = []
    for some, ids in zip(x.split(tokens), expert_ids.split(tokens), strict=True):
        h, members = mlp.hidden(some, slice(None)), members_of(mlp, ids, x.dtype)
        pieces.append((h * members if torch.is_grad_enabled() else h.mul_(members)) @ mlp.down_proj)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def run_runs(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Expert by expert: its long runs of neurons as slices of the shared rows, the others gathered block by block."""
    out = torch.empty_like(x)
    order = expert_ids.argsort()
    counts = torch.bincount(expert_ids, minlength=mlp.num_experts).tolist()
    for expert, rows in enumerate(order.split(counts)):
        if not len(rows):
            continue
        mine = x[rows]
        y = torch.zeros(mine.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        for first, last, start in mlp.blocks()[expert]:
            shared = slice(start, start + last - first)
            neurons = mlp.expert_neurons[expert, first:last] if start < 0 else shared
            y += mlp.hidden(mine, neurons) @ pick(mlp.down_proj, neurons)
        out[rows] = y.to(x.dtype)
    return out


def run_copies(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    """Every expert has contiguous weights of its own, N W rows in place of U: only for who asks for it."""
    gate, up, down = mlp.copies()
    order = expert_ids.argsort()
    mine, ends = x[order], F.one_hot(expert_ids, mlp.num_experts).sum(0).cumsum(0).int()
    # F.grouped_mm wants rows of a multiple of 16 bytes, and knows no float64
    if x.dtype == torch.float64 or any(size * x.element_size() % 16 for size in up.shape[1:]):
        starts = [0, *ends.tolist()]

        def product(rows: Tensor, weights: Tensor) -> Tensor:
            return torch.cat([rows[a:b] @ w for a, b, w in zip(starts, starts[1:], weights, strict=False)])
    else:

        def product(rows: Tensor, weights: Tensor) -> Tensor:
            return F.grouped_mm(rows, weights, offs=ends)

    def project(weights: Tensor, bias: Tensor | None) -> Tensor:
        y = product(mine, weights.transpose(1, 2))
        return y if bias is None else y + bias[mlp.expert_neurons.long()][expert_ids[order]]

    h = project(up, mlp.up_bias)
    h = mlp.activation(h) if gate is None else mlp.activation(project(gate, mlp.gate_bias)) * h
    return torch.empty_like(x).index_copy(0, order, product(h, down))


def choose_backend(mlp: ToMoEMLP, x: Tensor) -> str:
    """The backend that `auto` takes for inputs like `x` [T, D]: device, dtype, shape and gradient count, values do not."""
    for choose in BACKEND_CHOICES:
        if name := choose(mlp, x):
            return name
    if torch.compiler.is_compiling():
        return "masked"  # asking which experts got tokens breaks a graph
    if len(x) == 1 and x.device.type != "cpu":
        return "masked"  # asking for the expert's number makes a GPU wait
    # Expert after expert, a few tokens read all rows more than once; many tokens are worth it.
    return "runs" if len(x) == 1 or len(x) >= 64 * mlp.num_experts else "masked"


def run_auto(mlp: ToMoEMLP, x: Tensor, expert_ids: Tensor) -> Tensor:
    return EXPERT_BACKENDS[choose_backend(mlp, x)](mlp, x, expert_ids)


MASKED_ELEMENTS = 2**22  # activations that `masked` holds at once
LONG_RUN, GATHERED_BLOCK = 128, 512  # neurons from which on a slice beats gathering; neurons gathered at once
EXPERT_BACKENDS: dict[str, Callable[[ToMoEMLP, Tensor, Tensor], Tensor]] = {
    "reference": run_reference,
    "masked": run_masked,
    "runs": run_runs,
    "copies": run_copies,
    "auto": run_auto,
}
# Asked first by `auto`, in turn; None passes the question on. The tomoe package enters its kernels here.
BACKEND_CHOICES: list[Callable[[ToMoEMLP, Tensor], str | None]] = []


def pick(weight: Tensor, neurons: slice | Tensor) -> Tensor:
    """Rows of some neurons: a view for a slice, a copy for indices."""
    return weight[neurons] if isinstance(neurons, slice) else weight.index_select(0, neurons)


class ToMoEMLP(nn.Module):
    """N experts with top-1 routing that share neurons. Each neuron is stored once, one row of every matrix."""

    num_experts: int
    activation: Callable[[Tensor], Tensor]
    gate_proj: nn.Parameter | None
    gate_bias: nn.Parameter | None
    up_proj: nn.Parameter
    up_bias: nn.Parameter | None
    down_proj: nn.Parameter
    down_bias: nn.Parameter | None
    expert_neurons: Tensor

    def __init__(self, dense: Any, config: ToMoEConfig, layer: int):
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        self._derived: dict[str, Any] = {}
        gate: Any
        up: Any
        down: Any
        gate, up, down = (getattr(dense, n, None) for n in ("gate_proj", "up_proj", "down_proj"))
        up, down = (dense.fc1, dense.fc2) if up is None else (up, down)
        self.activation = getattr(dense, "act_fn", None) or getattr(dense, "activation_fn", None) or dense.act
        size, hidden = config.union_sizes[layer], up.in_features

        def rows(module: nn.Module | None, *shape: int) -> nn.Parameter | None:
            return None if module is None else nn.Parameter(torch.empty(*shape, dtype=up.weight.dtype))

        self.router = nn.Linear(hidden, config.num_experts, bias=False)
        self.register_parameter("gate_proj", rows(gate, size, hidden))
        self.register_parameter("gate_bias", rows(gate if getattr(gate, "bias", None) is not None else None, size))
        self.register_parameter("up_proj", rows(up, size, hidden))
        self.register_parameter("up_bias", rows(up if up.bias is not None else None, size))
        self.register_parameter("down_proj", rows(down, size, hidden))
        self.register_parameter("down_bias", rows(down if down.bias is not None else None, hidden))
        ids = torch.zeros(config.num_experts, config.expert_sizes[layer], dtype=torch.int32)
        self.register_buffer("expert_neurons", ids)  # [N, W], rows of the shared matrices, ascending

    def hidden(self, x: Tensor, neurons: slice | Tensor) -> Tensor:
        """Activations [T, n] of some neurons: act(gate x) * up x, or act(up x) where there is no gate."""

        def project(weight: Tensor, bias: Tensor | None) -> Tensor:
            return F.linear(
                x, pick(weight, neurons).to(x.dtype), None if bias is None else pick(bias, neurons).to(x.dtype)
            )

        up = project(self.up_proj, self.up_bias)
        return (
            self.activation(up)
            if self.gate_proj is None
            else self.activation(project(self.gate_proj, self.gate_bias)) * up
        )

    def derived(self, name: str, make: Callable[[], Any], *sources: Tensor | None) -> Any:
        """What `make` gives, kept beside the module, outside its state, until one of the tensors it was made from changes."""
        stamp = [None if t is None else (id(t), t.data_ptr(), -1 if t.is_inference() else t._version) for t in sources]
        if self._derived.get(name, (None,))[0] != stamp:
            self._derived[name] = (stamp, make())
        return self._derived[name][1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_derived": {}}

    def _apply(self, *args: Any, **kwargs: Any) -> ToMoEMLP:
        self._derived.clear()
        return super()._apply(*args, **kwargs)

    def blocks(self) -> list[list[tuple[int, int, int]]]:
        """For every expert (first, last, start): its neurons first..last are the rows from `start` on; -1 is no run."""
        return self.derived("blocks", self._find_blocks, self.expert_neurons)

    def _find_blocks(self) -> list[list[tuple[int, int, int]]]:
        def gathered(first: int, last: int) -> list[tuple[int, int, int]]:
            return [(i, min(i + GATHERED_BLOCK, last), -1) for i in range(first, last, GATHERED_BLOCK)]

        found = []
        for rows in self.expert_neurons.tolist():
            edges = [0, *(i for i in range(1, len(rows)) if rows[i] != rows[i - 1] + 1), len(rows)]
            blocks, done = [], 0
            for first, last in itertools.pairwise(edges):
                if last - first >= LONG_RUN:
                    blocks += [*gathered(done, first), (first, last, rows[first])]
                    done = last
            found.append(blocks + gathered(done, len(rows)))
        return found

    def copies(self) -> tuple[Tensor | None, Tensor, Tensor]:
        """Gate, up and down rows [N, W, D] of every expert; kept unless they are made with a gradient."""

        def make() -> tuple[Tensor | None, Tensor, Tensor]:
            rows = self.expert_neurons.long()
            return None if self.gate_proj is None else self.gate_proj[rows], self.up_proj[rows], self.down_proj[rows]

        weights = (self.gate_proj, self.up_proj, self.down_proj)
        if torch.is_grad_enabled() and self.up_proj.requires_grad:
            return make()
        if torch.compiler.is_compiling():
            return self._derived["copies"][1] if "copies" in self._derived else make()
        return self.derived("copies", make, self.expert_neurons, *weights)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.flatten(0, -2)
        logits = self.router(x.to(self.router.weight.dtype))
        expert_ids = logits.argmax(-1)
        y = EXPERT_BACKENDS[self.config.expert_backend](self, x, expert_ids)
        if torch.is_grad_enabled() and self.router.weight.requires_grad:
            # exactly 1, but with the gradient of the chosen expert's probability: fine-tuning can still move the router
            chosen = logits.softmax(-1).gather(1, expert_ids[:, None])
            y = y * (1 + (chosen - chosen.detach())).to(y.dtype)
        if self.down_bias is not None:
            y = y + self.down_bias
        return y.view_as(hidden_states)


class ValueRouter(nn.Module):
    """One logit per V/O dim from a token's input; all heads share the choice."""

    def __init__(self, hidden_size: int, embedding_size: int, head_dim: int):
        super().__init__()
        self.project_in = nn.Linear(hidden_size, embedding_size)
        self.norm = nn.LayerNorm(embedding_size)
        self.project_out = nn.Linear(embedding_size, head_dim)

    def forward(self, x: Tensor, top_k: int) -> Tensor:
        """0/1 mask [.., C] with exactly `top_k` ones."""
        x = x.to(self.project_in.weight.dtype)
        logits = self.project_out(F.gelu(self.norm(self.project_in(x))))
        return torch.zeros_like(logits).scatter_(-1, logits.topk(top_k, dim=-1).indices, 1.0)


class ToMoEAttention(nn.Module):
    """Q and K on the kept rotary pairs; V and O on the kept dims, or on K dims of each token's choice."""

    num_key_value_groups: int
    head_dim: int
    norm_eps: float
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
        self.register_buffer("rotary_ids", torch.zeros(config.rotary_pairs[layer], dtype=torch.int32))
        self.value_router = None
        if self.top_k < self.value_size:
            self.value_router = ValueRouter(hidden, config.value_embedding_size, self.value_size)

    def normalise(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        # RMS over all C dims of the dense head: the pruned ones were zero, but they count in the mean.
        f = x.float()
        scale = torch.rsqrt(f.square().sum(-1, keepdim=True) / self.head_dim + self.norm_eps)
        return weight * (f * scale).to(x.dtype)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE on [first halves of the pairs, second halves, dims that RoPE leaves alone]."""
        pairs = self.rotary_ids.numel()
        first, second, rest = x.split([pairs, pairs, self.qk_size - 2 * pairs], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        lead = hidden_states.shape[:-1]
        q = self.normalise(self.q_proj(hidden_states).view(*lead, -1, self.qk_size), self.q_norm).transpose(1, 2)
        k = self.normalise(self.k_proj(hidden_states).view(*lead, -1, self.qk_size), self.k_norm).transpose(1, 2)
        v = self.v_proj(hidden_states).view(*lead, -1, self.value_size)
        chosen = None
        if self.value_router is not None:
            chosen = self.value_router(hidden_states, self.top_k).unsqueeze(-2).to(v.dtype)
            v = v * chosen
        v = v.transpose(1, 2)
        pairs = self.rotary_ids.numel()  # ascending, so as many as there are means all of them
        kept = slice(pairs) if 2 * pairs == position_embeddings[0].shape[-1] else self.rotary_ids.long()
        cos, sin = (t[..., kept].unsqueeze(1) for t in position_embeddings)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        # FlashAttention wants equal widths in multiples of 8 (and crops a wider V in silence), and serving engines lay out
        # their caches by the config's head_dim. The dense width suits all of them, and zeros behind change no product.
        implementation = self.config._attn_implementation
        if implementation not in ("eager", "sdpa"):
            q, k, v = (F.pad(t, (0, self.head_dim - t.shape[-1])) for t in (q, k, v))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        out, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        out = out.reshape(*lead, -1, v.shape[-1])[..., : self.value_size]
        if chosen is not None:
            out = out * chosen
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


class ToMoEPreTrainedModel(PreTrainedModel):
    config_class = ToMoEConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Near ties of a router must fall as they fell when it was trained, whatever the dtype of the rest.
    _keep_in_fp32_modules_strict = ["router", "value_router"]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. Raises ValueError where the file's row or pair numbers point outside the matrices."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).check_ids()
        return loaded

    def check_ids(self) -> None:
        """Raises ValueError unless neurons and pairs are ascending numbers of what is there: duplicates would count twice."""
        base: Any = self.base_model
        pairs = base.rotary_emb.inv_freq.numel()
        for i, layer in enumerate(base.layers):
            if not hasattr(layer, "mlp"):  # engines that share layers out leave none in its place
                continue
            rows = self.config.union_sizes[i]
            for what, ids, count in (
                ("neurons of an expert", layer.mlp.expert_neurons, rows),
                ("rotary pairs", layer.self_attn.rotary_ids[None], pairs),
            ):
                edges = F.pad(F.pad(ids.long(), (1, 0), value=-1), (0, 1), value=count)
                if not bool((edges.diff() > 0).all()):
                    raise ValueError(f"layer {i} numbers its {what} out of order or outside the {count} that there are")

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """The family's code and our attention read the family's config, which transformers does not know of."""
        super().set_attn_implementation(*args, **kwargs)
        cast(Any, self.base_model).family.config._attn_implementation = self.config._attn_implementation


def replace_layers_(family: Any, config: ToMoEConfig) -> None:
    """Put ToMoE's MLP and attention into every decoder layer of a family's own model, sized by the config."""
    for i, layer in enumerate(family.layers):
        layer.mlp = ToMoEMLP(layer.mlp, config, i)
        layer.self_attn = ToMoEAttention(layer.self_attn, config, i, family.config)


class ToMoEModel(ToMoEPreTrainedModel):
    """The decoder without its output matrix: the family's own model, with our layers in it.

    The family's model is no child of this one. Both hold the same dict of children, so names read `layers.0.mlp...` as in any
    decoder, and whatever replaces a part here (an engine, a quantizer) replaces it there.
    """

    family: Any

    def __init__(self, config: ToMoEConfig, family: Any = None):
        super().__init__(config)
        if config.expert_backend not in EXPERT_BACKENDS:
            raise ValueError(f"the config asks for the expert backend {config.expert_backend!r}, which is not there")
        family = AutoModel.from_config(config.dense_config()) if family is None else family
        family.config._attn_implementation = config._attn_implementation
        replace_layers_(family, config)
        self._modules = family._modules
        object.__setattr__(self, "family", family)
        self._no_split_modules = getattr(family, "_no_split_modules", None)
        self.post_init()
        self._pp_plan = dict(getattr(family, "_pp_plan", None) or {})

    def train(self, mode: bool = True) -> ToMoEModel:
        self.family.training = mode
        return super().train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPast | MoeModelOutputWithPast:
        if not kwargs.pop("output_router_logits", self.config.output_router_logits):
            return self.family(*args, **kwargs)
        routed: list[Tensor] = []
        routers = [layer.mlp.router for layer in cast(Any, self).layers]
        handles = [router.register_forward_hook(lambda *own: routed.append(own[2])) for router in routers]
        try:
            outputs = self.family(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return MoeModelOutputWithPast(**outputs, router_logits=cast(Any, tuple(routed)))


def balance_loss(routed: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """N sum_i F_i P_i of router logits [T, N], mean over layers: 1 where tokens spread evenly, N where all go one way.

    F_i is the share of tokens that expert i gets, P_i its mean probability. A mask [B, S] leaves padding out.
    """
    terms = []
    for logits in routed:
        real = slice(None) if mask is None or mask.numel() != len(logits) else mask.flatten().bool()
        probs = logits[real].float().softmax(-1)
        shares = F.one_hot(probs.argmax(-1), probs.shape[-1]).float().mean(0)
        terms.append((probs.shape[-1] * (shares * probs.mean(0)).sum()).to(routed[0].device))
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
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = cast(Tensor, outputs.last_hidden_state)[:, kept, :]
        # A tensor of its own: for a slice PyTorch copies the whole output matrix on a CPU.
        logits = self.lm_head(hidden.clone(memory_format=torch.contiguous_format))
        routed = getattr(outputs, "router_logits", None)
        loss, balance = None, None if routed is None else balance_loss(routed, attention_mask)
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            loss = loss if balance is None else loss + self.config.router_aux_loss_coef * balance.to(loss.device)
        return MoeCausalLMOutputWithPast(
            loss=loss, aux_loss=balance, logits=logits, past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states, attentions=outputs.attentions, router_logits=routed,
        )  # fmt: skip


AutoConfig.register("tomoe", ToMoEConfig, exist_ok=True)
AutoModel.register(ToMoEConfig, ToMoEModel, exist_ok=True)
AutoModelForCausalLM.register(ToMoEConfig, ToMoEForCausalLM, exist_ok=True)
# Whoever saves such a model (a fine-tuning script, say) writes auto_map and a copy of this file beside the weights.
ToMoEConfig.register_for_auto_class()
ToMoEModel.register_for_auto_class("AutoModel")
ToMoEForCausalLM.register_for_auto_class("AutoModelForCausalLM")
