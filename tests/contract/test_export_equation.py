"""The equation, one step on: masked dense model == every stock architecture that holds its plan; the rest is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_equation import assert_same, decisions
from torch import Tensor
from transformers import AutoModelForCausalLM, Exaone4ForCausalLM, OlmoForCausalLM, PreTrainedModel

from conftest import FAMILIES, FORMS, PICO, make_pico, make_plan, randomise, tokens
from tomoe.errors import UserError
from tomoe.exporting.stock.carrier import Stock
from tomoe.exporting.stock.overlapping import common_neurons
from tomoe.exporting.stock.qwen2_moe import Qwen2Moe
from tomoe.exporting.target import Options
from tomoe.exporting.targets import TARGETS, choose, write_export
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plan import Plan
from tomoe.pruning.masking import masked, planned_masks
from tomoe.pruning.repair.plan import repair_plan
from tomoe.recipe.conversion import RepairSection

pytestmark = pytest.mark.slow

# the first is what `auto` takes
HOLDS = {
    "llama": ("mixtral", "qwen2_moe"),
    "llama3": ("mixtral", "qwen2_moe"),
    "mistral": ("mixtral", "qwen2_moe"),
    "qwen2": ("qwen2_moe",),
    "qwen3": ("qwen3_moe",),
}
CASES = [(f, attention, c) for f in HOLDS for attention in ("off", "static") for c in HOLDS[f]]
SMALL = Options(width_multiple=8)


@dataclass(frozen=True)
class Case:
    dense: PreTrainedModel
    plan: Plan
    folded: ToMoEForCausalLM
    folder: Path


def make_case(family: str, attention: str, target: str, folder: Path, **changes: object) -> Case:
    dense = make_pico(family, **changes)
    # many neurons, so that experts of all layers differ in width and some neurons are in all experts
    plan = make_plan(dense, attention, active=0.8)
    moe = fold(dense, plan)
    write_export(choose(moe, target), moe, None, folder, SMALL)
    return Case(dense, plan, moe, folder)


@pytest.fixture(scope="module", params=CASES, ids=lambda three: "-".join(three))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case(*request.param, tmp_path_factory.mktemp("export") / request.param[2])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_export_computes_what_the_masks_mean(case: Case, implementation: str) -> None:
    exported, report = AutoModelForCausalLM.from_pretrained(
        case.folder, attn_implementation=implementation, output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(exported).__module__.startswith("transformers.models.")
    assert exported.dtype == torch.float32
    ids = tokens(2, 24, seed=5)  # beyond the sliding window of mistral
    with torch.no_grad():
        with masked(case.dense, planned_masks(case.plan)):
            meant = case.dense(ids).logits
        assert (meant - case.dense(ids).logits).abs().max() > 1e-2, "the masks changed nothing"
        assert_same(exported(ids).logits, meant)


@pytest.mark.parametrize("form", FORMS)
def test_the_own_form_holds_every_plan(form: str, tmp_path: Path) -> None:
    """Refitted matrices and a choice of V/O dims, too, with whatever experts."""
    dense, ids = make_pico("qwen2"), tokens(2, 24, seed=5)
    text = tokens(8, 16, seed=3)
    plan = make_plan(dense, "per_token", form=form)
    plan = repair_plan(plan, dense, text, torch.ones_like(text, dtype=torch.bool), RepairSection(mode="full"))
    moe = fold(dense, plan)
    write_export(choose(moe, "hf"), moe, None, tmp_path / "out", SMALL)
    with torch.no_grad():
        with masked(dense, planned_masks(plan)):
            meant = dense(ids).logits
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits, meant)


def test_what_all_experts_have_is_stored_once_where_there_is_a_shared_expert(tmp_path: Path) -> None:
    case = make_case("qwen2", "static", "qwen2_moe", tmp_path / "out")
    mlps = [layer.mlp for layer in case.folded.model.layers]
    layout = Qwen2Moe().layout(case.folded, 8)
    shared = [min(len(common_neurons(mlp)), layout.shared) for mlp in mlps]
    assert max(shared) > 0
    stored = load_file(case.folder / "model.safetensors")
    for i, (mlp, layer, count) in enumerate(zip(mlps, case.plan.counts, shared, strict=True)):
        block = f"model.layers.{i}.mlp."
        assert not stored[f"{block}shared_expert_gate.weight"].any()
        assert int(stored[f"{block}shared_expert.up_proj.weight"].any(1).sum()) == count
        for n in range(mlp.num_experts):
            up = stored[f"{block}experts.{n}.up_proj.weight"]
            assert len(up) == layout.width
            assert int(up.any(1).sum()) == layer.width - count
        rows = {
            tuple(r.tolist()) for name, t in stored.items() if name.startswith(block) and "up_proj" in name for r in t
        }
        dense = case.dense.model.layers[i].mlp.up_proj.weight
        assert rows - {(0.0,) * dense.shape[1]} <= {tuple(r.tolist()) for r in dense}


def test_biases_that_an_engine_expects_are_written_as_zeros(tmp_path: Path) -> None:
    """vLLM's Qwen2Moe has biases of Q, K and V whatever the config says, and does not fill those that a file leaves out."""
    case = make_case("llama", "static", "qwen2_moe", tmp_path / "out")
    stored = load_file(case.folder / "model.safetensors")
    for i, layer in enumerate(case.dense.model.layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            bias = stored[f"model.layers.{i}.self_attn.{name}.bias"]
            assert bias.shape == (getattr(layer.self_attn, name).out_features,)
            assert not bias.any()


@pytest.mark.parametrize(("family", "target"), [("llama3", "mixtral"), ("llama3", "qwen2_moe"), ("qwen3", "qwen3_moe")])
def test_a_reader_of_the_keys_of_transformers_4_computes_the_same(family: str, target: str, tmp_path: Path) -> None:
    changes = {} if family == "llama3" else {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    case = make_case(family, "off", target, tmp_path / "out", **changes)
    only_older_keys(case.folder)
    ids = tokens(2, 48, seed=5)
    with torch.no_grad():
        assert_same(AutoModelForCausalLM.from_pretrained(case.folder)(ids).logits, case.folded(ids).logits)


def only_older_keys(folder: Path) -> None:
    """Take from config.json what transformers 5 alone knows."""
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("rope_parameters")
    if "num_experts" in config:
        config.pop("num_local_experts", None)
    (folder / "config.json").write_text(json.dumps(config))


def test_what_cannot_be_held_is_refused_in_one_sentence(tmp_path: Path) -> None:
    def refusal(family: str, attention: str, target: str, **changes: object) -> str:
        with pytest.raises(UserError) as refused:
            make_case(family, attention, target, tmp_path / "out", **changes)
        assert not (tmp_path / "out").exists()
        assert "\n" not in str(refused.value)
        return str(refused.value)

    for family in ("llama", "qwen2", "qwen3"):
        assert "V/O dims for each token" in refusal(family, "per_token", HOLDS[family][0])
    assert "these can: hf" in refusal("phi", "off", "mixtral")
    assert "no gate" in refusal("phi", "off", "qwen2_moe")
    assert refusal("qwen2", "off", "mixtral").startswith(
        "mixtral cannot hold this model exactly: its Q, K and V projections have biases; these can: qwen2_moe"
    )
    assert "does not normalize Q and K" in refusal("llama", "off", "qwen3_moe")
    assert "normalizes Q and K" in refusal("qwen3", "off", "qwen2_moe")
    assert "output has a bias" in refusal("llama", "off", "qwen2_moe", attention_bias=True)
    assert "MLP has biases" in refusal("llama", "off", "mixtral", mlp_bias=True)
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    assert "sliding windows" in refusal("qwen3", "off", "qwen3_moe", **windows)
    assert "no export target 'mixtrel'" in refusal("llama", "off", "mixtrel")


@pytest.mark.parametrize(
    ("model_class", "target", "words"),
    [
        (OlmoForCausalLM, "mixtral", "its norms have no weights"),
        (OlmoForCausalLM, "glm4_moe", "its norms have no weights"),
        (Exaone4ForCausalLM, "qwen3_moe", "its layers have no `input_layernorm`"),
    ],
)
def test_norms_that_stand_elsewhere_are_refused_and_auto_takes_the_own_form(
    model_class: Any, target: str, words: str
) -> None:
    windows = {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention"] * 2}
    dense = randomise(model_class(model_class.config_class(**PICO | (windows if "4" in model_class.__name__ else {}))))
    form = "fine" if target == "glm4_moe" else "overlapping"
    moe = fold(dense, make_plan(dense, "off", form=form))
    with pytest.raises(UserError, match=words):
        choose(moe, target)
    assert words in str(TARGETS[target].supports_dense(dense, form))
    assert choose(moe, "auto").target.name == "hf"


@pytest.mark.parametrize(("layers", "family"), [(1, "qwen2"), (0, "qwen2"), (0, "qwen3")])
def test_sliding_windows_of_some_or_all_layers_are_kept(layers: int, family: str, tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": layers}
    case = make_case(family, "off", HOLDS[family][0], tmp_path / "out", **windows)
    exported, ids = AutoModelForCausalLM.from_pretrained(case.folder), tokens(2, 24, seed=5)
    with torch.no_grad():
        meant = case.folded(ids).logits
        assert_same(exported(ids).logits, meant)
        whole = make_pico(family)
        plan = Plan(case.plan.shape, case.plan.layers)
        assert (fold(whole, plan)(ids).logits - meant).abs().max() > 1e-2, "the window changed nothing"


def test_a_model_that_does_more_than_its_parts_say_is_refused() -> None:
    """Some families differ in ways that no config key or tensor name tells; a few tokens run through it do."""
    moe = fold(make_pico("llama"), make_plan(make_pico("llama"), "off"))
    assert TARGETS["mixtral"].supports(moe) is None
    norm = moe.model.layers[0].input_layernorm
    with torch.no_grad():
        handle = norm.register_forward_hook(lambda module, args, out: out + args[0])
        assert "RMS norms" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
        handle = moe.model.layers[0].register_forward_hook(lambda module, args, out: 2 * out)
        assert "not simply added" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
        handle = moe.model.layers[0].register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))
        assert "embeddings are scaled" in str(TARGETS["mixtral"].supports(moe))
        handle.remove()
    assert TARGETS["mixtral"].supports(moe) is None


def test_auto_takes_a_stock_architecture_where_one_fits_and_says_why() -> None:
    for family in FAMILIES:
        for attention in ("static", "per_token") if family in ("llama", "qwen2", "phi") else ("static",):
            dense = make_pico(family)
            choice = choose(fold(dense, make_plan(dense, attention)), "auto")
            if family in HOLDS and attention != "per_token":
                assert choice.target.name == HOLDS[family][0]
                assert "exactly" in choice.reason
            else:
                assert choice.target.name == "hf"
                assert all(carrier in choice.reason for carrier, target in TARGETS.items() if isinstance(target, Stock))


@pytest.mark.parametrize(("family", "target"), [(f, c) for f in HOLDS for c in HOLDS[f]])
def test_bfloat16_rounds_no_worse_than_masked_bfloat16(family: str, target: str, tmp_path: Path) -> None:
    """Where both choose the experts of the float32 function: a stock router rounds its logits to bfloat16, ours does not."""
    exact = make_pico(family)
    plan = make_plan(exact, "static")
    exact.save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    moe = fold(dense, plan)
    write_export(choose(moe, target), moe, None, tmp_path / "out", SMALL)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in exported.parameters()} == {torch.bfloat16}

    ids = tokens(64, 4, seed=9)
    with torch.no_grad():
        with masked(exact, planned_masks(plan)):
            meant, chosen_exactly = decisions(exact, plan, ids)
        with masked(dense, planned_masks(plan)):
            ours, chosen_masked = decisions(dense, plan, ids)
        chosen: list[Tensor] = []
        for layer in exported.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].view(*ids.shape)))
        theirs = exported(ids).logits.float()
    alike = torch.ones(ids.shape, dtype=torch.bool)
    for exactly, ours_chose, theirs_chose in zip(chosen_exactly, chosen_masked, chosen, strict=True):
        alike &= (exactly == ours_chose).all(-1) & (exactly.argmax(-1) == theirs_chose)
    alike = alike.cumprod(1).bool()  # a token sees those before it
    assert alike.sum() >= 40, "too few tokens to judge by"
    error_masked, error_exported = ((logits - meant)[alike].square().mean().sqrt() for logits in (ours, theirs))
    assert error_exported <= 1.5 * error_masked


