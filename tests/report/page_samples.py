"""A report page in which every name, text and token is hostile, and nothing is left out."""

from __future__ import annotations

from dataclasses import replace

import torch

from conftest import make_pico, make_plan
from tomoe.evaluation.compare import compare
from tomoe.evaluation.routing_trace import RoutingTrace
from tomoe.evaluation.writing.loops import Variety
from tomoe.moe.fold import fold
from tomoe.recipe.conversion import Recipe
from tomoe.report.all_figures import all_figures
from tomoe.report.page import Generation, PageFacts, commands

EVIL = "</script><img src=x onerror=alert(1)><svg onload=alert(2)> & \"more\" 'x' {{ 7 * 7 }} $x$"
COST = {"seconds": {"text": 3.0, "learning": 60.0}, "tokens": {"text": 4096}, "peak_memory_bytes": 2_000_000_000,
        "device": "cpu", "threads": 2}  # fmt: skip
TIMED = [{"phase": "decode", "batch": 1, "prompt": 8, "dtype": EVIL, "dense_s": 1.0, "moe_s": 0.8, "ratio": 1.25,
          "ratio_low": 1.2, "ratio_high": 1.3}]  # fmt: skip


def hostile_facts() -> PageFacts:
    """The report of a pico model, measured; its texts are traced by a formula, so that layers and tokens are known."""
    dense = make_pico("llama3")
    plan = make_plan(dense, "per_token")
    recipe = Recipe(model=f"someone/{EVIL}").model_dump(mode="json")
    widths = [[layer.width - 1, layer.width, layer.width, layer.width + 1] for layer in plan.counts]
    plan = replace(plan, recipe=recipe, source="0" * 64, notes={"steps": 8, "torch": EVIL, "expert_widths": widths})
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    rows = compare([(f"dense {EVIL}", dense), (f"moe {EVIL}", fold(dense, plan))], ids, torch.ones_like(ids, dtype=torch.bool),
                   data=EVIL, sources=["a", EVIL, "a", EVIL])  # fmt: skip
    metrics = [
        {"step": i, "distill": 1 / i, "budget": 0.1, "coverage": 0.1, "balance": 0.3, "active_fraction": 0.9}
        for i in range(1, 9)
    ]
    words = [EVIL, "two\n", "", *"abcdefgh"]
    trace = RoutingTrace(words, [[(i + layer) % 4 for i in range(len(words))] for layer in range(3)], 4)
    return PageFacts(
        title=f"t {EVIL}", plan=plan, rows=rows, texts=[(f"source {EVIL}", trace), ("other", trace)],
        generations=[Generation(f"p {EVIL}", [(f"model {EVIL}", f"a {EVIL}"), ("moe", "b\n  c")])],
        figures=all_figures(plan, rows, metrics, COST, TIMED),
        commands=[(f"tomoe x {EVIL}", f"does {EVIL}"), *commands(Recipe(model=f"x/{EVIL}"), f"out {EVIL}")],
        cost=COST, timed=True, varieties=[Variety(f"model {EVIL}", 8, 64, 3, 0.5)],
    )  # fmt: skip
