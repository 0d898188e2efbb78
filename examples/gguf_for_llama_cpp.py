"""Make a GGUF file that llama.cpp runs.

python examples/gguf_for_llama_cpp.py
python examples/gguf_for_llama_cpp.py model=Qwen/Qwen2.5-1.5B active=0.7    # or any other key of the recipe
"""

import sys

from tomoe import Recipe, convert, export
from tomoe.exporting.target import Options

# llama.cpp has room for 30 experts of a token and runs a large shared part faster than many experts. The target sees to
# both, so it comes before the conversion.
convert(Recipe.load(None, ["model=smollm2-135m", "active=0.5", "target=gguf", *sys.argv[1:]]), "moe-gguf")

# llama.cpp itself runs the file here (pip install xllamacpp), and its predictions are compared with the converted model's;
# unverified=True would write it without. Eight bits change little; q4_k is smaller, but wants rows that 256 divides.
export("moe-gguf", "gguf", "moe-llama-cpp", options=Options(precision="q8_0"))
print("Where llama.cpp is installed: llama-server -m moe-llama-cpp/model-q8_0.gguf")
