"""GGUF files, run by llama.cpp itself: the same predictions as the folded MoE, the same tokens of a text."""

from __future__ import annotations

import gc
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType, quants
from test_equation import assert_same
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from conftest import LLAMA3_ROPE, make_pico, make_plan, tokens, write_export
from pico_files import CommandLine, pico_recipe, proved, refused, write_folded, write_pico, write_text
from pico_tokenizer import TOKENIZER, make_tokenizer
from tomoe.errors import UserError
from tomoe.exporting.choice import choose_target
from tomoe.exporting.gguf import file as gguf_file
from tomoe.exporting.gguf import llama_cpp
from tomoe.exporting.gguf.experts import merge_experts
from tomoe.exporting.gguf.file import Weights
from tomoe.exporting.gguf.llama_cpp import LlamaCpp, quantize
from tomoe.exporting.gguf.target import Gguf, entries, write_gguf
from tomoe.exporting.gguf.tokenizer import SPLITS, splitting_rule
from tomoe.exporting.target import Options, Precision
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.pipeline.convert import convert

pytestmark = [pytest.mark.slow, pytest.mark.engine]

LETTER = TOKENIZER.convert_tokens_to_ids("a")


@pytest.fixture
def needs_llama_cpp() -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")


def make_dense(family: str, **changes: object) -> PreTrainedModel:
    """Weights of usual size, and with values that float16 holds, as in published models."""
    dense = make_pico(family, vocab_size=len(TOKENIZER), **changes)
    for parameter in dense.parameters():
        parameter.data.copy_((parameter.data * (0.5 if parameter.dim() > 1 else 1.0)).bfloat16())
    return dense


def make_moe(family: str, attention: str = "static", **changes: object) -> ToMoEForCausalLM:
    dense = make_dense(family, **changes)
    return fold(dense, make_plan(dense, attention, active=0.8))


def opened(path: Path) -> LlamaCpp:
    return LlamaCpp(path, len(TOKENIZER), 64, LETTER, threads=1)


def run(path: Path, prompt: list[int]) -> Tensor:
    return opened(path).log_probs(prompt)


@pytest.mark.usefixtures("needs_llama_cpp")
@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2"])
def test_llama_cpp_predicts_what_the_folded_model_does(family: str, tmp_path: Path) -> None:
    moe, file = make_moe(family), tmp_path / "f32"
    ids = tokens(1, 5 if family == "mistral" else 20, seed=5)  # within mistral's sliding window
    with torch.no_grad():
        meant = moe(ids).logits[0, -1].log_softmax(-1)
    write_gguf(moe, TOKENIZER, file, "f32", 32)
    assert_same(run(file, ids[0].tolist()), meant)
    if family == "mistral":
        # contexts end where a sliding window would begin
        fields = GGUFReader(file).fields
        assert fields["llama.context_length"].contents() == 6
        assert fields["llama.attention.key_length"].contents() == 8
        assert fields["llama.expert_used_count"].contents() == 1
        assert fields["tokenizer.ggml.add_bos_token"].contents() is True


@pytest.mark.usefixtures("needs_llama_cpp")
def test_coarser_weights_predict_almost_the_same(tmp_path: Path) -> None:
    """Here with a whole attention."""
    moe = make_moe("llama", "off")
    ids = tokens(1, 20, seed=5)
    with torch.no_grad():
        meant = moe(ids).logits[0, -1].log_softmax(-1)
    found = {}
    for precision in ("f32", "f16", "q8_0"):
        write_gguf(moe, TOKENIZER, tmp_path / precision, precision, 32)
        found[precision] = run(tmp_path / precision, ids[0].tolist())
    assert_same(found["f32"], meant)
    # float16 weights make llama.cpp round activations to float16 too
    assert float((meant.exp() * (found["f16"] - meant).abs()).sum()) <= 1e-3
    assert float((found["f16"] - meant).abs().max()) <= 2e-3
    assert float((meant.exp() * (meant - found["q8_0"])).sum()) <= 0.01
    sizes = {name: (tmp_path / name).stat().st_size for name in found}
    assert sizes["q8_0"] < 0.75 * sizes["f16"] < 0.5 * sizes["f32"]


