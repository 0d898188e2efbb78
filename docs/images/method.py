"""Draw the method, dense MLP -> masks and router -> plan -> rows, for both forms of experts.

method.svg shows fine-grained experts, method-overlapping.svg experts that share neurons. Both are written into the package,
whose report shows them; the site takes them from there. Deterministic, standard library only.

    python docs/images/method.py

The masks are made up, but they obey the rules of a real plan: all experts of the layer have the same width. Fine-grained ones
share nothing, so their rows stand one after the other, behind the shared part; those that share neurons stand in Gray-code
order of their membership. The card has a background of its own, so the drawing reads on light and dark pages alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 1096, 552
EXPERTS, NEURONS = 8, 24
KEPT = 11  # neurons of an expert that shares them
SHARED, FINE = 8, 2  # neurons of the shared part and of a fine-grained expert
ROW, BAR = 10, 8  # distance of two neurons, height of one
TOP = 186  # of the first neuron in every panel
STEP, PART = 47, 42  # distance of the three matrices of a neuron, width of each
# Paul Tol's light scheme, as in the report: told apart by the color-blind
COLORS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
INK, SOFT, LINE, CARD = "#1f2933", "#52606d", "#9aa5b1", "#fbfbf9"
GATE, UP, DOWN = "#b8c2cc", "#cbd2d9", "#dde2e7"
SHARED_COLOR = "#66788a"

Masks = list[list[bool]]  # [group of neurons][neuron]


@dataclass(frozen=True)
class Form:
    """What differs between the two forms. A group is an expert or the shared part; colors and names are theirs."""

    masks: Masks
    colors: tuple[str, ...]
    names: tuple[str, ...]
    tokens: tuple[tuple[str, tuple[int, ...]], ...]  # a token and the groups that its router chooses
    rows: list[int]  # neurons as the result stores them
    plan_size: str
    layout: str
    masks_notes: tuple[str, str]
    rows_notes: tuple[str, str]
    about: str


def overlapping() -> Form:
    """Experts that share neurons, of which a token uses one (the paper's form)."""
    masks = make_masks(best_seed())
    return Form(
        masks,
        COLORS,
        tuple(str(n) for n in range(EXPERTS)),
        (("The", (2,)), ("sea", (0,)), ("is", (5,)), ("wide", (3,))),
        gray_order(masks),
        "0.94 MB",
        "shared rows, in Gray-code order",
        (f"{EXPERTS} experts share neurons; all have", "one width, so the budget is exact."),
        ("Every neuron is stored once;", "an expert is a few runs of rows."),
        "masks that sort its neurons into eight experts which share neurons, and a router that sends each token to one of them; "
        "the plan, which holds masks, routers and what was refitted; and the result, in which every neuron is stored once and an "
        "expert is a few runs of rows.",
    )


def fine() -> Form:
    """A shared part, and small experts of which a token uses several."""
    order = list(range(NEURONS))
    random.Random(3).shuffle(order)
    sizes = [SHARED] + [FINE] * EXPERTS
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    groups = [sorted(order[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
    return Form(
        [[f in group for f in range(NEURONS)] for group in groups],
        (SHARED_COLOR, *COLORS),
        ("S", *(str(n) for n in range(EXPERTS))),
        (("The", (2, 4)), ("sea", (1, 5)), ("is", (3, 7)), ("wide", (6, 8))),
        [f for group in groups for f in group],
        "10 MB",
        "one expert after the other",
        ("A token uses the shared part S", f"and the best of {EXPERTS} small experts."),
        ("Every neuron is stored once;", "how many experts run is a setting."),
        "masks that sort its neurons into a shared part and eight small experts, and a router that chooses two of them for each "
        "token; the plan, which holds masks, routers and what was refitted; and the result, in which every neuron is stored once "
        "and the experts stand one after the other, behind the shared part.",
    )


def make_masks(seed: int) -> Masks:
    """Every expert takes its KEPT best neurons by a score that is partly shared by all experts."""
    draw = random.Random(seed)
    shared = [draw.gauss(0, 1) for _ in range(NEURONS)]
    masks = []
    for _ in range(EXPERTS):
        score = [1.3 * common + draw.gauss(0, 1) for common in shared]
        best = sorted(range(NEURONS), key=lambda f: -score[f])[:KEPT]
        masks.append([f in best for f in range(NEURONS)])
    return masks


def gray_rank(pattern: list[bool]) -> int:
    """The position of a membership pattern in the Gray code; bit 0 is the most significant."""
    rank, bit = 0, False
    for member in pattern:
        bit ^= member
        rank = 2 * rank + bit
    return rank


def gray_order(masks: Masks) -> list[int]:
    """The neurons that some expert uses, in Gray-code order of membership."""
    used = [f for f in range(NEURONS) if any(mask[f] for mask in masks)]
    return sorted(used, key=lambda f: (gray_rank([mask[f] for mask in masks]), f))


def runs(mask: list[bool], order: list[int]) -> list[tuple[int, int]]:
    """(first row, number of rows) of every contiguous run of an expert's rows."""
    found: list[tuple[int, int]] = []
    for row, neuron in enumerate(order):
        if mask[neuron]:
            if found and sum(found[-1]) == row:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((row, 1))
    return found


def text(
    x: float, y: float, words: str, size: float = 15, *, anchor: str = "start", fill: str = SOFT, weight: int = 400
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, radius: float = 1.5, stroke: str = "none"
) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def line(points: str, *, color: str = LINE, width: float = 1.5, arrow: bool = False, dashed: bool = False) -> str:
    head = ' marker-end="url(#arrow)"' if arrow else ""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<path d="{points}" fill="none" stroke="{color}" stroke-width="{width:g}"{dash}{head}/>'


def heading(x: float, number: int, title: str, subtitle: str) -> list[str]:
    return [
        f'<circle cx="{x + 12:g}" cy="42" r="12" fill="{INK}"/>',
        text(x + 12, 47, str(number), 14, anchor="middle", fill=CARD, weight=700),
        text(x + 32, 48.5, title, 19, fill=INK, weight=700),
        text(x, 76, subtitle),
    ]


def notes(x: float, *lines: str) -> list[str]:
    return [text(x, 456 + 20 * i, words, fill=INK if i == 0 else SOFT) for i, words in enumerate(lines)]


def matrix_heads(x: float) -> list[str]:
    return [
        text(x + PART / 2 + STEP * i, TOP - 10, name, 13.5, anchor="middle")
        for i, name in enumerate(("gate", "up", "down"))
    ]


def neuron_row(x: float, y: float) -> list[str]:
    """One neuron: a row of gate and of up, a column of down."""
    return [rect(x + STEP * i, y, PART, BAR, color) for i, color in enumerate((GATE, UP, DOWN))]


def dense_panel(x: float) -> list[str]:
    rows = [part for f in range(NEURONS) for part in neuron_row(x, TOP + ROW * f)]
    return [
        *heading(x, 1, "Dense MLP", "one layer, weights frozen"),
        *matrix_heads(x),
        *rows,
        *notes(x, "A bar is one neuron:", "its three weight vectors."),
    ]


def masks_panel(x: float, form: Form) -> list[str]:
    step, cell = 208 / len(form.masks), 20 if len(form.masks) == EXPERTS else 18
    out = heading(x, 2, "Router and masks", "carved from text, then learned")
    for i, (token, chosen) in enumerate(form.tokens):
        left, width = x + 52 * i, 46
        for group in chosen:
            column = x + step * group + cell / 2
            out.append(
                line(f"M{left + width / 2:g} 116 C{left + width / 2:g} 148 {column:g} 132 {column:g} 160", width=2)
            )
        out.append(rect(left, 94, width, 22, form.colors[chosen[0]], radius=5))
        out.append(text(left + width / 2, 110, token, 13.5, anchor="middle", fill=INK))
    out.append(text(x + 212, 141, "router", 13.5))
    for n, mask in enumerate(form.masks):
        left = x + step * n
        out.append(rect(left, 160, cell, 18, form.colors[n], radius=4))
        out.append(text(left + cell / 2, 174, form.names[n], 13, anchor="middle", fill=name_color(form, n), weight=700))
        out += [rect(left, TOP + ROW * f, cell, BAR, form.colors[n] if mask[f] else "#eceef0") for f in range(NEURONS)]
    return [*out, *notes(x, *form.masks_notes)]


def name_color(form: Form, n: int) -> str:
    """Light on the dark color of the shared part."""
    return CARD if form.colors[n] == SHARED_COLOR else INK


def plan_panel(x: float, form: Form) -> list[str]:
    top, width, height, fold = 196, 162, 216, 26
    sheet = f"M{x} {top} h{width - fold} l{fold} {fold} v{height - fold} h-{width} z"
    corner = f"M{x + width - fold} {top} v{fold} h{fold}"
    out = [
        *heading(x, 3, "Plan", "everything learned"),
        f'<path d="{sheet}" fill="#ffffff" stroke="{LINE}" stroke-width="1.5" stroke-linejoin="round"/>',
        f'<path d="{corner}" fill="#eceef0" stroke="{LINE}" stroke-width="1.5" stroke-linejoin="round"/>',
        text(x + 14, top + 28, "masks", 13),
        text(x + 14, top + 122, "routers", 13),
    ]
    for n, mask in enumerate(form.masks):
        y = top + 38 + 64 / len(form.masks) * n
        out += [
            rect(x + 14 + 5.5 * f, y, 4.3, 6, form.colors[n] if mask[f] else "#eceef0", radius=0.8)
            for f in range(NEURONS)
        ]
    for n, color in enumerate(COLORS):
        out.append(rect(x + 14 + 16.7 * n, top + 132, 14, 30, color, radius=2))
    out += [text(x + 14, top + 186, "recipe and sizes", 13), text(x + 14, top + 203, "hash of dense model", 13)]
    return [*out, *notes(x, f"{form.plan_size} for SmolLM2-135M,", "plus what is refitted.")]


def moe_panel(x: float, form: Form) -> list[str]:
    step, cell, left = 136 / len(form.masks), 13, x + 152
    out = heading(x, 4, "Mixture-of-Experts", form.layout)
    out += matrix_heads(x)
    for row in range(len(form.rows)):
        out += neuron_row(x, TOP + ROW * row)
    for n, mask in enumerate(form.masks):
        out.append(rect(left + step * n, 160, cell, 18, form.colors[n], radius=3))
        name = text(
            left + step * n + cell / 2, 174, form.names[n], 12, anchor="middle", fill=name_color(form, n), weight=700
        )
        out.append(name)
        for first, count in runs(mask, form.rows):
            height = ROW * count - ROW + BAR
            out.append(rect(left + step * n, TOP + ROW * first, cell, height, form.colors[n], radius=3))
    return [*out, *notes(x, *form.rows_notes)]


def arrow(x: float, label: str) -> list[str]:
    return [text(x + 18, 292, label, 13.5, anchor="middle"), line(f"M{x} 306 h32", color=INK, width=2, arrow=True)]


def draw(form: Form) -> str:
    """The whole picture."""
    xs = 32, 252, 540, 780
    parts = [
        *dense_panel(xs[0]),
        *arrow(190, "learn"),
        *masks_panel(xs[1], form),
        *arrow(478, "extract"),
        *plan_panel(xs[2], form),
        *arrow(722, "fold"),
        *moe_panel(xs[3], form),
        line(f"M{xs[0] + 68} 490 V522 H410", dashed=True, color=INK),
        text(548, 527, "rows of the dense matrices", anchor="middle"),
        line(f"M686 522 H{xs[3] + 68} V492", dashed=True, color=INK, arrow=True),
    ]
    style = "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif\""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-labelledby="title desc" {style}>'
    )
    about = [
        '<title id="title">How ToMoE turns a dense MLP into a Mixture-of-Experts</title>',
        f'<desc id="desc">A dense MLP with frozen weights; {form.about}</desc>',
        f'<defs><marker id="arrow" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>',
        rect(0.75, 0.75, WIDTH - 1.5, HEIGHT - 1.5, CARD, radius=14, stroke="#d5d9de"),
    ]
    return "\n".join([head, *about, *parts, "</svg>", ""])


def best_seed() -> int:
    """Of 400 seeds the one whose experts come in the fewest runs while two neurons belong to nobody."""

    def cost(seed: int) -> tuple[int, int]:
        masks = make_masks(seed)
        order = gray_order(masks)
        return abs(len(order) - (NEURONS - 2)), sum(len(runs(mask, order)) for mask in masks)

    return min(range(400), key=cost)


def drawings() -> dict[str, str]:
    """The files and what they hold."""
    return {"method.svg": draw(fine()), "method-overlapping.svg": draw(overlapping())}


if __name__ == "__main__":
    templates = Path(__file__).parents[2] / "src" / "tomoe" / "report" / "templates"
    for name, drawn in drawings().items():
        (templates / name).write_text(drawn, encoding="utf-8")
