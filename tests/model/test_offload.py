"""Offloaded layers: the same bytes as from the whole model, and never two layers in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import FAMILIES, make_pico, make_plan, tokens
from pico_files import CommandLine, contents, pico_recipe, small, write_pico, write_text
from stored_models import write_gguf
from tomoe.conversion import verbs
from tomoe.conversion.convert import convert
from tomoe.errors import UserError
from tomoe.evaluation.evaluate import evaluate
from tomoe.memory import estimate
from tomoe.model import hub
from tomoe.model.loading import fingerprint, load_config, load_dense
from tomoe.model.mlp import decoder_layers
from tomoe.model.structure import check_output
from tomoe.moe import checkpoint
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import FoldedLayers, fold
from tomoe.pruning.layouts import settle_layout
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow

# they say how it was made
METADATA = ("recipe.json", "plan.json", "SHA256SUMS", "README.md", ".README.md.sha256")


def recipe(folder: Path, *changes: str) -> Recipe:
    return pico_recipe(folder, "train.steps=0", *changes)


def weights(out: Path) -> dict[str, str]:
    """What a conversion is, without the run that it came from."""
    return {name: value for name, value in contents(out, METADATA).items() if not name.startswith("run/")}


# what is read layer by layer always computes as it is stored
STORED = ("train.dtype=bfloat16", "train.compute_dtype=stored")


def in_memory(model: nn.Module) -> list[int]:
    return [i for i, layer in enumerate(decoder_layers(model)) if not all(p.is_meta for p in layer.parameters())]


# mistral's tensors have the names and kinds of llama's
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "mistral"])
def test_carving_and_folding_from_files_give_the_bytes_of_the_whole_model(family: str, tmp_path: Path) -> None:
    write_pico(tmp_path / "dense", family)
    write_text(tmp_path / "text.txt")
    kind = {"llama3": STORED, "qwen3": ("attention.pruning=per_token",)}.get(family, ())
    made = [
        convert(recipe(tmp_path, *kind, f"offload={offload}"), tmp_path / f"offload-{offload}")
        for offload in ("false", "true")
    ]
    assert made[0].source == made[1].source
    assert made[0].dense_config == made[1].dense_config
    whole, offloaded = (weights(tmp_path / f"offload-{offload}") for offload in ("false", "true"))
    assert {"plan.safetensors", "model.safetensors", "config.json"} <= set(whole)
    assert offloaded == whole
    # the stages by themselves read layer by layer too
    verbs.plan(tmp_path / "offload-false" / "run", tmp_path / "plan")
    verbs.apply_plan(str(tmp_path / "plan"), None, tmp_path / "applied")
    assert weights(tmp_path / "applied") == whole
    moe = load_dense(str(tmp_path / "applied"), torch.float32)
    dense = load_dense(str(tmp_path / "dense"), torch.bfloat16 if family == "llama3" else torch.float32)
    meant = fold(dense, made[0]).float()
    assert all(torch.equal(t, moe.state_dict()[name]) for name, t in meant.state_dict().items())


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    make_pico("llama", num_hidden_layers=3).save_pretrained(tmp_path / "dense", max_shard_size="20KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 3
    return tmp_path / "dense"


def test_one_layer_is_in_memory_at_a_time(dense: Path) -> None:
    model, whole = load_dense(str(dense), torch.float32, offload=True), load_dense(str(dense), torch.float32)
    held: list[list[int]] = []
    for layer in decoder_layers(model):
        layer.mlp.register_forward_hook(lambda *_: held.append(in_memory(model)))
    with torch.no_grad():
        assert torch.equal(model(tokens()).logits, whole(tokens()).logits)
    assert held == [[0], [1], [2]]
    check_output(model)
    assert fingerprint(model) == fingerprint(whole)
    assert in_memory(model) == []


def test_a_model_is_folded_while_it_is_written(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into several files, from an offloaded and from a whole model; each layer once, and no two at a time."""
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SHARD_BYTES", "30KB")
    whole = load_dense(str(dense), torch.float32)
    plan = make_plan(whole, "static")
    meant = fold(whole, plan)
    folded: list[int] = []
    asked = FoldedLayers.layer

    def layer(self: FoldedLayers, i: int) -> dict[str, torch.Tensor]:
        if self.number != i:
            folded.append(i)
        found = asked(self, i)
        assert in_memory(offloaded) == []
        return found

    for name, offloaded in (("offloaded", load_dense(str(dense), torch.float32, offload=True)), ("whole", whole)):
        lazy = fold(offloaded, plan, lazily=True)
        if name == "offloaded":
            monkeypatch.setattr(FoldedLayers, "layer", layer)
        save_moe(lazy, plan, None, tmp_path / name)
        monkeypatch.setattr(FoldedLayers, "layer", asked)
        with torch.no_grad():
            assert torch.equal(lazy(tokens()).logits, meant(tokens()).logits)
    assert folded == [0, 1, 2]
    assert contents(tmp_path / "offloaded") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 4
    found = load_dense(str(tmp_path / "whole"), torch.float32).state_dict()
    assert all(torch.equal(t, found[name]) for name, t in meant.state_dict().items())


