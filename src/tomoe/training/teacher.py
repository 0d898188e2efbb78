"""The dense model's final hidden states: computed, or read from a cache on disk."""

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

from tomoe.files import atomic_write
from tomoe.model.loading import fingerprint
from tomoe.model.running import run_model


def hidden_states(model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "T D"]:
    """Return the final hidden states, flattened over tokens."""
    return run_model(model, ids, mask)[0].flatten(0, 1)


class TeacherCache:
    """`hidden_states` with a cache on disk: one file of S x D numbers per sequence, named after its tokens.

    Any number of runs on the same text share one folder, in whatever order they read the text, and a kill leaves only
    whole files. Cached states are those that were computed, to the bit; weights, dtype, device and version of torch have
    a folder each. A damaged file is computed again. Calls raise UserError if the folder cannot be written.
    """

    def __init__(self, folder: Path, model: PreTrainedModel):
        key = (fingerprint(model), str(model.dtype), model.device.type, torch.__version__)
        self.folder = folder / hashlib.sha256(repr(key).encode()).hexdigest()[:16]

    def __call__(
        self, model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"]
    ) -> Float[Tensor, "T D"]:
        paths = [self._path(*sequence) for sequence in zip(ids, mask, strict=True)]
        shape = (ids.shape[1], model.config.hidden_size)
        states = [cached for path in paths if (cached := self._read(path, shape)) is not None]
        if len(states) < len(paths):
            states = list(hidden_states(model, ids, mask).unflatten(0, ids.shape))
            for path, hidden in zip(paths, states, strict=True):
                atomic_write(path, save({"hidden": hidden.contiguous()}))
        return torch.cat(states).to(model.device)

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