def make_fine(family: str, **changes: object) -> tuple[ToMoEForCausalLM, ToMoEForCausalLM]:
    """A model with fine-grained experts, and the same with all of them for each token."""
    dense = make_dense(family, **changes)
    plan = make_plan(dense, "off", form="fine")
    everything = replace(plan, layers=tuple(replace(layer, top_k=8) for layer in plan.layers))
    return fold(dense, plan), fold(dense, everything)


@pytest.mark.usefixtures("needs_llama_cpp")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_llama_cpp_runs_fine_grained_experts(family: str, tmp_path: Path) -> None:
    moe, whole = make_fine(family)
    ids, file = tokens(1, 20, seed=5), tmp_path / "f32"
    write_gguf(moe, TOKENIZER, file, "f32", 1)
    with torch.no_grad():
        planned, meant = (m(ids).logits[0].log_softmax(-1) for m in (moe, whole))
    everything = run(merge_experts(file, tmp_path / "all"), ids[0].tolist())
    assert float((everything - meant[-1]).abs().max()) <= 2e-3
    # a router may choose otherwise where two experts are almost tied
    model = opened(file)
    off = [float((model.log_probs(ids[0, :n].tolist()) - planned[n - 1]).abs().max()) for n in range(2, 21)]
    assert sum(d <= 2e-3 for d in off) >= 0.8 * len(off), off
    assert float((planned - meant).abs().max()) > 0.05, "the router changed nothing"


@pytest.mark.usefixtures("needs_llama_cpp")
@pytest.mark.parametrize("precision", ["f32", "bf16", "q8_0"])
def test_layers_of_other_sizes_run_with_all_experts(precision: Precision, tmp_path: Path) -> None:
    """A first layer that is whole, and one that needs experts of zeros, because it chooses fewer than the last."""
    dense = make_pico("llama", vocab_size=len(TOKENIZER), num_hidden_layers=3, layer_types=None)
    plan = make_plan(dense, "off", form="fine")
    top_ks = (8, 2, 5)
    plan = replace(plan, layers=tuple(replace(layer, top_k=k) for layer, k in zip(plan.layers, top_ks, strict=True)))
    everything = replace(plan, layers=tuple(replace(layer, top_k=8) for layer in plan.layers))
    file, ids = tmp_path / "file", tokens(1, 20, seed=5)
    write_gguf(fold(dense, plan), TOKENIZER, file, precision, 32)
    sizes = {t.name: t.data.shape[0] for t in GGUFReader(merge_experts(file, tmp_path / "all")).tensors}
    assert {sizes[f"blk.{i}.ffn_up.weight"] for i in range(3)} == {512}
    with torch.no_grad():
        meant = fold(dense, everything)(ids).logits[0, -1].log_softmax(-1)
    predicted = run(tmp_path / "all", ids[0].tolist())
    if precision == "f32":
        assert_same(predicted, meant)
    assert float((meant.exp() * (meant - predicted)).sum()) <= 0.01


def test_more_experts_of_a_token_than_llama_cpp_takes() -> None:
    dense = make_pico("llama", vocab_size=len(TOKENIZER), intermediate_size=192)
    plan = make_plan(dense, "off", form="fine", num_experts=40)
    *others, last = (replace(layer, top_k=31) for layer in plan.layers)
    problem = Gguf().supports(fold(dense, replace(plan, layers=(*others, replace(last, top_k=30)))))
    assert problem == "a token would use 31 experts of a layer, and llama.cpp takes 30; convert with target = gguf"
    fits = replace(plan, layers=tuple(replace(layer, top_k=30) for layer in plan.layers))
    assert Gguf().supports(fold(dense, fits)) is None


