"""Models and tokenizers are loaded frozen and without their own code; otherwise one sentence says why not. No network."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from conftest import make_pico
from pico_tokenizer import make_tokenizer
from stored_models import edit_config, write_gguf
from tomoe.errors import UserError
from tomoe.model import catalog, hub, loading, stored
from tomoe.model.catalog import KnownModel
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer


def test_a_loaded_model_is_frozen_and_of_the_asked_kind(model: Path) -> None:
    loaded = load_dense(str(model), torch.bfloat16)
    assert not loaded.training
    assert {(p.dtype, p.requires_grad) for p in loaded.parameters()} == {(torch.bfloat16, False)}
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert load_tokenizer(str(model))("a<eos>").input_ids == make_tokenizer()("a<eos>").input_ids


REMOTE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda f: (f / "model.safetensors").write_bytes(b"cut off"),
            "its files are damaged or cut off; get them again",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"holds no model\.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"pytorch_model\.bin may run code"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (
            lambda f: (f / "config.json").write_text("{}"),
            r"the config of .* cannot be used: Unrecognized model .*model_type",
        ),
        (
            lambda f: edit_config(f, model_type="t5"),
            "is a .t5. model, of which transformers has no causal language model",
        ),
        (lambda f: edit_config(f, model_type="own"), "`own`"),
        (lambda f: edit_config(f, **REMOTE), r"its own code \(trust_remote_code\).*not run here"),
        (lambda f: edit_config(f, num_attention_heads=5), r"cannot be used: .*\(5\)"),
        (
            lambda f: edit_config(f, attention_dropout=list(range(1000))),
            r"cannot be used: .*attention_dropout.* \.\.\.",
        ),
        (lambda f: edit_config(f, initializer_range="x" * 5000), r"cannot be used: .*initializer_range.*xxx \.\.\."),
    ],
)
def test_models_that_cannot_be_loaded(
    model: Path, damage: object, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(damage)
    damage(model)
    with pytest.raises(UserError, match=words) as refused:
        load_dense(str(model), torch.float32)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600, "a value from the file is repeated in full"
    assert str(model) in str(refused.value)
    assert capfd.readouterr() == ("", "")


MEMORY = "there is too little memory; free some, or use offload=True to hold one layer at a time"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TypeError("unsupported operand"), "TypeError: unsupported operand"),
        (ValueError("A setting cannot be 3"), "A setting cannot be 3"),
        (RuntimeError("CUDA error"), "CUDA error"),
        (IndexError(), "IndexError"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError("`x` does not recognize this architecture"), "`x` does not recognize this architecture"),
        (RuntimeError("can't allocate memory"), f"can't allocate memory; {MEMORY}"),
        (MemoryError("no"), f"MemoryError: no; {MEMORY}"),
    ],
)
def test_whatever_a_library_raises_is_a_sentence_that_blames_no_file(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    def failing(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(stored.AutoModelForCausalLM, "from_pretrained", failing)
    with pytest.raises(UserError) as refused:
        load_dense(str(model), torch.float32)
    assert str(refused.value) == f"cannot load the model {model}: {words}"


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub. Check this.\nAnd that.")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(stored.AutoConfig, "from_pretrained", unreachable)
    for load in (lambda: load_dense("owner/name", torch.float32), lambda: load_tokenizer("owner/name")):
        with pytest.raises(UserError, match=r"owner/name.*couldn't connect to the hub.*; smollm2-135m needs no hub$"):
            load()


@pytest.mark.parametrize("length", ["many", None, list(range(1000))])
def test_a_tokenizer_whose_longest_text_is_no_number(model: Path, length: object) -> None:
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": length}))
    if length is None:  # transformers takes it for a number that is not given
        assert load_tokenizer(str(model)).model_max_length > 1e20
        return
    with pytest.raises(
        UserError, match=r"tokenizer_config\.json is damaged \(model_max_length is .*not a number"
    ) as refused:
        load_tokenizer(str(model))
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("config", ["{}", '{"tokenizer_class": "LlamaTokenizer"}'])
def test_a_folder_without_a_tokenizer(model: Path, config: str) -> None:
    """transformers explains it in a list, of which the first line is half a sentence, or makes one that knows no word."""
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(str(model))
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=r"cannot load the tokenizer .*; copy tokenizer\.json"):
        load_tokenizer(str(model))


def test_a_saved_tokenizer_names_no_code(model: Path, tmp_path: Path) -> None:
    """With trust_remote_code, transformers would run the code of another repository that `auto_map` names."""
    path = model / "tokenizer_config.json"
    code = {"AutoTokenizer": ["attacker/repo--evil.EvilTokenizer", None]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": code}))
    tokenizer = load_tokenizer(str(model))
    tokenizer.save_pretrained(tmp_path / "loaded")
    assert "auto_map" not in (tmp_path / "loaded" / path.name).read_text()


def test_the_fingerprint_is_of_the_weights_and_their_shapes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of their dtype, nor of the pieces in which they are read."""
    loaded = load_dense(str(model), torch.float32)
    whole = fingerprint(loaded)
    assert fingerprint(load_dense(str(model), torch.bfloat16)) == whole
    monkeypatch.setattr(loading, "_CHUNK", 97)
    assert fingerprint(loaded) == whole
    up = loaded.model.layers[1].mlp.up_proj
    up.weight[3, 4] += 0.5
    changed = fingerprint(loaded)
    assert changed != whole
    up.weight = torch.nn.Parameter(up.weight.view(up.weight.shape[::-1]), requires_grad=False)  # the same bytes
    assert fingerprint(loaded) != changed


