"""A report page in which every name and text is hostile, and nothing is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conftest import make_pico, make_plan
from tomoe.data.corpus import Sequences
from tomoe.data.evaluation_text import EvaluationText
from tomoe.evaluation.compare import compare
from tomoe.evaluation.speed.timings import Cell
from tomoe.evaluation.writing.run import Variety
from tomoe.moe.fold import fold
from tomoe.recipe.conversion import Recipe
from tomoe.report.figures import all_figures
from tomoe.report.page import Generation

EVIL = "</script><img src=x onerror=alert(1)><svg onload=alert(2)> & \"more\" 'x' {{ 7 * 7 }} $x$"
COST = {
    "seconds": {"text": 3.0, "learning": 60.0},
    "tokens": {"text": 4096},
    "peak_memory_bytes": 2_000_000_000,
    "device": "cpu",
    "threads": 2,
}
_CELL = Cell("decode", 1, 8, "float32", "cpu", 1, "runs", 3, 1.0, 0.8, 1.25, 1.2, 1.3, 8, 4, 2.0)


def cell(**changes: Any) -> Cell:
    """Writing a token, 1.25 times as fast as the dense model."""
    return replace(_CELL, **changes)


def hostile_facts() -> dict[str, Any]:
    """The report of a pico model, measured."""
    dense = make_pico("llama3")
    plan = make_plan(dense, "per_token")
    recipe = Recipe(model=f"someone/{EVIL}").model_dump(mode="json")
    plan = replace(plan, recipe=recipe, source="0" * 64, notes={"steps": 8, "torch": EVIL})
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    names, models = [f"dense {EVIL}", f"moe {EVIL}"], [dense, fold(dense, plan)]
    text = EvaluationText(Sequences(ids, torch.ones_like(ids, dtype=torch.bool)), EVIL)
    rows = list(compare(names, models, text))
    metrics = [{"step": i, "distill": 1 / i} for i in range(1, 9)]
    cells = [cell(backend=EVIL)]
    return dict(
        title=f"t {EVIL}",
        plan=plan,
        rows=rows,
        generations=[Generation(f"p {EVIL}", [(f"model {EVIL}", f"a {EVIL}"), ("moe", "b\n  c")])],
        figures=all_figures(plan, metrics),
        cost=COST,
        cells=cells,
        varieties=[Variety(f"model {EVIL}", 8, 64, looped, 0.5) for looped in (1, 3)],
    )
