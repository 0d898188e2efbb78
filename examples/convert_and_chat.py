"""Turn a small chat model into a Mixture-of-Experts and talk to it.

python examples/convert_and_chat.py
python examples/convert_and_chat.py model=Qwen/Qwen2.5-0.5B-Instruct active=0.7    # or any other key of the recipe
"""

import sys
from pathlib import Path

from tomoe import Recipe, convert, load

# Half of the decoder parameters work on a token. Nothing is trained: experts and routers come from the statistics of
# text that the model writes itself, so this takes minutes on a laptop.
if not Path("moe/config.json").exists():
    convert(Recipe.load(None, ["model=smollm2-135m", "active=0.5", *sys.argv[1:]]), "moe")

# From here on it is a transformers model like any other.
model, tokenizer = load("moe")
chat = []
while question := input("you: "):
    chat.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    written = model.generate(**prompt.to(model.device), max_new_tokens=200)
    answer = tokenizer.decode(written[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    chat.append({"role": "assistant", "content": answer})
    print(f"moe: {answer}")