def test_offloaded_models_are_measured_as_whole_ones_are(tmp_path: Path) -> None:
    write_pico(tmp_path / "dense", "qwen2")
    write_text(tmp_path / "text.txt")
    convert(recipe(tmp_path, *STORED), tmp_path / "moe")
    names = [str(tmp_path / "dense"), str(tmp_path / "moe")]
    whole, offloaded = (evaluate(names, tokens=64, dtype="bfloat16", offload=offload) for offload in (False, True))
    assert offloaded == whole
    assert whole[1].measurement.kl != 0


def test_the_command_says_that_nothing_was_measured(tomoe: CommandLine, tmp_path: Path) -> None:
    write_pico(tmp_path / "dense")
    text = write_text(tmp_path / "text.txt")
    command = ["carve", tmp_path / "dense", "--data", text, "-o", tmp_path / "moe", *small(), "--offload"]
    done = tomoe(*command)
    assert done.code == 0, done.err
    assert f"tomoe evaluate {tmp_path / 'dense'} {tmp_path / 'moe'} --offload" in done.err.replace("\n", " ")
    assert (tmp_path / "moe" / "README.md").exists()
    assert not (tmp_path / "moe" / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["train.steps=3", "data.sources=text.txt"], r"learning takes thousands of passes \(train.steps is 3\)"),
        (["data.sources=text.txt,self"], "the source self takes one pass per token"),
        (["data.sources=text.txt", "train.shard=true"], "offload and train.shard cannot be combined"),
    ],
)
def test_what_cannot_be_offloaded(changes: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Recipe.load(None, ["offload=true", "train.steps=0", *changes])


def test_a_gguf_file_is_loaded_whole(tmp_path: Path) -> None:
    write_gguf(make_pico("llama"), tmp_path / "model.gguf")
    with pytest.raises(UserError, match="GGUF is unpacked as a whole; load it whole"):
        load_dense(str(tmp_path / "model.gguf"), torch.float32, offload=True)
    assert load_dense(str(tmp_path / "model.gguf"), torch.float32, offload=None).device.type == "cpu"


def rewrite(folder: Path, name: str, change: dict[str, torch.Tensor | None]) -> None:
    """Change or take away tensors of a model in one file."""
    tensors = load_file(folder / name)
    tensors |= {key: value for key, value in change.items() if value is not None}
    save_file({k: v for k, v in tensors.items() if change.get(k, v) is not None}, folder / name, {"format": "pt"})


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    make_pico("llama").save_pretrained(tmp_path / "dense")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path / "dense", "model.safetensors", {name: None, "model.norm.weight": torch.ones(7)})
    with pytest.raises(UserError, match=rf"lack 1 tensors of its config, for example {name}"):
        load_dense(str(tmp_path / "dense"), torch.float32, offload=True)
    rewrite(tmp_path / "dense", "model.safetensors", {name: torch.ones(48, 32)})
    with pytest.raises(UserError, match=r"model.norm.weight is \(7,\), its config says \(32,\)"):
        load_dense(str(tmp_path / "dense"), torch.float32, offload=True)
    rewrite(tmp_path / "dense", "model.safetensors", {name: torch.ones(47, 32), "model.norm.weight": torch.ones(32)})
    with pytest.raises(UserError, match=r"model.layers.1.mlp.up_proj.weight is \(47, 32\)"):
        load_dense(str(tmp_path / "dense"), torch.float32, offload=True)


