"""Continues a prompt with any model, or asks a chat model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from tomoe.errors import Note, UserError, shortened
from tomoe.model.compute_dtype import reads_slowly
from tomoe.model.tokens import UNKNOWN, check_ids, continuation_text, prompt_ids

# What a call relies on, whatever the model's generation_config.json says: one text, token by token, as ids alone.
PLAIN = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_cache": True,
    "cache_implementation": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "use_mtp": None,
    "guidance_scale": None,
    "constraints": None,
    "force_words_ids": None,
    "min_length": 0,
    "min_new_tokens": None,
    "max_time": None,
    "token_healing": False,
    "watermarking_config": None,
}
PROMPT = "The three most important things about the sea are"  # continued to verify an export
LEAST_TEMPERATURE = 1e-5
LONG_PROMPT = 64  # tokens from which a dtype that the processor emulates is felt


def asked(tokenizer: PreTrainedTokenizerBase, question: str, begun: str = "") -> list[int]:
    """Return the tokens of a question in the model's chat template, up to the beginning of its answer, or of what follows
    `begun`. Raises UserError if there is no template, or if it refuses the question."""
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
    chat: bool = False,
    on_text: Callable[[str], None] | None = None,
) -> str:
    """Continue a prompt, or with `chat` answer it, through the model's chat template; at temperature 0 with the most likely
    tokens, else sampled with the seed. `on_text` receives the text in pieces. A Note warns of a long prompt in a dtype that this
    processor emulates. Raises UserError for a prompt without a token, or with one that has no row, for a text longer than the
    learned positions, without a chat template, and for invalid numbers."""
    if not isinstance(prompt, str):
        raise UserError(f"the prompt is a {type(prompt).__name__}, but it should be one text; call again for each")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}, but it should be at least 1")
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature is {temperature}, but it should be 0 or greater")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}, but it should be between 0 and 2**63 - 1")
    prompted = asked(tokenizer, prompt) if chat else prompt_ids(tokenizer, prompt)
    if not prompted:
        raise UserError("there is nothing to continue: the prompt has no token")
    ids = torch.tensor([prompted], device=model.device)
    check_ids(ids, model, max_new_tokens)
    if len(prompted) >= LONG_PROMPT and reads_slowly(model):
        warnings.warn(
            f"this processor has no bfloat16 instructions, so the {len(prompted)} tokens of the prompt take several times as "
            "long as with dtype float32, which needs twice the memory",
            Note,
            stacklevel=2,
        )
    # of a temperature so near 0 that the quotient does not fit a number, nothing but the most likely token is left
    greedy = temperature < LEAST_TEMPERATURE
    # generate draws from the global generator only
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(seed)
        written = cast(Any, model).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=not greedy,
            temperature=None if greedy else temperature,
            top_p=None,
            top_k=None if greedy else 0,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            # for strings that end a text
            tokenizer=tokenizer,
            logits_processor=LogitsProcessorList([_refuse_nonfinite]),
            **plain(),
            streamer=None if on_text is None else _Streamer(tokenizer, prompted, on_text),
        )
    return continuation_text(tokenizer, prompted, written[0, len(prompted) :].tolist())


def _refuse_nonfinite(_: Tensor, scores: Tensor) -> Tensor:
    """Return the next-token scores unchanged. Raises UserError for NaN, with which the first token would be chosen."""
    if bool(scores.isnan().any()) or not bool(scores.isfinite().any()):
        raise UserError(
            "the predictions of the model are not finite numbers; load it in float32 or bfloat16, and if that does not help, "
            "its weights are damaged: get or convert it again"
        )
    return scores


def plain() -> dict[str, Any]:
    """The settings of PLAIN that this version of transformers supports."""
    known = vars(GenerationConfig())
    return {name: value for name, value in PLAIN.items() if name in known}


class _Streamer(BaseStreamer):
    """Passes generated text on in complete characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: list[int], on_text: Callable[[str], None]):
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.on_text = on_text
        self.written: list[int] = []
        self.begun = False
        self.shown = 0

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then each token, from `generate`."""
        if not self.begun:
            self.begun = True
            return
        self.written += value.flatten().tolist()
        # the last of it may be a part of a character
        self._show(self._text().rstrip(UNKNOWN))

    def end(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return continuation_text(self.tokenizer, self.prompt, self.written)

    def _show(self, text: str) -> None:
        if piece := text[self.shown :]:
            self.on_text(piece)
            self.shown += len(piece)
