"""Every type of causal language model that the installed transformers has: converted, refused, or not tried, and why.

Makes a tiny random model of each, converts it, and holds the conversion to the contract of `tests/contract/family_contract.py`.
Writes one JSON line a type to OUT/families.jsonl, resumes from them, and prints docs/reference/families.md.

    python benchmarks/families.py OUT [--only llama,gemma2] > docs/reference/families.md
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "contract")]

from family_contract import hold, public_class, write_public, write_tiny  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from pico_files import write_text  # noqa: E402
from tomoe.errors import UserError  # noqa: E402
from tomoe.model.loading import load_dense  # noqa: E402
from tomoe.model.mlp import converted_mlps  # noqa: E402

CONVERTED, REFUSED, NOT_TRIED, FAILED = "converted", "refused", "not tried", "failed"
# the names under which models are published, those most looked for first, and their types in config.json
PUBLISHED = {
    "Llama 1 to 3.3, SmolLM 1 and 2, TinyLlama": ("llama",),
    "Qwen 1.5, 2, 2.5": ("qwen2",),
    "Qwen 3": ("qwen3",),
    "Qwen 3.5, 3.8": ("qwen3_5", "qwen3_5_text"),
    "Gemma 1, 2": ("gemma", "gemma2"),
    "Gemma 3": ("gemma3", "gemma3_text"),
    "Gemma 4": ("gemma4", "gemma4_text", "gemma4_unified_text"),
    "VaultGemma, RecurrentGemma": ("vaultgemma", "recurrent_gemma"),
    "Phi 1, 1.5, 2": ("phi",),
    "Phi 3, 3.5, 4": ("phi3",),
    "Mistral, Ministral": ("mistral", "ministral", "ministral3"),
    "SmolLM 3": ("smollm3",),
    "Granite 3, 4": ("granite", "granitemoehybrid"),
    "GLM 4": ("glm", "glm4"),
    "LFM 2": ("lfm2",),
    "OLMo 1 to 3": ("olmo", "olmo2", "olmo3", "olmo_hybrid"),
    "Command R, Command A, Aya": ("cohere", "cohere2"),
    "Falcon": ("falcon",),
    "EXAONE 3, 4": ("exaone", "exaone4"),
    "Nemotron": ("nemotron", "nemotron_h"),
    "StableLM 2, StarCoder 1 and 2": ("stablelm", "gpt_bigcode", "starcoder2"),
    "ERNIE 4.5, Hunyuan, InternLM 3, MiniCPM 3, Seed-OSS": (
        "ernie4_5",
        "hunyuan_v1_dense",
        "internlm3",
        "minicpm3",
        "seed_oss",
    ),
    "GPT-2, GPT-Neo, GPT-J, GPT-NeoX, Pythia": ("gpt2", "gpt_neo", "gptj", "gpt_neox", "gpt_neox_japanese"),
    "OPT, BLOOM, MPT": ("opt", "bloom", "mpt"),
}


def tried(write: Callable[[Path], PreTrainedModel | None]) -> dict[str, Any]:
    """What became of a model that `write` writes to a folder, and returns unless it is to be loaded from there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            dense = write(folder / "dense")
        except Exception as error:
            return {"outcome": NOT_TRIED, "why": _short(error)}
        try:
            if dense is None:
                dense = load_dense(str(folder / "dense"), torch.float32)
            mlp = converted_mlps(dense)[0].name
            found = hold(dense, folder, write_text(folder / "text.txt"))
        except UserError as error:
            return {"outcome": REFUSED, "why": str(error).partition(" model: ")[2] or str(error)}
        except Exception as error:
            return {"outcome": FAILED, "why": _short(error)}
    errors = {name: found["repair"][name] for name in ("error_before", "error_after")}
    return {"outcome": CONVERTED, "class": type(dense).__name__, "mlp": mlp, "layers": found["layers"]} | errors


def try_type(model_type: str) -> dict[str, Any]:
    """What became of one type of model."""
    found = tried(partial(write_tiny, model_type))
    if found["outcome"] == NOT_TRIED:
        found["why"] = f"no generic tiny config builds it ({found['why']})"
    return found


