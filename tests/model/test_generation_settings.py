"""What generation_config.json of a model says changes neither what a call returns nor whether it can; mistakes are named."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tomoe as public
from pico_files import CommandLine, pico_recipe, refused, write_pico, write_text
from tomoe.errors import UserError
from tomoe.evaluation.writing.continuations import continuations
from tomoe.model.generation import LONG_PROMPT
from tomoe.model.hooks import hooked
from tomoe.moe.active_experts import load

SETTINGS = {
    "stop_strings": ["<|end|>"],
    "num_beams": 3,
    "return_dict_in_generate": True,
    "output_scores": True,
    "min_length": 40,
    "penalty_alpha": 0.6,
    "prompt_lookup_num_tokens": 3,
    "cache_implementation": "static",
    "max_time": 1e-9,
}


def settle(model: Path, **settings: object) -> Path:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2} | settings))
    return model


def test_the_same_text_whatever_the_models_settings(tomoe: CommandLine, model: Path) -> None:
    command = ("generate", model, "the sea", "--max-new-tokens", "4")
    plain = tomoe(*command)
    for name, value in SETTINGS.items():
        settle(model, **{name: value})
        written = tomoe(*command)
        assert (written.code, written.out) == (0, plain.out), (name, written.err)
        loaded, tokenizer = load(model, dtype="float32")
        # one row goes by the family's own `generate`
        loaded._is_stateful = True
        assert len(continuations(loaded, tokenizer, [[3, 4, 5]], 3)[0]) == 3, name


def test_a_stop_string_ends_the_text(model: Path) -> None:
    loaded, tokenizer = load(settle(model, stop_strings=["aaa"]), dtype="float32")
    [always] = tokenizer("a", add_special_tokens=False)["input_ids"]

    def only_a(_: object, args: object, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([always]), 1e9)

    with hooked([loaded.get_output_embeddings().register_forward_hook(only_a)]):
        assert public.generate(loaded, tokenizer, "the b", max_new_tokens=8) == "aaa"


def test_settings_that_cannot_be_read_are_named(tomoe: CommandLine, model: Path, text: Path, tmp_path: Path) -> None:
    settle(model, num_return_sequences=3)
    for command in (("generate", model, "the sea"), ("convert", model, "-o", tmp_path / "out", "--data", text)):
        outcome = tomoe(*command)
        refused(outcome, "generation_config.json cannot be used", "num_return_sequences", "delete the file")
        assert "damaged" not in outcome.err
    # the advice helps
    (model / "generation_config.json").unlink()
    assert tomoe("generate", model, "the sea", "--max-new-tokens", "1").code == 0


def test_mistakes_in_python_calls_are_sentences(tmp_path: Path) -> None:
    folder, text = str(write_pico(tmp_path / "dense")), str(write_text(tmp_path / "text.txt"))
    model, tokenizer = public.load(folder, dtype=torch.float32)
    assert model.dtype == torch.float32
    out, moe = tmp_path / "out", tmp_path / "moe"
    wrong = {
        "dtype is 'fp16'": lambda: public.load(folder, dtype="fp16"),
        "one text": lambda: public.generate(model, tokenizer, ["a", "b"]),  # type: ignore[arg-type]
        "max_new_tokens is 0": lambda: public.generate(model, tokenizer, "a", max_new_tokens=0),
        "temperature is -1": lambda: public.generate(model, tokenizer, "a", temperature=-1.0),
        r"seed is 9223372036854775808, but": lambda: public.generate(model, tokenizer, "a", seed=2**63),
        "device is 'meta'|no device 'meta'": lambda: public.evaluate([folder], text, device="meta"),
        "holds half a character": lambda: public.generate(model, tokenizer, "caf\udce9"),
        "temperature is nan": lambda: public.generate(model, tokenizer, "a", temperature=float("nan")),
        "context is 0": lambda: public.evaluate([folder], text, context=0),
        "stride is 0": lambda: public.evaluate([folder], text, stride=0),
        "tokens is -5": lambda: public.evaluate([folder], text, tokens=-5),
        "dtype is 'half'": lambda: public.evaluate([folder], text, dtype="half"),
        r"Recipe.load\(None": lambda: public.convert(folder, out),  # type: ignore[arg-type]
        r"FinetuneRecipe.load\(None": lambda: public.finetune(pico_recipe(tmp_path), out),  # type: ignore[arg-type]
        "dtype is 'f8'": lambda: public.export(moe, "auto", out, dtype="f8"),
        "tokens is 3": lambda: public.export(moe, "auto", out, tokens=3),
    }
    for words, call in wrong.items():
        with pytest.raises(UserError, match=words):
            call()
    assert not out.exists()


@pytest.mark.parametrize(
    ("instructions", "dtype", "tokens", "warned"),
    [
        ((), "bfloat16", LONG_PROMPT, True),
        ((), "bfloat16", LONG_PROMPT - 1, False),
        ((), "float32", LONG_PROMPT, False),
        (("avx512_bf16",), "bfloat16", LONG_PROMPT, False),
    ],
)
def test_a_long_prompt_in_a_dtype_that_the_processor_emulates_is_named(
    monkeypatch: pytest.MonkeyPatch, model: Path, instructions: tuple[str, ...], dtype: str, tokens: int, warned: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(instructions, True))
    loaded, tokenizer = load(model, dtype, device="cpu")
    prompt = "a" * tokens
    assert len(tokenizer(prompt)["input_ids"]) == tokens
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        public.generate(loaded, tokenizer, prompt, max_new_tokens=1)
    assert any(f"the {tokens} tokens of the prompt" in str(warning.message) for warning in seen) == warned


def test_a_temperature_near_zero_is_the_most_likely_token(model: Path) -> None:
    """Its quotient does not fit a number."""
    loaded, tokenizer = public.load(str(model), dtype=torch.float32)
    likely, near = (public.generate(loaded, tokenizer, "the sea", 8, temperature) for temperature in (0.0, 1e-40))
    assert near == likely


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_that_are_no_numbers_are_refused(model: Path, temperature: float) -> None:
    """The most likely of them would be the first token, again and again."""
    loaded, tokenizer = public.load(str(model), dtype=torch.float32)
    loaded.lm_head.weight.data[5] = torch.nan
    with pytest.raises(UserError, match="predictions of the model are not finite numbers"):
        public.generate(loaded, tokenizer, "the sea", 8, temperature)
