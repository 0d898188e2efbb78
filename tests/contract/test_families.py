"""The contract of a conversion, for one type of model for each kind of structure; `benchmarks/families.py` holds all to it.
Models that read more than text are of the class that their public checkpoints name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from family_contract import hold, hold_inputs, recipe_for, tiny_model, write_public, write_tiny

from pico_files import CommandLine, fine, write_text
from tomoe.errors import UserError
from tomoe.evaluation.param_counts import model_facts
from tomoe.model.far_tokens import far_tokens, near_tokens
from tomoe.model.loading import load_dense
from tomoe.model.mlp import converted_mlps
from tomoe.model.structure import check_output, shape_of
from tomoe.model.tokens import check_ids

KINDS = {
    "linear attention in some layers": "qwen3_5_text",
    "convolutions in some layers, MLP named w1, w3, w2": "lfm2",
    "state spaces, layers without an MLP": "nemotron_h",
    "norms of all heads together, behind their part": "olmo2",
    "scaled embeddings, soft caps, norms before and behind": "gemma2",
    "multipliers of residual, embeddings and logits": "granite",
    "no RoPE in some layers": "smollm3",
    "interleaved RoPE, parallel blocks": "cohere",
    "query scale by position": "ministral3",
    "latent attention": "minicpm3",
    "fused projections": "phi3",
    "fused projections of other names": "moshi",
    "transposed weights, layers elsewhere": "gpt2",
    "residual handed to the MLP": "bloom",
    "MLP that is no module": "opt",
    "a cache of its own, gates that start at zero": "xlstm",
}


# Of others, whose layers are alike, two are enough.
FOUR_LAYERS = {"qwen3_5_text", "lfm2", "nemotron_h", "smollm3"}


def layers(kind: str) -> dict[str, int]:
    """What makes a tiny model of a kind small."""
    names = ["num_hidden_layers", *(["n_layer"] if KINDS[kind] == "bloom" else [])]
    return {} if KINDS[kind] in FOUR_LAYERS else dict.fromkeys(names, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversion_keeps_what_the_family_computes(kind: str, tmp_path: Path) -> None:
    dense = write_tiny(KINDS[kind], tmp_path / "dense", **layers(kind))
    found = hold(dense, tmp_path, write_text(tmp_path / "text.txt"))
    assert found["layers"] == (4 if KINDS[kind] in FOUR_LAYERS - {"nemotron_h"} else 2)


# Attention that has no projections which read one input stays whole.
MLPS_ALONE = {"minicpm3", "nemotron_h", "moshi", "xlstm"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_choose_inputs_in_every_family(kind: str, tmp_path: Path) -> None:
    kinds = hold_inputs(tiny_model(KINDS[kind], **layers(kind)), tmp_path)
    assert kinds == ({"up", "down"} if KINDS[kind] in MLPS_ALONE else {"attention", "output", "up", "down"})


REFUSED = {
    "experts already": ("mixtral", "Mixtures of Experts already"),
    "a norm within the MLP": ("bitnet", "the MLP of layer 0 is not the usual formula"),
    "layers that run again": ("hrm_text", "its layers run several times for each token"),
    "experts but for the first layers": ("beam", "Mixtures of Experts already"),
    "no MLP": ("mamba", "no up and down projections that are known"),
    "an encoder": ("bert", "no list of decoder layers outside of an encoder"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_no_dense_causal_decoder_is_refused_in_a_sentence(reason: str) -> None:
    model_type, words = REFUSED[reason]
    with pytest.raises(UserError, match=f"cannot convert this '{model_type}' model: .*{words}") as caught:
        check_output(tiny_model(model_type))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", ["bitnet", "hrm_text", "gemma3n_text"])
def test_the_doctor_says_what_convert_says(model_type: str, tomoe: CommandLine, tmp_path: Path) -> None:
    """The norm within an MLP, the second run of a layer and several streams at once show without weights, too."""
    model = write_tiny(model_type, tmp_path)
    with pytest.raises(UserError) as refused:
        check_output(model)
    done = tomoe("doctor", tmp_path)
    assert done.code == 2
    assert str(refused.value).partition(" (relative")[0] in " ".join(done.err.split())


def test_layers_that_share_an_mlp_are_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(UserError, match="its layers share one MLP"):
        converted_mlps(model)


def test_of_two_widths_the_common_one_is_converted() -> None:
    model, wider = tiny_model("llama"), tiny_model("llama", intermediate_size=768)
    model.model.layers[2].mlp = wider.model.layers[2].mlp
    assert [mlp.number for mlp in converted_mlps(model)] == [0, 1, 3]


@pytest.mark.slow
def test_the_command_line_measures_and_draws_families_of_other_names(tomoe: CommandLine, tmp_path: Path) -> None:
    """Its attention cannot be pruned, its MLP is no module, and its positions are learned."""
    dense, text = tmp_path / "dense", write_text(tmp_path / "text.txt")
    recipe = recipe_for(write_tiny("opt", dense), dense, text)
    done = tomoe("convert", dense, "--data", text, "-o", tmp_path / "moe", *fine(), "--active", str(recipe.active))
    assert done.code == 0, done.err
    assert "experts" in (tmp_path / "moe" / "report.html").read_text()
    # longer than the positions, unless the context follows the model
    done = tomoe("evaluate", dense, tmp_path / "moe", "--text", write_text(tmp_path / "long.txt", 40))
    assert done.code == 0, done.err
    assert "512 tokens (the context)" in " ".join(done.out.split())


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
    with pytest.raises(UserError, match="a 'bart' model: its decoder reads the output of an encoder") as caught:
        load("BartForConditionalGeneration", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*reads more than text")
@pytest.mark.parametrize("name", ["Gemma4ForConditionalGeneration", "GotOcr2ForConditionalGeneration"])
def test_they_convert_as_their_checkpoints_are(name: str, tmp_path: Path) -> None:
    """In float32, on tokens that no rounding lets choose other experts: with near ties, two were 1e-5 and 4e-5 off.

    Of Qwen3.5 the text model is loaded alone, which is one of KINDS.
    """
    dense = load(name, tmp_path / "dense")
    assert hold(dense, tmp_path, write_text(tmp_path / "text.txt"))["layers"] == 4
