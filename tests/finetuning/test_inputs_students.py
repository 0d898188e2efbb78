"""Fine-tuning where tokens choose inputs: the gradient is that of the masked product, and what is learned is what is saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from family_contract import inputs_masked
from margins import assert_same
from test_inputs_equation import make_inputs_plan
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from conftest import make_pico, tokens
from tomoe.data.corpus import Sequences
from tomoe.finetuning.students import FinetuneStep, MoEStudent
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.kernels import inputs as kernels
from tomoe.moe.modeling_tomoe import BACKENDS, ToMoEForCausalLM, choices_of, chosen_inputs, column_norms, matrix_of
from tomoe.plans import InputsPlan
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder

pytestmark = pytest.mark.slow
# grouped heads and biases; no gate and a choice for fewer tied sizes
FAMILIES = ("qwen2", "phi")


class Text:
    """Two fresh sequences a pass, the second with padding."""

    def __init__(self, first: int = 0):
        self.first = first

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Sequences:
        ids = tokens(2, 12, seed=self.first + step)
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, 9:] = False
        return Sequences(ids, mask)


def recipe(*changes: str) -> FinetuneRecipe:
    return FinetuneRecipe.load(None, ["train.steps=3", "train.learning_rate=1e-2", "train.warmup_steps=0", *changes])


def teacher_of(student: PreTrainedModel) -> PreTrainedModel:
    """Another model that shares embeddings and output matrix, which are not trained: something to learn."""
    teacher = make_pico(student.config.tomoe_dense_type, num_hidden_layers=1)
    teacher.model.embed_tokens, teacher.lm_head = student.get_input_embeddings(), student.get_output_embeddings()
    return teacher


def clear_text(dense: PreTrainedModel, plan: InputsPlan) -> Text:
    """Text whose tokens choose alike however their numbers are rounded."""
    for first in range(100):
        text = Text(first)
        batch = text.batch(0, 0, 1, 1, 0)
        with inputs_masked(dense, plan.inputs()) as margins, torch.no_grad():
            dense(batch.input_ids, attention_mask=batch.mask.long())
        if min(margins) > 1e-5:
            return text
    raise AssertionError("no text with wide margins")


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_the_masked_product(family: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of KL(teacher || student) over the tokens that are no padding, by autograd through products with constant masks."""
    if not kernel:
        monkeypatch.setitem(BACKENDS, "largest inputs", {"pytorch": BACKENDS["largest inputs"]["pytorch"]})
    dense = make_pico(family)
    plan = make_inputs_plan(dense)
    moe, batch = fold(make_pico(family), plan), clear_text(dense, plan).batch(0, 0, 1, 1, 0)
    teacher = teacher_of(moe)
    learner = MoEStudent(moe, plan, recipe())
    terms = FinetuneStep(learner, recipe(), teacher)(batch, 0, 0)

    trained = {name for name, p in moe.named_parameters() if p.requires_grad}
    assert all(any(f".{i}.{part}" in name for name in trained) for i in range(2) for part in ("self_attn", "mlp"))
    for name, p in dense.named_parameters():
        p.requires_grad_(name in trained)
    with inputs_masked(dense, plan.inputs()):
        student = dense(batch.input_ids, attention_mask=batch.mask.long()).logits[batch.mask]
    with torch.no_grad():
        meant = teacher(batch.input_ids, attention_mask=batch.mask.long()).logits[batch.mask]
    loss = F.kl_div(student.log_softmax(-1), meant.log_softmax(-1), log_target=True, reduction="batchmean")
    loss.backward()
    assert terms.keys() == {"loss", "distill"}
    torch.testing.assert_close(terms["loss"], loss.detach(), rtol=1e-5, atol=0)
    expected = {name: p.grad for name, p in dense.named_parameters() if name in trained}
    for name, p in moe.named_parameters():
        if name in trained and not name.endswith("k_proj.bias"):  # which shifts all scores alike
            assert (p.grad - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
    with torch.no_grad():
        assert (student - dense(batch.input_ids).logits[batch.mask]).abs().max() > 1e-2, "the masks changed nothing"


def test_a_zero_that_is_chosen_has_a_gradient() -> None:
    """As in layers behind a ReLU: fewer numbers than tokens use are not zero."""
    if kernels.kernel() is None:
        pytest.skip("no compiler")
    norms = torch.linspace(1, 2, 6)
    x = torch.tensor([[0.0, 2.0, 0.0, -1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    found = []
    for way in (kernels.largest, chosen_inputs):
        own = x.clone().requires_grad_()
        y = way(own, norms, 4)
        (y * torch.arange(1.0, 7.0)).sum().backward()
        found.append((y.detach(), own.grad))
    (y, gradient), (other, meant) = found
    assert torch.equal(y, other)
    assert torch.equal(gradient, meant)
    assert [int((row != 0).sum()) for row in gradient] == [4, 4]


def learned(moe: ToMoEForCausalLM, plan: InputsPlan, made: FinetuneRecipe, folder: Path) -> MoEStudent:
    """After the steps of the recipe, towards another model."""
    learner = MoEStudent(moe, plan, made)
    run = RunFolder(folder / "run", "weights")
    run.begin(made, resume=False)
    step = FinetuneStep(learner, made, teacher_of(moe))
    Training(moe, learner.learned, made.train, made.seed, Text(), run, step, scales=learner.learned.scales()).train()
    return learner


def dense_of(moe: ToMoEForCausalLM, family: str) -> PreTrainedModel:
    """The dense model of the same weights, in float32."""
    dense = make_pico(family)
    missing, unexpected = dense.load_state_dict(moe.state_dict(), strict=False)
    assert not missing
    assert all(".tomoe_choices." in name for name in unexpected)
    return dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_learned_is_masked_and_reloaded_alike(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tokens choose by the norms of the new weights, as they are stored, at this budget and at others."""
    before = fold(make_pico(family), plan := make_inputs_plan(make_pico(family)))
    moe, after = learned(fold(make_pico(family), plan), plan, recipe(), tmp_path).finish("", dtype)
    assert after == plan
    assert moe.dtype == dtype
    pairs = zip(choices_of(moe), choices_of(before), strict=True)
    assert any(not torch.equal(own.norms, old.norms) for own, old in pairs), "nothing was learned"
    for choice, projections in moe.choices():
        assert torch.equal(choice.norms, column_norms([matrix_of(projection) for projection in projections]))
    save_moe(moe, after, None, tmp_path / "moe", check=True)
    dense = dense_of(moe, family)
    for active in (plan.active, 0.8, 1.0):
        reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", tomoe_active=active, dtype=torch.float32)
        batch = clear_text(dense, other := InputsPlan(**(vars(plan) | {"active": active}))).batch(0, 0, 1, 1, 0)
        with inputs_masked(dense, other.inputs()), torch.no_grad():
            assert_same(reloaded(batch.input_ids).logits, dense(batch.input_ids).logits)


def test_every_token_chooses_in_training_whatever_prompts_do(tmp_path: Path) -> None:
    plan = make_inputs_plan(make_pico("qwen2"))
    results: list[dict[str, Tensor]] = []
    for prompts in ("chosen", "whole"):
        moe = fold(make_pico("qwen2"), plan)
        moe.config.tomoe_prompts = prompts
        result, _ = learned(moe, plan, recipe(), tmp_path / prompts).finish("")
        assert result.config.tomoe_prompts == prompts
        results.append(result.state_dict())
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_compute_what_they_computed_beside_the_weights(family: str, tmp_path: Path) -> None:
    """They see the chosen inputs alone, and the norms are those of both together."""
    pytest.importorskip("peft")
    plan, made = make_inputs_plan(make_pico(family)), recipe("weights=lora", "lora.rank=2", "train.learning_rate=0.1")
    learner = learned(fold(make_pico(family), plan), plan, made, tmp_path)
    assert all("lora_" in name for name, _ in learner.learned.named_parameters())
    # two adapters of each projection that has a choice
    adapted = sum(len(projections) for _, projections in learner.model.choices())
    assert len(list(learner.learned.parameters())) == 2 * adapted
    learner.write_()
    norms = [choice.norms.clone() for choice in choices_of(learner.model)]
    with torch.no_grad():
        texts = [clear.batch(0, 0, 1, 1, 0) for clear in map(Text, range(50))]
        beside = [learner.model(text.input_ids).logits for text in texts]
    moe, _ = learner.finish("")
    assert moe.state_dict().keys() == fold(make_pico(family), plan).state_dict().keys()
    for choice, own in zip(choices_of(moe), norms, strict=True):
        torch.testing.assert_close(choice.norms, own, rtol=2**-7, atol=0)  # neighbors as bfloat16 values
    # a sum of another order may round a norm otherwise, and so choose otherwise where scores are near
    with torch.no_grad():
        apart = [
            (moe(text.input_ids).logits - own).norm() / own.norm() for text, own in zip(texts, beside, strict=True)
        ]
    assert sorted(apart)[len(apart) // 2] < 1e-5
    assert not any(p.requires_grad for p in moe.parameters())
