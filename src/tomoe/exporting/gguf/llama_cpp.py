"""llama.cpp: quantizes weights for a GGUF file, and runs the file to compare it with the model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from jaxtyping import Float, Shaped
from torch import Tensor

from tomoe.errors import UserError

_PIECE = 2**18  # numbers that a thread quantizes at a time


def binding() -> Any:
    """Import xllamacpp. Raises UserError if it is not installed."""
    try:
        import xllamacpp  # type: ignore[import-untyped]
    except ImportError:
        raise UserError("running a GGUF file needs llama.cpp: pip install xllamacpp") from None
    return xllamacpp


def check_quantizer(precision: str) -> None:
    """Raise UserError if weights of this precision need llama.cpp and it is not installed."""
    if "_k" in precision and find_spec("xllamacpp") is None:
        raise UserError(f"{precision} weights are made by llama.cpp: pip install xllamacpp, or choose q8_0")


def quantize(
    x: Float[np.ndarray, "*rows n"],
    kind: GGMLQuantizationType,
    importance: Float[np.ndarray, "*matrices n"] | None = None,
) -> Shaped[np.ndarray, "*rows bytes"]:
    """Quantize float32 rows to a type of llama.cpp; K-quants, and matrices with the (positive) importance of their columns, by
    llama.cpp's own code, in as many threads as PyTorch has. The bytes do not depend on their number."""
    if importance is None and not kind.name.endswith("_K"):
        return quants.quantize(x, kind)
    library = ctypes.CDLL(binding().xllamacpp.__file__)
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    out = np.empty(quants.quant_shape_to_byte_shape(x.shape, kind), np.uint8)
    matrices, stored = x.reshape(-1, *x.shape[-2:]), out.reshape(-1, *out.shape[-2:])
    columns = None if importance is None else np.ascontiguousarray(importance, np.float32).reshape(len(matrices), -1)
    step = max(1, _PIECE // x.shape[-1])

    def piece(i: int, first: int) -> None:
        rows, into = matrices[i, first : first + step], stored[i, first : first + step]
        weights = None if columns is None else columns[i].ctypes.data
        library.ggml_quantize_chunk(int(kind), rows.ctypes.data, into.ctypes.data, 0, *rows.shape, weights)

    # ctypes gives up the interpreter's lock while the library works
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        [*pool.map(lambda at: piece(*at), product(range(len(matrices)), range(0, matrices.shape[1], step)))]
    return out


class LlamaCpp:
    """One file, run on the CPU."""

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        context: int,
        letter: int,
        threads: int | None = None,
        rows: int = 1,
        exact: bool = True,
    ):
        """`letter` is any token that is text by itself: llama.cpp returns no end-of-text and no half characters.

        `rows` sequences can run at once, with `context` tokens together. exact: keys and values are kept in float32; float16,
        its default and faster, would hide differences of the weights.
        """
        x = binding()
        p = x.CommonParams()
        p.model.path = str(path)
        p.n_ctx, p.n_parallel, p.n_gpu_layers = context, rows, 0
        p.warmup = p.fit_params = False
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = threads or torch.get_num_threads()
        if exact:
            p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
            p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        p.verbosity = -1
        self.vocab_size, self.letter = vocab_size, letter
        try:
            self.server = x.Server(p)
        except RuntimeError as error:
            raise UserError(f"llama.cpp cannot load {path}: {error}") from None

    def _complete(self, prompt: Sequence[int] | str, **options: Any) -> dict[str, Any]:
        request = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "temperature": 0.0,
            "cache_prompt": True,
        }
        answer: dict[str, Any] = self.server.handle_completions(request | options)
        if "choices" not in answer:
            raise UserError(f"llama.cpp does not answer: {answer.get('error', answer)}")
        return answer

    def log_probs(self, prompt: Sequence[int] | str, fresh: bool = False) -> Float[Tensor, " V"]:
        """Return log-probs of the next token. `fresh` reuses nothing of an earlier prompt, so that rounding is reproducible."""
        # decides which token is answered; log-probs are of the logits before the bias
        bias = [[self.letter, 1e6]]
        options = {"n_predict": 1, "n_probs": self.vocab_size, "logit_bias": bias, "cache_prompt": not fresh}
        tops = self._complete(prompt, **options)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        log_probs = torch.full((self.vocab_size,), torch.nan)
        log_probs[torch.tensor([top["id"] for top in tops])] = torch.tensor([top["logprob"] for top in tops])
        return log_probs

    def write(self, prompt: Sequence[int] | str, tokens: int, stop: Sequence[str] = ()) -> str:
        """Continue a prompt greedily, up to one of the texts in `stop`, which is left out."""
        return str(self._complete(prompt, n_predict=tokens, stop=list(stop))["choices"][0]["text"])

    def run(self, prompt: Sequence[int], tokens: int, fresh: bool = True) -> None:
        """Generate exactly this many tokens, and if `fresh` reuse nothing of an earlier prompt: for timing."""
        self._complete(prompt, n_predict=tokens, ignore_eos=True, cache_prompt=not fresh)