@pytest.mark.usefixtures("needs_llama_cpp")
def test_quantized_rows_of_fine_grained_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K-quants hold 256 numbers of a row together, Q8_0 holds 32. llama.cpp computes from them what it computes from the
    numbers that they stand for, but for its rounding of activations to eight bits."""
    moe, _ = make_fine("qwen2", hidden_size=256)
    ids, sizes = tokens(1, 20, seed=5)[0].tolist(), {}

    def predicted(file: Path) -> Tensor:
        return run(merge_experts(file, tmp_path / "all"), ids)

    for precision, multiple, step in (
        ("q8_0", 32, 2**-7),
        ("q6_k", 256, 2**-5),
        ("q4_k", 256, 2**-3),
        ("q4_k_m", 256, 2**-3),
    ):
        file = tmp_path / precision
        write_gguf(moe, TOKENIZER, file, precision, multiple)
        types = {t.name: t.tensor_type for t in GGUFReader(file).tensors}
        assert types["blk.0.ffn_down_exps.weight"].name == precision.upper().removesuffix("_M")
        assert types["blk.0.ffn_gate_inp.weight"].name == types["blk.0.exp_probs_b.bias"].name == "F32"
        sizes[precision] = sum(t.n_bytes for t in GGUFReader(file).tensors if "attn" in t.name)
        kinds = iter([entry.type for entry in entries(moe, precision, multiple)])

        def stood_for(numbers: np.ndarray, _: GGMLQuantizationType) -> np.ndarray:
            kind = next(kinds)  # noqa: B023
            rounded = quants.dequantize(quantize(numbers, kind), kind)
            assert abs(rounded - numbers).max() <= step * abs(numbers).max()  # noqa: B023
            return rounded

        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, "quantize", stood_for)
            write_gguf(moe, TOKENIZER, tmp_path / "f32", "f32", multiple)
        meant = predicted(tmp_path / "f32")
        assert float((meant.exp() * (meant - predicted(file))).sum()) <= 0.01
    assert sizes["q4_k"] < 0.8 * sizes["q6_k"] < 0.8 * sizes["q8_0"]


def test_rows_that_are_too_short_for_a_type_take_a_larger_one(tmp_path: Path) -> None:
    moe, _ = make_fine("llama")
    types = {entry.name: entry.type.name for entry in entries(moe, "q4_k", 1)}
    assert types["blk.0.attn_q.weight"] == "Q8_0"
    assert types["blk.0.ffn_down_exps.weight"] == "F16"
    assert re.fullmatch(
        r" \(\d+% of the numbers q8_0 and \d+% of the numbers f16: rows whose length is not a multiple of 256\)",
        Weights("q4_k", 2).larger_rows(entries(moe, "q4_k", 1)),
    )
    assert Weights("f16", 2).larger_rows(entries(moe, "f16", 1)) == ""
    wide, _ = make_fine("qwen2", hidden_size=256)
    assert Weights("q4_k", 2).larger_rows(entries(wide, "q4_k", 256)) == ""


# What llama_model_quantize (llama-cpp-python 0.3.36) makes of files of random numbers: the tensors that are not Q4_K.
LLAMA_CPP_MIXES = {
    (10, 16): {"Q6_K": {f"blk.{i}.{part}" for i in (0, 3, 6, 8, 9) for part in ("attn_v", "ffn_down_exps")}},
    (12, 0): {"Q6_K": {f"blk.{i}.{part}" for i in (0, 3, 6, 9, 10, 11) for part in ("attn_v", "ffn_down")}},
    (6, 8): {
        "Q6_K": {"blk.2.ffn_down_exps", "blk.5.ffn_down_exps"},
        "Q8_0": {f"blk.{i}.{part}" for i in range(6) for part in ("attn_k", "attn_v")},
        "Q5_K": {f"blk.{i}.attn_output" for i in range(6)},
    },
}  # fmt: skip


@pytest.mark.parametrize(("layers", "experts"), LLAMA_CPP_MIXES)
def test_the_mixture_of_types_is_llama_cpps(layers: int, experts: int) -> None:
    weights = Weights("q4_k_m", layers, experts)
    stacked = "_exps" if experts else ""
    parts = ["attn_q", "attn_k", "attn_v", "attn_output", *(f"ffn_{p}{stacked}" for p in ("gate", "up", "down"))]
    names = ["token_embd", "output", *(f"blk.{i}.{part}" for i in range(layers) for part in parts)]
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(weights.fitting(f"{name}.weight", (256, 256)).name, set()).add(name)
    others = {kind: names for kind, names in found.items() if kind != "Q4_K"}
    expected = LLAMA_CPP_MIXES[layers, experts]
    assert others == expected | {"Q6_K": expected["Q6_K"] | {"output"}}
    assert weights.fitting("blk.1.ffn_up.weight", (256, 320)).name == "Q5_0"
    assert weights.fitting("output.weight", (256, 320)).name == "Q8_0"
    assert Weights("q4_k_m", 8, tied=True).fitting("token_embd.weight", (64, 256)).name == "Q6_K"


@pytest.mark.usefixtures("needs_llama_cpp")
def test_a_text_is_read_as_the_tokenizer_reads_it(tmp_path: Path) -> None:
    text = "the bold  boat, the <eos> 1234\n\n can't über"
    ids = TOKENIZER(text).input_ids
    assert ids[0] == TOKENIZER.bos_token_id
    assert 2 in ids
    path = tmp_path / "model.gguf"
    write_gguf(make_moe("llama"), TOKENIZER, path, "f32", 32)
    model = opened(path)
    assert torch.equal(model.log_probs(text, fresh=True), model.log_probs(ids, fresh=True))
    other = TOKENIZER(text.replace("bold", "cold")).input_ids
    assert not torch.allclose(model.log_probs(text, fresh=True), model.log_probs(other, fresh=True), atol=1e-2)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Byte-pair encoding as Llama 2 and Mistral have it: spaces are ▁, unknown signs fall back to bytes."""
    letters = ["▁", *"abcdehlotu"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("b", "o"), ("▁", "bo")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += ["".join(m) for m in merges] + letters
    vocab = {name: i for i, name in enumerate(names)}
    bare = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bare.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    bare.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.usefixtures("needs_llama_cpp")
def test_sentencepiece_vocabularies_too(tmp_path: Path) -> None:
    tokenizer, text = sentencepiece_like(), "the boat told the über"
    ids, path = tokenizer(text).input_ids, tmp_path / "model.gguf"
    assert len(ids) < len(text)
    dense = make_pico("llama", vocab_size=300)  # more rows than tokens
    assert len(tokenizer) < 300
    write_gguf(fold(dense, make_plan(dense, "off")), tokenizer, path, "f32", 32)
    types = GGUFReader(path).fields["tokenizer.ggml.token_type"].contents()
    assert types[:4] == [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, TokenType.BYTE]
    assert types[258:260] == [TokenType.BYTE, TokenType.NORMAL]
    assert types[-1] == TokenType.UNUSED
    model = LlamaCpp(path, 300, 64, tokenizer.convert_tokens_to_ids("a"), threads=1)
    assert torch.equal(model.log_probs(text, fresh=True), model.log_probs(ids, fresh=True))


def test_what_llama_cpp_cannot_do_is_refused() -> None:
    assert "V/O dims" in str(Gguf().supports(make_moe("llama", "per_token")))
    assert "glm4moe takes plain rotary" in str(Gguf().supports(make_fine("llama3")[0]))

    def problem(family: str, form: str, **changes: object) -> str | None:
        return Gguf().supports_dense(make_pico(family, **changes), form)

    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    for family, form in (("qwen2", "overlapping"), ("llama3", "overlapping"), ("qwen3", "fine")):
        assert problem(family, form) is None
    assert problem("llama", "overlapping", rope_parameters=linear) is None
    assert problem("phi", "fine") == "its MLP has no gate projection"
    assert "is gelu" in str(problem("llama", "overlapping", hidden_act="gelu"))
    assert "(yarn)" in str(problem("llama", "overlapping", rope_parameters=yarn))
    assert "normalizes Q and K" in str(problem("qwen3", "overlapping"))
    assert "sliding window" in str(problem("mistral", "fine"))
    # scaled frequencies have a place in `llama`, not in the architectures of fine-grained experts and of Qwen3
    scaled = "these are scaled (llama3)"
    assert str(problem("llama3", "fine")).endswith(f"{scaled}; experts.form = overlapping has a place for them")
    assert str(problem("qwen3", "fine", rope_parameters=LLAMA3_ROPE)).endswith(scaled)


def test_tensors_are_made_when_they_are_written_and_counted_before(tmp_path: Path) -> None:
    def tensors() -> dict[int, Tensor]:
        return {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)}

    moe = make_moe("qwen2", num_hidden_layers=3)
    before = tensors()  # held, so that no new one gets the number of one that is gone
    planned = list(entries(moe, "q8_0", 32))
    assert not tensors().keys() - before.keys()
    size = sum(entry.nbytes for entry in planned)
    assert size == Gguf().sizes(moe, Options(32, "q8_0")).bytes
    seen: list[tuple[int, int]] = []
    write_gguf(moe, TOKENIZER, tmp_path / "model.gguf", "q8_0", 32, lambda *at: seen.append(at))
    assert len(seen) == len(planned)
    assert seen[-1] == (size, size)
    assert size == sum(int(tensor.n_bytes) for tensor in GGUFReader(tmp_path / "model.gguf").tensors)


