"""What closed-form repair wins back: a carved plan (or an existing one) with its projections refitted, against the same without.

A repair that an existing plan has is left out.

The start is carved from as many tokens as by default, unless `--set data.calibration_tokens=N` gives another number. The text
to refit to is drawn from the same sources, and the held-out sequences are never in it; the test text is of another kind. A
line of OUT/repair.jsonl for each way.

    python benchmarks/repair.py MODEL OUT --train a.txt,b.jsonl --test c.txt [--active 0.7,0.5 | --plan FOLDER]
        [--tokens 16384,32768] [--target local,half] [--ridge 0.01] [--rank 0,64] [--attention off] [--output]
        [--dtype bfloat16] [--set section.key=value ...]
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tomoe.conversion import finish_plan, make_network
from tomoe.data.corpus import Corpus, Sequences, joined, prepare
from tomoe.data.evaluation_text import read_text
from tomoe.evaluation.perplexity import Predictions, measure
from tomoe.model.loading import load_dense, load_tokenizer
from tomoe.plan import Plan
from tomoe.pruning.masking import LayerMasks, masked, planned_masks
from tomoe.pruning.repair.layers import LayerRepair, RepairSettings, repair_layers, repaired
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.run import DataSection

SEQ_LEN = 512
HELD_OUT = 8192
CALIBRATION = DataSection().calibration_tokens


class Bench:
    """The dense model, its predictions for both texts, and what is measured beside them."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.tokenizer = args, load_tokenizer(args.model)
        self.model = load_dense(args.model, getattr(torch, args.dtype))
        self.corpus = self.text(SEQ_LEN)
        test = read_text(args.test, self.tokenizer, 1024, args.test_tokens).sequences
        self.texts = {"held_out": self.corpus.evaluation, "test": test}
        self.dense = {name: Predictions(self.model, keep=True) for name in self.texts}
        self.dense_ppl = {
            name: measure(self.dense[name], t.input_ids, t.mask).perplexity for name, t in self.texts.items()
        }

    def recipe(self, active: float, tokens: int = SEQ_LEN) -> Recipe:
        return Recipe.load(
            None,
            [
                f"model={self.args.model}", f"active={active}", "train.steps=0", f"data.sources={self.args.train}",
                f"data.tokens={tokens + CALIBRATION + HELD_OUT}", f"data.calibration_tokens={CALIBRATION}",
                f"data.evaluation_tokens={HELD_OUT}",
                f"attention.pruning={self.args.attention}", "repair.mode=none", "experts.form=overlapping", *self.args.set,
            ],
        )  # fmt: skip

    def text(self, tokens: int) -> Corpus:
        return prepare(self.recipe(0.7, tokens).data, self.tokenizer, 0)

    def calibration(self, tokens: int) -> Sequences:
        """So many tokens that are not held out."""
        corpus = self.text(tokens)
        held_out = {tuple(row) for row in self.corpus.evaluation.input_ids.tolist()}
        assert held_out == {tuple(row) for row in corpus.evaluation.input_ids.tolist()}
        return joined([corpus.calibration, corpus.train]).truncate(tokens)

    def carve(self, active: float) -> Plan:
        folder = self.args.out / "-".join(["carved", self.args.attention, str(active), *self.args.set])
        if not (folder / "plan.json").exists():
            recipe = self.recipe(active)
            net = make_network(recipe, self.model, self.corpus.calibration)
            folder.mkdir(parents=True, exist_ok=True)
            finish_plan(net, self.model, recipe, self.corpus, {"steps": 0}, "").save(folder)
        return Plan.load(folder)

    @contextmanager
    def pruned(
        self, masks: Sequence[LayerMasks] | None, repairs: Sequence[LayerRepair] | None = None
    ) -> Iterator[None]:
        """Inside the block the dense model runs with these masks and refitted projections, if there are any."""
        with ExitStack() as stack:
            if masks:
                stack.enter_context(masked(self.model, masks))
            if repairs:
                stack.enter_context(repaired(self.model, repairs))
            yield

    def measure(self, model: PreTrainedModel | None = None) -> dict[str, float]:
        """Both texts, read by `model` (the dense one if none is given)."""
        line: dict[str, float] = {}
        for name, text in self.texts.items():
            scores = measure(model or self.model, text.input_ids, text.mask, self.dense[name])
            line[f"{name}_perplexity"] = round(scores.perplexity, 3)
            line[f"{name}_error"] = round(scores.standard_error or 0.0, 3)
            line[f"{name}_kl"] = round(scores.kl or 0.0, 4)
            line[f"{name}_top1"] = round(scores.top1_agreement or 0.0, 4)
        return line

    def row(self, name: str, plan: Plan, settings: RepairSettings | None, tokens: int) -> dict[str, Any]:
        began, worked, repairs = time.perf_counter(), time.process_time(), None
        if settings:
            text = self.calibration(tokens)
            began, worked = time.perf_counter(), time.process_time()
            repairs = list(repair_layers(self.model, planned_masks(plan), text.input_ids, text.mask, settings))
        line: dict[str, Any] = {"plan": name, "active": round(plan.active_fraction(), 4), "tokens": tokens}
        line |= {n: getattr(settings, n) for n in ("target", "ridge", "rank", "output")} if settings else {}
        if repairs:
            line["seconds"] = round(time.perf_counter() - began)
            # of all threads; another's work on the machine aside
            line["cpu_seconds"] = round(time.process_time() - worked)
            line["threads"] = torch.get_num_threads()
            for part in ("error_before", "error_after"):
                line[part] = round(sum(getattr(layer.down, part) for layer in repairs), 4)
        with self.pruned(planned_masks(plan), repairs):
            line |= self.measure()
        with (self.args.out / "repair.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--test-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--plan", type=Path, action="append", default=[])
    parser.add_argument("--attention", default="off", choices=["off", "static", "per_token"])
    for name, default in (
        ("active", "0.7,0.5"), ("tokens", "32768"), ("target", "half"), ("ridge", "0.01"), ("rank", "0"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--output", action="store_true", help="refit the output projections of whole attention, too")
    parser.add_argument("--only-repaired", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe (repeatable)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    print(json.dumps(bench.dense_ppl), flush=True)
    plans = {str(path): Plan.load(path).without_repair() for path in args.plan} or {
        f"carved {active}": bench.carve(float(active)) for active in args.active.split(",")
    }
    ways = list(itertools.product(*(getattr(args, n).split(",") for n in ("tokens", "target", "ridge", "rank"))))
    for name, plan in plans.items():
        if not args.only_repaired:
            bench.row(name, plan, None, 0)
        for tokens, target, ridge, rank in ways:
            settings = RepairSettings(target, float(ridge), int(rank), args.output or args.attention != "off")
            bench.row(name, plan, settings, int(tokens))


if __name__ == "__main__":
    main()
