"""Tables of single tokens: what the MoE lost most on beside the dense model, and what each expert gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from page_samples import EVIL
from test_card import plan_of

from conftest import make_pico, make_plan, tokens
from pico_tokenizer import make_tokenizer
from tomoe.evaluation.routing_trace import RoutingTrace
from tomoe.evaluation.token_losses import TokenLosses, token_losses, typical_tokens
from tomoe.moe.fold import fold
from tomoe.report.page import PageFacts, write_page
from tomoe.report.token_tables import WORST, loss_sentence, loss_table, typical_table


def test_losses_are_those_of_each_model() -> None:
    tokenizer = make_tokenizer()
    dense = make_pico("llama", vocab_size=len(tokenizer))
    moe = fold(dense, make_plan(dense, "off"))
    ids = tokens(1, 12)[0]
    found = token_losses(dense, moe, tokenizer, ids.tolist())
    assert found is not None
    for model, losses in ((dense, found.dense), (moe, found.moe)):
        with torch.no_grad():
            expected = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        torch.testing.assert_close(torch.tensor(losses), expected)
    assert found.dense != found.moe
    assert len(found.tokens) == 12
    assert token_losses(dense, moe, tokenizer, [3]) is None


def test_the_tokens_that_lost_most_stand_behind_their_text() -> None:
    losses = TokenLosses(["The", " old", "\n", " boat", " sank"], [1.0, 2.0, 3.0, 0.5], [1.5, 1.0, 7.25, 0.5])
    titles, rows = loss_table(losses)
    assert len(titles) == 4
    assert rows[0] == ["… The old [boat]", "3.00", "7.25", "+4.25"]
    assert [row[-1] for row in rows] == ["+4.25", "+0.50", "+0.00", "-1.00"]
    assert rows[-1][0] == "… The old [↵]"
    assert "Of 4 tokens of the held-out text 2 cost the MoE more than the dense model, +0.94 nats" in loss_sentence(
        losses
    )
    assert "without the tenth that cost most more, -0.17." in loss_sentence(losses)
    many = TokenLosses(["x"] * 100, [0.0] * 99, [1.0] * 99)
    assert len(loss_table(many)[1]) == WORST


def test_losses_that_do_not_belong_to_their_tokens() -> None:
    with pytest.raises(ValueError, match="one loss in each model"):
        TokenLosses(["a", "b"], [1.0, 2.0], [1.0, 2.0])


def test_typical_tokens_go_to_one_expert_rather_than_to_the_others() -> None:
    text = [" sea", " the", " sea", " the", " sea", " rare", " the", " the", "\n", "\n", "\n", " the"]
    experts = [0, 0, 0, 1, 0, 1, 1, 1, 1, 1, 1, 0]
    first = RoutingTrace(text, [experts, [1 - e for e in experts]], 3)
    found = typical_tokens([first, RoutingTrace([" sea"], [[1], [1]], 3)])
    assert found[0] == [["sea"], ["the"], []], "often, and not elsewhere; a line end is no token to show"
    assert found[1] == [["the"], ["sea"], []]
    assert typical_table(found)[1] == [
        ["layer 0, expert 0", "sea"], ["layer 0, expert 1", "the"], ["layer 1, expert 0", "the"], ["layer 1, expert 1", "sea"],
    ]  # fmt: skip


def test_layers_in_which_all_tokens_use_the_same_experts_show_nothing() -> None:
    assert typical_table([[[]], [["sea"]], [[]]])[1] == [["layer 1, expert 0", "sea"]]
    assert typical_table([[[]]])[1] == []


def test_the_page_opens_at_the_first_layer_with_a_choice(tmp_path: Path) -> None:
    trace = RoutingTrace(["a"], [[0], [1], [0]], 2, [[], [[1]], [[0]]])
    assert (trace.first_choice(), RoutingTrace(["a"], [[1]], 2).first_choice()) == (1, 0)
    text = write_page(tmp_path, PageFacts("t", plan_of("self"), texts=[("text", trace)])).read_text("utf-8")
    assert 'type="range" min="0" max="2" value="1"' in text


def test_the_page_shows_them_and_escapes_them(tmp_path: Path) -> None:
    losses = TokenLosses(["a", EVIL], [1.0], [2.0])
    facts = PageFacts("t", plan_of("self"), losses=losses, typical=[[[EVIL]]])
    text = write_page(tmp_path, facts).read_text("utf-8")
    assert EVIL not in text
    assert text.count("onerror") == 2
    assert "Loss by token" not in write_page(tmp_path, PageFacts("t", plan_of("self"))).read_text("utf-8")
