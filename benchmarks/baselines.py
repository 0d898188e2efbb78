"""Ways to cut a dense model, side by side: one model, one budget, the same two texts, each way with and without repair.

Attention stays whole, so the MLPs pay for all of the cut. Rows, each with the neurons that a token uses in a layer:

- dense: all of them
- norm: the same for all tokens, those whose weights have the largest norm; every layer equally wide
- activation x norm: the same for all tokens, by root mean square on calibration text times the norm of the down column
  (as Wanda scores weights); every layer equally wide
- random split: those of the experts that a linear router chooses, of twelve that share nothing; neurons dealt out at random,
  every layer alike (as LLaMA-MoE begins, but for the router, which is fitted by least squares)
- clustered: a shared part and those of the experts that their central neurons choose; neurons clustered by the tokens that
  activate them, every layer alike (as CMoE carves, before it trains)
- one expert: the same for all tokens, by backward elimination, with the widths of the carved start
- overlapping: the expert that the router chooses, of eight that share neurons; nothing is learned
- fine-grained: a shared part and those of many small experts that the router chooses; nothing is learned
- --plan NAME=FOLDER: a plan that was made elsewhere, for example by learning
- --model NAME=FOLDER: a converted model as it is, for example a fine-tuned one
- best per token: for every token those with the largest contribution. No model can do that, because the choice needs all
  activations; it bounds what a router can reach at these widths
- inputs per token: every projection, those of attention included, multiplies the inputs that are largest for the token
  (as TEAL does, at one share for all); saves time for single sequences only

`repaired` refits the down projections to those masks in closed form. Tasks are run for every row that is repaired or that
no repair fits: the dense and the converted models, and inputs per token. --speed times the converted models beside the dense
one, and those of the carved rows, which it writes to OUT.
Lines go to OUT/baselines.jsonl, and those that are there are not made again; table and figure are drawn from all of them.

    python benchmarks/baselines.py MODEL OUT --train a.txt,b.jsonl --test c.txt [--active 0.7,0.5] [--tokens 65536]
        [--only ROW,ROW] [--plan NAME=FOLDER ...] [--model NAME=FOLDER ...] [--tasks piqa,arc_easy --task-dir TASKS --limit 100]
        [--dtype bfloat16] [--set section.key=value ...] [--speed]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from matplotlib.ticker import LogLocator, NullLocator
from repair import Bench
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.conversion import finish_plan, make_network, save_conversion
from tomoe.data.corpus import Sequences
from tomoe.evaluation.speed.benchmark import benchmark
from tomoe.evaluation.tasks import TaskSet, parse_tasks
from tomoe.files import format_bytes
from tomoe.model.hooks import hooked
from tomoe.model.loading import load_model
from tomoe.model.running import run_model
from tomoe.model.structure import LayerParts, layer_parts, shape_of
from tomoe.plan import REPAIRED, Plan
from tomoe.pruning.fine_carving import RidgeRegression, balanced_assignment
from tomoe.pruning.masking import LayerMasks, planned_masks
from tomoe.pruning.repair.layers import RepairSettings, repair_layers
from tomoe.recipe.conversion import RepairSection
from tomoe.report.style import COLORS, CaptionedFigure, canvas, save, styled

Line = dict[str, Any]
MARKED = 10
"""Neurons that count as active for a token: those of the largest activations."""
CLUSTERED = 15, 3
"""Routed experts and those of a token; about as many neurons are shared as a token gets from its experts."""
SPLIT = 12
"""Experts of a random split, which shares nothing."""
CLUSTER_STEPS = 10
SPEED_BATCHES = 1, 8
CARVED = {
    "one expert": "experts.num_experts=1", "overlapping": "experts.form=overlapping", "fine-grained": "experts.form=fine",
}  # fmt: skip
"""The rows of a carved start, with the key of the recipe that makes them."""
SPARSE = "inputs per token"
"""The row that has no masks of neurons."""


class StaticMasks:
    """The same neurons for every token."""

    value_rotation = None

    def __init__(self, kept: Float[Tensor, " F"]):
        self.kept = kept

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return self.kept.expand(len(x), -1)

    def qk(self) -> None:
        return None

    def values(self, x: Float[Tensor, "T D"]) -> None:
        return None


class BestMasks(StaticMasks):
    """For every token the neurons with the largest |activation| x norm of the down column."""

    def __init__(self, parts: LayerParts, width: int):
        self.parts, self.width = parts, width
        self.norm = parts.down.weight.float().norm(dim=0)

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return largest(self.parts.of_mlp.hidden(x).float().abs() * self.norm, self.width)


def largest(scores: Float[Tensor, "*n size"], count: int) -> Float[Tensor, "*n size"]:
    """Mark the `count` largest with 1."""
    return torch.zeros_like(scores).scatter_(-1, scores.topk(count, -1).indices, 1.0)


class ExpertMasks(StaticMasks):
    """Masks of one layer: a shared part, and the k experts of a token that `score` puts first."""

    def __init__(self, expert: Int[Tensor, " F"], top_k: int, score: Callable[[Tensor], Tensor]):
        self.top_k, self.score = top_k, score
        self.shared = (expert < 0).float()
        self.members = F.one_hot(expert + 1)[:, 1:].T.float()

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        return largest(self.score(x).float(), self.top_k) @ self.members + self.shared


def clustered(model: PreTrainedModel, text: Sequences, width: int) -> list[ExpertMasks]:
    """Clusters of neurons that are active for the same tokens, in the manner of CMoE.

    The neurons that are most often among a token's largest activations are shared; the others are clustered by the tokens
    that mark them, in equal sizes. The router is the neuron next to the center of each cluster: an expert scores as high
    as that neuron's activation is large.
    """
    experts, top_k = CLUSTERED

    def make(p: LayerParts, x: Tensor, h: Tensor) -> ExpertMasks:
        size = (h.shape[1] - width) // (experts - top_k)
        marks = largest(h.abs(), MARKED)
        order = marks.mean(0).argsort(descending=True, stable=True)
        routed = order[h.shape[1] - experts * size :]
        assigned, nearest = equal_clusters(marks[:, routed].T, experts)
        expert = torch.full((h.shape[1],), -1)
        expert[routed] = assigned
        rows = routed[nearest]

        def score(x: Float[Tensor, "T D"]) -> Float[Tensor, "T N"]:
            mlp = p.of_mlp
            up = x @ mlp.up.weight[rows].T
            return (up if mlp.gate is None else mlp.activation(x @ mlp.gate.weight[rows].T) * up).abs()

        return ExpertMasks(expert, top_k, score)

    return by_layer(model, text, make)


def equal_clusters(x: Float[Tensor, "n t"], clusters: int) -> tuple[Int[Tensor, " n"], Int[Tensor, " N"]]:
    """Clusters of one size by distance, from the first rows on, and the row next to each center."""
    centers = x[:clusters]
    for _ in range(CLUSTER_STEPS):
        assigned = balanced_assignment(-torch.cdist(x, centers), len(x) // clusters)
        members = F.one_hot(assigned, clusters).T.to(x.dtype)
        centers = members @ x / members.sum(1, keepdim=True)
    distance = torch.cdist(x, centers).masked_fill(members.T == 0, torch.inf)
    return assigned, distance.argmin(0)


def random_split(model: PreTrainedModel, text: Sequences, width: int) -> list[ExpertMasks]:
    """Neurons dealt out at random, nothing shared, and a linear router, in the manner of LLaMA-MoE.

    The router is fitted to the experts' shares of the output's energy by least squares, as that of the carved start; there
    it is learned, with all weights, on many tokens.
    """
    generator = torch.Generator().manual_seed(0)

    def make(p: LayerParts, x: Tensor, h: Tensor) -> ExpertMasks:
        size = h.shape[1] // SPLIT
        expert = torch.randperm(h.shape[1], generator=generator) % SPLIT
        energy = (h * p.down.weight.float().norm(dim=0)).square() @ F.one_hot(expert, SPLIT).float()
        weight, bias = RidgeRegression(x).fit(F.normalize(energy.sqrt(), dim=1))
        return ExpertMasks(expert, round(width / size), lambda x: x.float() @ weight.T + bias)

    return by_layer(model, text, make)


def by_layer(
    model: PreTrainedModel, text: Sequences, make: Callable[[LayerParts, Tensor, Tensor], ExpertMasks]
) -> list[ExpertMasks]:
    """Call `make` with the parts, the inputs [T, D] and the activations [T, F] of every layer of the dense model."""
    made: list[ExpertMasks] = []
    inputs: dict[str, Tensor] = {}
    valid: Bool[Tensor, "B S"] = text.mask

    def handles() -> Iterator[RemovableHandle]:
        for p in layer_parts(model):

            def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
                inputs["x"] = args[0][valid].float()

            def carve(_: nn.Module, args: tuple[Tensor, ...], p: LayerParts = p) -> None:
                made.append(make(p, inputs["x"], args[0][valid].float()))

            yield p.mlp.register_forward_pre_hook(note)
            yield p.down.register_forward_pre_hook(carve)

    with torch.no_grad(), hooked(handles()):
        run_model(model, text.input_ids, text.mask)
    return made


@contextmanager
def sparse_inputs(model: nn.Module, active: float) -> Iterator[None]:
    """Inside the block every projection of the decoder multiplies only the share `active` of its inputs, by size."""

    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = args[0]
        return (x * largest(x.abs().float(), round(active * x.shape[-1])).to(x.dtype),)

    def handles() -> Iterator[RemovableHandle]:
        for p in layer_parts(model):
            for module in filter(None, (p.q, p.k, p.v, p.o, p.of_mlp.gate, p.of_mlp.up, p.down)):
                yield module.register_forward_pre_hook(cut)

    with hooked(handles()):
        yield


class Baselines:
    """All rows of one model: masks by name and budget, measured and kept."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.bench, self.file = args, Bench(args), args.out / "baselines.jsonl"
        self.model, self.corpus = self.bench.model, self.bench.corpus
        self.parts, self.shape = layer_parts(self.model), shape_of(self.model)
        self.tasks = TaskSet(parse_tasks(args.tasks), args.task_dir, limit=args.limit) if args.tasks else None
        named = (text.partition("=") for text in args.plan)
        self.plans = [(name, Plan.load(Path(folder)).without_repair()) for name, _, folder in named]
        self.rms = self.root_mean_squares()

    def root_mean_squares(self) -> list[Float[Tensor, " F"]]:
        """The root mean square of every neuron's activation on the calibration text."""
        text, squares = self.corpus.calibration, [torch.zeros(self.shape.mlp_size) for _ in self.parts]

        def handles() -> Iterator[RemovableHandle]:
            for p, total in zip(self.parts, squares, strict=True):

                def add(_: nn.Module, args: tuple[Any, ...], total: Tensor = total) -> None:
                    total += args[0][text.mask].float().square().sum(0)

                yield p.down.register_forward_pre_hook(add)

        with torch.no_grad(), hooked(handles()):
            run_model(self.model, text.input_ids, text.mask)
        return [(total / text.tokens).sqrt() for total in squares]

    def ways(self, active: float) -> dict[str, Callable[[], Sequence[LayerMasks]]]:
        """What makes the masks of each row at this budget."""
        s = self.shape
        attention = s.num_layers * attention_params(s, s.head_dim, s.head_dim)
        width = round((active * decoder_params(s) - attention) / (s.num_layers * mlp_params(s, 1)))

        def static(score: Callable[[LayerParts, Tensor], Tensor]) -> Sequence[LayerMasks]:
            pairs = zip(self.parts, self.rms, strict=True)
            return [StaticMasks(largest(score(p, rms), width)) for p, rms in pairs]

        def carved(name: str, setting: str) -> Sequence[LayerMasks]:
            recipe = self.bench.recipe(active).changed([setting])
            net = make_network(recipe, self.model, self.corpus.calibration)
            plan = finish_plan(net, self.model, recipe, self.corpus, {"steps": 0}, "")
            if self.args.speed:
                save_conversion(plan, self.model, self.bench.tokenizer, self.folder(name, active), force=True)
            return planned_masks(plan)

        near = {name: plan for name, plan in self.plans if abs(plan.active_fraction() - active) < 0.005}
        return {
            "norm": lambda: static(lambda p, _: neuron_norm(p)),
            "activation x norm": lambda: static(lambda p, rms: rms * p.down.weight.float().norm(dim=0)),
            "random split": lambda: random_split(self.model, self.corpus.calibration, width),
            "clustered": lambda: clustered(self.model, self.corpus.calibration, width),
            **{name: partial(carved, name, setting) for name, setting in CARVED.items()},
            **{name: partial(planned_masks, plan) for name, plan in near.items()},
            "best per token": lambda: [BestMasks(p, width) for p in self.parts],
        }

    def folder(self, name: str, active: float) -> Path:
        """Where the model of a carved row is written for timing, as it is before repair, which changes no speed."""
        return self.args.out / f"{name} {active}"

    def lines(self) -> list[Line]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def row(
        self, key: Line, masks: Sequence[LayerMasks] | None = None, repairs: Any = None, spent: float = 0.0,
        model: PreTrainedModel | None = None, facts: Line | None = None,
    ) -> None:  # fmt: skip
        """Measure both texts, and the tasks if there are any, and keep the line. `spent`: CPU seconds of making it."""
        with self.bench.pruned(masks, repairs):
            line = key | {"cpu_seconds": round(spent)} | (facts or {}) | self.bench.measure(model)
            if self.tasks and (repairs or not masks):
                scores = self.tasks.run(model or self.model, self.bench.tokenizer)
                line["tasks"] = {t.task: [t.value, t.standard_error, t.metric, t.examples] for t in scores}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)

    def speed(self, folder: Path) -> Line:
        """Tokens/s of a converted model and of the dense one, decoding 1 and 8 sequences in turn, and bytes of weights.

        Empty without --speed, or where there is no such model.
        """
        if not self.args.speed or not folder.exists():
            return {}
        timed = benchmark(
            self.args.model, str(folder), SPEED_BATCHES, (128,), text=self.args.test, threads=1, dtype=self.args.dtype
        )
        decoding = [cell for cell in timed.cells if cell.phase == "decode"]
        return {
            "weights": timed.moe_memory.weights, "dense_weights": timed.dense_memory.weights,
            "tokens_per_s": {str(cell.batch): round(cell.batch / cell.moe_s, 1) for cell in decoding},
            "dense_tokens_per_s": {str(cell.batch): round(cell.batch / cell.dense_s, 1) for cell in decoding},
        }  # fmt: skip

    def run_models(self) -> None:
        """The rows of converted models."""
        done = {line["row"] for line in self.lines()}
        for name, _, folder in (text.partition("=") for text in self.args.model_row):
            if name not in done:
                plan = Plan.load(Path(folder))
                fitted = plan.notes.get(REPAIRED, {}).get("tokens", 0)
                key = {"row": name, "active": round(plan.active_fraction(), 2), "repair_tokens": fitted}
                self.row(key, model=load_model(folder, self.args.dtype), facts=self.speed(Path(folder)))

    def run(self, active: float) -> None:
        """Make and measure the rows of one budget that are not there yet."""

        def key(name: str, tokens: int = 0) -> Line:
            return {"row": name, "active": active, "repair_tokens": tokens}

        done = [{name: line[name] for name in key("")} for line in self.lines()]
        text = self.bench.calibration(self.args.tokens)
        ridge = self.args.ridge or RepairSection().ridge_for(text.tokens, self.shape.mlp_size)
        settings = RepairSettings(self.args.target, ridge)
        ways = self.ways(active)
        only = self.args.only.split(",") if self.args.only else [*ways, SPARSE]
        for name, make in ((name, ways[name]) for name in only if name in ways):
            plain, fitted = key(name), key(name, text.tokens)
            if plain in done and fitted in done:
                continue
            began = time.process_time()
            masks = make()
            if plain not in done:
                self.row(plain, masks, spent=time.process_time() - began)
            if fitted not in done:
                began = time.process_time()
                repairs = list(repair_layers(self.model, masks, text.input_ids, text.mask, settings))
                spent = time.process_time() - began
                self.row(fitted, masks, repairs, spent, facts=self.speed(self.folder(name, active)))
        if SPARSE in only and key(SPARSE) not in done:
            with sparse_inputs(self.model, active):
                self.row(key(SPARSE))


