"""`tomoe export`: what it says, writes, proves and refuses; and the measure that the proof rests on."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import tomoe.exporting.stock.architecture as architecture
import tomoe.exporting.writing as writing
from conftest import LLAMA3_ROPE, make_pico, tokens
from pico_files import SMALL, CommandLine, contents, pico_recipe, proved, write_folded, write_pico, write_text
from pico_tokenizer import make_tokenizer
from tomoe.errors import UserError
from tomoe.evaluation.perplexity import measure
from tomoe.exporting.agreement import BOUNDS, agree, judge, record, summarize
from tomoe.exporting.stock.architecture import StockArch, StockLayout
from tomoe.exporting.stock.table import Mixtral
from tomoe.files import format_bytes
from tomoe.moe.modeling_tomoe import ToMoEMLP
from tomoe.pipeline.convert import convert

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder, with the text that it held out."""
    place = tmp_path_factory.mktemp("made")
    dense = write_pico(place / "dense")
    tokenizer = AutoTokenizer.from_pretrained(dense)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(dense)
    write_text(place / "text.txt")
    convert(pico_recipe(place, "train.steps=0"), place / "moe")
    return place / "moe"


def test_an_export_says_what_it_costs_and_proves_itself(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    before = contents(made)
    done = tomoe("export", made, "-o", tmp_path / "out")
    proof = proved(done, tmp_path / "out")
    assert "mixtral: Mixtral holds it exactly" in done.err
    stored = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert format_bytes(json.loads((tmp_path / "out" / "export.json").read_text())["bytes"]) in done.err
    assert "It is for loading elsewhere, not for speed" in done.err
    assert "The same model: largest difference" in done.out
    assert contents(made) == before
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]

    metadata = json.loads((tmp_path / "out" / "export.json").read_text())
    assert metadata["bytes"] == pytest.approx(stored, rel=0.05)
    assert proof["typical_difference"] <= proof["largest_difference"] <= 1e-4 * proof["largest_logit"]
    assert proof["kl"] < 1e-6
    assert proof["top1_agreement"] == 1
    assert proof["perplexity"] == pytest.approx(proof["reference_perplexity"], rel=1e-5)
    # all that was held out, but the first token of each sequence of 16
    assert proof["positions"] == int(SMALL["data.evaluation_tokens"]) * 15 // 16

    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code" not in card
    assert "It predicts the same: largest difference" in card
    assert f"loaded with transformers 4.57.1, {transformers.__version__}." in card
    assert "tomoe export moe --format mixtral -o out" in card
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(made).chat_template
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.model_type == "mixtral"
    assert again.generation_config.eos_token_id == 2


def test_its_own_form_travels_too(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    done = tomoe("export", made, "--format", "hf", "-o", tmp_path / "out", "--tokens", "32")
    assert proved(done, tmp_path / "out")["positions"] == 30
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "(5.16 to 5.24 were tried" in card
    ids = tokens()
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (made, tmp_path / "out"))
    assert torch.equal(ours, theirs)