def test_an_export_that_is_refused_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    moe = make_moe("llama")
    for tokenizer, words in (
        (PreTrainedTokenizerFast(tokenizer_object=bare), "Whitespace"),
        (make_tokenizer(), "no merges"),
    ):
        with pytest.raises(UserError, match=words):
            write_export(choose_target(moe, "gguf"), moe, tokenizer, tmp_path / "out", Options())
        assert list((tmp_path / "out").iterdir()) == []


def test_tokenizers_that_split_otherwise_are_refused() -> None:
    def rule(pre: pre_tokenizers.PreTokenizer) -> str:
        bare = Tokenizer(models.BPE())
        bare.pre_tokenizer = pre
        return splitting_rule(json.loads(bare.to_str())["pre_tokenizer"])

    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for pattern, name in SPLITS.items():
        assert rule(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])) == name
    digits = pre_tokenizers.Digits(individual_digits=True)
    assert rule(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])) == "smollm"
    for strange in (
        by_bytes,
        pre_tokenizers.Whitespace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), by_bytes]),
    ):
        with pytest.raises(UserError, match="not known to split text"):
            rule(strange)


@pytest.mark.usefixtures("needs_llama_cpp")
def test_a_window_of_a_few_tokens_can_be_proved_too(tomoe: CommandLine, tmp_path: Path) -> None:
    moe, text = write_folded(tmp_path / "moe", "mistral", TOKENIZER), write_text(tmp_path / "text.txt")
    options = ("--format", "gguf", "--text", text, "--tokens", "16")
    done = tomoe("export", moe, "-o", tmp_path / "out", *options)
    assert proved(done, tmp_path / "out")["positions"] == 4  # contexts of 5 tokens, within the window of 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    dense = write_pico(place / "dense", vocab_size=len(TOKENIZER))
    TOKENIZER.save_pretrained(dense)
    write_text(place / "text.txt")
    convert(pico_recipe(place, "train.steps=0"), place / "moe")
    return place / "moe"


