"""Refitted layers on disk until the plan is written, so that a repair that was killed resumes after the last whole one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.files import atomic_file, parse_json
from tomoe.pruning.refit import Refit
from tomoe.pruning.repair import LayerRepair

_METADATA = "tomoe_repair"


class FinishedLayers:
    """One file for each layer that is refitted: `folder`/layer-000.safetensors and so on, matrices in float32.

    `key` names everything that the matrices depend on; files with another key are of another repair and count as missing.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key

    def load(self, device: torch.device) -> list[LayerRepair]:
        """The layers that are finished, from the first on; all ranks get the same number of them."""
        found: list[LayerRepair] = []
        while (layer := self._read(self._path(len(found)), device)) is not None:
            found.append(layer)
        count = torch.tensor([len(found)])
        distributed.broadcast_([count])
        if len(found) < int(count):
            raise UserError(f"{self.folder} cannot be read by every process; put it on a disk that all of them share")
        return found[: int(count)]

    def keep(self, i: int, layer: LayerRepair) -> None:
        """Write layer i; only rank 0 does. Raises UserError if it cannot be written."""
        if distributed.rank():
            return
        fits = _parts(layer)
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
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, i: int) -> Path:
        return self.folder / f"layer-{i:03d}.safetensors"

    def _read(self, path: Path, device: torch.device) -> LayerRepair | None:
        """One layer; None if there is no whole file of this repair."""
        try:
            with safe_open(path, framework="pt", device=str(device)) as file:
                metadata = parse_json((file.metadata() or {}).get(_METADATA, "{}"))
                if metadata["key"] != self.key:
                    return None
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            fits = {name: _refit(name, tensors, *numbers) for name, numbers in metadata["fits"].items()}
            return LayerRepair(fits["down"], fits.get("output"))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError):
            return None


def _parts(layer: LayerRepair) -> dict[str, Refit]:
    return {"down": layer.down} | ({} if layer.output is None else {"output": layer.output})


def _refit(name: str, tensors: dict[str, Tensor], before: float, after: float, ridge: float) -> Refit:
    left, right = tensors.get(f"{name}.u"), tensors.get(f"{name}.v")
    factors = None if left is None or right is None else (left, right)
    return Refit(tensors[f"{name}.weight"], factors, before, after, ridge)
