"""The converted model under other people's loops: transformers.Trainer and TRL, with the balance loss that stock MoEs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from conftest import make_pico, make_plan, pico_moe, tokens
from pico_files import write_text
from pico_tokenizer import make_tokenizer
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, balance_loss

pytestmark = pytest.mark.slow

ARGUMENTS = dict(
    max_steps=8,
    per_device_train_batch_size=4,
    learning_rate=3e-3,
    lr_scheduler_type="constant",
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    bf16=False,
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
    dataloader_pin_memory=False,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A converted model with a tokenizer, whose experts are balanced while it is trained."""
    tokenizer = make_tokenizer()
    dense = make_pico("llama", vocab_size=len(tokenizer))
    plan = make_plan(dense, "per_token")
    save_moe(fold(dense, plan), plan, tokenizer, tmp_path / "moe")
    return tmp_path / "moe"


def load(folder: Path, **changes: Any) -> ToMoEForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **changes)


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def assert_it_learned_and_comes_back(trainer: Trainer, before: ToMoEForCausalLM, out: Path, most: float) -> None:
    """`most`: what may be left of the loss."""
    found = losses(trainer)
    assert sum(found[-2:]) < most * sum(found[:2]), found
    for layer, was in zip(trainer.model.model.layers, before.model.layers, strict=True):
        assert not torch.equal(layer.mlp.router.weight, was.mlp.router.weight), "the router learned nothing"
        assert not torch.equal(layer.mlp.down_proj, was.mlp.down_proj)
    trainer.save_model(str(out))
    again, ids = load(out), tokens()
    with torch.no_grad():
        assert torch.equal(again(ids).logits, trainer.model.eval()(ids).logits)
        assert not torch.equal(again(ids).logits, before(ids).logits)


def test_the_trainer_of_transformers(folder: Path, tmp_path: Path) -> None:
    model = load(folder, output_router_logits=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens(32, 12, seed=3)[:4].repeat(8, 1)]
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path / "trainer"), **ARGUMENTS), train_dataset=rows)
    trainer.train()
    # 0.66 over eight seeds, with a standard deviation of 0.026
    assert_it_learned_and_comes_back(trainer, load(folder), tmp_path / "trained", 0.93)


@pytest.mark.filterwarnings(
    "ignore:.*is deprecated and will be removed:FutureWarning"
)  # TRL speaks as transformers did before
def test_the_supervised_trainer_of_trl(folder: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    lines = [line[:24] for line in write_text(tmp_path / "text.txt", 8).read_text().split("\n\n")]
    model = load(folder, output_router_logits=True)
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "trl"), max_length=32, dataset_num_proc=None, **ARGUMENTS)
    trainer = trl.SFTTrainer(
        model, args=arguments, train_dataset=Dataset.from_dict({"text": lines * 4}), processing_class=make_tokenizer()
    )
    trainer.train()
    # its own words for what stock MoEs report
    # the smallest is 1.05 over eight seeds, with a standard deviation of 0.043
    assert all(row["aux_loss"] > 0.5 for row in trainer.state.log_history if "aux_loss" in row)
    assert any("aux_loss" in row for row in trainer.state.log_history)
    # 0.75 over eight seeds, with a standard deviation of 0.026
    assert_it_learned_and_comes_back(trainer, load(folder), tmp_path / "trained", 1.0)


def test_balance_loss_of_the_model() -> None:
    """Written out token by token; padding does not count, and the loss has its share of it."""
    moe = pico_moe("qwen2", "off")[0].requires_grad_(True)
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    bare = moe(ids, attention_mask=mask, labels=ids)
    out = moe(ids, attention_mask=mask, labels=ids, output_router_logits=True)
    assert getattr(bare, "aux_loss", None) is None
    assert getattr(bare, "router_logits", None) is None
    assert len(out.router_logits) == len(moe.model.layers)
    total = 0.0
    for logits in out.router_logits:
        probs = logits.softmax(-1)[mask.flatten().bool()].tolist()
        for i in range(4):
            share = sum(row.index(max(row)) == i for row in probs) / len(probs)
            total += 4 * share * sum(row[i] for row in probs) / len(probs)
    torch.testing.assert_close(out.aux_loss.item(), total / len(out.router_logits), rtol=1e-5, atol=0)
    torch.testing.assert_close(out.loss, bare.loss + 0.1 * out.aux_loss)
    out.aux_loss.backward()
    assert all(bool(layer.mlp.router.weight.grad.any()) for layer in moe.model.layers)
    assert not any(layer.mlp.router._forward_hooks for layer in moe.model.layers)


def test_balance_loss_is_one_where_tokens_spread_evenly_and_n_where_all_go_one_way() -> None:
    even, alike = 50.0 * torch.eye(4).repeat(3, 1), 50.0 * torch.eye(4)[:1].repeat(12, 1)
    torch.testing.assert_close(balance_loss([even], None), torch.tensor(1.0))
    torch.testing.assert_close(balance_loss([even, alike], None), torch.tensor(2.5))