def test_row_numbers_of_an_offloaded_moe_are_checked(dense: Path, tmp_path: Path) -> None:
    whole = load_dense(str(dense), torch.float32)
    plan = make_plan(whole, "off")
    save_moe(fold(whole, plan), plan, None, tmp_path / "moe")
    rows = load_file(tmp_path / "moe" / "model.safetensors")["model.layers.1.mlp.expert_neurons"]
    rewrite(tmp_path / "moe", "model.safetensors", {"model.layers.1.mlp.expert_neurons": rows + 1000})
    with pytest.raises(UserError, match="layer 1 numbers its neurons of an expert out of order or outside"):
        load_dense(str(tmp_path / "moe"), torch.float32, offload=True)


def test_what_a_run_is_does_not_depend_on_how_it_was_read() -> None:
    values = ["train.steps=0", "data.sources=text.txt"]
    whole, offloaded = Recipe.load(None, values), Recipe.load(None, [*values, "offload=true"])
    assert whole.digest() == offloaded.digest()
    assert json.loads(offloaded.model_dump_json())["offload"] is True


def test_what_is_read_layer_by_layer_needs_the_memory_of_a_layer(
    tomoe: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pico(tmp_path / "dense", num_hidden_layers=6)
    text = write_text(tmp_path / "text.txt")
    # `tomoe carve` repairs, too
    whole, offloaded = (recipe(tmp_path, "repair.mode=full", *more) for more in ([], ["offload=true"]))
    sizes = estimate.sizes_of(load_config(str(tmp_path / "dense")), whole)
    layer, all_layers = (weights.total for weights in (largest(sizes, offloaded), largest(sizes, whole)))
    assert all_layers - layer == 4 * sizes.decoder_params * 5 // 6
    too_little = int((1 - estimate.MARGIN) * all_layers) - 1
    monkeypatch.setattr(estimate, "available_memory", lambda device: estimate.AvailableMemory(too_little, 0))
    command = ["carve", tmp_path / "dense", "--data", text, "-o", tmp_path / "moe", *small()]
    refused = tomoe(*command)
    assert refused.code == 2
    assert "--offload holds one layer at a time" in refused.err
    assert tomoe(*command, "--offload").code == 0


def largest(sizes: estimate.Sizes, recipe: Recipe) -> estimate.MemoryEstimate:
    return max(estimate.least_memory(sizes, recipe, settle_layout(recipe, sizes.shape)), key=lambda need: need.total)


def test_files_with_other_names_are_read_by_layer_too(tmp_path: Path) -> None:
    """transformers finds tensors that lack the first part of their name."""
    write_pico(tmp_path / "dense")
    whole = load_dense(str(tmp_path / "dense"), torch.float32)
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    short = {name.removeprefix("model."): t for name, t in stored.items()}
    save_file(short, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    assert fingerprint(load_dense(str(tmp_path / "dense"), torch.float32, offload=True)) == fingerprint(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_output_matrices_are_tied_as_the_whole_models(tied: bool, tmp_path: Path) -> None:
    """By the config; but where the files hold two different ones, both are kept."""
    make_pico("llama3").save_pretrained(tmp_path / "dense")
    if not tied:
        rewrite(tmp_path / "dense", "model.safetensors", {"lm_head.weight": torch.randn(64, 32)})
    whole, offloaded = (
        load_dense(str(tmp_path / "dense"), torch.float32, offload=offload) for offload in (False, True)
    )
    assert (offloaded.lm_head.weight is offloaded.model.embed_tokens.weight) is tied
    assert fingerprint(offloaded) == fingerprint(whole)
    with torch.no_grad():
        assert torch.equal(offloaded(tokens()).logits, whole(tokens()).logits)


def test_a_model_on_the_hub(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        asked.append(name)
        if not (dense / name).is_file():
            raise EntryNotFoundError(name)
        return str(dense / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    offloaded = load_dense("owner/name", torch.float32, offload=True)
    assert asked[-3:] == sorted(path.name for path in dense.glob("*.safetensors"))[-3:]
    assert fingerprint(offloaded) == fingerprint(load_dense(str(dense), torch.float32))


def test_an_adapter_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "ada/base"}')

    def download(repo: str, name: str, revision: str | None = None) -> str:
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError(name)
        return str(tmp_path / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    with pytest.raises(UserError, match="holds an adapter of ada/base, not a model; merge it"):
        load_dense("owner/adapter", torch.float32)


def test_a_hub_out_of_reach_is_one_sentence() -> None:
    with pytest.raises(UserError, match="cannot load the model owner/nothing-there from the hub"):
        load_dense("owner/nothing-there", torch.float32, offload=True)
