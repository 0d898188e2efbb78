"""Importance matrices: what is measured, where it stands in the tensors of a file, and what it gains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, quants
from torch import Tensor, nn

from conftest import make_pico, make_plan, tokens
from pico_files import CommandLine, pico_recipe, write_pico, write_text
from pico_tokenizer import TOKENIZER
from tomoe.exporting.gguf import llama_cpp
from tomoe.exporting.gguf.importance import measured
from tomoe.exporting.gguf.llama_cpp import quantize
from tomoe.exporting.gguf.target import entries
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.pipeline.convert import convert

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture
def moe() -> ToMoEForCausalLM:
    # rows of all matrices are long enough for K-quants, those of experts (of 64 neurons) for Q5_0
    dense = make_pico("qwen2", vocab_size=len(TOKENIZER), hidden_size=256, intermediate_size=768)
    return fold(dense, make_plan(dense, "off", form="fine"))


def squares_of(moe: ToMoEForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """Sums of squares by name in the file, token by token, from what modules are called with."""
    found: dict[str, Tensor] = {}

    def add(name: str, x: Tensor) -> None:
        found[name] = found.get(name, 0) + x.double().square()

    def watch(i: int, layer: nn.Module) -> None:
        def each(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
            def hook(_: nn.Module, args: tuple[Tensor]) -> None:
                for x in args[0][0]:
                    add(f"{i}.{name}", x)

            return hook

        layer.self_attn.k_proj.register_forward_pre_hook(each("attn_k"))
        layer.self_attn.o_proj.register_forward_pre_hook(each("attn_output"))
        layer.mlp.register_forward_pre_hook(lambda mlp, args: of_tokens(i, mlp, args[0][0]))

    def of_tokens(i: int, mlp: nn.Module, x_TD: Tensor) -> None:
        for x in x_TD:
            of_token(i, mlp, x)

    def of_token(i: int, mlp: nn.Module, x: Tensor) -> None:
        logits = mlp.router.weight @ x + mlp.router.bias
        chosen = logits.topk(mlp.top_k).indices.tolist()
        h = nn.functional.silu(mlp.gate_proj @ x) * (mlp.up_proj @ x)
        add(f"{i}.ffn_up_exps", x)
        add(f"{i}.ffn_down_shexp", h[: mlp.shared_size])
        for n in range(mlp.num_experts):
            own = h[mlp.expert_rows[n].long()]
            add(f"{i}.ffn_down_exps.{n}", own if n in chosen else torch.zeros_like(own))

    for i, layer in enumerate(moe.model.layers):
        watch(i, layer)
    with torch.no_grad():
        hidden = moe.model(ids).last_hidden_state[0]
    for x in hidden:
        add("output", x)
    return found


def test_each_column_has_the_squares_of_its_inputs(moe: ToMoEForCausalLM) -> None:
    ids = tokens(1, 20, seed=5)
    importance = measured(moe, ids, torch.ones_like(ids, dtype=torch.bool), lambda done, total: None)
    assert importance.tokens == 20
    made = {entry.name: entry for entry in entries(moe, "q4_k", 64, importance)}
    assert made["blk.1.ffn_down_exps.weight"].type.name == "Q8_0"
    made = {entry.name: entry for entry in entries(moe, "q4_k_m", 64, importance)}

    def columns(name: str) -> Tensor:
        entry = made[name]
        assert entry.importance is not None, name
        held = entry.importance()
        assert tuple(held.shape) == entry.shape
        return held.amax(-2).double()

    for name, squares in squares_of(moe, ids).items():
        layer, _, rest = name.partition(".")
        part, _, expert = rest.partition(".")
        file_name = "output.weight" if name == "output" else f"blk.{layer}.{part}.weight"
        if file_name not in made or made[file_name].importance is None:
            continue
        of_all = columns(file_name)
        own = of_all[int(expert)] if expert else of_all
        # experts of zeros, which a layer may get, come last
        for found in own[: moe.config.tomoe_num_experts] if own.dim() == 2 else [own]:
            torch.testing.assert_close(found[: len(squares)], squares, rtol=1e-4, atol=1e-6)
    # what is not quantized, or by a type that takes none, has none
    for name in ("blk.1.attn_norm.weight", "blk.1.ffn_gate_inp.weight", "token_embd.weight"):
        assert made[name].importance is None
    weighted = {name.rpartition("blk.0.")[2] for name, entry in made.items() if entry.importance and "blk.0." in name}
    assert {"attn_q.weight", "attn_output.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"} <= weighted


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_0"])
def test_important_columns_are_rounded_less(kind: str) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    random = np.random.default_rng(0)
    numbers = random.standard_normal((2, 8, 512)).astype(np.float32)
    importance = random.choice([1e-3, 1.0], size=(2, 512)).astype(np.float32)
    which = GGMLQuantizationType[kind]

    def error(*more: np.ndarray) -> np.ndarray:
        rounded = quants.dequantize(quantize(numbers, which, *more), which)
        return (importance[:, None] * (rounded - numbers) ** 2).sum((1, 2))

    assert (error(importance) < error(np.ones_like(importance))).all()
    # each matrix has its own
    turned = quantize(numbers[::-1].copy(), which, importance[::-1].copy())
    assert np.array_equal(turned[::-1], quantize(numbers, which, importance))


def test_rows_quantized_in_pieces_by_threads_are_those_quantized_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    random = np.random.default_rng(0)
    numbers = random.standard_normal((3, 7, 512)).astype(np.float32)
    importance = random.uniform(0.1, 1, (3, 512)).astype(np.float32)
    whole = quantize(numbers, GGMLQuantizationType.Q4_K, importance)
    monkeypatch.setattr(llama_cpp, "_PIECE", 2 * 512)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert np.array_equal(quantize(numbers, GGMLQuantizationType.Q4_K, importance), whole)
    finally:
        torch.set_num_threads(threads)


def test_the_command_measures_it_on_the_text_of_the_conversion(tomoe: CommandLine, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    dense = write_pico(tmp_path / "dense", vocab_size=len(TOKENIZER), hidden_size=256)
    TOKENIZER.save_pretrained(dense)
    write_text(tmp_path / "text.txt")
    convert(
        pico_recipe(
            tmp_path, "train.steps=0", "target=gguf", "experts.form=fine", "active=0.8", "experts.num_experts=8"
        ),
        tmp_path / "moe",
    )

    def exported(name: str, *more: str) -> tuple[bytes, set[str]]:
        # random numbers are too sensitive for the comparison, with or without importance
        command = ("export", tmp_path / "moe", "--format", "gguf", "-o", tmp_path / name, "--weights", "q6_k")
        done = tomoe(*command, "--tokens", "64", "--unverified", *more)
        assert done.code == 0, done.err
        reader = GGUFReader(tmp_path / name / "model-q6_k.gguf")
        return next(t.data.tobytes() for t in reader.tensors if t.name == "blk.0.attn_q.weight"), {*reader.fields}

    weighted, fields = exported("weighted")
    assert "quantize.imatrix.entries_count" in fields
    assert exported("by-layer", "--offload")[0] == weighted
    (tmp_path / "moe" / "run" / "corpus.safetensors").unlink()
    plain, fields = exported("plain")
    assert "quantize.imatrix.entries_count" not in fields
    assert weighted != plain
