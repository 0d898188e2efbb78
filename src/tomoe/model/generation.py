"""Continues a prompt with any model."""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import UserError, shortened
from tomoe.model.tokens import check_ids, check_length

# continued by both models in the report
PROMPT = "The three most important things about the sea are"


def asked(tokenizer: PreTrainedTokenizerBase, question: str, begun: str = "") -> list[int]:
    """The tokens of a question in the model's chat template, up to where its answer begins, or goes on after `begun`.

    Raises UserError if there is no template, or if it refuses the question.
    """
    if not tokenizer.chat_template:
        raise UserError("this model's tokenizer has no chat template, so it can only continue a text")
    turns = [{"role": "user", "content": question}]
    try:
        # models that think first are asked not to; templates without that choice ignore the word
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    except Exception as error:
        raise UserError(f"the model's chat template refuses a question ({shortened(error)})") from error
    # the template writes the special tokens
    return list(tokenizer(str(text) + begun, add_special_tokens=False)["input_ids"])


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The continuation of a prompt. Temperature 0 takes the most likely tokens, a higher one samples with the seed.

    Raises UserError for a prompt without a token, or with one that the model has no row for, or if the text
    would be longer than the positions that it has learned.
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    if prompt_tokens == 0:
        raise UserError("there is nothing to continue: the prompt has no token")
    check_ids(inputs["input_ids"], model)
    check_length(prompt_tokens + max_new_tokens, model)
    greedy = temperature == 0
    # generate draws from the global generator only
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(seed)
        ids = cast(Any, model).generate(
            **inputs,
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            temperature=None if greedy else temperature,
            top_p=None,
            top_k=None if greedy else 0,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(ids[0, prompt_tokens:], skip_special_tokens=True))
