"""Run vLLM on folders and write down what it predicts: a process of its own, so that nothing of vLLM reaches the tests.

    python vllm_process.py REQUESTS ANSWERS

Both are JSON files. REQUESTS holds a list of the arguments of `predict`, ANSWERS what it returned for each.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# In one process a model is gone with its object.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def predict(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int,
    dtype: str = "float32",
    may_fail: bool = False,
    **overrides: Any,
) -> list[dict[str, Any]]:
    """Load a folder, with `overrides` of its config, and continue prompts of token ids greedily.

    For each prompt: the log-probs of its tokens but the first, those of the most likely tokens there, and the ids written.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype=dtype,
        hf_overrides=overrides,
        max_model_len=max(map(len, prompts)) + new_tokens,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=new_tokens, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
    answers = []
    for ids, output in zip(prompts, outputs, strict=True):
        places = output.prompt_logprobs[1:]
        answers.append(
            {
                "log_probs": [place[token].logprob for token, place in zip(ids[1:], places, strict=True)],
                "most_likely": [max(entry.logprob for entry in place.values()) for place in places],
                "written": list(output.outputs[0].token_ids),
            }
        )
    return answers


if __name__ == "__main__":
    requests, answers = map(Path, sys.argv[1:])
    predicted: list[Any] = []
    for request in json.loads(requests.read_text("utf-8")):
        try:
            predicted.append(predict(**request))
        # what vLLM says of a class that it cannot run
        except Exception as error:
            if not request.pop("may_fail", False):
                raise
            predicted.append(f"{type(error).__name__}: {error}")
        gc.collect()
    answers.write_text(json.dumps(predicted), encoding="utf-8")
