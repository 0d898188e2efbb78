"""The memory of fine-tuning, computed from sizes: on an H100 the estimate was a tenth above the measurement."""

from __future__ import annotations

from dataclasses import dataclass

from tomoe.budget import decoder_params
from tomoe.model.shape import ModelShape
from tomoe.training.distillation import CHUNK_ON_DEVICE

# Tokens of a step from which more make nothing faster, and the part of what is free that a batch may fill.
MOST_TOKENS = 32_768
FILLED = 0.9
_FLOAT32 = 4


@dataclass(frozen=True)
class Tuning:
    """A fine-tuning, as far as it affects memory. `outside`: parameters outside of the decoder layers, `output`: those of the
    output matrix; `rank`: of the adapters, 0 if all weights are trained."""

    shape: ModelShape
    outside: int
    output: int
    num_experts: int
    itemsize: int = 2
    rank: int = 0
    eight_bit: bool = False
    checkpointing: bool = False

    def total(self, tokens: int) -> int:
        """Return bytes in a forward and backward pass over this many tokens."""
        s = self.shape
        decoder = decoder_params(self.shape)
        heads = (s.num_heads + s.num_kv_heads) * s.head_dim
        # of Q, K, V, O and the three matrices of the MLP: an adapter has a row for each input and one for each output
        sides = s.num_layers * (4 * s.hidden_size + 2 * heads + 3 * (s.hidden_size + s.mlp_size))
        trained = self.rank * sides if self.rank else decoder
        both_models = 2 * (decoder + self.outside) * self.itemsize
        copies = _FLOAT32 if self.rank or self.itemsize < _FLOAT32 else 0
        moments = 2 if self.eight_bit else 2 * _FLOAT32
        logits = 5 * CHUNK_ON_DEVICE * self.output // s.hidden_size * _FLOAT32
        # beside the gradients, which are float32
        return both_models + trained * (copies + _FLOAT32 + moments) + tokens * self.of_a_token() + logits

    def of_a_token(self) -> int:
        """Return bytes of activations per token for the backward pass. Per layer, in the dtype of the weights: six numbers per
        neuron (gate, activated gate, up, product, mask, masked product), Q, K, V, result and inputs; in float32 the inputs of
        norms and router."""
        s = self.shape
        numbers = 6 * s.mlp_size + 2 * (s.num_heads + s.num_kv_heads) * s.head_dim + 4 * s.hidden_size
        layer = self.itemsize * numbers + _FLOAT32 * (5 * s.hidden_size + 6 * self.num_experts)
        return s.num_layers * s.hidden_size * self.itemsize + layer if self.checkpointing else s.num_layers * layer

    def rows(self, free: int, seq_len: int, passes: int) -> int:
        """Return the sequences per forward pass (of `passes` in a step) that fit into this many free bytes; 0 if none does."""
        left = FILLED * free - self.total(0)
        fit = int(left // (seq_len * self.of_a_token()))
        return max(0, min(fit, max(1, MOST_TOKENS // (seq_len * passes))))