def test_the_fingerprint_counts_tied_weights_once(tmp_path: Path) -> None:
    tied = make_pico("llama", tie_word_embeddings=True)
    before = fingerprint(tied)
    tied.save_pretrained(tmp_path)
    assert fingerprint(load_dense(str(tmp_path), torch.float32)) == before
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.clone(), requires_grad=False)
    assert fingerprint(tied) != before


# ---- GGUF


def test_a_gguf_file_loads_and_saves_as_any_other_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dense = make_pico("llama")
    write_gguf(dense, tmp_path / "pico.gguf")
    model = load_dense(str(tmp_path / "pico.gguf"), torch.float32)
    assert capfd.readouterr() == ("", "")
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(tokens).logits, dense(tokens).logits)
    assert model.config._name_or_path == "pico"
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path"} & set(saved)
    assert fingerprint(load_dense(str(tmp_path / "saved"), torch.bfloat16)) == fingerprint(model)


def test_a_known_model_is_unpacked_once_and_loads_as_its_gguf_file_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = make_tokenizer(merges=[("t", "h")])
    write_gguf(make_pico("llama", vocab_size=len(tokens)), tmp_path / "Pico.gguf", tokens)
    file = str(tmp_path / "Pico.gguf")
    monkeypatch.setattr(catalog, "MODELS", {"pico": KnownModel("", "", "Pico.gguf", "")})
    monkeypatch.setattr(catalog, "fetch", lambda name: tmp_path / "Pico.gguf")
    tokenizer = load_tokenizer("pico")
    assert capfd.readouterr() == ("", "")
    words = "The <eos>böat\n 12"
    assert tokenizer(words).input_ids == load_tokenizer(file)(words).input_ids
    assert tokenizer.name_or_path == "Pico"
    monkeypatch.setattr(loading, "_unpack", None)
    for dtype in (torch.float32, torch.bfloat16):
        actual, expected = load_dense("pico", dtype), load_dense(file, dtype)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=0)
        assert actual.config._name_or_path == "Pico"
        assert actual.config.to_dict() == expected.config.to_dict()
        assert actual.generation_config.to_dict() == expected.generation_config.to_dict()


def test_a_gguf_file_that_is_none_or_cut_off(tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"no gguf at all")
    with pytest.raises(UserError, match=r"none\.gguf"):
        load_dense(str(tmp_path / "none.gguf"), torch.float32)
    write_gguf(make_pico("llama"), tmp_path / "cut.gguf")
    os.truncate(tmp_path / "cut.gguf", 40_000)
    with pytest.raises(UserError, match=r"it is damaged or cut off .*; get it again"):
        load_dense(str(tmp_path / "cut.gguf"), torch.float32)
