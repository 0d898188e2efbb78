"""The verdict: what was lost and gained, in sentences that say what was measured, and what was not."""

from __future__ import annotations

from dataclasses import replace

from page_samples import cell
from test_card import measured
from test_warnings import row

from tomoe.evaluation.results import Row, TaskScore
from tomoe.evaluation.writing.run import Variety
from tomoe.report.page import gained, lost


def scored(value: float) -> TaskScore:
    return TaskScore("piqa", 0, "acc", value, 0.05, 100, 0, {"acc": value}, "1.0", "lm-eval")


def better(rows: list[Row]) -> list[Row]:
    return [rows[0], replace(rows[1], measurement=replace(rows[1].measurement, perplexity=1.9))]


def test_what_was_lost_is_said_in_numbers() -> None:
    assert lost([]) == lost([row()]) == "Quality was not measured."
    rows = measured(tasks=(scored(0.5),))
    rows[0] = replace(rows[0], tasks=(scored(0.75),))
    loops = [Variety("dense", 8, 64, 1, 0.9), Variety("moe", 8, 64, 3, 0.5)]
    assert lost(rows, loops) == (
        "Lost: perplexity 12.50 instead of 2.00 (+525.0%); a different most likely next token at 25% of the positions; piqa "
        "50.0% instead of 75.0%; 3 of the 8 texts that it wrote end in a loop (dense model: 1)."
    )
    assert lost(better(rows)).startswith(
        "Perplexity is no worse: 1.90 instead of 2.00 (-5.0%); a different most likely"
    )


def test_what_was_gained_is_the_speed_of_the_fewest_sequences() -> None:
    cells = [
        cell(phase="prefill", ratio=0.8, ratio_low=0.7, ratio_high=0.9),
        cell(batch=8, ratio=9.0),
        cell(choice_ratio=1.03),
    ]
    said = gained([], cells)
    assert said.startswith(
        "Gained: writing a token is 1.25 times as fast as with the dense model (1 sequence of 8 tokens, float32, cpu, 1 thread; "
        "1.03 by the choice, the rest by the kernel). Slower: reading a prompt is 0.80 times"
    )
    assert "9.00" not in said
    assert gained([], [cell(ratio_low=0.9)]).startswith("Neither gained nor lost: writing a token is 1.25")


def test_what_was_not_timed_is_said() -> None:
    said = gained(measured(), [])
    assert said.startswith("Speed was not measured: the commands below do it. ")
    assert "weights work on a token" in said
