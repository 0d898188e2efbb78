"""Models that read more than text, by the class that their public checkpoints name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from family_contract import hold, write_public

from pico_files import write_text
from tomoe.errors import UserError
from tomoe.evaluation.param_counts import model_facts
from tomoe.model.far_tokens import far_tokens, near_tokens
from tomoe.model.loading import load_dense
from tomoe.model.structure import shape_of
from tomoe.model.tokens import check_ids

# and the class that transformers loads of them
CLASSES = {
    "Gemma3ForConditionalGeneration": "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration": "Gemma4ForConditionalGeneration",
    "GotOcr2ForConditionalGeneration": "GotOcr2ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
}


def load(name: str, folder: Path) -> transformers.PreTrainedModel:
    write_public(name, folder)
    return load_dense(str(folder), torch.float32)


@pytest.mark.filterwarnings("ignore:.*reads more than text")
@pytest.mark.parametrize("name", CLASSES)
def test_sizes_are_read_where_the_decoder_has_them(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    assert type(model).__name__ == CLASSES[name]
    text = model.config.get_text_config(decoder=True)
    assert near_tokens(model).run(model).isfinite().all()
    assert far_tokens(model) or getattr(text, "sliding_window", None) is None
    assert model_facts(model)["max_positions"] == text.max_position_embeddings
    with pytest.raises(UserError, match="embeddings have"):
        check_ids(torch.tensor([[text.vocab_size]]), model)
    shape = shape_of(model)
    assert shape.num_heads in (0, text.num_attention_heads)


def test_a_decoder_behind_an_encoder_is_refused(tmp_path: Path) -> None:
    """transformers loads such a decoder alone, with embeddings drawn anew: logits differed by 0.8 from load to load."""
    with pytest.raises(UserError, match="a 'bart' model: its decoder continues what an encoder has read") as caught:
        load("BartForConditionalGeneration", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reads more than text")
@pytest.mark.parametrize("name", CLASSES)
def test_they_convert_as_their_checkpoints_are(name: str, tmp_path: Path) -> None:
    """In float32, on tokens that no rounding lets choose other experts: with near ties, two were 1e-5 and 4e-5 off."""
    dense = load(name, tmp_path / "dense")
    assert hold(dense, tmp_path, write_text(tmp_path / "text.txt"))["layers"] == 4
