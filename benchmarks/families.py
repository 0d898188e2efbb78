"""Every type of causal language model that the installed transformers knows: converted, refused, or not tried, and why.

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
    lines = [
        "# Model families",
        "",
        f"Of the {len(found)} types of causal language model in transformers {transformers.__version__}, "
        f"{len(of[CONVERTED])} convert, {len(of[REFUSED])} are refused, and {len(of[NOT_TRIED])} were not tried. "
        "Each was tried on a tiny random model with every second neuron active:",
        "",
        "- the folder, loaded without tomoe, gives the logits of the dense model under the plan's masks, to 1e-5 on 200 tokens;",
        "- with all experts it is the dense model;",
        "- with a cache it writes the same text as without, and padding changes nothing, wherever the dense model keeps that;",
        "- a repair lowers the error.",
        "",
        f"`python benchmarks/families.py OUT` writes this page (torch {torch.__version__}).",
        "",
        "## Converted",
        "",
        "| first MLP | types |",
        "|---|---|",
        *_grouped(of[CONVERTED], lambda row: f"`{row['mlp']}`"),
        "",
        "## Refused",
        "",
        f"{len(of[REFUSED]) - len(dense)} types are Mixtures of Experts already. The others:",
        "",
        "| reason | types |",
        "|---|---|",
        *_grouped(dense, lambda row: row["why"].partition(" (relative")[0].partition(", but ")[0]),
        "",
        "## Other classes of public checkpoints",
        "",
        "The public checkpoints of these types name another class than the one above. A tiny model of it was written to a folder "
        "and converted from there:",
        "",
        "| outcome | classes |",
        "|---|---|",
        *_public(found),
        "",
        "## Not tried",
        "",
        "No generic tiny config builds these: " + ", ".join(row["type"] for row in of[NOT_TRIED]) + ".",
        *(f"\n{row['type']} **failed**: {row['why']}" for row in of[FAILED]),
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