def try_public(model_type: str) -> dict[str, Any]:
    """What became of the class that public checkpoints of a type name, loaded from a folder of it, if it is another."""
    name = public_class(model_type)
    if name == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]:
        return {}
    found = tried(partial(write_public, name))
    why = f"as `{found['class']}`" if found["outcome"] == CONVERTED else found["why"]
    return {"public": name, "public_outcome": found["outcome"], "public_why": why}


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:110]}"


def rows(out: Path, only: list[str]) -> Iterator[dict[str, Any]]:
    """The row of every type, in their order; those in the file are not tried again."""
    file = out / "families.jsonl"
    done = {row["type"]: row for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    for model_type in only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if model_type not in done:
            began = time.monotonic()
            done[model_type] = {"type": model_type, **try_type(model_type), **try_public(model_type)}
            with file.open("a") as rows_file:
                rows_file.write(json.dumps(done[model_type]) + "\n")
            seconds = time.monotonic() - began
            print(f"{model_type}: {done[model_type]['outcome']} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        yield done[model_type]


def _grouped(found: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> list[str]:
    """Rows of a table: what some types have in common, and the types."""
    groups: dict[str, list[str]] = {}
    for row in found:
        groups.setdefault(key(row), []).append(row["type"])
    return [f"| {name} | {', '.join(types)} |" for name, types in groups.items()]


def _public(found: list[dict[str, Any]]) -> list[str]:
    groups: dict[str, list[str]] = {}
    for row in found:
        if name := row.get("public"):
            why = "" if row["public_outcome"] == NOT_TRIED else f": {row['public_why'].partition(' (relative')[0]}"
            groups.setdefault(f"{row['public_outcome']}{why}", []).append(name)
    return [f"| {outcome} | {', '.join(names)} |" for outcome, names in sorted(groups.items())]


def page(found: list[dict[str, Any]]) -> str:
    """The page of the reference."""
    outcomes = CONVERTED, REFUSED, NOT_TRIED, FAILED
    of = {outcome: [row for row in found if row["outcome"] == outcome] for outcome in outcomes}
    dense = [row for row in of[REFUSED] if "Mixtures of Experts already" not in row["why"]]
    names = {kind: name for name, kinds in PUBLISHED.items() for kind in kinds}
    known = [row for name in PUBLISHED for row in of[CONVERTED] if names.get(row["type"]) == name]
    others = [row for row in of[CONVERTED] if row["type"] not in names]
    lines = [
        "# Model families",
        "",
        "<!-- Generated by benchmarks/families.py. -->",
        "",
        "Which models convert. The type is `model_type` in a model's `config.json`; for your model run",
        "",
        "```",
        "tomoe doctor MODEL",
        "```",
        "",
        f"Of the {len(found)} types of causal language model in transformers {transformers.__version__}, "
        f"{len(of[CONVERTED])} convert, {len(of[REFUSED])} are refused, and {len(of[NOT_TRIED])} were not tried.",
        "",
        "## Converted",
        "",
        "| models | types |",
        "|---|---|",
        *_grouped(known, lambda row: names[row["type"]]),
        *_grouped(others, lambda row: "others"),
        "",
        "## Refused",
        "",
        f"{len(of[REFUSED]) - len(dense)} types are Mixtures of Experts already. The others:",
        "",
        "| reason | types |",
        "|---|---|",
        *_grouped(dense, lambda row: row["why"].partition(" (relative")[0].partition(", but ")[0]),
        "",
        "## Multimodal and encoder-decoder checkpoints",
        "",
        "The published checkpoints of some types name another class than transformers' causal language model of that type:",
        "",
        "| outcome | classes |",
        "|---|---|",
        *_public(found),
        "",
        "## Not tried",
        "",
        "No generic tiny config builds these: " + ", ".join(row["type"] for row in of[NOT_TRIED]) + ".",
        *(f"\n{row['type']} **failed**: {row['why']}" for row in of[FAILED]),
        "",
        "## How they were tried",
        "",
        f"On a tiny random model of each type, with half of the neurons active (`python benchmarks/families.py OUT`, torch "
        f"{torch.__version__}). The folder, loaded without tomoe, has the logits of the dense model under the plan's masks, to "
        "1e-5 on 200 tokens, and with all experts those of the dense model. Caches and padding change nothing that they do not "
        "change in the dense model, and a repair lowers the error.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="types, separated by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(page(list(rows(args.out, [name for name in args.only.split(",") if name]))))


if __name__ == "__main__":
    main()
