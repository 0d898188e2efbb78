"""Tables of the report about single tokens: what the MoE lost most on, and what the experts get."""

from __future__ import annotations

from collections.abc import Sequence

from tomoe.evaluation.token_losses import TokenLosses
from tomoe.report.html import shown

# tokens in the table, and tokens before each that show where it stands
WORST, BEFORE = 12, 6
# experts in the table of a layer
EXPERTS = 16
Table = tuple[list[str], list[list[str]]]


def loss_table(losses: TokenLosses) -> Table:
    """Titles and rows: the tokens whose loss grew most, each behind the text before it."""
    grown = [moe - dense for dense, moe in zip(losses.dense, losses.moe, strict=True)]
    worst = sorted(range(len(grown)), key=lambda i: -grown[i])[:WORST]
    rows = []
    for i in worst:
        # the loss i is of the token i + 1
        before = "".join(losses.tokens[max(0, i + 1 - BEFORE) : i + 1]).replace("\n", " ").strip()
        token = shown(losses.tokens[i + 1]).strip()
        rows.append([f"… {before} [{token}]", f"{losses.dense[i]:.2f}", f"{losses.moe[i]:.2f}", f"{grown[i]:+.2f}"])
    return ["token, after this text", "loss, dense", "loss, MoE", "difference"], rows


def loss_sentence(losses: TokenLosses) -> str:
    """How the difference in loss is spread over the tokens of the passage."""
    grown = sorted((moe - dense for dense, moe in zip(losses.dense, losses.moe, strict=True)), reverse=True)
    more = sum(g > 0 for g in grown)
    tenth = max(1, len(grown) // 10)
    mean = sum(grown) / len(grown)
    rest = sum(grown[tenth:]) / max(1, len(grown) - tenth)
    return (
        f"Of {len(grown):,} tokens of the held-out text {more:,} cost the MoE more than the dense model, {mean:+.2f} nats on "
        f"average; without the tenth that cost most more, {rest:+.2f}."
    )


def typical_table(typical: Sequence[Sequence[Sequence[str]]]) -> Table:
    """Titles and rows of a first, a middle and a last layer that have any: the tokens that are typical of each expert."""
    layers = [layer for layer, experts in enumerate(typical) if any(experts)]
    rows = []
    for layer in sorted({layers[i] for i in (0, len(layers) // 2, -1)}) if layers else []:
        named = [(expert, tokens) for expert, tokens in enumerate(typical[layer]) if tokens]
        rows += [[f"layer {layer}, expert {expert}", "  ".join(tokens)] for expert, tokens in named[:EXPERTS]]
    return ["expert", "typical tokens"], rows