def neuron_norm(p: LayerParts) -> Float[Tensor, " F"]:
    """Squared norm of all weights of a neuron."""
    rows = [w.weight.float().square().sum(1) for w in (p.of_mlp.gate, p.of_mlp.up) if w is not None]
    return torch.stack([*rows, p.down.weight.float().square().sum(0)]).sum(0)


def table(lines: Sequence[Line]) -> str:
    """All lines as Markdown, best test KL last within a budget; below them tasks and speed of the lines that have any."""
    lines = sorted(lines, key=lambda line: (-line["active"], -line["test_kl"]))
    return markdown(texts(line) for line in lines) + "\n" + markdown(use(line) for line in lines if "tasks" in line)


def markdown(rows: Iterable[dict[str, str]]) -> str:
    """Rows by title. A title that a row lacks leaves its cell empty."""
    rows = list(rows)
    titles = list(dict.fromkeys(title for row in rows for title in row))
    cells = [titles, ["---"] * len(titles), *([row.get(title, "") for title in titles] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def named(line: Line) -> dict[str, str]:
    repaired_on = f"{line['repair_tokens']:,}" if line["repair_tokens"] else "-"
    return {"row": line["row"], "active": f"{line['active']:.0%}", "repaired on": repaired_on}


def texts(line: Line) -> dict[str, str]:
    """What making the row took, and both texts."""
    row = named(line) | {"CPU s": str(line["cpu_seconds"] or "")}
    for text, title in (("held_out", "held-out"), ("test", "test")):
        row[f"{title} ppl"] = f"{line[f'{text}_perplexity']:,.2f} ± {line[f'{text}_error']:,.2f}"
        row[f"{title} KL"] = f"{line[f'{text}_kl']:.3f}"
        row[f"{title} top-1"] = f"{line[f'{text}_top1']:.1%}"
    return row


def use(line: Line) -> dict[str, str]:
    """Tasks in percent, and for converted models their speed beside the dense one and the size of their weights."""
    row, scores = named(line), line["tasks"]
    for task, (value, error, *_) in scores.items():
        row[task] = f"{100 * value:.1f} ± {100 * (error or 0):.1f}"
    mean = sum(value for value, *_ in scores.values()) / len(scores)
    error = sum((error or 0) ** 2 for _, error, *_ in scores.values()) ** 0.5 / len(scores)
    row["mean"] = f"{100 * mean:.1f} ± {100 * error:.1f}"
    for batch, speed in line.get("tokens_per_s", {}).items():
        row[f"tokens/s, {batch} at once (dense)"] = f"{speed} ({line['dense_tokens_per_s'][batch]})"
    if "weights" in line:
        row["weights (dense)"] = f"{format_bytes(line['weights'])} ({format_bytes(line['dense_weights'])})"
    return row


@styled
def figure(lines: Sequence[Line]) -> CaptionedFigure:
    """KL of every row on the test text: one line for each row, one color for each budget, hollow before repair."""
    cut = [line for line in lines if line["active"] < 1]
    best: dict[str, tuple[float, float]] = {}  # at the smallest budget of each row, which nearly all rows share
    for line in cut:
        key = (line["active"], line["test_kl"])
        best[line["row"]] = min(best.get(line["row"], key), key)
    names = sorted(best, key=lambda name: -best[name][1])
    budgets = sorted({line["active"] for line in cut}, reverse=True)
    drawn, (axes,) = canvas(1.3 + 0.28 * len(names))
    for n, active in enumerate(budgets):
        for repaired_too in (False, True):
            points = [line for line in cut if line["active"] == active and bool(line["repair_tokens"]) == repaired_too]
            axes.plot(
                [line["test_kl"] for line in points], [names.index(line["row"]) for line in points], "os"[n % 2],
                color=COLORS[n % 4], markerfacecolor=COLORS[n % 4] if repaired_too else "none", markersize=5,
                label=f"{active:.0%} active{', repaired' if repaired_too else ''}",
            )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("KL to the dense model on the test text, nats")
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)  # over the long names, too
    said = "; ".join(
        f"{line['row']}{' repaired' if line['repair_tokens'] else ''} at {line['active']:.0%}: {line['test_kl']:.3f}"
        for line in cut
    )
    return CaptionedFigure(
        "baselines", "Ways to cut a model", f"Dot plot of KL by way and budget. {said}.",
        "Further left is better. A filled mark is the hollow one of its color with refitted down projections.", drawn,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--test-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--speed", action="store_true", help="time the models of --model beside the dense one")
    parser.add_argument("--active", default="0.7,0.5")
    parser.add_argument("--tokens", type=int, default=65536, help="to refit to")
    parser.add_argument("--target", default="half", choices=["local", "half"])
    parser.add_argument("--ridge", type=float, default=0.0, help="of the repair; 0: as in a conversion")
    parser.add_argument(
        "--only", default="", metavar="ROW,ROW", help="rows to make, in this order; all if none is named"
    )
    parser.add_argument("--plan", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--model", dest="model_row", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--tasks", default="")
    parser.add_argument("--task-dir", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--set", action="append", default=[], help="a key of the recipe (repeatable)")
    parser.set_defaults(attention="off")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    baselines = Baselines(args)
    if not any(line["row"] == "dense" for line in baselines.lines()):
        baselines.row({"row": "dense", "active": 1.0, "repair_tokens": 0})
    baselines.run_models()
    for active in args.active.split(","):
        baselines.run(float(active))
    lines = baselines.lines()
    (args.out / "baselines.md").write_text(table(lines))
    if any(line["active"] < 1 for line in lines):  # of the dense model alone there is nothing to draw
        save(figure(lines), args.out)


if __name__ == "__main__":
    main()
