"""`load`: a model that is ready to use, dense or converted, with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.model.loading import load_model, load_tokenizer
from tomoe.moe.active_experts import dial_of, use_


def load(
    name: str | Path, dtype: str | torch.dtype = "bfloat16", device: str = "auto", active: float | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A dense model (hub id, folder, .gguf file, known name) or a converted folder, with its tokenizer.

    `active`: let tokens use as many fine-grained experts as make this fraction of the decoder parameters active, or the
    nearest number of them; or so many inputs. Raises UserError if there is no such model, or none that can.
    """
    setting = None if active is None else dial_of(str(name)).nearest(active)
    model = load_model(str(name), dtype, device)
    if setting is not None:
        use_(model, setting)
    return model, load_tokenizer(str(name))
