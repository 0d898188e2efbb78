"""Active parameters, counted in one place. The loss, the plan and every report use this arithmetic.

What a token uses are projection weights and routers; the share `active` is of the dense decoder's projection weights. The
paper's own budget (`Recipe.counts_routers`) leaves the routers out. Biases and norms are never counted, as in the paper. A width
is an int (reports) or a tensor with a gradient (the loss).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tomoe.model.shape import ModelShape

BUDGET_TOLERANCE = 0.002  # largest distance between the active fraction of a plan and the requested one


def mlp_params(shape: ModelShape, width: Any) -> Any:
    """Count the projection weights of an MLP of `width` neurons."""
    return (3 if shape.gated else 2) * shape.hidden_size * width


def attention_params(shape: ModelShape, qk_dims: Any, value_dims: Any) -> Any:
    """Count the projection weights of attention with `qk_dims` in Q and K and `value_dims` in V and O, per head."""
    return shape.hidden_size * (shape.num_heads + shape.num_kv_heads) * (qk_dims + value_dims)


def decoder_params(shape: ModelShape) -> int:
    """Count the projection weights of all decoder layers: T_total (Eq. 8, Sec. 3.4)."""
    attention = attention_params(shape, shape.head_dim, shape.head_dim)
    return int(shape.num_layers * (mlp_params(shape, shape.mlp_size) + attention)) + shape.other_params


def layer_params(shape: ModelShape, width: Any, qk_dims: Any, value_dims: Any) -> Any:
    """Count the projection weights of a converted layer with its share of what is always active."""
    own = mlp_params(shape, width) + attention_params(shape, qk_dims, value_dims)
    return own + shape.other_params / shape.num_layers if shape.other_params else own


def router_params(shape: ModelShape, num_experts: int, value_embedding: int = 0) -> int:
    """Count the router weights of a layer: a row for each expert, and two matrices if tokens choose their V/O dims.

    `value_embedding` is the size of an embedding between these (0: none). A single expert's row is unused.
    """
    rows = num_experts if num_experts > 1 else 0
    return shape.hidden_size * rows + value_embedding * (shape.hidden_size + shape.head_dim)


def active_fraction(shape: ModelShape, widths: Iterable[tuple[Any, Any, Any]], routers: int) -> float:
    """Return the share `active`: the weights of converted layers that a token uses, `routers` of them in routers, as a fraction
    of the dense decoder's projection weights."""
    return float(active_params(shape, widths) + routers) / decoder_params(shape)


def active_params(shape: ModelShape, widths: Iterable[tuple[Any, Any, Any]]) -> Any:
    """Count T(d_MoE) (Eq. 8, Sec. 3.4) from (MLP width, Q/K dims, V/O dims) per converted layer."""
    layers = sum(mlp_params(shape, w) + attention_params(shape, qk, v) for w, qk, v in widths)
    return layers + shape.other_params


@dataclass(frozen=True)
class Decoding:
    """The weights read to generate one token, except norms and biases: they bound the speed of decoding one sequence."""

    decoder: int  # projection weights of all decoder layers
    attention: int  # those of them that every token uses: of attention, and of layers without experts
    output: int  # of the output matrix
    routers: int

    @classmethod
    def of(cls, shape: ModelShape, output: int, routers: int) -> Decoding:
        """Count them from a model's sizes and the weights of all its routers."""
        attention = shape.num_layers * attention_params(shape, shape.head_dim, shape.head_dim) + shape.other_params
        return cls(decoder_params(shape), int(attention), output, routers)

    def read(self, active: float) -> int:
        """Count the weights that a token reads if the share `active` of the decoder parameters, routers included, works on it."""
        return round(active * self.decoder) + self.output

    @property
    def always(self) -> float:
        """The share of the dense model's reads that does not depend on the experts: attention, output, routers."""
        return (self.attention + self.output + self.routers) / (self.decoder + self.output)

    def speedup(self, active: float) -> float:
        """The largest possible speedup of decoding one sequence over the dense model."""
        return (self.decoder + self.output) / self.read(active)

    def sentence_without_routers(self, active: float) -> str:
        """Describe what bounds decoding where tokens choose no experts."""
        share = self.read(active) / (self.decoder + self.output)
        return (
            f"One sequence can decode at most {self.speedup(active):.2f} times as fast as by the dense model: at "
            f"{active:.0%} a token reads {share:.0%} of its weights, the output matrix among them"
        )

    def sentence(self, least: float, active: float) -> str:
        """Describe what is always read, and the bounds with one expert per token and as converted."""
        return (
            f"{self.always:.0%} of the weights that decoding a token reads are always read (attention, output matrix, routers), "
            f"so one sequence can decode at most {self.speedup(least):.1f} times as fast as by the dense model with one "
            f"expert ({least:.0%} active), and {self.speedup(active):.1f} times at {active:.0%}"
        )


FILE_BITS = {"bf16": 16.0, "Q8_0": 8.5, "Q4_K": 4.5}  # bits of a weight in files, with the scales of its block


def file_bytes(weights: int) -> dict[str, int]:
    """Count the bytes of a file with this many weights, by its format."""
    return {name: round(weights * bits / 8) for name, bits in FILE_BITS.items()}
