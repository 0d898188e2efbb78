"""Reports: numbers against plain computations on pico models, and files that read back."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from rich.console import Console
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from conftest import make_pico, make_plan
from tomoe.budget import active_params, decoder_params
from tomoe.data.corpus import Sequences
from tomoe.data.evaluation_text import EvaluationText
from tomoe.errors import UserError
from tomoe.evaluation import param_counts, perplexity, tables
from tomoe.evaluation.compare import compare
from tomoe.evaluation.perplexity import Predictions, measure
from tomoe.evaluation.results import Measurement, checked
from tomoe.files import format_bytes
from tomoe.model.structure import shape_of
from tomoe.moe.fold import fold
from tomoe.plans import ALWAYS, LayerPlan, Plan
from tomoe.plans.tensors import router_shapes
from tomoe.recipe.conversion import Recipe
from tomoe.report import card, page, summary
from tomoe.report.html import svg_uri, template

pytestmark = pytest.mark.slow


def some_sequences(count: int = 4, length: int = 12) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Random tokens; padding on the right of one sequence, on the left of another."""
    ids = torch.randint(3, 64, (count, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, -5:] = False
    mask[2, :3] = False
    return ids, mask


def some_plan(model: PreTrainedModel, per_token: bool = True) -> Plan:
    """Three experts, half of the neurons each; attention narrower in layer 1 alone."""
    s, generator = shape_of(model), torch.Generator().manual_seed(3)
    layers = []
    for i in range(s.num_layers):
        neurons = torch.zeros(3, s.mlp_size, dtype=torch.bool)
        for row in neurons:
            row[torch.randperm(s.mlp_size, generator=generator)[: s.mlp_size // 2]] = True
        qk, values = torch.ones(s.num_qk_choices, dtype=torch.bool), torch.ones(s.head_dim, dtype=torch.bool)
        router: dict[str, Tensor] = {}
        if i == 1:
            qk[0], values[1:4] = False, per_token
            if per_token:
                router = {name: torch.randn(*size, generator=generator) for name, size in router_shapes(s, 4).items()}
        top_k = s.head_dim - 3 if router else int(values.sum())
        layers.append(LayerPlan(neurons, torch.randn(3, s.hidden_size, generator=generator), qk, values, top_k, router))
    recipe = Recipe(model="someone/dense-1b").model_dump(mode="json")
    return Plan(s, tuple(layers), "0" * 64, {}, recipe, {"steps": 150, "torch": "2", "tomoe": "1"})


def plain_logits(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per sequence: float32 logits of the positions that predict a real token, and those tokens."""
    found = []
    for row, real in zip(ids, mask, strict=True):
        logits = model(input_ids=row[None], attention_mask=real[None].long()).logits[0].float()
        kept = [t for t in range(len(row) - 1) if real[t] and real[t + 1]]
        found.append((logits[kept], row[[t + 1 for t in kept]]))
    return found


@pytest.mark.parametrize(
    ("dense", "chunk"), [("phi", 3), ("llama3", 128)], indirect=["dense"], ids=["a bias at the output", "tied"]
)
def test_perplexity_is_the_plain_one(dense: PreTrainedModel, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "CHUNK", chunk)
    ids, mask = some_sequences()
    parts = plain_logits(dense, ids, mask)
    nll = F.cross_entropy(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))
    m = measure(dense, ids, mask)
    assert m.nll == pytest.approx(float(nll), rel=1e-5)
    assert m.perplexity == pytest.approx(math.exp(m.nll))
    assert (m.tokens, m.blocks, m.context_length) == (11 + 6 + 8 + 11, 4, 12)
    assert m.kl is None
    assert m.top1_agreement is None


def test_kl_and_agreement_are_the_plain_ones(llama: PreTrainedModel) -> None:
    ids, mask = some_sequences()
    other = make_pico("llama3")
    other.lm_head.weight.data[5:40] *= 0.5
    taught, found = (torch.cat([p[0] for p in plain_logits(m, ids, mask)]).log_softmax(-1) for m in (llama, other))
    m = measure(other, ids, mask, reference=llama)
    assert m.kl == pytest.approx(float(F.kl_div(found, taught, log_target=True, reduction="batchmean")), rel=1e-5)
    agreement = float((found.argmax(-1) == taught.argmax(-1)).float().mean())
    assert 0 < agreement < 1
    assert m.top1_agreement == pytest.approx(agreement)


def test_standard_error_by_hand(llama: PreTrainedModel) -> None:
    # equal lengths: deviation of the means of sequences, over sqrt(B)
    sums, tokens = torch.tensor([2.0, 4.0, 9.0]), torch.tensor([2.0, 2.0, 2.0])
    assert perplexity.ratio_error(sums, tokens) == pytest.approx(float((sums / 2).std() / math.sqrt(3)))
    # unequal lengths, m = 12/6: residuals 0 - 2*1, 5 - 2*2, 7 - 2*3 = -2, 1, 1
    unequal = perplexity.ratio_error(torch.tensor([0.0, 5.0, 7.0, 0.0]), torch.tensor([1.0, 2.0, 3.0, 0.0]))
    assert unequal == pytest.approx(math.sqrt(3 / 2 * (4 + 1 + 1)) / 6)
    assert perplexity.ratio_error(sums[:1], tokens[:1]) is None

    ids, mask = some_sequences()
    mask[:] = True
    losses = torch.tensor([measure(llama, ids[i : i + 1], mask[i : i + 1]).nll for i in range(4)])
    m = measure(llama, ids, mask)
    assert m.standard_error == pytest.approx(m.perplexity * float(losses.std()) / 2, rel=1e-4)
    assert measure(llama, ids[:1], mask[:1]).standard_error is None


class Scaled(nn.Module):
    """A causal LM that no chunking can see through: its logits are more than the output matrix gives."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.base_model, self.inside = model.base_model, model

    def get_output_embeddings(self) -> nn.Module:
        return self.inside.get_output_embeddings()

    def forward(self, **inputs: Tensor) -> object:
        out = self.inside(**inputs)
        out.logits = out.logits * 0.5
        return out


def test_logits_that_are_scaled_on_the_way_out_count_as_they_are(llama: PreTrainedModel) -> None:
    """The states say too little, so nothing of them is kept."""
    ids, mask = some_sequences()
    parts = plain_logits(llama, ids, mask)
    nll = F.cross_entropy(torch.cat([p[0] for p in parts]) * 0.5, torch.cat([p[1] for p in parts]))
    first = Predictions(Scaled(llama), keep=True)
    assert measure(first, ids, mask).nll == pytest.approx(float(nll), rel=1e-5)
    assert first.kept == {}
    assert measure(llama, ids, mask, first).kl == measure(llama, ids, mask, Scaled(llama)).kl


def test_no_more_logits_than_a_chunk_at_a_time(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "CHUNK", 4)
    monkeypatch.setattr(perplexity, "PROBE", 2)
    seen = []
    llama.lm_head.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[-2]))
    measure(llama, *some_sequences(), reference=llama)
    assert max(seen) == 4


def test_measuring_leaves_the_model_as_it_was_and_drops_nothing_out() -> None:
    model = make_pico("llama", attention_dropout=0.9)
    ids, mask = some_sequences()
    expected = measure(model, ids, mask).nll
    model.train()
    assert measure(model, ids, mask).nll == expected
    assert model.training


def test_progress_and_what_is_written_down(llama: PreTrainedModel) -> None:
    ids, mask = some_sequences()
    progress: list[tuple[int, int]] = []
    m = measure(llama, ids, mask, progress=lambda *at: progress.append(at), name="x", data="wikitext", seed=3)
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert (m.model, m.data, m.seed, m.device, m.dtype) == ("x", "wikitext", 3, "cpu", "float32")
    assert set(m.versions) == {"torch", "transformers", "tomoe"}
    file = Path("numbers.json")
    assert checked(file, Measurement, json.loads(json.dumps(asdict(m)))) == m
    with pytest.raises(UserError, match=r"numbers\.json is damaged \(at 'perplexity': Field required\)"):
        checked(file, Measurement, {"ppl": 1.0})


def test_what_cannot_be_measured_is_said_in_a_sentence(llama: PreTrainedModel) -> None:
    ids, mask = some_sequences()
    with pytest.raises(UserError, match="none of the 4 sequences"):
        measure(llama, ids, torch.zeros_like(mask))
    with pytest.raises(UserError, match="the embeddings have 64 rows"):
        measure(llama, ids + 40, mask)
    with pytest.raises(UserError, match="same vocabulary"):
        measure(llama, ids, mask, reference=make_pico("llama", vocab_size=65))
    llama.model.norm.weight.data[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        measure(llama, ids, mask)


# -- sizes


@pytest.mark.parametrize("family", ["llama3", "qwen3", "phi"], ids=["tied", "wide heads", "no gate"])
def test_facts_follow_the_plan(family: str) -> None:
    dense = make_pico(family)
    facts, whole = param_counts.model_facts(dense), decoder_params(shape_of(dense))
    assert (facts["block_params"], facts["active_block_params"], facts["active_share"]) == (whole, whole, 1.0)
    assert facts["active_params"] == facts["total_params"] == sum(p.numel() for p in dense.parameters())
    for plan in (some_plan(dense), some_plan(dense, per_token=False), make_plan(dense, "off", form="fine")):
        moe = fold(dense, plan)
        facts = param_counts.model_facts(moe)
        assert facts["active_share"] == pytest.approx(plan.active_fraction())
        assert facts["active_block_params"] == active_params(plan.shape, plan.widths()) + plan.router_params
        ends = ("_proj", "_proj.weight", "dense.weight", "router.weight", "project_in.weight", "project_out.weight")
        blocks = [p.numel() for name, p in moe.named_parameters() if name.endswith(ends)]
        assert facts["block_params"] == sum(blocks)
        idle = facts["block_params"] - facts["active_block_params"]
        assert facts["active_params"] == facts["total_params"] - idle
        assert idle > 0


def test_facts_of_models_that_tomoe_did_not_make(tmp_path: Path) -> None:
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    config = MixtralConfig(**sizes, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=1)
    mixtral = param_counts.model_facts(MixtralForCausalLM(config))
    expert, attention, router = 3 * 32 * 48, 4 * 32 * 32, 4 * 32
    assert mixtral["block_params"] == 2 * (4 * expert + attention + router)
    assert mixtral["active_block_params"] == 2 * (expert + attention + router)
    assert mixtral["active_share"] is None
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))
    assert param_counts.model_facts(gpt2)["active_block_params"] == 2 * 12 * 32 * 32
    assert measure(gpt2.eval(), *some_sequences()).tokens == 36
    (tmp_path / "model.safetensors").write_bytes(b"x" * 70)
    (tmp_path / "plan.safetensors").write_bytes(b"x" * 1000)
    assert param_counts.model_facts(gpt2, tmp_path)["bytes_on_disk"] == 70


# -- tables


def test_comparison_measures_each_against_the_first(llama: PreTrainedModel, tmp_path: Path) -> None:
    ids, mask = some_sequences()
    moe = fold(llama, some_plan(llama))
    (tmp_path / "moe").mkdir()
    progress: list[tuple[str, int, int]] = []
    names, models = ["dense", str(tmp_path / "moe")], iter([llama, moe])
    text = EvaluationText(Sequences(ids, mask), "a text")
    found = list(compare(names, models, text, lambda stage, i, n, _: progress.append((stage, i, n))))
    assert [row.name for row in found] == ["dense", "moe"]
    assert found[0].measurement == measure(llama, ids, mask, name="dense", data="a text")
    assert found[1].measurement == measure(moe, ids, mask, llama, name="moe", data="a text")
    assert progress[-1] == ("evaluating moe", 4, 4)
    # real tokens alone are routed
    assert found[0].usage is None
    assert found[1].usage is not None
    assert found[1].usage.tokens == int(mask.sum())
    for layer, shares in zip(moe.model.layers, found[1].usage.shares, strict=True):
        router, logits = layer.mlp.router, []
        assert not router._forward_hooks
        hook = router.register_forward_hook(lambda _m, _i, out, logits=logits: logits.append(out))
        moe(input_ids=ids, attention_mask=mask.long())
        hook.remove()
        chosen = logits[0].argmax(-1)[mask.flatten()]
        assert shares == pytest.approx((torch.bincount(chosen, minlength=3) / len(chosen)).tolist())


def test_tables_show_the_same_numbers(llama: PreTrainedModel) -> None:
    names, models = ["dense", "a|b[red]"], [llama, fold(llama, some_plan(llama))]
    rows = list(compare(names, models, EvaluationText(Sequences(*some_sequences()), "a text", seed=7)))
    m = rows[1].measurement
    markdown = tables.to_markdown(rows)
    head, ruler, dense_line, moe_line, _, note = markdown.splitlines()
    assert head.startswith("| model | active params |")
    assert "on disk" not in head
    assert ruler.count("|") == head.count("|") == dense_line.count("|")
    assert "| 100.0% |" in dense_line
    assert "| - | - |" in dense_line
    assert moe_line.startswith("| a\\|b\\[red\\] |")
    assert f"{m.perplexity:.2f} ± {m.standard_error:.2f}" in moe_line
    assert f"{m.kl:.4f}" in moe_line
    assert m.data_sha256[:12] in note
    assert "seed 7" in note
    assert "ATTENTION" not in note
    console = Console(file=io.StringIO(), width=200)
    console.print(tables.to_rich(rows))
    assert "a|b[red]" in console.file.getvalue()
    assert f"{m.kl:.4f}" in console.file.getvalue()
    # rows of different texts are called out
    assert "ATTENTION" in tables.footnote([rows[0], replace(rows[1], measurement=replace(m, data_sha256="other"))])


def test_counts_are_readable() -> None:
    assert [tables.count(n) for n in (7, 1500, 134_515_008, 6_738_415_616)] == ["7", "1.5 K", "134.5 M", "6.7 B"]


# -- summary


def test_summary_says_how_it_was_learned(llama: PreTrainedModel) -> None:
    plan = some_plan(llama)
    lines = dict(summary.conversion_summary(plan))
    assert lines["Active params"].startswith(f"{plan.active_fraction():.1%}")
    assert lines["Experts"].startswith("3 per layer, one for each token, 24 of 48 neurons wide")
    assert "chosen for each token: Q/K 6 to 8, V/O 5 to 8 of 8 dims" in lines["Attention"]
    assert lines["Learning"].startswith("150 steps of 512 tokens")
    assert dict(summary.conversion_summary(replace(plan, notes={"steps": 0})))["Learning"] == "none"


@pytest.mark.parametrize("note", [None, 3, {"name": "a"}, {"name": "a", "summary": 3, "paper": ""}])
def test_the_method_is_named_as_the_plan_notes_it(note: object) -> None:
    plan = make_plan(make_pico("llama"), "off")
    assert "Method" not in dict(summary.conversion_summary(replace(plan, notes={"method": note})))
    known = {"name": "a", "summary": "Groups neurons.", "paper": "https://b.example"}
    lines = dict(
        summary.conversion_summary(replace(plan, notes={"method": known}, recipe=Recipe().model_dump(mode="json")))
    )
    assert lines["Method"] == "a: Groups neurons. https://b.example"
    assert len(summary.conversion_summary(replace(plan, recipe={}, dense_config={}))) == 4


def test_summary_bounds_the_speed_of_decoding_by_the_weights_that_are_read(llama: PreTrainedModel) -> None:
    plan = replace(make_plan(llama, "off", form="fine"), dense_config=llama.config.to_dict())
    shape, lines = plan.shape, dict(summary.conversion_summary(plan))
    attention = shape.num_layers * 2 * 32 * (4 + 2) * 8
    output, routers, mlps = 64 * 32, shape.num_layers * 32 * 8, shape.num_layers * 3 * 32 * 48
    dense = attention + mlps + output
    at = [attention + share * mlps + output + routers for share in (0, (16 + 4) / 48, (16 + 2.5 * 4) / 48)]
    assert lines["Decoding"].startswith(f"{at[0] / dense:.0%} of the weights")
    assert f"{dense / at[1]:.1f} times as fast as by the dense model with one expert" in lines["Decoding"]
    assert f"and {dense / at[2]:.1f} times at" in lines["Decoding"]
    assert lines["File"].startswith(f"about {format_bytes(2 * (dense + routers))} in bf16")


def test_card_summary_and_page_of_fine_grained_experts(llama: PreTrainedModel, tmp_path: Path) -> None:
    plan = make_plan(llama, "off", form="fine")
    free = torch.zeros(8)
    layers = [replace(layer, top_k=k, router_bias=free) for layer, k in zip(plan.layers, (2, 3, 3), strict=False)]
    plan = replace(plan, layers=tuple(layers))
    (first, second, *_), size = plan.counts, plan.shape.mlp_size
    experts = dict(summary.conversion_summary(plan))["Experts"]
    assert (
        f"a part of {first.shared_size} neurons that all tokens share, and 8 experts of {first.expert_size}" in experts
    )
    assert f"2 to 3 of which each token uses: {first.width} to {second.width} of {size} neurons" in experts
    always = [replace(layers[0], router_bias=torch.tensor([ALWAYS, *[0.0] * 7])), *layers[1:]]
    biased = dict(summary.conversion_summary(replace(plan, layers=tuple(always))))["Experts"]
    assert "each token uses (up to 1 of them the same ones for all tokens)" in biased
    titles, body = summary.layer_table(plan)
    assert titles[1:5] == ["shared part", "expert size", "of a token", "neurons of a token"]
    assert body[0][1:5] == [str(first.shared_size), str(first.expert_size), "2", str(first.width)]
    text = card.write_card(tmp_path, plan).read_text()
    assert "each token uses a shared\npart and the experts that a small router chooses among 8" in text
    assert "sends each token to one" not in text
    shown = page.write_page(tmp_path, "t", plan).read_text()
    assert experts in shown
    assert svg_uri(template("method.svg")) in shown
    assert svg_uri(template("method-overlapping.svg")) not in shown


def test_a_name_tells_nothing_of_the_disk() -> None:
    names = [
        "/home/ada/own text.txt",
        "models/small.gguf",
        "smollm2-135m",
        "owner/name",
        "owner/name:configuration",
        "",
    ]
    assert [summary.shown_name(name) for name in names] == ["own text.txt", "small.gguf", *names[2:]]
