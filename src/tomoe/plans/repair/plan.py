"""Plan -> Plan: refit the down projections (and, if V/O dims are pruned, the output projections) to the plan's masks.

Refitted layers are kept on disk until the plan is written, so that a repair that was killed resumes after the last complete one.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.files import atomic_file
from tomoe.model.shape import ModelShape
from tomoe.plans import REPAIRED, LayerPlan, Plan
from tomoe.plans.masking import planned_masks
from tomoe.plans.repair.equations import Refit
from tomoe.plans.repair.layers import LayerRepair, RepairSettings, repair_layers
from tomoe.progress import ProgressCallback, no_progress
from tomoe.recipe.conversion import RepairSection

KEPT = "repair"  # subfolder of a run that keeps the layers of an unfinished repair
_KEY = "tomoe_repair"  # in the metadata of their files


class FinishedLayers:
    """One file per refitted layer: `folder`/layer-000.safetensors and so on, matrices in float32.

    `key` names everything that the matrices depend on; files with another key are of another repair and count as missing.
    """

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key

    def count(self) -> int:
        """Count the finished layers, from the first; equal in all ranks. Matrices are not read."""
        found = 0
        while self._is_whole(self._path(found)):
            found += 1
        count = torch.tensor([found])
        distributed.broadcast_([count])
        if found < int(count):
            raise UserError(f"{self.folder} cannot be read by every process; put it on a disk that all of them share")
        return int(count)

    def read(self, i: int, device: torch.device) -> LayerRepair:
        """Read layer i, one of the `count` finished ones."""
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
        """Delete the files, once the plan with the matrices is written."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob("layer-*.safetensors"):
                path.unlink()
            self.folder.rmdir()

    def _path(self, i: int) -> Path:
        return self.folder / f"layer-{i:03d}.safetensors"

    def _is_whole(self, path: Path) -> bool:
        """Whether the file is complete and belongs to this repair."""
        try:
            with safe_open(path, framework="pt") as file:
                return bool((file.metadata() or {}).get(_KEY) == self.key)
        except (OSError, SafetensorError):
            return False


def _refit(tensors: dict[str, Tensor], name: str) -> Refit:
    factors = (tensors[f"{name}.u"], tensors[f"{name}.v"]) if f"{name}.u" in tensors else None
    return Refit(tensors[f"{name}.weight"], factors, *tensors[f"{name}.numbers"].tolist())


def repair_plan(
    plan: Plan,
    model: PreTrainedModel,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    section: RepairSection,
    on_progress: ProgressCallback = no_progress,
    folder: Path | None = None,
    stored: torch.dtype | None = None,
) -> Plan:
    """Return the plan with refitted projections, and a note of how they were fitted and what it gained; if the section leaves
    that out, the plan itself.

    `model` holds the dense weights that the plan is for, `ids` the calibration sequences; `mask` is False on padding.
    `stored` is the dtype of full matrices in the plan (default: the model's). Earlier refits of the plan are replaced. Under
    torchrun every rank must take part; all get the same plan. Hidden states that do not fit in memory go to a file in
    `folder`. Its subfolder `repair` keeps finished layers, with which a repair that was killed resumes; the caller deletes it
    (`forget_repair`) once the plan is written. Raises UserError if activations are not finite.
    """
    if section.mode == "none":
        return plan
    bare = plan.without_repair()
    prunes_values = any(layer.value_top_k < plan.shape.head_dim for layer in bare.layers)
    target = section.target_after(plan.notes.get("steps", 0))
    real_tokens = int(mask.sum())
    # text that is all padding is refused by the repair itself
    ridge = section.ridge_for(max(1, real_tokens), plan.shape.mlp_size)
    settings = RepairSettings(target, ridge, section.rank if section.mode == "low_rank" else 0, prunes_values)
    repaired: list[LayerPlan] = []
    errors = torch.zeros(2, dtype=torch.float64)
    store = None if folder is None else FinishedLayers(folder / KEPT, _key(bare, model, ids, mask, settings))
    count = 0 if store is None else store.count()

    def finished(i: int) -> LayerRepair | None:
        return store.read(i, model.device) if store is not None and i < count else None

    report = partial(on_progress, "repair")
    fits = repair_layers(model, planned_masks(bare, model.device), ids, mask, settings, report, folder, finished)
    for i, (layer, fit) in enumerate(zip(bare.layers, fits, strict=True)):
        if store is not None and i >= count:
            try:
                store.keep(i, fit)
            except UserError:  # a full disk: better to repair without a way to resume than not at all
                store.forget()
                store = None
        repaired.append(replace(layer, refit=_tensors(fit, stored or model.dtype)))
        errors += torch.tensor([fit.down.error_before, fit.down.error_after], dtype=torch.float64)
    before, after = (errors / len(bare.layers)).tolist()
    note = {
        "mode": section.mode,
        "ridge": ridge,
        "target": target,
        "tokens": real_tokens,
        "error_before": before,
        "error_after": after,
        "output": prunes_values,
    }
    if section.mode == "low_rank":
        note["rank"] = section.rank
    return replace(bare, layers=tuple(repaired), notes=bare.notes | {REPAIRED: note})


def forget_repair(folder: Path) -> None:
    """Delete the files that a repair kept in `folder` to resume from."""
    FinishedLayers(folder / KEPT, "").forget()


def _key(
    plan: Plan, model: PreTrainedModel, ids: Int[Tensor, "B S"], mask: Bool[Tensor, "B S"], settings: RepairSettings
) -> str:
    """SHA-256 (hex) of everything that the refitted matrices depend on."""
    sha = hashlib.sha256(repr((plan.source, settings, str(model.dtype), model.device.type, torch.__version__)).encode())
    tensors = {"ids": ids, "mask": mask}
    for i, layer in enumerate(plan.layers):
        fields = vars(layer) | {f"value_router.{name}": t for name, t in layer.value_router.items()}
        sha.update(repr([value for value in fields.values() if isinstance(value, int)]).encode())
        tensors |= {f"{i}.{name}": value for name, value in fields.items() if isinstance(value, Tensor)}
    sha.update(save({name: t.contiguous().cpu() for name, t in tensors.items()}))
    return sha.hexdigest()


def _tensors(fit: LayerRepair, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what the plan keeps of a layer: matrices in `dtype`, low-rank factors in float32."""
    tensors: dict[str, Tensor] = {}
    for name, refit in (("down", fit.down), ("output", fit.output)):
        if refit is not None and refit.factors is None:
            tensors[f"{name}.weight"] = refit.weight.to(dtype).cpu()
        elif refit is not None and refit.factors is not None:
            sides = zip(("left", "right"), refit.factors, strict=True)
            tensors |= {f"{name}.{side}": factor.contiguous().cpu() for side, factor in sides}
    return tensors


def repair_bytes(shape: ModelShape, section: RepairSection, itemsize: int, output: bool = False) -> int:
    """Estimate the bytes that repair adds to a plan; `output`: with the output projections of attention."""
    if section.mode == "none":
        return 0
    sizes = [shape.mlp_size, *([shape.num_heads * shape.head_dim] if output else [])]
    if section.mode == "full":
        return shape.num_layers * shape.hidden_size * sum(sizes) * itemsize
    ranks = [min(section.rank, shape.hidden_size, size) for size in sizes]
    # factors are float32
    return shape.num_layers * sum((shape.hidden_size + n) * r for n, r in zip(sizes, ranks, strict=True)) * 4
