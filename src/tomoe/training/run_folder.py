"""The folder of a training run: recipe, metrics, checkpoints. Everything in it survives a kill at any moment.

RUN/recipe.json            what was asked; without it nothing was begun
RUN/origin.sha256          the fingerprint of the model that is learned from: the dense one, or the converted one
RUN/corpus.safetensors     the text, as token blocks
RUN/metrics.jsonl          one line per logged step
RUN/masks/step-000100/     masks.safetensors, optimizer.safetensors, state.json
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from tomoe.errors import UserError
from tomoe.files import read_json, sha256, write_whole
from tomoe.recipe.base import BaseRecipe

KEEP = 2  # checkpoints that stay: the last, and the one before it


@dataclass(frozen=True)
class Checkpoint:
    """One readable checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]


def optimizer_tensors(optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """AdamW's moments and step counts by parameter name, so that safetensors can hold them."""
    names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
    return {f"{names[p]}.{key}": value for p, slots in optimizer.state.items() for key, value in slots.items()}


def restore_optimizer(optimizer: Optimizer, net: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, p in net.named_parameters():
        own = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.rpartition(".")[0] == name}
        if any(t.shape not in (p.shape, ()) for t in own.values()):
            raise ValueError(f"the moments of {name} are not of its shape")
        if own:
            optimizer.state[p] = {k: t.to(p.device) if k != "step" else t for k, t in own.items()}


class RunFolder:
    """Reads and writes one run. Every OSError becomes a UserError that says what was being written.

    `learned` names what its checkpoints hold: masks, or the weights of a fine-tuned model.
    """

    def __init__(self, path: Path, learned: str = "masks"):
        self.path, self.checkpoints = path, path / learned
        self.tensors = (f"{learned}.safetensors", "optimizer.safetensors")
        self.recipe, self.origin = path / "recipe.json", path / "origin.sha256"
        self.corpus, self.metrics = path / "corpus.safetensors", path / "metrics.jsonl"
        self.follow: Callable[[dict[str, Any]], None] = lambda row: None  # hears of every row that is logged

    def goes_on(self, recipe: BaseRecipe, resume: bool, force: bool) -> bool:
        """Whether the run that is here goes on; else a new one may begin. Writes nothing.

        Raises UserError where neither can be.
        """
        changed = type(recipe).load(self.recipe).differences(recipe) if resume and self.recipe.exists() else []
        if changed and not force:
            raise UserError(
                f"{self.path} was begun with another recipe ({'; '.join(changed)}); resume with the same one, or give --force "
                "to begin anew"
            )
        if self.recipe.exists() and not resume and not force:
            raise UserError(
                f"{self.path} already holds a run; give --resume to go on with it, or --force to begin anew"
            )
        there = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UserError(f"cannot write to {self.path}: {there} is {'read-only' if there.is_dir() else 'no folder'}")
        return resume and self.recipe.exists() and not changed

    def begin(self, recipe: BaseRecipe, resume: bool, origin: str = "") -> None:
        """Make the folder; only a resumed run keeps what is in it. Raises UserError where it cannot be written.

        `origin` is the fingerprint of the model that is learned from. The recipe goes first and comes last: what a kill
        leaves of an older run is never taken for this one's.
        """
        try:
            if not resume:
                for old in (self.recipe, self.origin, self.corpus, self.metrics):
                    old.unlink(missing_ok=True)
                if self.checkpoints.exists():
                    shutil.rmtree(self.checkpoints)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror or error}") from error
        if origin:
            write_whole(self.origin, f"{origin}\n")
        recipe.save(self.recipe)

    def origin_fingerprint(self) -> str:
        """Of the model that the run was begun with; empty where it was not kept."""
        return self.origin.read_text(encoding="ascii").strip() if self.origin.is_file() else ""

    def check_origin(self, found: str, name: str) -> None:
        """Raises UserError where the weights of the model `name` are not those that the run was begun with."""
        known = self.origin_fingerprint() or "not kept"
        if known != found:
            raise UserError(
                f"the weights of {name} changed since {self.path} was begun (hash {known[:12]} then, {found[:12]} now); "
                "bring back those it was begun with, or begin anew with --force"
            )

    def save(self, step: int, net: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write `step-N` under a temporary name, then rename; older checkpoints go only after that."""
        final = self.checkpoints / f"step-{step:06d}"
        part = self.checkpoints / f".part-{step:06d}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            save_file(net.state_dict(), part / self.tensors[0])
            save_file(optimizer_tensors(optimizer, net), part / "optimizer.safetensors")
            sums = {name: sha256(part / name) for name in self.tensors}
            (part / "state.json").write_text(
                json.dumps(state | {"step": step, "sha256": sums}, indent=2, sort_keys=True)
            )
            for file in part.iterdir():
                with file.open("rb") as f:
                    os.fsync(f.fileno())
            aside = self.checkpoints / f".old-{step:06d}"
            if final.exists():  # made again after a resume: deleted in place, half of it could be left by a kill
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            part.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.checkpoints} ({error}); earlier ones are kept"
            ) from error
        for old in sorted(self.checkpoints.glob("step-*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def last(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None where there is none. Damaged ones are passed over.

        Raises UserError where there are checkpoints, but none is whole.
        """
        folders = sorted(self.checkpoints.glob("step-*"), reverse=True)
        for folder in folders:
            found = self._read(folder)
            if found:
                return found
        if folders:
            raise UserError(
                f"no checkpoint in {self.checkpoints} is whole (files truncated or foreign); begin anew with --force"
            )
        return None

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            state = read_json(folder / "state.json")
            # our own names, not those that the file has: they could lead anywhere
            whole = all(sha256(folder / name) == state["sha256"][name] for name in self.tensors)
            named = type(state["step"]) is int and folder.name == f"step-{state['step']:06d}"
            return Checkpoint(folder, state["step"], state) if whole and named else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def restore(self, checkpoint: Checkpoint, net: nn.Module, optimizer: Optimizer | None) -> None:
        """Load weights (and moments) of a checkpoint. Raises UserError where it is for another network."""
        device = next(net.parameters()).device
        try:
            net.load_state_dict(load_file(checkpoint.folder / self.tensors[0], device=str(device)))
            if optimizer is not None:
                restore_optimizer(optimizer, net, load_file(checkpoint.folder / "optimizer.safetensors"))
        except (RuntimeError, ValueError, SafetensorError) as error:
            raise UserError(
                f"{checkpoint.folder} does not fit this model and recipe; begin anew with --force"
            ) from error

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One line of JSON, which has no word for what is not finite: null stands there."""
        said = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(said, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write metrics to {self.path}: {error.strerror or error}; the last checkpoint is kept"
            ) from error
        self.follow(said)

    def rows(self) -> list[dict[str, Any]]:
        """The logged steps so far; a last line that a kill cut short is passed over."""
        found = []
        for line in self.metrics.read_text(encoding="utf-8").splitlines() if self.metrics.exists() else ():
            with suppress(ValueError):
                found.append(json.loads(line))
        return found

    def forget_metrics_after(self, step: int) -> None:
        """Drop lines of steps that a resumed run will make again (and a last line cut by a kill)."""
        if self.metrics.exists():
            kept = [row for row in self.rows() if row.get("step", 0) <= step]
            write_whole(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
