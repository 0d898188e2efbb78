"""Everything that a .gguf file says is used or refused, and what is no model is named before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig, PreTrainedModel

from conftest import make_pico
from pico_files import CommandLine, refused
from stored_models import write_gguf, write_random_gguf
from tomoe.errors import UserError
from tomoe.model import gguf_tensors
from tomoe.model.loading import check_loading, fingerprint, load_dense
from tomoe.model.mlp import decoder_layers

Writer = gguf.GGUFWriter
ROPE = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def pico(rope: dict[str, object], **changes: object) -> PreTrainedModel:
    return make_pico("llama", rope_parameters=ROPE | rope, max_position_embeddings=256, **changes)


def factors(model: PreTrainedModel, off: float = 1.0) -> Callable[[Writer], None]:
    """What llama.cpp divides the frequencies by, as its converter computes it for LLaMA 3.1."""
    found = model.model.rotary_emb.inv_freq.numpy()
    plain = 10000.0 ** (-np.arange(len(found)) / len(found))
    return lambda w: w.add_tensor("rope_freqs.weight", (off * plain / found).astype(np.float32))


def linear(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def yarn(writer: Writer) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(64)


def same(model: PreTrainedModel, file: Path) -> None:
    ids = torch.arange(3, 53)[None].repeat(1, 5)[:, :200] % model.config.vocab_size
    torch.testing.assert_close(load_dense(str(file), torch.float32)(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("rope", "more"),
    [
        ({"rope_type": "linear", "factor": 4.0}, linear),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, yarn),
        (LLAMA3, None),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_a_stretched_rotary_embedding(
    tmp_path: Path, rope: dict[str, object], more: Callable[[Writer], None] | None
) -> None:
    model = pico(rope)
    write_gguf(model, tmp_path / "m.gguf", more=more or factors(model))
    same(model, tmp_path / "m.gguf")


def test_biases(tmp_path: Path) -> None:
    model = pico({"rope_type": "default"}, attention_bias=True, mlp_bias=True)
    write_gguf(model, tmp_path / "all.gguf")
    same(model, tmp_path / "all.gguf")
    model = pico({"rope_type": "default"})
    size = model.model.layers[0].self_attn.v_proj.out_features
    write_gguf(model, tmp_path / "v.gguf", more=lambda w: w.add_tensor("blk.0.attn_v.bias", np.ones(size, np.float32)))
    biased = pico({"rope_type": "default"}, attention_bias=True)
    state = {name: torch.zeros_like(t) for name, t in biased.state_dict().items()} | model.state_dict()
    state["model.layers.0.self_attn.v_proj.bias"].fill_(1)
    biased.load_state_dict(state)
    same(biased, tmp_path / "v.gguf")


REFUSED: dict[str, Callable[[Writer], object]] = {
    "longrope": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
    "yarn_log_multiplier": lambda w: (yarn(w), w.add_rope_scaling_yarn_log_mul(0.1)),
    "llama.logit_scale": lambda w: w.add_logit_scale(0.5),
    "llama.attention.causal": lambda w: w.add_causal_attention(False),
    "llama.attention.key_length": lambda w: w.add_key_length(2),
    "llama.attention.sliding_window": lambda w: w.add_sliding_window(16),
    "blk.0.attn_q_norm.weight": lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(8, np.float32)),
    "rope_factors_long.weight": lambda w: w.add_tensor("rope_factors_long.weight", np.ones(4, np.float32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_config_says_is_refused(tmp_path: Path, what: str) -> None:
    write_gguf(pico({"rope_type": "default"}), tmp_path / "m.gguf", more=REFUSED[what])
    with pytest.raises(UserError, match=rf"holds .*{what}.*which transformers does not read.*safetensors"):
        load_dense(str(tmp_path / "m.gguf"), torch.float32)


def test_factors_of_no_known_formula_are_refused(tmp_path: Path) -> None:
    model = pico(LLAMA3)
    write_gguf(model, tmp_path / "m.gguf", more=factors(model, off=1.5))
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        check_loading(str(tmp_path / "m.gguf"))


SIZES = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=320, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
# every architecture that is read tensor by tensor, as far as it is of a kind that can be converted or nearly so
ARCHITECTURES = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 128}, "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64}, "stablelm": {}, "starcoder2": {}, "nemotron": {},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
}  # fmt: skip


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tensors_are_what_transformers_makes_of_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, several pieces of each, whole and by layer, and keys without the vocabulary."""
    config = AutoConfig.for_model(kind, **SIZES | ARCHITECTURES[kind])
    # transformers dequantizes the newer one of these in the dtype itself, which rounds twice
    dtype = torch.float32 if kind == "lfm2" else torch.bfloat16
    file = tmp_path / "m.gguf"
    write_random_gguf(config, file, kind.removesuffix("_text"))
    read_keys = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    monkeypatch.setattr(gguf_tensors, "_PIECE", 1000)
    found = load_dense(str(file), dtype)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.state_dict(), expected.state_dict(), rtol=0, atol=0, equal_nan=True)
    assert found.config.vocab_size == read_keys.vocab_size == SIZES["vocab_size"]
    assert len({t.dtype for t in found.state_dict().values()}) == 1
    by_layer = load_dense(str(file), dtype, offload=True)
    layers = decoder_layers(by_layer)
    assert all(p.is_meta for p in layers.parameters())
    with torch.no_grad():
        assert torch.equal(by_layer(torch.arange(3, 40)[None]).logits, found(torch.arange(3, 40)[None]).logits)
    assert fingerprint(by_layer) == fingerprint(found)


def bare(path: Path, fill: Callable[[Writer], object]) -> Path:
    writer = Writer(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_what_is_no_model_is_named(tmp_path: Path, tomoe: CommandLine) -> None:
    write_gguf(pico({"rope_type": "default"}), tmp_path / "m.gguf", split_max_tensors=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) > 1
    refused(tomoe("doctor", parts[1]), f"part 2 of {len(parts)}", "--merge")

    def adapter(w: Writer) -> None:
        w.add_type("adapter")
        w.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 4), np.float32))

    refused(tomoe("doctor", bare(tmp_path / "lora.gguf", adapter)), "adapter", "merge it")
    refused(tomoe("doctor", bare(tmp_path / "clip.gguf", lambda w: w.add_type("mmproj"))), "not a language model")
    refused(tomoe("doctor", bare(tmp_path / "vocab.gguf", lambda w: w.add_vocab_size(8))), "no weights")
