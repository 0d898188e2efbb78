"""Tokens by expert: the choice is the router's own, the text comes out whole, and no text gets out of its place."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import make_pico, make_plan, tokens
from html_reader import Reader
from pico_files import CommandLine, refused
from pico_tokenizer import make_tokenizer
from tomoe.cli.console import output
from tomoe.cli.route import show_layer
from tomoe.errors import UserError
from tomoe.evaluation.routing_trace import RoutingTrace, pieces, trace_ids
from tomoe.moe.fold import fold
from tomoe.plans import ALWAYS
from tomoe.report import html

EVIL = "</script><img src=x onerror=alert(1)> \"&'{{ 7*7 }}"


def test_a_trace_is_what_each_router_chooses() -> None:
    dense = make_pico("phi")
    moe = fold(dense, make_plan(dense, "per_token"))
    ids = tokens(1, 12)[0]
    trace = trace_ids(moe, make_tokenizer(), ids.tolist())
    assert (len(trace.tokens), trace.num_experts) == (12, 4)
    for i, layer in enumerate(moe.model.layers):
        seen: list[torch.Tensor] = []
        hook = layer.mlp.router.register_forward_hook(lambda _m, _i, logits, seen=seen: seen.append(logits))
        moe(input_ids=ids[None])
        hook.remove()
        assert trace.experts[i] == seen[0].argmax(-1).tolist()
        assert sum(trace.shares(i)) == pytest.approx(1)
        assert not layer.mlp.router._forward_hooks


def test_a_trace_of_fine_grained_experts_holds_all_that_a_token_chooses() -> None:
    """Those that all tokens use by their bias are not chosen, and where all are used, nothing is."""
    dense = make_pico("llama")
    plan = make_plan(dense, "off", form="fine")
    bias = torch.where(torch.arange(8) < 3, ALWAYS, 0.0)
    changed = [replace(plan.layers[0], top_k=5, router_bias=bias), replace(plan.layers[1], top_k=8)]
    moe = fold(dense, replace(plan, layers=(*changed, *plan.layers[2:])))
    ids = tokens(1, 12)[0]
    seen: list[torch.Tensor] = []
    mlp = moe.model.layers[0].mlp
    mlp.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    trace = trace_ids(moe, make_tokenizer(), ids.tolist())
    logits = seen[0][0].float() @ mlp.router.weight.float().T
    best = logits[:, 3:].topk(2).indices + 3
    assert trace.chosen[0] == best.tolist()
    assert trace.experts[0] == best[:, 0].tolist()
    assert trace.chosen[1] == []
    assert [trace.has_choice(0), trace.has_choice(1)] == [True, False]
    lines = html.numbers(trace).splitlines()
    assert lines[0] == "layer 0  " + " ".join(str(expert) for expert in trace.experts[0])
    assert lines[1] == "layer 1  every token uses the same experts"


def test_what_cannot_be_traced_is_said() -> None:
    dense = make_pico("llama")
    with pytest.raises(UserError, match="no routers: it is dense"):
        trace_ids(dense, make_tokenizer(), [5, 6])
    with pytest.raises(UserError, match="no text to route"):
        trace_ids(dense, make_tokenizer(), [])


def test_characters_of_several_tokens_stand_at_their_last() -> None:
    tokenizer = make_tokenizer(opens_with_bos=True)
    text = "a é 日本 🙂\n🙂"
    found = pieces(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(found) == "<bos>" + text
    assert found[:6] == ["<bos>", "a", " ", "", "é", " "]
    assert found[-4:] == ["", "", "", "🙂"]
    half = tokenizer("ab é")["input_ids"][:-1]
    assert pieces(tokenizer, half)[-1] == "\ufffd"  # the rest of it was cut off
    assert (
        "".join(pieces(tokenizer, tokenizer("\x1b[31mred\u202e\x07")["input_ids"])) == "<bos>\ufffd[31mred\ufffd\ufffd"
    )


def trace_of(*words: str, layers: int = 3, experts: int = 12) -> RoutingTrace:
    rows = [[(layer + i) % experts for i in range(len(words))] for layer in range(layers)]
    return RoutingTrace(list(words), rows, experts)


def test_a_page_escapes_names_and_tokens(tmp_path: Path) -> None:
    words = [EVIL, "b\n", "", *"cdefghi", "j", "k"]
    page = html.write_route_page(tmp_path / "x.html", EVIL, EVIL, trace_of(*words), layer=1)
    text = page.read_text(encoding="utf-8")
    reader = Reader(text)
    assert "img" not in reader.tags
    assert reader.tags.count("script") == 2
    assert EVIL in reader.data
    assert {"b↵\n", "·"} <= set(reader.data)
    assert reader.token_classes() == [
        "x1",
        "x2",
        "x3",
        "x4",
        "x5",
        "x6",
        "x7",
        "x0 u1",
        "x1 u1",
        "x2 u1",
        "x3 u1",
        "x0",
    ]
    data = re.search(r'<script type="application/json">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1]) == trace_of(*words).experts
    assert " 1  2  3  4  5  6  7  8  9 10 11  0" in text
    assert not re.search(r"https?://", text)


@pytest.mark.slow
def test_the_command(tomoe: CommandLine, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = converted / "moe"
    shown = tomoe("route", moe, "ab 12")
    assert shown.code == 0, shown.err
    assert re.fullmatch(r"(layer [01]: a[₀₁]b[₀₁] [₀₁]1[₀₁]2[₀₁]\n){2}", shown.out), shown.out
    (tmp_path / "in.txt").write_text("ab 12")
    assert tomoe("route", moe, "--file", tmp_path / "in.txt").out == shown.out
    one = tomoe("route", moe, "ab 12", "--layer", "1", "--tokens", "2").out
    assert re.fullmatch(r"layer 1: a[₀₁]b[₀₁]\n", one)
    long = tomoe("route", moe, "ab 12 " * 30, "--layer", "0").out
    assert re.fullmatch(r"layer 0:   0  \d+%   1  \d+%\n[ab12 ₀₁]+\n\n", long), long
    page = tmp_path / "page.html"
    assert tomoe("route", moe, "ab 12", "--html", page, "--layer", "1").code == 0
    assert len(Reader(page.read_text(encoding="utf-8")).token_classes()) == 5
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    coloured = tomoe("route", moe, "ab 12", "--layer", "0").out
    assert "48;2;119;170;221" in coloured or "48;2;238;136;102" in coloured
    assert "₀" not in coloured
    assert "\x1b[48" not in tomoe("route", moe, "ab 12", "--plain").out


def test_a_page_lists_the_experts_of_a_token(tmp_path: Path) -> None:
    """No more than eight of them."""
    many = [list(range(9, 0, -1)), list(range(8, 0, -1))]
    trace = RoutingTrace(["a", "b"], [[17, 2], [0, 0], [9, 8]], 64, [[[17, 2, 40], [2, 17, 1]], [], many])
    listed = [["17 2 40", "2 17 1"], ["", ""], ["9 8 7 6 5 4 3 2 …", "8 7 6 5 4 3 2 1"]]
    classes = [["x1 u2", "x2"], [], ["x1 u1", "x0 u1"]]
    shares = [[("2", "50 %"), ("17", "50 %")], [], [("8", "50 %"), ("9", "50 %")]]
    for layer in range(3):
        page = html.write_route_page(tmp_path / "x.html", "t", "text", trace, layer)
        text = page.read_text(encoding="utf-8")
        assert Reader(text).token_classes() == classes[layer]
        titles = [
            "experts " + experts.replace(" ", ", ") if experts else "all use the same experts"
            for experts in listed[layer]
        ]
        assert re.findall(r'title="([^"]+)">', text) == titles
        assert re.findall(r"<li><span[^>]*>(\d+)</span> <span>(\d+ %)</span>", text) == shares[layer]
        assert ('class="note same" hidden' in text) == (layer != 1)
        data = re.search(r'<script type="application/json">(.*?)</script>', text)
        assert data is not None
        assert json.loads(data[1]) == listed


@pytest.mark.slow
def test_the_command_names_the_strongest_of_fine_grained_experts(tomoe: CommandLine, converted_fine: Path) -> None:
    shown = tomoe("route", converted_fine / "moe", "ab 12 " * 30, "--layer", "1")
    assert shown.code == 0, shown.err
    assert re.fullmatch(
        r"layer 1: \d+ of 64 experts per token, the strongest:(  +\d+  +\d+%){1,6}(  others \d+%)?\n"
        r"[ab12 ₀-₉]+\n\n",
        shown.out,
    ), shown.out


def test_layers_of_a_short_text_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    """Percentages of two tokens say nothing, and thirty lines of them hide the tokens."""
    trace = RoutingTrace(["a", "b"], [[0, 1]] * 30, 2)
    for layer in (3, 12):
        show_layer(output(), trace, layer, colored=False)
    assert capsys.readouterr().out == "layer  3: a₀b₁\nlayer 12: a₀b₁\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("ab", "--layer", "2"), "there is no layer 2: the model has the layers 0 to 1"),
        ((), "give a text to route"),
        (("ab", "--file", "x"), "give a text to route"),
        (("--file", "nowhere.txt"), "cannot read nowhere.txt"),
        (("",), "there is no text to route"),
    ],
)
def test_the_command_says_what_is_wrong(tomoe: CommandLine, converted: Path, words: tuple[str, ...], said: str) -> None:
    refused(tomoe("route", converted / "moe", *words), said)
