"""Convert with text of your own, and see on other text what it cost.

python examples/your_own_text.py notes.txt held_out.txt
python examples/your_own_text.py "notes.txt,code.jsonl" held_out.txt model=Qwen/Qwen2.5-0.5B active=0.7
"""

import sys

from tomoe import Recipe, convert, evaluate

text, held_out, *settings = sys.argv[1:]

# The text decides which neurons share an expert, and the repair is fitted to it. Name every kind of text that you need:
# a kind that was left out gets worse. Several sources are mixed in equal parts; data sets of the hub work, too.
sources = ", ".join(f'"{source}"' for source in text.split(","))
recipe = Recipe.load(None, ["model=smollm2-135m", "active=0.5", f"data.sources=[{sources}]", *settings])
convert(recipe, "moe-own-text")

# Perplexity alone says little: it depends on the text. KL is how far the predictions moved; 0 would be the dense model.
dense, moe = evaluate([recipe.model, "moe-own-text"], held_out, context=recipe.data.seq_len)
print(f"perplexity {dense.measurement.perplexity:.2f} dense, {moe.measurement.perplexity:.2f} as experts")
print(f"KL {moe.measurement.kl:.3f} nats, same next token {moe.measurement.top1_agreement:.1%}")
