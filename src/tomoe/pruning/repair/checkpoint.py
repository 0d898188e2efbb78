"""Refitted layers on disk until the plan is written, so that a repair that was killed resumes after the last whole one."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.files import atomic_file, parse_json
from tomoe.pruning.repair.equations import Refit
from tomoe.pruning.repair.layers import LayerRepair

_METADATA = "tomoe_repair"


class FinishedLayers:
    """One file for each layer that is refitted: `folder`/layer-000.safetensors and so on, matrices in float32.

    `key` names everything that the matrices depend on; files with another key are of another repair and count as missing.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key

    def count(self) -> int:
        """How many layers are finished, from the first on; the same in all ranks. Matrices are not read."""
        found = 0
        while self._fits(self._path(found)) is not None:
            found += 1
        count = torch.tensor([found])
        distributed.broadcast_([count])
        if found < int(count):
            raise UserError(f"{self.folder} cannot be read by every process; put it on a disk that all of them share")
        return int(count)

    def read(self, i: int, device: torch.device) -> LayerRepair:
        """Layer i, one of the `count` that are finished."""
        path = self._path(i)
        tensors = load_file(path, device=str(device))
        fits = {name: _refit(name, tensors, *numbers) for name, numbers in (self._fits(path) or {}).items()}
        return LayerRepair(fits["down"], fits.get("output"))

    def keep(self, i: int, layer: LayerRepair) -> None:
        """Write layer i; only rank 0 does. Raises UserError if it cannot be written."""
        if distributed.rank():
            return
        fits = {"down": layer.down} | ({} if layer.output is None else {"output": layer.output})
        metadata = {
            "key": self.key,
            "fits": {name: (f.error_before, f.error_after, f.ridge) for name, f in fits.items()},
        }
        tensors = {f"{name}.weight": f.weight.contiguous().cpu() for name, f in fits.items()}
        for name, f in fits.items():
            if f.factors is not None:
                tensors |= {f"{name}.{side}": t.contiguous().cpu() for side, t in zip("uv", f.factors, strict=True)}
        try:
            with atomic_file(self._path(i)) as part:
                save_file(tensors, part, metadata={_METADATA: json.dumps(metadata, sort_keys=True)})
        except SafetensorError as error:
            raise UserError(f"cannot write {self._path(i)}: {error}") from None

    def forget(self) -> None:
        """Delete the files, once the plan that holds the matrices is written."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("layer-*.safetensors"):
                path.unlink()
            self.folder.rmdir()

    def _path(self, i: int) -> Path:
        return self.folder / f"layer-{i:03d}.safetensors"

    def _fits(self, path: Path) -> dict[str, tuple[float, float, float]] | None:
        """Errors before and after, and the ridge, of the matrices of one file; None if it is no whole one of this repair."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata = parse_json((file.metadata() or {}).get(_METADATA, "{}"))
            return metadata["fits"] if metadata["key"] == self.key else None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None


def _refit(name: str, tensors: dict[str, Tensor], before: float, after: float, ridge: float) -> Refit:
    left, right = tensors.get(f"{name}.u"), tensors.get(f"{name}.v")
    factors = None if left is None or right is None else (left, right)
    return Refit(tensors[f"{name}.weight"], factors, before, after, ridge)
