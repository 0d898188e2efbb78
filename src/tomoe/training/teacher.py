"""What the dense model says about a block of text: computed, or read where it was computed before."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from tomoe.files import write_whole
from tomoe.model.loading import fingerprint
from tomoe.model.structure import run_blocks


def hidden_states(model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "T D"]:
    """Final hidden states, flattened over tokens."""
    return run_blocks(model, ids, mask)[0].flatten(0, 1)


class TeacherCache:
    """The same, kept on disk: one file a block, S x D numbers, under a name made of its tokens.

    So any number of runs on the same text share one folder, whatever order they read it in, and a kill leaves whole files
    only. What is kept is what was computed, to the bit; another version of torch, dtype, device or weights has a folder of
    its own. A damaged file is computed again. Raises UserError where the folder cannot be written.
    """

    def __init__(self, folder: Path, model: PreTrainedModel):
        about = (fingerprint(model), str(model.dtype), model.device.type, torch.__version__)
        self.folder = folder / hashlib.sha256(repr(about).encode()).hexdigest()[:16]

    def __call__(
        self, model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "T D"]:
        paths = [self._path(*block) for block in zip(ids, mask, strict=True)]
        kept = [b for path in paths if (b := self._read(path, (ids.shape[1], model.config.hidden_size))) is not None]
        if len(kept) < len(paths):
            kept = list(hidden_states(model, ids, mask).unflatten(0, ids.shape))
            for path, block in zip(paths, kept, strict=True):
                write_whole(path, save({"hidden": block.contiguous()}))
        return torch.cat(kept).to(model.device)

    def _path(self, ids: Int[Tensor, " S"], mask: Bool[Tensor, " S"]) -> Path:
        name = hashlib.sha256(ids.cpu().numpy().tobytes() + mask.cpu().numpy().tobytes()).hexdigest()
        return self.folder / name[:2] / f"{name}.safetensors"

    @staticmethod
    def _read(path: Path, shape: tuple[Any, ...]) -> Tensor | None:
        try:
            hidden = load_file(path)["hidden"]
        except (OSError, KeyError, SafetensorError):
            return None
        return hidden if hidden.shape == shape else None
