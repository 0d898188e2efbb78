"""Recover quality: train the weights and the routers of a converted model.

python examples/finetune.py moe text.txt smollm2-135m
python examples/finetune.py moe text.txt smollm2-135m train.steps=1000 weights=lora    # or any other key
"""

import sys

from tomoe import evaluate, finetune
from tomoe.recipe.finetuning import FinetuneRecipe

moe, text, dense, *settings = sys.argv[1:]

# The dense model is the teacher. Take text that the conversion was not fitted to, because the repair knows its own text
# by heart. If you name the same files anyway, what the conversion has read is left out as long as there is other text.
recipe = FinetuneRecipe.load(None, [f"model={moe}", f"data.sources={text}", "train.steps=200", *settings])
finetune(recipe, "moe-tuned")

# Without a text all three are measured on what fine-tuning held out.
for row in evaluate([dense, "moe-tuned", moe]):
    found = row.measurement
    print(f"{found.model}: perplexity {found.perplexity:.2f}", "" if found.kl is None else f"KL {found.kl:.3f}")
