"""Kinds of checkpoints: whole and offloaded they are the numbers that were stored, or one sentence says why not."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from conftest import make_pico, tokens
from pico_files import CARVED, CommandLine, Outcome, fine, refused, write_pico, write_text
from stored_models import KINDS, edit_config, edit_tensors, write_stored
from tomoe.errors import Note, UserError
from tomoe.model import stored
from tomoe.model.dequantization import Packing
from tomoe.model.loading import fingerprint, load_dense

PACKAGES = {"bitsandbytes": "bitsandbytes", "compressed-tensors": "compressed_tensors"}


def kinds(*words: str) -> list[object]:
    """The kinds, skipped where a package is missing; bitsandbytes takes seconds to import."""
    found: list[object] = []
    for kind in KINDS:
        package = PACKAGES.get(kind.split()[0])
        marks = [pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")] if package else []
        marks += [pytest.mark.slow] if kind.startswith("bitsandbytes") else []
        found.append(pytest.param(kind, marks=marks))
    return found


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        return model(tokens(length=40)).logits


@pytest.mark.parametrize("kind", kinds())
def test_a_checkpoint_is_the_numbers_that_are_stored(kind: str, tmp_path: Path) -> None:
    meant = write_stored(tmp_path / "dense", kind)
    whole = load_dense(str(tmp_path / "dense"), torch.float32)
    torch.testing.assert_close(logits(whole), logits(meant))
    assert {p.dtype for p in whole.parameters()} == {torch.float32}
    assert not hasattr(whole.config, "quantization_config")
    if kind.startswith("bitsandbytes"):
        with pytest.raises(UserError, match=r"bitsandbytes.* is unpacked as a whole"):
            load_dense(str(tmp_path / "dense"), torch.float32, offload=True)
    offload = None if kind.startswith("bitsandbytes") else True
    offloaded = load_dense(str(tmp_path / "dense"), torch.float32, offload=offload)
    assert torch.equal(logits(offloaded), logits(whole))
    assert fingerprint(offloaded) == fingerprint(whole)
    half = [load_dense(str(tmp_path / "dense"), torch.bfloat16, offload=o) for o in (False, offload)]
    assert fingerprint(half[0]) == fingerprint(half[1])


def carve(tomoe: CommandLine, folder: Path, *options: str) -> Outcome:
    """Make `moe` of `dense` in a folder, of which the logits are those of the dense model if all experts are chosen."""
    text = write_text(folder / "text.txt")
    options = (*fine(), *CARVED, "--active", "0.6", "--repair", "none", *options)
    return tomoe("convert", folder / "dense", "-o", folder / "moe", "--data", text, *options)


def all_experts(folder: Path) -> Tensor:
    return logits(AutoModelForCausalLM.from_pretrained(folder / "moe", dtype=torch.float32, num_experts_per_tok=64))


def test_a_quantized_checkpoint_becomes_a_plain_model(tomoe: CommandLine, tmp_path: Path) -> None:
    """`apply` must find the weights that the plan was made for."""
    meant = write_stored(tmp_path / "dense", "fp8 in blocks")
    done = carve(tomoe, tmp_path, "--offload")
    assert done.code == 0, done.err
    assert (tmp_path / "moe" / "evaluation.json").exists()
    assert "quantization_config" not in json.loads((tmp_path / "moe" / "config.json").read_text())
    torch.testing.assert_close(all_experts(tmp_path), logits(meant), atol=1e-3, rtol=1e-3)
    done = tomoe("apply", tmp_path / "moe", tmp_path / "dense", "-o", tmp_path / "again")
    assert done.code == 0, done.err
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("moe", "again"))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


PLAIN = "name the model that was quantized"
ENTRIES: dict[str, tuple[dict[str, object], str]] = {
    "gptq": ({"bits": 4, "group_size": 32}, PLAIN),
    "awq": ({"bits": 4, "version": "gemm"}, PLAIN),
    "torchao": ({"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}, PLAIN),
    "hqq": ({"quant_config": {"weight_quant_params": {"nbits": 4}}}, PLAIN),
    "quark": ({}, PLAIN),
    "compressed-tensors": ({"config_groups": {}}, "pip install compressed"),
}


@pytest.mark.parametrize("method", ENTRIES)
def test_what_cannot_be_dequantized_here_is_one_sentence(tomoe: CommandLine, model: Path, method: str) -> None:
    entry, words = ENTRIES[method]
    if method in PACKAGES and find_spec(PACKAGES[method]) is not None:
        pytest.skip("the package is there")
    edit_config(model, quantization_config=entry | {"quant_method": method})
    packed = {"model.layers.0.mlp.up_proj.qweight": torch.ones(4, 512, dtype=torch.int32)}
    edit_tensors(model, lambda tensors: {n: t for n, t in tensors.items() if "0.mlp.up_proj" not in n} | packed)
    for offload in (False, True):
        with pytest.raises(UserError, match=words):
            load_dense(str(model), torch.float32, offload=offload)
    refused(tomoe("doctor", model), words)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes"])
def test_an_entry_of_the_config_is_left_over_beside_plain_weights(model: Path, method: str) -> None:
    """Whoever merges or dequantizes a model may leave it. BitNet's weights are plain, too, but rounded whenever they run."""
    plain = load_dense(str(model), torch.float32)
    entry = {"load_in_4bit": True} if method == "bitsandbytes" else ENTRIES.get(method, ({}, ""))[0]
    edit_config(model, quantization_config=entry | {"quant_method": method})
    for offload in (False, True):
        with pytest.warns(Note, match=f"names the quantization {method}.*, but its weights are plain, and are read so"):
            loaded = load_dense(str(model), torch.float32, offload=offload)
        assert fingerprint(loaded) == fingerprint(plain)
        assert not hasattr(loaded.config, "quantization_config")
    edit_config(model, quantization_config={"quant_method": "bitnet", "quantization_mode": "online"})
    with pytest.raises(UserError, match="quantized by bitnet"):
        load_dense(str(model), torch.float32)


