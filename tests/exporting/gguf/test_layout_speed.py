"""Layouts of experts are timed before a conversion: what is timed are files that an export would have, from the config alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from transformers import Qwen2Config, Qwen3Config

from pico_files import CommandLine, refused
from tomoe.errors import Note, UserError
from tomoe.exporting.gguf import layout_speed
from tomoe.exporting.gguf.layout_speed import TOKENS, best, table, time_layouts, to_json
from tomoe.exporting.gguf.llama_cpp import LlamaCpp
from tomoe.model.loading import load_config

SIZES = dict(
    hidden_size=256, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=20_000, max_position_embeddings=512,
)  # fmt: skip


@pytest.fixture
def config_alone(tmp_path: Path) -> str:
    """A folder without a weight."""
    Qwen2Config(**SIZES).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def read(path: Path) -> tuple[gguf.GGUFReader, float]:
    """A file, and the bytes of weights that a token reads: all but the embeddings, and of experts those it uses."""
    file = gguf.GGUFReader(path)
    keys = {name.rpartition(".")[2]: field.contents() for name, field in file.fields.items() if "expert" in name}
    share = keys["expert_used_count"] / keys["expert_count"]
    parts = (t.n_bytes * (share if "_exps" in t.name else 1) for t in file.tensors if t.name != "token_embd.weight")
    return file, float(sum(parts))


def by_bytes(path: Path, context: int, threads: int) -> Callable[[int], tuple[float, float]]:
    """An engine whose tokens take as long as it reads, and whose prompts are slower with more experts than 16."""
    file, number = read(path)
    names = {t.name for t in file.tensors}
    experts = file.fields["glm4moe.expert_count"].contents() if "blk.0.ffn_up_exps.weight" in names else 0
    assert context == 32 + TOKENS
    assert threads == 2
    return lambda prompt: (float(prompt * (2 if experts > 16 else 1)), number)


def test_files_are_those_of_an_export_and_the_fastest_that_reads_prompts_well_is_taken(config_alone: str) -> None:
    rows = time_layouts(config_alone, [0.7], ["q8_0"], layers=2, prompt=32, rounds=2, threads=2, open_file=by_bytes)
    dense, *converted = rows
    assert dense.candidate.layout is None
    assert dense.token_ratios == (1, 1)
    assert len(converted) > 1
    for row in converted:
        assert row.token_ratios == pytest.approx((row.bound, row.bound))
        assert row.candidate.layout is not None
        assert row.candidate.bytes < dense.candidate.bytes
    taken = best(rows).candidate.layout
    assert taken is not None
    assert taken.num_experts <= 16
    # all layers, and the rows of the real vocabulary
    assert dense.tokens_per_second == pytest.approx(1 / dense.candidate.full_bytes)
    assert dense.candidate.full_bytes > 3 * dense.candidate.bytes
    assert len(table(rows)[1]) == len(json.loads(to_json("m", 1, rows))["rows"]) == len(rows)


def test_a_file_has_the_sizes_of_its_layout_and_the_dense_one_has_no_experts(config_alone: str) -> None:
    seen = []

    def opened(path: Path, context: int, threads: int) -> Callable[[int], tuple[float, float]]:
        file = gguf.GGUFReader(path)
        seen.append({t.name: tuple(t.shape.tolist()) for t in file.tensors})
        return lambda prompt: (1.0, 1.0)

    rows = time_layouts(config_alone, [0.7], ["q4_k_m"], layers=2, rounds=1, open_file=opened)
    assert seen[0]["blk.1.ffn_up.weight"] == (256, 1536)
    assert not any("exps" in name for name in seen[0])
    for row, tensors in zip(rows[1:], seen[1:], strict=True):
        layout = row.candidate.layout
        assert layout is not None
        assert tensors["blk.1.ffn_up_exps.weight"] == (256, layout.expert_size, layout.num_experts)
        assert tensors["blk.1.attn_q.bias"] == (256,)


@pytest.mark.engine
@pytest.mark.parametrize("config", [Qwen2Config(**SIZES), Qwen3Config(**SIZES, head_dim=64)], ids=["qwen2", "qwen3"])
def test_llama_cpp_runs_them(config: Qwen2Config | Qwen3Config, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    config.save_pretrained(tmp_path)
    ran = []

    def opened(path: Path, context: int, threads: int) -> Callable[[int], tuple[float, float]]:
        ran.append(bool(LlamaCpp(path, 4096, 64, 300, threads=1).log_probs([300, 301, 302]).isfinite().all()))
        return lambda prompt: (1.0, 1.0)

    time_layouts(str(tmp_path), [0.7], ["q8_0"], layers=2, rounds=1, open_file=opened)
    assert len(ran) > 2
    assert all(ran)


def test_what_is_missing_is_said(config_alone: str, tomoe: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_speed, "find_spec", lambda name: None)
    refused(tomoe("benchmark", config_alone, "--engine", "llama.cpp"), "pip install llama-cpp-python")
    refused(tomoe("benchmark", config_alone, config_alone, "--engine", "llama.cpp"), "leave", "out")
    refused(tomoe("benchmark", config_alone), "name the converted model")
    with pytest.raises(UserError, match="can be cut to"):
        time_layouts(config_alone, [0.01], open_file=by_bytes)


def test_as_many_layers_are_timed_as_fit_into_memory(config_alone: str) -> None:
    config = load_config(config_alone)
    one = sum(candidate.file_bytes for candidate, _ in layout_speed.candidates(config, [0.7], "q8_0", 1))

    def timed(layers_free: float) -> int:
        memory = int(layers_free * one / layout_speed._MEMORY_SHARE) + 1
        written: list[int] = []

        def opened(path: Path, context: int, threads: int) -> Callable[[int], tuple[float, float]]:
            (count,) = [f.contents() for f in gguf.GGUFReader(path).fields.values() if f.name.endswith(".block_count")]
            written.append(count)
            return lambda prompt: (1.0, 1.0)

        time_layouts(config_alone, [0.7], ["q8_0"], layers=2, rounds=1, memory=memory, open_file=opened)
        assert len({*written}) == 1
        return written[0]

    assert timed(2) == 2
    with pytest.warns(Note, match="1 of 2 layers"):
        assert timed(1.9) == 1
    with pytest.raises(UserError, match="name fewer fractions"):
        timed(0.9)
