"""What is left of a dense model at several shares: text, tasks, programs that it writes, loops, decode speed, bytes.

Rows of every model and share: `fine-grained`, a conversion as `tomoe convert` makes it but for text and tokens of repair;
`code`, the same if --chats and --text hold code alone; `static`, the same neurons for all tokens: one expert by backward
elimination with the widths of a carved start, repaired alike, the line to beat. `dialed` is the fine-grained conversion at
--from, run with more experts: no conversion of its own. `inputs` is one conversion by that method, run at every share: with the
choice on every token, but for speed, where a prompt is whole as it is for users. Nothing of these is trained. `fine-tuned` is
what `tomoe finetune` made of the fine-grained one, in WORK/NAME-fine-tuned-SHARE.

Every cell is computed once and kept in RESULTS (JSON), so an interrupted run goes on where it stopped; what cannot be
computed yet, because its conversion is missing and `convert` is not among the steps, is left out. The table and the figure
are drawn from RESULTS alone.

    python benchmarks/headline.py RESULTS --work WORK --model NAME=MODEL [--active 0.7,0.6,0.5]
        [--rows fine-grained,static,code,inputs,dialed,fine-tuned] [--from 0.5] --text a.txt,books --chats c.jsonl
        --test wikitext2.valid.txt --task-dir TASKS --problems FOLDER
        [--steps convert,text,humaneval,loops,tasks,positions,speed] [--tasks arc_easy,piqa --limit 100] [--solve 41]
    python benchmarks/headline.py RESULTS --draw FOLDER [--page PAGE]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import tomoe
from tomoe.data.evaluation_text import EvaluationText, load_text
from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.perplexity import Predictions, measure
from tomoe.evaluation.results import Measurement
from tomoe.evaluation.speed.throughput import benchmark, weight_bytes
from tomoe.evaluation.tasks import TaskSet, parse_tasks
from tomoe.files import atomic_write
from tomoe.model.loading import load_dense, load_model, load_tokenizer
from tomoe.recipe.conversion import Recipe
from tomoe.report.style import COLORS, MARKERS, CaptionedFigure, canvas, save, styled

Cell = dict[str, Any]
WAYS = {
    "fine-grained": [],
    "code": [],
    "inputs": ["method.name=inputs"],
    "static": ["experts.form=overlapping", "experts.num_experts=1"],
}
"""What is set in the default recipe for each row."""
SHOWN = {
    "dense": "dense",
    "fine-grained": "fine-grained experts",
    "code": "fine-grained experts, from code alone",
    "inputs": "largest inputs",
    "dialed": "more experts than converted for",
    "static": "same neurons for all tokens",
    "fine-tuned": "fine-grained experts, fine-tuned",
}
STEPS = "convert", "text", "humaneval", "loops", "tasks", "positions", "speed"
REPAIR_TOKENS = 32_768
TEST = 1024, 8192
"""Context and tokens of the test text."""
LONG = 8192
"""Tokens of the one sequence whose positions are compared."""
WRITING_ROWS = 32
AT_LOAD = "dialed", "inputs"
"""Rows of folders that were converted for another share."""
KEPT = 0.9
"""The share of the dense model's solved problems that the sweet spot keeps."""


@dataclass(frozen=True)
class Row:
    """One model of the table."""

    name: str
    way: str
    active: float
    folder: Path

    @property
    def key(self) -> str:
        return f"{self.name} {self.way} {self.active:.0%}"


class Results:
    """The cells, in a file that is written after each of them."""

    def __init__(self, path: Path):
        self.path = path
        self.rows: dict[str, Cell] = json.loads(path.read_text())["rows"] if path.exists() else {}

    def lacks(self, row: Row, step: str) -> bool:
        return step not in self.rows.get(row.key, {})

    def put(self, row: Row, step: str, cell: Cell) -> None:
        kept = self.rows.setdefault(row.key, {"name": row.name, "way": row.way, "active": row.active})
        kept[step] = cell
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "tomoe": tomoe.__version__}
        atomic_write(self.path, json.dumps({"versions": versions, "rows": self.rows}, indent=1) + "\n")
        print(f"{row.key}: {step} {json.dumps(cell)}", flush=True)


def chat_rows(source: Path, out: Path) -> Path:
    """Rows of instruction, input and output as chats, which a conversion reads through the model's chat template."""
    if not out.exists():
        lines = []
        for line in source.read_text().splitlines():
            row = json.loads(line)
            asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
            lines.append(json.dumps({"messages": turns}) + "\n")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(lines))
    return out