@pytest.mark.usefixtures("needs_llama_cpp")
def test_the_command_proves_a_file_by_running_it(tomoe: CommandLine, made: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = tomoe("export", made, "--format", "gguf", "-o", out, "--weights", "f32", "--tokens", "64")
    proof = proved(done, out)
    assert sorted(p.name for p in out.iterdir()) == [".README.md.sha256", "README.md", "export.json", "model-f32.gguf"]
    assert proof["positions"] == 4 * 8
    assert proof["largest_difference"] < 1e-4
    assert proof["written"]["llama.cpp"] == proof["written"]["converted"] != ""
    counted = json.loads((out / "export.json").read_text())["bytes"]
    assert counted == pytest.approx((out / "model-f32.gguf").stat().st_size, rel=0.05)
    assert "llama-cli -m" in done.out


def test_without_llama_cpp_a_file_is_refused_unless_no_comparison_is_wanted(
    tomoe: CommandLine, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    out, command = tmp_path / "out", ("export", made, "--format", "gguf", "-o", tmp_path / "out")
    refused(tomoe(*command), "compared with the model by llama.cpp", "pip install xllamacpp", "--unverified")
    refused(tomoe("convert", "nothing", "-o", out, "--format", "gguf"), "pip install xllamacpp")
    with monkeypatch.context() as patch:
        # what installing it would not mend comes first
        patch.setattr(Gguf, "supports", lambda *_: "it has too many experts")
        refused(tomoe(*command), "cannot represent this model exactly: it has too many experts")
    refused(tomoe(*command, "--unverified", "--weights", "q4_k"), "q4_k weights are made by llama.cpp")
    assert not out.exists()

    done = tomoe(*command, "--unverified", "--weights", "q8_0")
    assert done.code == 0, done.err
    assert "Not verified: nothing was compared" in done.out
    metadata = json.loads((out / "export.json").read_text())
    assert (metadata["proof"]["same"], metadata["text"]) == (None, None)
    card = (out / "README.md").read_text()
    assert "Not verified: not compared with the converted model, as asked." in card
    assert "predicts the same" not in card
    with pytest.raises(UserError, match="pip install xllamacpp"):
        llama_cpp.binding()