def test_text_of_ones_own_and_a_coarser_dtype(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", sentences=8)
    options = ("--text", text, "--dtype", "bfloat16", "--width-multiple", "256")
    done = tomoe("export", made, "-o", tmp_path / "out", *options)
    assert proved(done, tmp_path / "out")["how"].startswith("bfloat16")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["text"]["name"] == "text.txt"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.intermediate_size % 256 == 0


def test_what_a_short_text_does_not_reach_is_tried(
    tomoe: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of 16 tokens see neither a window of 32 nor frequencies that change after 64 tokens."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    sizes = {"max_position_embeddings": 256, "sliding_window": 32}
    moe = write_folded(tmp_path / "moe", "mistral", make_tokenizer(), rope_parameters=rope, **sizes)
    text = write_text(tmp_path / "text.txt")
    export = ("export", moe, "--text", text, "--tokens", "16", "--format", "mixtral", "-o")
    done = tomoe(*export, tmp_path / "right")
    edges = {"window": "beyond the window of 32 tokens", "context": "beyond the original context of 64 tokens"}
    assert [tried["what"] for tried in proved(done, tmp_path / "right")["far"]] == list(edges.values())
    for edge, words in edges.items():
        assert f"{words} largest difference" in " ".join(done.out.split())
        monkeypatch.setattr(architecture, "write_config", partial(without_the_edge, edge))
        failed = tomoe(*export, tmp_path / "out")
        assert failed.code == 2
        assert f"would not be the same model: {words} its predictions differ by" in " ".join(failed.err.split())
        assert not (tmp_path / "out").exists()


def without_the_edge(edge: str, config: PreTrainedConfig, folder: Path) -> None:
    """A config.json that says nothing of windows, or of other frequencies for many tokens."""
    if edge == "window":
        config.sliding_window = None
    else:
        config.rope_parameters |= {"long_factor": config.rope_parameters["short_factor"]}
    config.save_pretrained(folder)


def test_a_disk_without_room_is_left_alone(
    tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=12_345))
    done = tomoe("export", made, "-o", tmp_path / "deep" / "out")
    assert done.code == 2
    assert "has only 12 kB left" in done.err
    assert not list(tmp_path.iterdir())


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wrong(target: Mixtral, mlp: ToMoEMLP, layout: StockLayout, expert: int) -> tuple[Tensor, Tensor, Tensor]:
    gate, up, down = StockArch.matrices(target, mlp, layout, expert)
    return gate, up, (1.05 if mlp.layer_idx == 1 and expert == 0 else 1) * down


def test_what_is_in_the_way_stays_until_an_export_is_proved(
    tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    before = contents(made)
    for place in (made, made.parent):
        assert "holds the converted model itself" in tomoe("export", made, "-o", place, "--force").err
    assert contents(made) == before
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    assert "holds no export" in tomoe("export", made, "-o", out, "--force").err
    (out / "thesis.txt").unlink()
    assert tomoe("export", made, "-o", out, "--tokens", "16", "--format", "hf").code == 0
    assert json.loads((out / "config.json").read_text())["model_type"].startswith("tomoe")

    def refusal(*options: str) -> str:
        first = contents(out)
        done = tomoe("export", made, "-o", out, *options)
        assert done.code == 2
        assert contents(out) == first
        assert list(tmp_path.iterdir()) == [out]
        return " ".join(done.err.split())

    assert "already holds an export" in refusal()
    with monkeypatch.context() as patch:
        patch.setattr(writing, "save_file", full)
        assert "No space left on device" in refusal("--force")
    with monkeypatch.context() as patch:
        patch.setattr(Mixtral, "matrices", wrong)
        problem = refusal("--force")
    assert "would not be the same model: its predictions differ by" in problem
    assert "layer 1 is the first to differ" in problem
    assert tomoe("export", made, "-o", out, "--force", "--tokens", "16").code == 0
    assert json.loads((out / "config.json").read_text())["model_type"] == "mixtral"


def test_what_cannot_be_exported_or_proved(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "holds a 'llama' model" in tomoe("export", made.parent / "dense", "-o", out).err
    assert "holds no converted model" in tomoe("export", tmp_path, "-o", out).err
    bare = tmp_path / "bare"
    shutil.copytree(made, bare, ignore=lambda *_: ["run"])
    assert "use --text FILE to name a file or source" in tomoe("export", bare, "-o", out).err
    assert (
        "glm4_moe cannot represent this model exactly" in tomoe("export", made, "-o", out, "--format", "glm4_moe").err
    )
    assert not out.exists()


def test_padding_does_not_run() -> None:
    """Who watches a model that is compared, as the check of its routers does, counts real tokens only."""
    model, ids = make_pico("llama"), tokens(3, 16)
    lengths = torch.tensor([16, 9, 2])
    mask = torch.arange(16) < lengths[:, None]
    seen: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    recorded = record(model, ids, mask)
    assert seen == [len(states) for states in recorded.states] == lengths.tolist()


def test_agreement_is_what_the_other_measure_says() -> None:
    """KL, agreement and perplexity by the code of `tomoe evaluate`; differences by hand."""
    reference, model, ids = make_pico("llama"), make_pico("llama"), tokens(5, 16)
    with torch.no_grad():
        model.lm_head.weight[7] += 0.3
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 9:] = False
    agreement = agree(record(reference, ids, mask), record(model, ids, mask), ids, mask)
    other = measure(model, ids, mask, reference)
    assert agreement.positions == other.tokens == 5 * 15 - 7
    assert agreement.kl == pytest.approx(other.kl, rel=1e-4)
    assert agreement.top1_agreement == pytest.approx(other.top1_agreement)
    assert agreement.perplexity == pytest.approx(other.perplexity)
    assert agreement.reference_perplexity == pytest.approx(measure(reference, ids, mask).perplexity)
    with torch.no_grad():
        difference = (reference(ids).logits - model(ids).logits).abs()[:, :15].amax(-1)
        difference[1, 8:] = 0
    assert agreement.largest_difference == pytest.approx(float(difference.max()), rel=1e-4)
    assert agreement.typical_difference == pytest.approx(float(difference.amax(1).median()), rel=1e-4)


def test_numbers_that_are_none_are_no_agreement() -> None:
    def one(make: Callable[[Tensor], Tensor]) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
        logits = torch.zeros(2, 5)
        return [[(logits, make(logits), torch.tensor([1, 2]))]]

    with pytest.raises(UserError, match="not finite"):
        summarize(one(lambda t: t + torch.nan))
    with pytest.raises(UserError, match="no token"):
        summarize([])
    assert summarize(one(lambda t: t)).kl == 0


def test_what_counts_as_the_same() -> None:
    """In float32 a typical sequence has to agree; one may be spoiled by a near tie of a router; KL bounds the whole."""
    logits, likely = torch.tensor([[40.0, 0.0]]), torch.tensor([0])
    good = replace(summarize([[(logits, logits, likely)]]), typical_difference=2e-3, kl=5e-5)
    assert judge(good, BOUNDS["float32"]) is None
    assert "0.005 in a typical sequence" in str(judge(replace(good, typical_difference=5e-3), BOUNDS["float32"]))
    assert judge(replace(good, typical_difference=3.0), BOUNDS["bfloat16"]) is None
    assert "KL of 0.0002" in str(judge(replace(good, kl=2e-4), BOUNDS["float32"]))
    assert "KL of 0.06" in str(judge(replace(good, kl=0.06), BOUNDS["bfloat16"]))
    assert judge(replace(good, kl=float("nan")), BOUNDS["float32"]) is not None


@pytest.mark.parametrize("kind", ["mixtral", "glm4_moe"])
@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 5e5}, LLAMA3_ROPE], ids=["default", "llama3"])
def test_whoever_reads_the_older_rope_keys_rotates_alike(kind: str, rope: dict[str, object], tmp_path: Path) -> None:
    if kind == "glm4_moe":
        # its own default turns half of each head
        rope = rope | {"partial_rotary_factor": 1.0}
    config = AutoConfig.for_model(kind, rope_parameters=dict(rope))
    writing.write_config(config, tmp_path)
    file = tmp_path / "config.json"
    written = json.loads(file.read_text())
    # Transformers 5.19 takes the scaling for all there is, and elsewhere the defaults of the class.
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    assert written["rope_scaling"] == (scaling if "factor" in rope else None)
    assert written["rope_theta"] == rope["rope_theta"]
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    del written["rope_parameters"]
    file.write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
