"""Make a model that vLLM serves without any code of tomoe.

python examples/serve_in_vllm.py
python examples/serve_in_vllm.py model=Qwen/Qwen2.5-1.5B active=0.5    # or any other key of the recipe
"""

import sys

from tomoe import Recipe, convert, export

# The target comes before the conversion: a stock architecture wants the same number of experts in every layer, and vLLM
# runs a large shared part faster than many experts. GLM-4-MoE has a shared part and needs no copy of a neuron.
convert(Recipe.load(None, ["model=smollm2-135m", "active=0.5", "target=glm4_moe", *sys.argv[1:]]), "moe-vllm")
export("moe-vllm", "glm4_moe", "moe-glm4")

try:
    from vllm import LLM, SamplingParams
except ImportError:
    sys.exit("The model is in moe-glm4. Where vLLM is installed: vllm serve moe-glm4")
(answer,) = LLM("moe-glm4").generate(["The sea is"], SamplingParams(max_tokens=40, temperature=0))
print(answer.outputs[0].text)
