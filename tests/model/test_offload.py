"""Offloaded layers: the same bytes as from the whole model, and never two layers in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from torch import nn

from conftest import make_pico, make_plan, tokens
from pico_files import SMALL, CommandLine, contents, pico_recipe, write_pico
from pico_tokenizer import TOKENIZER
from stored_models import edit_tensors, write_gguf
from tomoe.errors import UserError
from tomoe.evaluation.evaluate import evaluate
from tomoe.evaluation.results import read_rows
from tomoe.exporting.choice import TARGETS
from tomoe.model import hub
from tomoe.model.loading import fingerprint, load_dense
from tomoe.model.mlp import decoder_layers
from tomoe.model.structure import check_output
from tomoe.moe import checkpoint
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.fold import FoldedLayers, fold
from tomoe.pipeline import stages
from tomoe.pipeline.convert import convert
from tomoe.recipe.conversion import Recipe

pytestmark = pytest.mark.slow

# they say how it was made
METADATA = ("recipe.json", "plan.json", "SHA256SUMS", "README.md", ".README.md.sha256")


def recipe(folder: Path, *changes: str) -> Recipe:
    return pico_recipe(folder, "train.steps=0", "repair.tokens=128", *changes)


def weights(out: Path) -> dict[str, str]:
    """What a conversion is, without the run that it came from."""
    return {name: value for name, value in contents(out, METADATA).items() if not name.startswith("run/")}


# what is read layer by layer always computes as it is stored
STORED = ("train.dtype=bfloat16", "train.compute_dtype=stored")


def in_memory(model: nn.Module) -> list[int]:
    return [i for i, layer in enumerate(decoder_layers(model)) if not all(p.is_meta for p in layer.parameters())]


@pytest.mark.usefixtures("text")
def test_carving_and_folding_from_files_give_the_bytes_of_the_whole_model(tmp_path: Path) -> None:
    """With a tied output matrix, computing as stored, norms of heads, and values chosen token by token."""
    write_pico(tmp_path / "dense", "qwen3", tie_word_embeddings=True)
    kind = (*STORED, "attention.pruning=per_token")
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
    stages.train(recipe(tmp_path, *kind, "offload=true"), tmp_path / "run")
    stages.plan(tmp_path / "run", tmp_path / "plan")
    stages.apply_plan(str(tmp_path / "plan"), None, tmp_path / "applied")
    assert weights(tmp_path / "applied") == whole
    moe = load_dense(str(tmp_path / "applied"), torch.float32)
    dense = load_dense(str(tmp_path / "dense"), torch.bfloat16)
    meant = fold(dense, made[0]).float()
    assert all(torch.equal(t, moe.state_dict()[name]) for name, t in meant.state_dict().items())


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    """With biases and without gates, in several files."""
    make_pico("phi", num_hidden_layers=3).save_pretrained(tmp_path / "dense", max_shard_size="20KB")
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


def test_offloaded_models_are_measured_as_whole_ones_are(converted: Path) -> None:
    names = [str(converted / "dense"), str(converted / "moe")]
    whole, offloaded = (evaluate(names, tokens=64, dtype="bfloat16", offload=offload) for offload in (False, True))
    assert offloaded == whole
    assert whole[1].measurement.kl != 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi"])
def test_every_target_judges_an_offloaded_model_as_a_whole_one(tmp_path: Path, family: str) -> None:
    make_pico(family).save_pretrained(tmp_path / "dense")
    whole, offloaded = (
        load_dense(str(tmp_path / "dense"), torch.float32, offload=offload) for offload in (False, True)
    )
    for target in TARGETS.values():
        for form in ("fine", "overlapping"):
            assert target.supports_dense(offloaded, form) == target.supports_dense(whole, form)


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize(
    ("format", "sets"),
    [
        ("glm4_moe", ("experts.num_experts=16", "experts.expert_size=16")),
        ("mixtral", ("experts.form=overlapping",)),
        ("gguf", ("experts.num_experts=16", "experts.expert_size=16")),
    ],
)
def test_a_conversion_for_a_target_is_measured_and_exported_layer_by_layer(
    tomoe: CommandLine, tmp_path: Path, format: str, sets: tuple[str, ...]
) -> None:
    """The same files, numbers and proof as with whole models."""
    if format == "gguf":
        pytest.importorskip("xllamacpp")
    dense = write_pico(tmp_path / "dense", vocab_size=len(TOKENIZER), num_hidden_layers=3)
    TOKENIZER.save_pretrained(dense)
    more = {"train.compute_dtype": "stored", "experts.form": "fine"} | dict(key.split("=") for key in sets)
    sizes = [
        word for key, value in (SMALL | {"train.steps": "0"} | more).items() for word in ("--set", f"{key}={value}")
    ]
    found = []
    for options in ([], ["--offload"]):
        out = tmp_path / f"moe{'-'.join(options)}"
        words = ("--data", tmp_path / "text.txt", "--active", "0.8173", "--format", format)
        done = tomoe("convert", dense, "-o", out, *words, *sizes, *options)
        assert done.code == 0, done.err
        proof = json.loads((out / f"export-{format}" / "export.json").read_text())["proof"]
        rows = [vars(row.measurement) for row in read_rows(out)]
        found.append((proof, rows, weights(out)))
    (proof, rows, files), (by_layer, by_layer_rows, by_layer_files) = found
    assert proof["same"] is True
    # to generate a sample, every token would read all layers again
    proof.pop("written", None)
    assert by_layer == proof
    assert by_layer_rows == [row | {"model": new["model"]} for row, new in zip(rows, by_layer_rows, strict=True)]
    assert rows[1]["kl"] > 0
    # the rest tells what was measured and when
    parts = ("model.safetensors", "plan.safetensors", f"export-{format}/model")
    kept = [name for name in files if name.startswith(parts)]
    assert len(kept) >= 3
    assert [by_layer_files[name] for name in kept] == [files[name] for name in kept]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["train.steps=3", "data.sources=text.txt"], r"training takes thousands of passes \(train.steps is 3\)"),
        (["data.sources=text.txt,self"], "the source self takes one pass per token"),
        (["data.sources=text.txt", "train.shard=true"], "offload and train.shard cannot be combined"),
    ],
)
def test_what_cannot_be_offloaded(changes: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        Recipe.load(None, ["offload=true", "train.steps=0", *changes])


def test_a_gguf_file_is_converted_layer_by_layer(tmp_path: Path) -> None:
    """Never a number of another layer is read, and what is written is what the whole file becomes."""
    write_gguf(make_pico("llama", num_hidden_layers=3), tmp_path / "model.gguf")
    models = {
        offload: load_dense(str(tmp_path / "model.gguf"), torch.float32, offload=offload) for offload in (True, None)
    }
    assert all(in_memory(model) == [] for model in models.values())
    whole = load_dense(str(tmp_path / "model.gguf"), torch.float32)
    plan = make_plan(whole, "static")
    moes = [fold(model, plan, lazily=lazily) for model, lazily in ((models[True], True), (whole, False))]
    with torch.no_grad():
        assert torch.equal(moes[0](tokens()).logits, moes[1](tokens()).logits)
    assert in_memory(models[True]) == []


def test_row_numbers_of_an_offloaded_moe_are_checked(dense: Path, tmp_path: Path) -> None:
    whole = load_dense(str(dense), torch.float32)
    plan = make_plan(whole, "off")
    save_moe(fold(whole, plan), plan, None, tmp_path / "moe")
    rows = "model.layers.1.mlp.expert_neurons"
    edit_tensors(tmp_path / "moe", lambda tensors: tensors | {rows: tensors[rows] + 1000})
    with pytest.raises(UserError, match="layer 1 numbers its neurons of an expert out of order or outside"):
        load_dense(str(tmp_path / "moe"), torch.float32, offload=True)


def test_what_a_run_is_does_not_depend_on_how_it_was_read() -> None:
    values = ["train.steps=0", "data.sources=text.txt"]
    whole, offloaded = Recipe.load(None, values), Recipe.load(None, [*values, "offload=true"])
    assert whole.digest() == offloaded.digest()
    assert json.loads(offloaded.model_dump_json())["offload"] is True


def test_files_with_other_names_are_read_by_layer_too(tmp_path: Path) -> None:
    """transformers finds tensors that lack the first part of their name."""
    write_pico(tmp_path / "dense")
    whole = load_dense(str(tmp_path / "dense"), torch.float32)
    edit_tensors(tmp_path / "dense", lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()})
    assert fingerprint(load_dense(str(tmp_path / "dense"), torch.float32, offload=True)) == fingerprint(whole)


@pytest.mark.parametrize("tied", [True, False])
def test_output_matrices_are_tied_as_the_whole_models(tied: bool, tmp_path: Path) -> None:
    """By the config; but where the files hold two different ones, both are kept."""
    make_pico("llama3").save_pretrained(tmp_path / "dense")
    if not tied:
        edit_tensors(tmp_path / "dense", lambda tensors: tensors | {"lm_head.weight": torch.ones(64, 32)})
    whole, offloaded = (
        load_dense(str(tmp_path / "dense"), torch.float32, offload=offload) for offload in (False, True)
    )
    for model in (whole, offloaded):
        assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
        assert model.config.tie_word_embeddings is tied
    assert fingerprint(offloaded) == fingerprint(whole)
    with torch.no_grad():
        assert torch.equal(offloaded(tokens()).logits, whole(tokens()).logits)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that were downloaded from the hub, of which every repository is `dense`."""
    names: list[str] = []

    def download(repo: str, name: str, revision: str | None = None) -> str:
        names.append(name)
        if not (tmp_path / "dense" / name).is_file():
            raise EntryNotFoundError(name)
        return str(tmp_path / "dense" / name)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    return names


def test_a_model_on_the_hub(dense: Path, asked: list[str]) -> None:
    offloaded = load_dense("owner/name", torch.float32, offload=True)
    assert asked[-3:] == sorted(path.name for path in dense.glob("*.safetensors"))[-3:]
    assert fingerprint(offloaded) == fingerprint(load_dense(str(dense), torch.float32))


@pytest.mark.usefixtures("asked")
def test_an_adapter_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "dense").mkdir()
    (tmp_path / "dense" / "adapter_config.json").write_text('{"base_model_name_or_path": "ada/base"}')
    with pytest.raises(UserError, match="holds an adapter of ada/base, not a model; merge it"):
        load_dense("owner/adapter", torch.float32)