def convert(model: str, row: Row, sources: Sequence[str]) -> None:
    """Convert as by default, with other text and fewer tokens of repair. A folder that is there stays."""
    if (row.folder / "config.json").exists():
        return
    settings = [
        f"model={model}", f"active={row.active}", f"data.sources={','.join(sources)}", f"repair.tokens={REPAIR_TOKENS}",
        *WAYS[row.way],
    ]  # fmt: skip

    def say(stage: str, step: int, total: int, _: object) -> None:
        print(f"{row.key}: {stage} {step}/{total}", flush=True)

    tomoe.convert(Recipe.load(None, settings), row.folder, resume=(row.folder / "run").exists(), on_progress=say)


class Bench:
    """What is measured of the rows of one model."""

    def __init__(self, args: argparse.Namespace, results: Results, dense: Path):
        self.args, self.results, self.dense = args, results, dense
        self.tokenizer = load_tokenizer(str(dense))
        self.references: dict[str, Predictions] = {}

    def run(self, row: Row, step: str, model: Callable[[], PreTrainedModel]) -> None:
        """Compute a cell that is lacking."""
        if self.results.lacks(row, step):
            self.results.put(row, step, getattr(self, step)(row, model))

    def measured(
        self, name: str, row: Row, model: Callable[[], PreTrainedModel], text: EvaluationText
    ) -> tuple[Measurement, Any]:
        """A model on a text, beside the dense one, which reads it once; and the model."""
        ids, mask = text.sequences.input_ids, text.sequences.mask
        if row.way == "dense":
            self.references[name] = Predictions(model(), keep=True)
            return measure(self.references[name], ids, mask), model()
        if name not in self.references:
            self.references[name] = Predictions(load_model(str(self.dense), self.args.dtype), keep=True)
        return measure(model(), ids, mask, self.references[name]), model()

    def text(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        """Perplexity and distance from the dense model on the test text, and what the model weighs."""
        context, tokens = TEST
        found, loaded = self.measured("test", row, model, load_text(self.args.test, self.tokenizer, context, tokens))
        facts = model_facts(loaded)
        return {
            "perplexity": found.perplexity, "error": found.standard_error, "kl": found.kl, "top1": found.top1_agreement,
            "tokens": found.tokens, "active": facts["active_share"], "active_params": facts["active_params"],
            "total_params": facts["total_params"], "bytes": weight_bytes(loaded) * 2 // loaded.dtype.itemsize,
        }  # fmt: skip

    def written(self, name: str, limit: int | None, model: PreTrainedModel) -> Cell:
        tasks = TaskSet(
            parse_tasks(name), self.args.problems, limit=limit, batch_size=WRITING_ROWS, run_code=name == "humaneval"
        )
        (score,) = tasks.run(model, self.tokenizer)
        return {"value": score.value, "error": score.standard_error, "examples": score.examples, **score.metrics}

    def humaneval(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        return self.written("humaneval", self.args.solve, model())

    def loops(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        return self.written("loops", None, model())

    def tasks(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        """Multiple choice, by accuracy as lm-eval shows it."""
        tasks = TaskSet(parse_tasks(self.args.tasks), self.args.task_dir, limit=self.args.limit)
        return {s.task: [s.value, s.standard_error, s.examples] for s in tasks.run(model(), self.tokenizer)}

    def positions(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        """Perplexity and KL by position in one long sequence."""
        found, _ = self.measured("long", row, model, load_text(self.args.test, self.tokenizer, LONG, LONG))
        return {str(span.end): [span.perplexity, span.kl] for span in found.spans}

    def speed(self, row: Row, model: Callable[[], PreTrainedModel]) -> Cell:
        """Decoding of one sequence beside the dense model, in turns; what the dense model reads beside itself is left out."""
        if row.way not in WAYS:
            return {}
        fraction = row.active if row.way in AT_LOAD else None
        timed = benchmark(
            str(self.dense), str(row.folder), (1,), (128,), text=self.args.test, threads=1, active=fraction
        )
        (cell,) = [cell for cell in timed.cells if cell.phase == "decode"]
        times = {"dense": cell.dense_s, "same_kernel": cell.same_kernel_s, "moe": cell.moe_s}
        return {f"{name}_ms": 1e3 * s for name, s in times.items() if s} | {
            "ratio": cell.ratio,
            "low": cell.ratio_low,
            "high": cell.ratio_high,
            "bound": cell.bound,
        }


def folder_name(name: str, way: str, active: float) -> str:
    if way == "inputs":
        return f"{name}-inputs"
    return f"{name}-{'fine-grained' if way == 'dialed' else way}-{active:.0%}"


def run_model(args: argparse.Namespace, results: Results, name: str, source: str, sources: Sequence[str]) -> None:
    """All rows of one model."""
    dense = args.work / f"{name}-dense"
    if not (dense / "config.json").exists():
        # unpacked once: a quantized file takes a minute each time
        load_dense(source, torch.bfloat16).save_pretrained(dense)
        load_tokenizer(source).save_pretrained(dense)
    rows = [
        Row(name, way, active, args.work / folder_name(name, way, args.of if way == "dialed" else active))
        for way in args.rows.split(",") for active in map(float, args.active.split(","))
    ]  # fmt: skip
    steps, bench = args.steps.split(","), Bench(args, results, dense)
    for row in [Row(name, "dense", 1.0, dense), *rows]:
        if "convert" in steps and row.way in WAYS:
            convert(source, row, sources)
        if not (row.folder / "config.json").exists():
            print(f"{row.key}: not converted yet", flush=True)
            continue
        loaded: list[PreTrainedModel] = []

        def model(row: Row = row, loaded: list[PreTrainedModel] = loaded) -> PreTrainedModel:
            if not loaded:
                fraction = row.active if row.way in AT_LOAD else None
                loaded.append(tomoe.load(str(row.folder), args.dtype, active=fraction)[0])
            return loaded[0]

        for step in steps:
            if step != "convert":
                bench.run(row, step, model)


def in_order(results: Results) -> list[dict[str, Any]]:
    """The rows by model, way and falling share."""
    ways = list(SHOWN)
    return sorted(results.rows.values(), key=lambda row: (row["name"], ways.index(row["way"]), -row["active"]))


def table(results: Results) -> str:
    """All rows as Markdown, and the sentence on the sweet spot of each model."""
    rows = in_order(results)
    cells = [dict(cells_of(row)) for row in rows]
    titles = list(dict.fromkeys(title for row in cells for title in row))
    lines = [titles, ["---"] * len(titles), *([row.get(title, "") for title in titles] for row in cells)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    names = dict.fromkeys(row["name"] for row in rows)
    return text + "".join(f"\n{sentence}\n" for name in names if (sentence := sweet_spot(rows, str(name))))


def cells_of(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and content of every cell that was computed."""
    yield "model", row["name"]
    yield "a token uses", SHOWN[row["way"]]
    text = row.get("text", {})
    yield "active", f"{text.get('active') or row['active']:.0%}"
    if text:
        yield "WikiText-2", f"{text['perplexity']:.2f} ± {text['error']:.2f}"
        yield "KL", "" if text["kl"] is None else f"{text['kl']:.3f}"
        yield "same top-1", "" if text["top1"] is None else f"{text['top1']:.1%}"
    if solved := row.get("humaneval"):
        yield f"HumanEval, of {solved['examples']}", f"{solved['solved']:.0f}"
    if loops := row.get("loops"):
        yield f"loops, of {loops['examples']}", f"{loops['value'] * loops['examples']:.0f}"
    if tasks := row.get("tasks"):
        total = sum(value for value, *_ in tasks.values())
        error = sum(error**2 for _, error, _ in tasks.values()) ** 0.5
        yield f"mean of {len(tasks)} tasks", f"{100 * total / len(tasks):.1f} ± {100 * error / len(tasks):.1f}"
    if speed := row.get("speed"):
        ratio = f"{speed['ratio']:.2f} ({speed['low']:.2f} to {speed['high']:.2f})"
        yield "decoding, x dense; bound", f"{ratio}; {speed['bound']:.2f}"
        if same := speed.get("same_kernel_ms"):
            yield "x all, same kernel", f"{same / speed['moe_ms']:.2f}"
    for end, (perplexity, kl) in row.get("positions", {}).items():
        yield f"to {int(end):,}", f"{perplexity:.1f}" if kl is None else f"{perplexity:.1f}, KL {kl:.3f}"


def sweet_spot(rows: Sequence[dict[str, Any]], name: str) -> str:
    """The smallest share at which fine-grained experts keep most of what the dense model solves."""
    own = [row for row in rows if row["name"] == name and "humaneval" in row]
    dense = next((row for row in own if row["way"] == "dense"), None)
    ours = sorted((row for row in own if row["way"] in ("fine-grained", "code")), key=lambda row: float(row["active"]))
    if dense is None or not ours:
        return ""
    needed = KEPT * dense["humaneval"]["solved"]
    kept = next((row for row in ours if row["humaneval"]["solved"] >= needed), None)
    shares = list(dict.fromkeys(f"{row['active']:.0%}" for row in ours))
    tried = ", ".join(shares)
    if kept is None:
        return f"{name}: none of the shares that were tried ({tried}) keeps {KEPT:.0%} of the dense model's HumanEval."
    speed = f", decoding {kept['speed']['ratio']:.2f} times as fast" if kept.get("speed") else ""
    spot = f"{name}: {kept['active']:.0%} active ({SHOWN[kept['way']]})"
    keeps = f"keeps {KEPT:.0%} of the dense model's HumanEval{speed}"
    if len(shares) == 1:
        return f"{spot} {keeps}; no other share was tried."
    return f"{spot} is the smallest share of {tried} that {keeps}."


@styled
def figure(results: Results) -> CaptionedFigure:
    """KL and solved problems against the active share: a color for each way, filled for the first model, else open."""
    drawn, axes = canvas(5.2, 2, sharex=True)
    said = []
    # more experts than a repair was fitted to are for the table
    rows = [row for row in in_order(results) if row["way"] != "dialed"]
    names, ways = (list(dict.fromkeys(row[key] for row in rows)) for key in ("name", "way"))
    colors, markers = (*COLORS, "#56b4e9", "#000000"), (*MARKERS, "v", "P")

    def style(way: str, name: str) -> dict[str, Any]:
        i = ways.index(way) % len(colors)
        look = {"color": colors[i], "marker": markers[i], "markersize": 6, "linestyle": "none"}
        return look if name == names[0] else look | {"markerfacecolor": "none"}

    for name, way in dict.fromkeys((row["name"], row["way"]) for row in rows):
        own = [row for row in rows if (row["name"], row["way"]) == (name, way)]
        for axis, step, value in ((axes[0], "text", "kl"), (axes[1], "humaneval", "value")):
            points = sorted((row["active"], row[step][value] or 0.0) for row in own if step in row)
            # no lines: between the points nothing was measured
            axis.plot([100 * x for x, _ in points], [y for _, y in points], **style(way, name))
            said.append(f"{name}, {SHOWN[way]}, {value}: " + ", ".join(f"{x:.0%} {y:.3f}" for x, y in points))
    for way in ways:
        axes[0].plot([], [], label=SHOWN[way], **style(way, names[0]))
    for name in names[1:]:
        axes[0].plot([], [], label=f"open: {name}", **style("dense", name))
    axes[0].set_ylabel("KL to the dense model, nats")
    axes[1].set_ylabel("HumanEval solved")
    axes[1].set_xlabel("active decoder parameters, %")
    title = names[0] if len(names) == 1 else f"filled: {names[0]}"
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, title=title)
    return CaptionedFigure(
        "headline", "Quality at each active fraction", "; ".join(said),
        "Above, KL to the dense model (100%) on WikiText-2; below, the share of problems solved.", drawn,
    )  # fmt: skip


def insert(page: Path, text: str) -> None:
    """Put the table between its marks on a page."""
    begin, end = "<!-- headline: generated by benchmarks/headline.py -->\n", "<!-- end of headline -->"
    before = page.read_text("utf-8")
    assert begin in before, f"{page} has no line {begin.strip()}"
    page.write_text(re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n{text}\n{end}", before, flags=re.DOTALL), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--work", type=Path, help="folder of conversions")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=MODEL")
    parser.add_argument("--active", default="0.7,0.6,0.5")
    parser.add_argument("--rows", default="fine-grained,static")
    parser.add_argument("--from", dest="of", type=float, default=0.5, help="share of the conversion to dial")
    parser.add_argument("--steps", default=",".join(STEPS))
    parser.add_argument("--text", default="", help="text to convert with")
    parser.add_argument("--chats", default="", help="instructions to convert with")
    parser.add_argument("--test", help="text to measure on")
    parser.add_argument("--task-dir", type=Path)
    parser.add_argument("--tasks", default="arc_easy,boolq,piqa,sciq")
    parser.add_argument("--limit", type=int, default=100, help="questions of each task")
    parser.add_argument("--problems", type=Path, help="folder with humaneval/*.jsonl")
    parser.add_argument("--solve", type=int, help="problems of HumanEval, evenly spread; all if none is given")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        help="of all steps but speed; without bfloat16 units float32 takes a fraction of the time",
    )
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="draw the figure, and compute nothing")
    parser.add_argument(
        "--page", type=Path, help="with --draw: page with marks to put the table between; else it is printed"
    )
    args = parser.parse_args()
    results = Results(args.results)
    if args.draw:
        save(figure(results), args.draw)
        if args.page is None:
            print(table(results))
        else:
            insert(args.page, table(results))
        return
    chats = [chat_rows(Path(name), args.work / "text" / Path(name).name) for name in args.chats.split(",") if name]
    sources = [*filter(None, args.text.split(",")), *map(str, chats)]
    for name, _, source in (text.partition("=") for text in args.model):
        run_model(args, results, name, source, sources)


if __name__ == "__main__":
    main()
