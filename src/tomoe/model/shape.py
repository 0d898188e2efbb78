"""The sizes of a dense model: every number of parameters follows from them.

Shapes: C dims of a head, Q choices of a head (one per rotary pair or unrotated dim), c kept dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from pydantic import ConfigDict, Field
from torch import Tensor

ORTHOGONAL = 1e-4  # largest error of the product of a rotation and its transpose; float32 ones are off by about 1e-6


# What a file may claim, whoever wrote it: no model is larger.
Few = Annotated[int, Field(strict=True, ge=0, le=2**16)]
Size = Annotated[int, Field(strict=True, ge=0, le=2**24)]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the decoder; every parameter count follows from them."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    num_layers: Annotated[Few, Field(ge=1)]  # L: decoder layers whose MLP is converted
    hidden_size: Annotated[Size, Field(ge=1)]  # D
    mlp_size: Annotated[Size, Field(ge=1)]  # F: the neurons that experts are made of
    num_heads: Few = 0  # H; this and the other sizes of attention are 0 where tomoe cannot prune it
    num_kv_heads: Few = 0  # G
    head_dim: Few = 0  # C
    rotary_size: Few = 0  # R: the first dims of a head, which RoPE rotates in pairs (j, j + R/2)
    gated: Annotated[bool, Field(strict=True)] = (
        True  # whether the MLP computes act(gate x) * up x, otherwise act(up x)
    )
    other_params: Annotated[int, Field(strict=True, ge=0, le=2**48)] = 0
    """Parameters of all other matrices of the decoder layers: attention that cannot be pruned, state spaces, whole layers."""

    @property
    def num_qk_choices(self) -> int:
        """Q: one choice per rotary pair, one per dim that RoPE does not rotate (Appendix A.2)."""
        return self.head_dim - self.rotary_size // 2

    def expand_qk(self, mask: Float[Tensor, " Q"]) -> Float[Tensor, " C"]:
        """Expand a mask over choices to head dims: the two dims of a pair share one entry."""
        pairs = mask[: self.rotary_size // 2]
        return torch.cat([pairs, pairs, mask[self.rotary_size // 2 :]])

    def qk_dims(self, kept: Bool[Tensor, " Q"]) -> Int[Tensor, " c"]:
        """Return kept head dims in the order of a pruned head: first halves of the pairs, second halves, unpaired dims."""
        num_pairs = self.rotary_size // 2
        pairs = kept[:num_pairs].nonzero().squeeze(1)
        return torch.cat([pairs, pairs + num_pairs, kept[num_pairs:].nonzero().squeeze(1) + self.rotary_size])

    @property
    def rotation_shape(self) -> tuple[int, int, int]:
        """Shape [G, C, C]: one matrix per key/value head."""
        return (self.num_kv_heads, self.head_dim, self.head_dim)

    def rotation_error(self, rotation: Tensor) -> str | None:
        """Say what is wrong with a rotation of the values; None if nothing is."""
        if tuple(rotation.shape) != self.rotation_shape:
            return f"its value rotation has shape {tuple(rotation.shape)}, the model needs {self.rotation_shape}"
        # NaN is not, either
        error = (rotation.mT @ rotation - torch.eye(self.head_dim, device=rotation.device)).abs().max()
        return None if bool(error <= ORTHOGONAL) else "its value rotation is not orthogonal"


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def text_config(config: Any) -> Any:
    """Return the part of a transformers config with the decoder's sizes: of a multimodal model, the text model's."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def max_positions(config: Any) -> int | None:
    """Return the context length of a transformers config; None if it does not say."""
    return getattr(text_config(config), "max_position_embeddings", None)


def num_kv_heads(config: Any) -> int:
    """Return the key/value heads in a decoder's config; as many as query heads if it does not say."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_dim(config: Any) -> int:
    """Return the head dim in a decoder's config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
