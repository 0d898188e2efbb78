"""Let each token use the largest inputs of every projection: no experts, nothing fitted, and a share chosen when it runs.

python examples/largest_inputs.py "The capital of France is"
python examples/largest_inputs.py "The capital of France is" model=Qwen/Qwen2.5-0.5B-Instruct active=0.6
"""

import sys
from pathlib import Path

from tomoe import Recipe, convert, generate, load

prompt, *settings = sys.argv[1:]

# A little text decides how many inputs each projection gets; the weights stay those of the dense model.
if not Path("moe-inputs/config.json").exists():
    convert(Recipe.load(None, ["model=smollm2-135m", "method.name=inputs", "active=0.7", *settings]), "moe-inputs")

# The share can be another one each time. Prompts use all inputs; single tokens, one after another, choose.
for active in (1.0, 0.7, 0.5):
    model, tokenizer = load("moe-inputs", active=active)
    print(f"{active:.0%}: {generate(model, tokenizer, prompt, max_new_tokens=40)}")
