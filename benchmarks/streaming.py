"""Peak memory of carving and folding with and without offloading, on a random Llama; each stage in a process of its own.

    python benchmarks/streaming.py FOLDER --layers 48 --hidden 1024 --mlp 2816 --tokens 2048

writes a model of these sizes into FOLDER, one file for each layer, and prints one line of JSON for each stage: `carve` (load,
rank all layers, plan) and `apply` (read the plan, fold, write), both whole and offloaded; and whether both made the same bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from tomoe.conversion import finish_plan, make_network
from tomoe.data.corpus import Corpus, Sequences
from tomoe.model.loading import load_dense
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.plan import Plan
from tomoe.recipe.conversion import Recipe
from tomoe.training.cost import peak_memory

SEQ_LEN = 512


def write_model(folder: Path, layers: int, hidden: int, mlp: int, vocabulary: int) -> None:
    """Write the model, never holding more than one layer in memory."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64, vocab_size=vocabulary, dtype=torch.bfloat16, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    generator, places = torch.Generator().manual_seed(0), dict[str, str]()

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(tensors, name))

    norm, outside = torch.ones(hidden, dtype=torch.bfloat16), ("model.embed_tokens.weight", "lm_head.weight")
    write(1, {name: matrix(vocabulary, hidden) for name in outside} | {"model.norm.weight": norm})
    for i in range(layers):
        layer = {f"self_attn.{name}_proj.weight": matrix(hidden, hidden) for name in "qkvo"}
        layer |= {f"mlp.{name}_proj.weight": matrix(mlp, hidden) for name in ("gate", "up")}
        layer |= {"mlp.down_proj.weight": matrix(hidden, mlp), "input_layernorm.weight": norm}
        layer |= {"post_attention_layernorm.weight": norm.clone()}
        write(i + 2, {f"model.layers.{i}.{name}": t for name, t in layer.items()})
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def text(vocabulary: int, tokens: int) -> Corpus:
    ids = torch.randint(vocabulary, (tokens // SEQ_LEN, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    sequences = Sequences(ids, torch.ones_like(ids, dtype=torch.bool))
    return Corpus(sequences, sequences, sequences, ("random",), "none", 0)


def stage(name: str, folder: Path, offload: bool, tokens: int) -> dict[str, Any]:
    began, out = time.perf_counter(), folder / ("offloaded" if offload else "whole")
    model = load_dense(str(folder), torch.bfloat16, offload=offload)
    if name == "carve":
        recipe = Recipe.load(
            None, ["experts.form=overlapping", "train.steps=0", "repair.mode=none", "active=0.5", f"model={folder}"]
        )
        corpus = text(model.config.vocab_size, tokens)
        net = make_network(recipe, model, corpus.calibration)
        finish_plan(net, model, recipe, corpus, 0, "").save(out / "plan")
    else:
        plan = Plan.load(out / "plan")
        save_moe(fold(model, plan, lazily=True), plan, None, out / "moe", force=True)
    return {
        "stage": name, "offload": offload, "peak_mb": round((peak_memory() or 0) / 1e6),
        "seconds": round(time.perf_counter() - began), "threads": torch.get_num_threads(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    sizes = {"layers": 48, "hidden": 1024, "mlp": 2816, "vocabulary": 32000, "tokens": 2048}
    for size, default in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=default)
    parser.add_argument("--stage", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(stage(args.stage[0], args.folder, args.stage[1] == "offloaded", args.tokens)))
        return
    write_model(args.folder, args.layers, args.hidden, args.mlp, args.vocabulary)
    stored = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    print(json.dumps({"checkpoint_mb": round(stored / 1e6)} | {size: getattr(args, size) for size in sizes}))
    for way in ("offloaded", "whole"):
        for name in ("carve", "apply"):
            command = [sys.executable, __file__, str(args.folder), "--tokens", str(args.tokens), "--stage", name, way]
            subprocess.run(command, check=True)
    ways = [{f.relative_to(args.folder / way): f.read_bytes() for f in (args.folder / way).rglob("*.safetensors")}
            for way in ("offloaded", "whole")]  # fmt: skip
    print(json.dumps({"same bytes": ways[0] == ways[1]}))


if __name__ == "__main__":
    main()
