"""The verdict on a conversion: what was lost and what was gained, in plain sentences made of what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from tomoe.evaluation.results import Row
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.tables import count
from tomoe.evaluation.writing.loops import Variety
from tomoe.report.summary import self_sampled

DOES = {"decode": "writing a token", "compiled decode": "writing a token, compiled,", "prefill": "reading a prompt"}


def lost(rows: Sequence[Row], varieties: Sequence[Variety] = ()) -> str:
    """What the last model does worse than the first, the dense one; says so if that was not measured."""
    if len(rows) < 2:
        return "Quality was not measured."
    dense, moe = rows[0].measurement, rows[-1].measurement
    change = moe.perplexity / dense.perplexity - 1
    text = " on text that the dense model wrote itself" if self_sampled(moe.data) else ""
    rating = "Lost: perplexity" if change > 0 else "Perplexity is no worse:"
    worse = [f"{rating} {moe.perplexity:.2f} instead of {dense.perplexity:.2f} ({change:+.1%}){text}"]
    if moe.top1_agreement is not None:
        worse.append(f"another most likely next token at {1 - moe.top1_agreement:.0%} of the positions")
    before = {(score.task, score.metric): score.value for score in rows[0].tasks}
    for score in rows[-1].tasks:
        value = before.get((score.task, score.metric))
        if value is not None:
            worse.append(f"{score.task} {score.value:.1%} instead of {value:.1%}")
    if len(varieties) > 1:
        worse.append(loops(varieties))
    return f"{'; '.join(worse)}."


def loops(varieties: Sequence[Variety]) -> str:
    """How many of its texts end in a loop, beside those of the dense model, which is first."""
    dense, moe = varieties[0], varieties[-1]
    return f"{moe.looped} of the {moe.texts} texts that it wrote end in a loop (dense model: {dense.looped})"


def gained(rows: Sequence[Row], cells: Sequence[Cell]) -> str:
    """What it saves: time for the fewest sequences that were timed, and weights that work on a token."""
    parts = [_speed(cell) for cell in _smallest(cells)] or ["Speed was not measured: the commands below do it."]
    if len(rows) > 1:
        dense, moe = rows[0].facts, rows[-1].facts
        parts.append(
            f"{count(moe['active_params'])} of its {count(moe['total_params'])} weights work on a token; of the dense model "
            f"all {count(dense['active_params'])} do."
        )
    return " ".join(parts)


def _smallest(cells: Sequence[Cell]) -> list[Cell]:
    """Of each phase the first cell with the fewest sequences; writing comes first."""
    phases = sorted(dict.fromkeys(cell.phase for cell in cells), key=lambda phase: phase == "prefill")
    return [min((cell for cell in cells if cell.phase == phase), key=lambda cell: cell.batch) for phase in phases]


def _speed(cell: Cell) -> str:
    rating = {"faster": "Gained", "SLOWER": "Slower", "even": "Neither gained nor lost"}[cell.verdict]
    sequences = "1 sequence" if cell.batch == 1 else f"{cell.batch} sequences"
    threads = f", {cell.threads} thread{'s' * (cell.threads != 1)}" if cell.device == "cpu" else ""
    choice = "" if cell.choice_ratio is None else f"; {cell.choice_ratio:.2f} by the choice, the rest by the kernel"
    return (
        f"{rating}: {DOES.get(cell.phase, cell.phase)} is {cell.ratio:.2f} times as fast as with the dense model "
        f"({sequences} of {cell.prompt} tokens, {cell.dtype}, {cell.device}{threads}{choice})."
    )
