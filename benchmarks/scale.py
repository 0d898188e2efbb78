"""Lower bounds of the memory that training needs, by arithmetic, for models that are too large to try everywhere.

    python benchmarks/scale.py [--tokens 2048] [--attention off|static|per_token]

prints the arithmetic of `tomoe.memory.estimate` from sizes of configs alone, as Markdown: one table of its terms, one of
their sums, with the base in bfloat16, int8 and nf4, and sharded over processes. int8 and nf4 hold for the projections of the
decoder layers, without their scales; embeddings and norms stay in bfloat16. Folding goes layer by layer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from tomoe.memory.estimate import Sizes, activation_bytes, least_memory, sizes_of, weight_bytes
from tomoe.pruning.layouts import Layout, settle_layout
from tomoe.recipe.conversion import Recipe

# as in the config.json of each; hidden size, MLP size, layers, heads, key/value heads, vocabulary
MODELS: dict[str, PreTrainedConfig] = {
    "SmolLM2-135M": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        vocab_size=49152, tie_word_embeddings=True,
    ),
    "1B (Llama-3.2-1B)": LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, tie_word_embeddings=True,
    ),
    "LLaMA-2-7B": LlamaConfig(
        hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        vocab_size=32000,
    ),
    "LLaMA-3-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256,
    ),
    "Qwen2.5-14B": Qwen2Config(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=48, num_attention_heads=40, num_key_value_heads=8,
        vocab_size=152064,
    ),
    "LLaMA-3-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Paper:
    """One model on paper: sizes, and the terms of training in bytes."""

    name: str
    sizes: Sizes
    recipe: Recipe
    checkpointed: Recipe
    layout: Layout

    def quantized(self, quantization: str) -> int:
        """Bytes of the weights with the projections of the decoder layers in int8 or nf4."""
        return weight_bytes(self.sizes, torch.bfloat16, quantization)

    def beside_weights(self) -> int:
        """All terms of training but the base, with activation checkpointing."""
        training, *_ = least_memory(self.sizes, self.checkpointed, self.layout)
        return training.total - weight_bytes(self.sizes, torch.bfloat16)


def on_paper(name: str, tokens: int, attention: str) -> Paper:
    recipe = Recipe.load(
        None,
        [
            "experts.form=overlapping", f"attention.pruning={attention}", "repair.mode=none", f"data.seq_len={tokens}",
            "data.tokens=1000000", "train.steps=1", "train.compute_dtype=stored",
        ],
    )  # fmt: skip
    sizes = sizes_of(MODELS[name], recipe)
    checkpointed = recipe.changed(["train.gradient_checkpointing=true"])
    return Paper(name, sizes, recipe, checkpointed, settle_layout(recipe, sizes.shape))


def gb(size: float) -> str:
    return f"{size / 1e9:.2f}" if size < 1e10 else f"{size / 1e9:.1f}"


def terms(p: Paper, tokens: int) -> list[str]:
    training, *_ = least_memory(p.sizes, p.recipe, p.layout)
    weights, learned, _, logits = training.parts.values()
    activations = (activation_bytes(p.sizes.shape, torch.bfloat16, tokens, again) for again in (False, True))
    return [
        p.name, f"{p.sizes.total / 1e9:.3f} B", f"{p.sizes.decoder_params / p.sizes.total:.0%}", gb(weights), gb(learned),
        *(f"{size / tokens / 1e6:.2f}" for size in activations), gb(logits),
    ]  # fmt: skip


def totals(p: Paper) -> list[str]:
    plain, *_ = least_memory(p.sizes, p.recipe, p.layout)
    rest = p.beside_weights()
    sharded = [gb(weight_bytes(p.sizes, torch.bfloat16, shards=n) + rest) for n in (4, 8)]
    *_, folding = least_memory(p.sizes, p.recipe.changed(["train.quantization=nf4"]), p.layout)
    return [
        p.name, gb(plain.total), gb(weight_bytes(p.sizes, torch.bfloat16) + rest), gb(p.quantized("int8") + rest),
        gb(p.quantized("nf4") + rest),
        *sharded, gb(folding.total),
    ]  # fmt: skip


def print_table(titles: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(titles) + " |")
    print("|---|" + "---:|" * (len(titles) - 1))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of a forward pass")
    parser.add_argument("--attention", choices=["off", "static", "per_token"], default="off")
    args = parser.parse_args()
    papers = [on_paper(name, args.tokens, args.attention) for name in MODELS]
    titles = [
        "model", "weights", "in decoder layers", "in bf16, GB", "trained, GB", "activations a token, MB", "checkpointed, MB",
        "logits, GB",
    ]  # fmt: skip
    print_table(titles, [terms(p, args.tokens) for p in papers])
    titles = [
        "training, GB", "bf16", "bf16, checkpointed", "int8", "nf4", "bf16 over 4", "bf16 over 8", "folding",
    ]  # fmt: skip
    print_table(titles, [totals(p) for p in papers])


if __name__ == "__main__":
    main()
