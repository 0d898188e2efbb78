"""Refitted layers on disk until the plan is written, so that a repair that was killed resumes after the last whole one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.files import atomic_file
from tomoe.pruning.repair.equations import Refit
from tomoe.pruning.repair.layers import LayerRepair

_KEY = "tomoe_repair"  # in the metadata of a file


class FinishedLayers:
    """One file for each layer that is refitted: `folder`/layer-000.safetensors and so on, matrices in float32.

    `key` names everything that the matrices depend on; files with another key are of another repair and count as missing.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key

    def count(self) -> int:
        """How many layers are finished, from the first on; the same in all ranks. Matrices are not read."""
        found = 0
        while self._is_whole(self._path(found)):
            found += 1
        count = torch.tensor([found])
        distributed.broadcast_([count])
        if found < int(count):
            raise UserError(f"{self.folder} cannot be read by every process; put it on a disk that all of them share")
        return int(count)

    def read(self, i: int, device: torch.device) -> LayerRepair:
        """Layer i, one of the `count` that are finished."""
        tensors = load_file(self._path(i), device=str(device))
        return LayerRepair(_refit(tensors, "down"), _refit(tensors, "output") if "output.weight" in tensors else None)

    def keep(self, i: int, layer: LayerRepair) -> None:
        """Write layer i; only rank 0 does. Raises UserError if it cannot be written."""
        if distributed.rank():
            return
        tensors: dict[str, Tensor] = {}
        for name, fit in (("down", layer.down), ("output", layer.output)):
            if fit is not None:
                numbers = [fit.error_before, fit.error_after, fit.ridge]
                tensors |= {f"{name}.weight": fit.weight, f"{name}.numbers": torch.tensor(numbers, dtype=torch.float64)}
                tensors |= {f"{name}.{side}": t for side, t in zip("uv", fit.factors or (), strict=False)}
        try:
            with atomic_file(self._path(i)) as part:
                save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, part, metadata={_KEY: self.key})
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

    def _is_whole(self, path: Path) -> bool:
        """Whether the file is a whole one of this repair."""
        try:
            with safe_open(path, framework="pt") as file:
                return bool((file.metadata() or {}).get(_KEY) == self.key)
        except (OSError, SafetensorError):
            return False


def _refit(tensors: dict[str, Tensor], name: str) -> Refit:
    factors = (tensors[f"{name}.u"], tensors[f"{name}.v"]) if f"{name}.u" in tensors else None
    return Refit(tensors[f"{name}.weight"], factors, *tensors[f"{name}.numbers"].tolist())
