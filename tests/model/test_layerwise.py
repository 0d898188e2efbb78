"""A text that runs layer by layer gets the numbers that it gets sequence by sequence, and reads weights once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from conftest import FAMILIES, PICO, make_pico, randomise, tokens
from tomoe.evaluation.perplexity import Predictions, measure
from tomoe.model import layerwise
from tomoe.model.layerwise import LayerPass, layer_inputs, returned_by_layers
from tomoe.model.loading import load_dense
from tomoe.model.mlp import decoder_layers
from tomoe.model.offload import _LayerHook

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
# layers of several kinds, logits that are capped, a residual stream that is another
MORE: dict[str, tuple[type[PreTrainedModel], object]] = {
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**PICO | {"num_hidden_layers": 3, "head_dim": 8}, sliding_window=6, layer_types=KINDS),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(**PICO | {"num_hidden_layers": 3, "head_dim": 8}, sliding_window=6, layer_types=KINDS),
    ),
    "qwen2 with windows": (
        Qwen2ForCausalLM,
        Qwen2Config(**PICO | {"num_hidden_layers": 3}, sliding_window=6, use_sliding_window=True, layer_types=KINDS),
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**PICO)),
}


def written(folder: Path, family: str) -> Path:
    if family in MORE:
        model_class, config = MORE[family]
        torch.manual_seed(0)
        randomise(model_class(config)).save_pretrained(folder)
    else:
        make_pico(family).save_pretrained(folder)
    return folder


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences of several lengths, padded, longer than any window."""
    ids = tokens(rows=4, length=20)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 12:] = mask[3, 17:] = False
    return ids, mask


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers whose weights were read, in order."""
    read: list[nn.Module] = []
    before = _LayerHook.pre_forward

    def pre_forward(hook: _LayerHook, module: nn.Module, *args: object, **kwargs: object) -> object:
        read.append(module)
        return before(hook, module, *args, **kwargs)

    monkeypatch.setattr(_LayerHook, "pre_forward", pre_forward)
    return read


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_offloaded_models_measure_the_same_numbers(tmp_path: Path, family: str, reads: list[nn.Module]) -> None:
    """Bit by bit: the same products of the same numbers, in another order of layers and sequences."""
    folder = written(tmp_path, family)
    whole, offloaded = (load_dense(str(folder), torch.float32, offload=offload) for offload in (False, True))
    other = load_dense(str(folder), torch.bfloat16).float()
    assert measure(offloaded, *text()) == measure(whole, *text())
    assert measure(other, *text(), reference=Predictions(offloaded, keep=True)) == measure(
        other, *text(), reference=whole
    )
    reads.clear()
    kept = Predictions(offloaded, keep=True)
    for _ in range(2):
        measure(other, *text(), reference=kept)
    first, *others = map(reads.count, decoder_layers(offloaded))
    # a few tokens show what the layers of a class return
    assert first <= 3
    assert others == [1] * len(others)


def test_windows_that_differ_by_layer_matter_here(tmp_path: Path) -> None:
    """So the tests above would find masks that were those of another layer."""
    model = load_dense(str(written(tmp_path, "gemma3")), torch.float32)
    ids, mask = text()
    returned = returned_by_layers(model)
    assert returned is not None
    _, handed = layer_inputs(model, ids[1:2], mask[1:2], returned)
    sliding, full, again = (kwargs["attention_mask"] for _, kwargs in handed)
    assert sliding is again
    assert not torch.equal(sliding, full)


def test_hidden_states_may_be_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path, "qwen2")
    whole, offloaded = (load_dense(str(folder), torch.float32, offload=offload) for offload in (False, True))
    monkeypatch.setattr(layerwise, "MEMORY", 0)
    made: list[str] = []
    from_file = torch.from_file
    monkeypatch.setattr(torch, "from_file", lambda name, **k: made.append(name) or from_file(name, **k))
    assert measure(offloaded, *text()) == measure(whole, *text())
    assert made
    assert not Path(made[0]).exists()


def test_a_decoder_that_does_more_between_layers_runs_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states that come to a layer are not what the one before it gave."""
    folder = written(tmp_path, "llama")
    whole, offloaded = (load_dense(str(folder), torch.float32, offload=offload) for offload in (False, True))
    for model in (whole, offloaded):
        second = decoder_layers(model)[1]
        second.register_forward_pre_hook(lambda _, args: (2 * args[0], *args[1:]))
    assert returned_by_layers(whole) is None
    passes: list[LayerPass] = []
    monkeypatch.setattr(LayerPass, "__init__", lambda *args, **kwargs: passes.append(args[0]))
    assert measure(offloaded, *text()) == measure(whole, *text())
    assert passes == []
