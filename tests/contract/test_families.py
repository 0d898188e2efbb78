"""The contract of a conversion, for one type of model for each kind of structure; `benchmarks/families.py` holds all to it."""

from __future__ import annotations

from pathlib import Path

import pytest
from family_contract import hold, hold_inputs, recipe_for, tiny_model, write_tiny

from pico_files import CommandLine, fine, write_text
from tomoe.errors import UserError
from tomoe.model.mlp import converted_mlps
from tomoe.model.structure import check_output

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


# Linear attention is held by the class of public checkpoints (test_composites); where RoPE is missing, only attention differs,
# which stays whole.
@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, name in KINDS.items() if name not in ("qwen3_5_text", "smollm3")])
def test_a_conversion_keeps_what_the_family_computes(kind: str, tmp_path: Path) -> None:
    dense = write_tiny(KINDS[kind], tmp_path / "dense")
    found = hold(dense, tmp_path, write_text(tmp_path / "text.txt"))
    assert found["layers"] == (2 if KINDS[kind] == "nemotron_h" else 4)


# Attention that has no projections which read one input stays whole.
MLPS_ALONE = {"minicpm3", "nemotron_h", "moshi", "xlstm"}


# What multiplies or caps outside of the projections is no matter of their inputs.
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind for kind, name in KINDS.items() if name not in ("gemma2", "granite", "ministral3")]
)
def test_tokens_choose_inputs_in_every_family(kind: str, tmp_path: Path) -> None:
    kinds = hold_inputs(tiny_model(KINDS[kind]), tmp_path)
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
