"""Draw what a token uses of a layer, for each kind of plan: method.svg (fine-grained experts), method-overlapping.svg,
method-static.svg, method-inputs.svg; and forms.svg, experts beside inputs, for the README.

All but the last are written into the package, whose report shows them; the site takes them from there. Deterministic, standard
library only.

    python docs/images/method.py

A column is a neuron, or an input of a projection. Which ones a token uses is made up, but obeys the rules of a real plan: as many
for each token. The card has a background of its own, so the drawings read on light and dark pages alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, LEFT, TOP, MARGIN = 480, 60, 14, 20  # LEFT: of the first column; MARGIN: of text
STEP, CELL, GAP = 11, 9, 7  # distance and width of columns; between experts
ROW, HEIGHT = 30, 14  # distance of two tokens, height of a cell
LINE = 18  # distance of two lines of text
INK, SOFT, CARD = "#1f2933", "#52606d", "#fbfbf9"
FILLS = {"#": "#0072b2", "s": "#3d4f60", "d": "#b8c2cc", ".": "none", "x": "none"}
EDGES = {".": "#b8c2cc", "x": "#d55e00"}
INPUTS_OF_A_TOKEN = 16
TOKENS = ("The", "sea", "is")


@dataclass(frozen=True)
class Drawing:
    """Lines of text and rows of columns. A row is a name and a pattern, in which a space stands between two experts.

    d: dense, s: shared, #: chosen, dot: not used, x: dropped; or digits, the sizes of inputs, of which the largest are chosen.
    """

    about: str
    head: str
    dense: str
    middle: str
    rows: tuple[str, ...]
    foot: tuple[str, str]


SHARED = "ssssssss "
FINE = Drawing(
    "In a dense MLP every token uses all neurons. With experts, each token uses a shared part and three of eight small experts.",
    "Dense MLP: every token uses all neurons",
    "d" * 8 + " " + " ".join(["ddd"] * 8),
    "Experts: a token uses the shared part and k of N",
    (
        SHARED + "... ### ... ... ### ... ... ###",
        SHARED + "### ... ... ### ... ... ### ...",
        SHARED + "... ### ### ... ... ### ... ...",
    ),
    ("Every neuron is in one expert or shared, and is stored once.", "A router chooses the experts (here 3 of 8)."),
)
OVERLAPPING = Drawing(
    "In a dense MLP every token uses all neurons. With overlapping experts, each token uses one expert; some neurons are "
    "in none.",
    "Dense MLP: every token uses all neurons",
    "d" * 36,
    "Overlapping experts: a token uses one of N",
    (
        "####.##.###...##.##..#.##..#.....xxx",
        "##.####.#..##..##..#...#.##.##...xxx",
        "###.###..#.#.##..##.##...##..#...xxx",
    ),
    ("Neurons in no expert (orange) are dropped, the others are", "stored once. A router chooses the expert."),
)
STATIC = Drawing(
    "In a dense MLP every token uses all neurons. Pruned, every token uses the same neurons, and the others are removed.",
    "Dense MLP: every token uses all neurons",
    "d" * 36,
    "Pruned: every token uses the same neurons",
    ("####x##xx###x##x##x##x#xx##x###xx##x",) * 3,
    ("The others (orange) are dropped, and the down projection", "is refitted to make up for them."),
)
INPUTS = Drawing(
    "A dense projection uses all inputs for every token. With sparse inputs, each token uses its largest inputs.",
    "Dense projection: every token uses all inputs",
    "d" * 36,
    "Sparse inputs: a token uses its largest inputs",
    (
        "719138264915728136924718351962748152",
        "184927315862917348261937518429681739",
        "926175831947216859312784619528371496",
    ),
    (
        "Inputs are ranked by |x| times the norm of their column;",
        "other columns are not read.",
    ),
)


def text(x: float, y: float, words: str, *, fill: str = INK, weight: int = 400, anchor: str = "start") -> str:
    style = f'font-size="13" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>'


def column(x: float, y: float, kind: str, height: int = HEIGHT) -> str:
    edge = f' stroke="{EDGES[kind]}"' if kind in EDGES else ""
    top = y + HEIGHT - height
    return f'<rect x="{x:g}" y="{top:g}" width="{CELL}" height="{height}" rx="1.5" fill="{FILLS[kind]}"{edge}/>'


def row(y: float, name: str, pattern: str) -> list[str]:
    """A name and its columns; of an input a bar as high as it is large."""
    largest = sorted(range(len(pattern)), key=lambda i: pattern[i], reverse=True)[:INPUTS_OF_A_TOKEN]
    parts, x = [text(LEFT - 12, y + 12, name, weight=700, anchor="end")], float(LEFT)
    for i, kind in enumerate(pattern):
        if kind == " ":
            x += GAP
            continue
        if kind.isdigit():
            parts.append(column(x, y, "#" if i in largest else "d", round(1.8 * int(kind))))
        else:
            parts.append(column(x, y, kind))
        x += STEP
    return parts


def draw(drawing: Drawing) -> str:
    """The whole picture."""
    parts, height = _content(drawing)
    return _picture(drawing.about, [_card(0, height), *parts], WIDTH, height)


def beside(left: Drawing, right: Drawing) -> str:
    """Two pictures in one."""
    (first, height), (second, height_right) = _content(left), _content(right)
    height = max(height, height_right)
    shift = WIDTH + MARGIN
    moved = [f'<g transform="translate({shift})">', *second, "</g>"]
    parts = [_card(0, height), *first, _card(shift, height), *moved]
    return _picture(f"{left.about} {right.about}", parts, shift + WIDTH, height)


def _content(drawing: Drawing) -> tuple[list[str], int]:
    """Texts and columns of a picture, and its height."""
    y = TOP + LINE
    parts = [text(MARGIN, y - 6, drawing.head, fill=SOFT), *row(y + 4, "", drawing.dense)]
    y += 2 * LINE + HEIGHT
    parts.append(text(MARGIN, y, drawing.middle, weight=700))
    y += 10
    for token, pattern in zip(TOKENS, drawing.rows, strict=True):
        parts += row(y, token, pattern)
        y += ROW
    for line in drawing.foot:
        parts.append(text(MARGIN, y + 10, line, fill=SOFT))
        y += LINE
    return parts, y + TOP


def _card(x: int, height: int) -> str:
    return f'<rect x="{x + 0.5}" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="10" fill="{CARD}" stroke="#d5d9de"/>'


def _picture(about: str, parts: list[str], width: int, height: int) -> str:
    font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title desc" font-family="{font}">',
        '<title id="title">What a token uses of a layer</title>',
        f'<desc id="desc">{escape(about)}</desc>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def drawings() -> dict[str, str]:
    """The files of the package and what they hold."""
    forms = {"method": FINE, "method-overlapping": OVERLAPPING, "method-static": STATIC, "method-inputs": INPUTS}
    return {f"{name}.svg": draw(drawing) for name, drawing in forms.items()}


if __name__ == "__main__":
    templates = Path(__file__).parents[2] / "src" / "tomoe" / "report" / "templates"
    for name, drawn in drawings().items():
        (templates / name).write_text(drawn, encoding="utf-8")
    Path(__file__).with_name("forms.svg").write_text(beside(FINE, INPUTS), encoding="utf-8")