STRANGER = """
import sys
sys.modules["tomoe"] = None  # from here on `import tomoe` fails
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(1)
ids = load_file(sys.argv[1])["ids"]
found = {}
for folder in sys.argv[3:]:
    for path in (folder, folder + "-again"):
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            found[path] = model(ids).logits
            found[path + "/written"] = model.generate(ids, max_new_tokens=6, do_sample=False)
        if path == folder:
            model.save_pretrained(folder + "-again")
save_file({name: value.contiguous().clone() for name, value in found.items()}, sys.argv[2])
"""


def test_a_process_without_tomoe_loads_generates_and_saves_again(tmp_path: Path) -> None:
    cases = {}
    for family, carriers in HOLDS.items():
        for target in carriers:
            folder = tmp_path / f"{family}-{target}"
            cases[str(folder)] = make_case(family, "static", target, folder)
    ids = tokens()
    save_file({"ids": ids}, tmp_path / "ids.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", STRANGER, tmp_path / "ids.safetensors", tmp_path / "found.safetensors", *cases],
        cwd=tmp_path,
        env=environment | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = load_file(tmp_path / "found.safetensors")
    for folder, case in cases.items():
        with torch.no_grad():
            meant = case.folded(ids).logits
            written = case.folded.generate(ids, max_new_tokens=6, do_sample=False)
        for path in (folder, f"{folder}-again"):
            assert_same(found[path], meant)
            assert torch.equal(found[f"{path}/written"], written)
        first, again = (load_file(Path(path) / "model.safetensors") for path in (folder, f"{folder}-again"))
        assert first.keys() == again.keys(), "transformers saves this architecture under other names"
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_large_exports_come_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tomoe.exporting.writing.SHARD_BYTES", 20_000)
    case = make_case("llama", "off", "mixtral", tmp_path / "out")
    shards = sorted(case.folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert all(shard.stat().st_size < 30_000 for shard in shards)
    assert (case.folder / "config.json").stat().st_mode == shards[0].stat().st_mode
    ids = tokens()
    with torch.no_grad():
        assert_same(AutoModelForCausalLM.from_pretrained(case.folder)(ids).logits, case.folded(ids).logits)
    assert list(tmp_path.iterdir()) == [case.folder]
