"""Active experts: an active fraction becomes a number of fine-grained experts a token, and every count follows it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM, MixtralConfig

import tomoe as package
from conftest import make_pico, pico_folder, tokens
from pico_files import CommandLine, refused
from tomoe.cli.console import printable
from tomoe.errors import UserError
from tomoe.evaluation.param_counts import model_facts
from tomoe.moe.active_experts import apply_setting_, runtime_settings


@pytest.fixture(scope="module")
def fine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with 16 shared neurons and 8 experts of 4; tokens use 3 of them in one layer and 2 in the other."""
    folder = tmp_path_factory.mktemp("fine") / "moe"
    _, plan = pico_folder(folder, "qwen2", "off", form="fine")
    assert [layer.top_k for layer in plan.layers] == [3, 2]
    return folder


def share(experts: int) -> float:
    """Active share of qwen2's pico model if both layers use so many experts in all, counted by hand."""
    attention, neuron, router = 2 * 32 * 8 * (4 + 2), 3 * 32, 8 * 32
    return (2 * (attention + router + 16 * neuron) + experts * 4 * neuron) / (2 * (attention + 48 * neuron))


def test_settings_in_numbers(fine: Path) -> None:
    """With more experts than planned, the layers use more in proportion to what they leave out."""
    settings = runtime_settings(str(fine))
    by_hand = {1: 1 + 1, 2: 2 + 1, 3: 3 + 2, 5: 5 + 4, 8: 8 + 8}
    for k, experts in by_hand.items():
        assert settings.setting(k).active_fraction == pytest.approx(share(experts)), k
    assert str(settings.setting(1)) == f"1 of 8 experts: {share(2):.3f} active"
    assert str(settings.setting(3)) == f"up to 3 of 8 experts: {share(5):.3f} active"
    assert settings.nearest(1.0) == settings.setting(8)
    assert settings.nearest(1e-9) == settings.setting(1)
    assert settings.nearest(share(5) + 1e-3) == settings.nearest(share(5) - 1e-3) == settings.setting(3)
    for wrong in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(UserError, match="above 0 and at most 1"):
            settings.nearest(wrong)


@pytest.mark.parametrize("k", [1, 3, 4, 8])
def test_counts_follow_the_setting(fine: Path, k: int) -> None:
    """What is set on a loaded model is what loading with it gives, and the counts know it."""
    moe = AutoModelForCausalLM.from_pretrained(fine)
    planned = model_facts(moe)
    apply_setting_(moe, runtime_settings(str(fine)).setting(k))
    facts = model_facts(moe)
    assert facts["active_share"] == pytest.approx(runtime_settings(str(fine)).setting(k).active_fraction)
    assert facts["active_params"] - facts["active_block_params"] == (
        planned["active_params"] - planned["active_block_params"]
    )
    assert (facts["total_params"], facts["block_params"]) == (planned["total_params"], planned["block_params"])
    assert (facts["active_block_params"] == facts["block_params"]) == (k == 8)
    other = AutoModelForCausalLM.from_pretrained(fine, num_experts_per_tok=k)
    with torch.no_grad():
        assert torch.equal(moe(tokens()).logits, other(tokens()).logits)
        assert model_facts(other) == facts


def test_a_stock_model_with_a_shared_expert_counts_what_a_token_meets() -> None:
    config = Glm4MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=40,
        moe_intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    )
    facts = model_facts(Glm4MoeForCausalLM(config))
    attention, dense, expert, router = 32 * 8 * (4 + 2 + 2 + 4), 3 * 32 * 40, 3 * 32 * 8, 16 * 32
    assert facts["active_block_params"] == 3 * attention + dense + 2 * ((3 + 1) * expert + router)
    assert facts["block_params"] == 3 * attention + dense + 2 * ((16 + 1) * expert + router)


def test_what_has_no_runtime_settings_says_why(tmp_path: Path) -> None:
    make_pico("qwen2").save_pretrained(tmp_path / "dense")
    pico_folder(tmp_path / "overlapping", "qwen2", "off")
    MixtralConfig().save_pretrained(tmp_path / "stock")
    for name, words in {
        "dense": "is a dense model: every token uses all of its parameters",
        "overlapping": "has overlapping experts, of which every token uses one",
        "stock": "a model of the type mixtral, which `tomoe convert` did not write; the converted folder",
    }.items():
        with pytest.raises(UserError, match=words):
            runtime_settings(str(tmp_path / name))


@pytest.mark.slow
def test_generating_with_another_number_of_experts(tomoe: CommandLine, converted_fine: Path) -> None:
    folder = converted_fine / "moe"
    setting = runtime_settings(str(folder)).nearest(0.4)
    done = tomoe("generate", folder, "the sea", "--active", "40%", "--max-new-tokens", "8")
    assert done.code == 0, done.err
    assert done.err == f"{setting}\n"
    assert abs(setting.active_fraction - 0.4) < 0.01
    model, tokenizer = package.load(folder, active=0.4)
    assert model.config.num_experts_per_tok == setting.value
    assert done.out == printable("the sea" + package.generate(model, tokenizer, "the sea", 8)) + "\n"
    refused(tomoe("generate", converted_fine / "dense", "the sea", "--active", "0.4"), "is a dense model")
    refused(tomoe("generate", folder, "the sea", "--active", "1.5"), "at most 1")