def test_what_is_unpacked_as_a_whole_is_not_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stored(tmp_path / "dense", "fp8 in blocks")
    monkeypatch.setattr(stored, "prepare_packing_", lambda *_: Packing("some_method", unpacked_at_once=True))
    with pytest.raises(UserError, match="cannot be sharded: some_method is unpacked as a whole"):
        load_dense(str(tmp_path / "dense"), torch.float32, shards=2)


# ---- tensors and the config


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]], **config: object) -> Callable[[Path], None]:
    """Changes the tensors of a folder, and keys of its config."""
    return lambda folder: (edit_tensors(folder, change), edit_config(folder, **config))


UNFIT: list[tuple[Callable[[Path], object], str]] = [
    (
        tensors(lambda t: t | {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
        "1 tensors that its config does not have, for example model.layers.0.self_attn.q_proj.bias",
    ),
    (tensors(lambda t: t, num_hidden_layers=1), "9 tensors that its config does not have"),
    (tensors(lambda t: {n: x for n, x in t.items() if "up_proj" not in n}), "lack 2 tensors"),
    (tensors(lambda t: t | {"model.norm.weight": torch.ones(7)}), "model.norm.weight is (7,), its config says (32,)"),
    # ModelOpt's NVFP4: two numbers in a byte
    (
        tensors(
            lambda t: t | {"model.layers.0.mlp.up_proj.weight": torch.zeros(512, 16, dtype=torch.uint8)},
            quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"},
        ),
        "is (512, 16), its config says (512, 32)",
    ),
    # whoever saves a model in shards over one in a single file leaves both, and transformers reads the older one
    (lambda f: make_pico("llama").save_pretrained(f, max_shard_size="20KB"), "two sets of weights"),
    (
        lambda f: (f / "adapter_config.json").write_text('{"base_model_name_or_path": "ada/base"}'),
        "holds an adapter (adapter_config.json) beside the model; merge it",
    ),
    (
        lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        "holds no model.safetensors, but consolidated.safetensors; if its tensors",
    ),
]


@pytest.mark.parametrize(("change", "words"), UNFIT)
def test_files_that_are_not_what_the_config_says_are_refused(
    tomoe: CommandLine, model: Path, change: Callable[[Path], object], words: str
) -> None:
    change(model)
    for offload in (False, True):
        with pytest.raises(UserError) as said:
            load_dense(str(model), torch.float32, offload=offload)
        assert words in str(said.value)
    refused(tomoe("doctor", model), words)


def test_what_is_left_over_beside_plain_weights_changes_nothing(model: Path) -> None:
    """Masks among the weights; and exl3 and others leave an entry in the config, which is not of the model that was loaded."""
    plain = load_dense(str(model), torch.float32)
    masks = {
        "model.layers.0.self_attn.attention.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
        "model.layers.0.attn.masked_bias": torch.tensor(-1e4),
    }
    edit_tensors(model, lambda tensors: tensors | masks)
    edit_config(model, quantization_config={"quant_method": "exl3", "bits": 4})
    for offload in (False, True):
        loaded = load_dense(str(model), torch.float32, offload=offload)
        assert fingerprint(loaded) == fingerprint(plain)
        assert not hasattr(loaded.config, "quantization_config")


def test_float8_numbers_whose_scales_have_another_name_are_refused(tmp_path: Path) -> None:
    write_stored(tmp_path / "dense", "fp8 without a method")
    edit_tensors(tmp_path / "dense", lambda t: {n.replace("weight_scale", "scaling"): x for n, x in t.items()})
    with pytest.raises(UserError, match=r"does not have, for example .*scal"):
        load_dense(str(tmp_path / "dense"), torch.float32)


def test_attention_runs_by_what_is_installed(model: Path) -> None:
    plain = load_dense(str(model), torch.float32)
    for asked in ("flash_attention_2", "someone/kernels-of-their-own"):
        edit_config(model, _attn_implementation=asked)
        loaded = load_dense(str(model), torch.float32)
        assert loaded.config._attn_implementation == "sdpa"
        assert torch.equal(logits(loaded), logits(plain))


def test_of_a_model_that_reads_images_the_text_model_is_loaded(tmp_path: Path) -> None:
    """Its other tensors are no leftovers: transformers knows them."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8, "vocab_size": 259}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    images = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    config = Qwen3_5Config(
        text_config=sizes | heads | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        vision_config=images | {"patch_size": 4, "num_position_embeddings": 16},
    )
    whole = Qwen3_5ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path / "dense")
    for offload in (False, True):
        with pytest.warns(Note, match=r"reads more than text; of it, the text model \(qwen3_5_text\) is loaded alone"):
            text = load_dense(str(tmp_path / "dense"), torch.float32, offload=offload)
        assert torch.equal(logits(text), logits(whole))


# ---- shards


@pytest.fixture
def sharded(model: Path) -> Path:
    """The model in several files."""
    dense = load_dense(str(model), torch.float32)
    (model / "model.safetensors").unlink()
    dense.save_pretrained(model, max_shard_size="150KB")
    return model


DOWN = "model.layers.0.mlp.down_proj.weight"


def edit_shard(file: Path, **more: Tensor) -> None:
    save_file(load_file(file) | more, file, {"format": "pt"})


@pytest.mark.parametrize("offload", [False, True])
def test_a_tensor_in_two_shards_is_refused_unless_both_are_the_same(sharded: Path, offload: bool) -> None:
    """transformers takes the one that it reads last, accelerate the one that the index names."""
    meant = fingerprint(load_dense(str(sharded), torch.float32))
    places = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    first, other = sharded / places[DOWN], sharded / next(f for f in places.values() if f != places[DOWN])
    right = load_file(first)[DOWN]
    edit_shard(other, **{DOWN: right})
    assert fingerprint(load_dense(str(sharded), torch.float32, offload=offload)) == meant
    edit_shard(other, **{DOWN: right + 1})
    with pytest.raises(UserError, match=rf"holds {DOWN} twice, with other numbers in model-.* than in model-"):
        load_dense(str(sharded), torch.float32, offload=offload)


@pytest.mark.parametrize("offload", [False, True])
def test_an_index_that_names_another_shard_is_refused(sharded: Path, offload: bool) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    held = index["weight_map"][DOWN]
    index["weight_map"][DOWN] = named = next(file for file in index["weight_map"].values() if file != held)
    path.write_text(json.dumps(index))
    with pytest.raises(UserError, match=f"says that {DOWN} lies in {named}, but it lies in {held}"):
        load_dense(str(sharded), torch.float32, offload=offload)


# ---- what the input decides fails before the work, or not at all


def test_what_a_config_says_that_is_not_of_the_model(tomoe: CommandLine, model: Path, tmp_path: Path) -> None:
    """It ties two matrices that differ, and says what a call returns. Llama 2's settings of generation say nothing without
    sampling, and transformers refuses to write them."""
    returned = {"return_dict": False, "output_attentions": True, "output_hidden_states": True}
    edit_config(model, tie_word_embeddings=True, **returned)
    dense = load_dense(str(model), torch.float32)
    values = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "max_length": 99}
    (model / "generation_config.json").write_text(json.dumps(values))
    assert all(getattr(dense.config, name) is not value for name, value in returned.items())
    done = carve(tomoe, tmp_path)
    assert done.code == 0, done.err
    assert "note" not in done.err
    torch.testing.assert_close(all_experts(tmp_path), logits(dense), atol=1e-3, rtol=1e-3)
    done = tomoe("export", tmp_path / "moe", "-o", tmp_path / "export")
    assert done.code == 0, done.err
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert written.get("max_length") == 99
    assert not {"temperature", "top_p"} & set(written)


def test_a_tokenizer_that_cannot_be_written_is_found_before_the_work(
    tomoe: CommandLine, model: Path, tmp_path: Path
) -> None:
    templates = [{"name": "default", "template": "x"}, {"name": "../outside", "template": "y"}]
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    refused(
        carve(tomoe, tmp_path),
        "cannot write the config and tokenizer of this model: Invalid chat template name: '../outside'",
    )
    assert not (tmp_path / "moe").exists()


def test_code_of_the_folder_is_named(model: Path) -> None:
    edit_config(model, auto_map={"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"})
    with pytest.warns(Note, match="brings code of its own, which is not run: transformers' own llama computes it"):
        load_dense(str(model), torch.float32)


def test_the_doctor_needs_no_weights(tomoe: CommandLine, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert tomoe("doctor", model, "--set", "device=cpu").code == 0


@pytest.mark.parametrize(("key", "value"), [("torch_dtype", "torch.bfloat16"), ("dtype", "auto"), ("dtype", "half2")])
def test_a_dtype_that_a_script_wrote_is_no_hindrance(tomoe: CommandLine, tmp_path: Path, key: str, value: str) -> None:
    """Every load says which dtype it takes."""
    dense = write_pico(tmp_path / "dense")
    meant = logits(load_dense(str(dense), torch.float32))
    config = json.loads((dense / "config.json").read_text())
    del config["dtype"]
    (dense / "config.json").write_text(json.dumps(config | {key: value}))
    assert torch.equal(logits(load_dense(str(dense), torch.float32)), meant)
    done = carve(tomoe, tmp_path)
    assert done.code == 0, done.err
