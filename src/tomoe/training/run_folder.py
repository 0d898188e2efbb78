"""The folder of a training run: recipe, metrics, checkpoints. Everything in it survives a kill at any moment.

RUN/recipe.json            the recipe; a folder without it holds no run
RUN/origin.sha256          the fingerprint of the model that the run starts from: the dense one, or the converted one
RUN/method.py              of a method in a file of the user's: a copy of that file
RUN/corpus.safetensors     the text, as sequences of tokens
RUN/metrics.jsonl          one line per logged step
RUN/best.safetensors       of a run that is checked on held-out text: the weights that were best
RUN/no-model.txt           of a run that ended without a model: why
RUN/plan/                  while a conversion is repaired: the plan before it
RUN/masks/step-000100/     masks.safetensors, optimizer.safetensors, state.json
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tomoe import distributed
from tomoe.data.corpus import Corpus
from tomoe.data.sources import SELF
from tomoe.errors import Advice, UserError, shortened
from tomoe.files import atomic_file, atomic_write, parse_json, read_json, read_text, sha256
from tomoe.folders import RUN, refuse_foreign_files
from tomoe.recipe.base import BaseRecipe
from tomoe.recipe.shared import RunRecipe

# Of AdamW, in 32 and in 8 bits: of the shape of their parameter.
_MOMENTS = ("exp_avg", "exp_avg_sq", "state1", "state2")
EARLIER = "earlier-"  # begins the names of text that the conversion before a fine-tuning learned from
START_OVER = Advice("force", "to start over")
KEEP = 2  # checkpoints that are kept: the last and the one before it


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint."""

    folder: Path
    step: int
    state: dict[str, Any]


def optimizer_tensors(optimizer: Optimizer, net: nn.Module) -> dict[str, Tensor]:
    """Return AdamW's moments and step counts by parameter name, so that safetensors can hold them."""
    names: dict[Tensor, str] = {p: name for name, p in net.named_parameters()}
    return {
        # copied, as moments in 8 bits share the table of their values, and safetensors takes nothing that is shared
        f"{names[p]}.{key}": value if key in _MOMENTS else torch.as_tensor(value).clone()
        for p, slots in optimizer.state.items()
        for key, value in slots.items()
    }


def restore_optimizer(optimizer: Optimizer, net: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Invert `optimizer_tensors`. Raises ValueError if a moment and its parameter differ in shape."""
    # a fused update reads the step counts where the moments are, others on the CPU
    fused = bool(optimizer.defaults.get("fused"))
    for name, p in net.named_parameters():
        moments = {key.removeprefix(name + "."): t for key, t in tensors.items() if key.rpartition(".")[0] == name}
        if any(t.shape != p.shape for k, t in moments.items() if k in _MOMENTS):
            raise ValueError(f"the moments of {name} are not of its shape")
        if moments:
            optimizer.state[p] = {k: t.to(p.device) if fused or k != "step" else t for k, t in moments.items()}
            if not isinstance(optimizer, AdamW):
                # bitsandbytes counts in numbers
                optimizer.state[p]["step"] = int(moments["step"])


class RunFolder:
    """Reads and writes one run; `kind` names what the checkpoints hold, masks or weights. Every OSError becomes a UserError
    that says what was being written."""

    def __init__(self, path: Path, kind: str = "masks"):
        self.path = path
        self.checkpoints = path / kind
        self.tensors = (f"{kind}.safetensors", "optimizer.safetensors")
        self.recipe = path / "recipe.json"
        self.origin, self.method = path / "origin.sha256", path / "method.py"
        self.corpus, self.metrics = path / "corpus.safetensors", path / "metrics.jsonl"
        self.best = path / "best.safetensors"
        self.plan = path / "plan"  # of a conversion that is being repaired
        self.no_model = path / "no-model.txt"  # why no model becomes of a run that is over

    def resumes(self, recipe: BaseRecipe, resume: bool, force: bool) -> bool:
        """Return whether the existing run resumes; if not, a new one may start. Writes nothing. Raises UserError if neither
        is possible: no flag says what to do with a run, its recipe differs, or the folder holds files of others or cannot be
        written."""
        refuse_foreign_files(self.path, force, RUN)
        changed = type(recipe).load(self.recipe).differences(recipe) if resume and self.recipe.exists() else []
        if changed and not force:
            raise UserError(
                f"{self.path} was started with another recipe ({'; '.join(changed)})",
                "resume with the same one",
                START_OVER,
            )
        if self.recipe.exists() and not resume and not force:
            raise UserError(f"{self.path} already holds a run", Advice("resume", "to continue it"), START_OVER)
        parent = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            reason = "read-only" if parent.is_dir() else "not a folder"
            raise UserError(f"cannot write to {self.path}: {parent} is {reason}")
        return resume and self.recipe.exists() and not changed

    def begin(self, recipe: BaseRecipe, resume: bool, origin: str = "") -> None:
        """Make the folder, of a run from the model with the fingerprint `origin`; only a resumed run keeps its content. The
        recipe is deleted first and written last, so that no rest of an older run is taken for a part of this one. Raises
        UserError if it cannot be written."""
        try:
            if not resume:
                # by its origin the folder is known as ours to the last
                files = (self.recipe, self.corpus, self.metrics, self.best, self.no_model)
                earlier = self.path.glob(f"{EARLIER}*corpus.safetensors")
                for old in (*files, *earlier, self.plan, *self.steps(), self.method, self.origin):
                    shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to {self.path}: {error.strerror or error}") from error
        if origin:
            atomic_write(self.origin, f"{origin}\n")
        recipe.save(self.recipe)

    def start(
        self, recipe: RunRecipe, resumes: bool, origin: Callable[[], str], prepare: Callable[[], Corpus]
    ) -> Corpus:
        """Prepare the text, then begin the run with it; or resume the run, and read its text. All processes take part.

        Nothing is written, and nothing of an older run is deleted, before the text has been prepared. Raises UserError if it
        cannot be, or if the run was started from a model with another fingerprint than `origin` gives.
        """

        def text() -> Corpus | None:
            return None if resumes and self.corpus.exists() else prepare()

        # all processes sample together; a sharded model runs in all of them or in none
        sampled = text() if distributed.world_size() > 1 and SELF in recipe.data.sources else None

        def begin() -> None:
            fingerprint = origin()
            if resumes:
                self.check_origin(fingerprint, recipe.model)
            corpus = sampled or text()
            if corpus is not None:
                self.begin(recipe, resumes, fingerprint)
                corpus.save(self.corpus)

        distributed.on_rank_zero(begin)
        return Corpus.load(self.corpus)

    def origin_fingerprint(self) -> str:
        """Return the fingerprint of the run's model; empty if none was recorded. Raises UserError if its file is damaged."""
        return read_text(self.origin).strip() if self.origin.exists() else ""

    def check_origin(self, fingerprint: str, name: str) -> None:
        """Raise UserError if the weights of the model `name` are not those that the run started from."""
        recorded = self.origin_fingerprint() or "not recorded"
        if recorded != fingerprint:
            raise UserError(
                f"the weights of {name} changed since {self.path} was started (hash {recorded[:12]} then, "
                f"{fingerprint[:12]} now)",
                "restore the original weights",
                START_OVER,
            )

    def keep_method(self, file: Path, resumes: bool) -> None:
        """Copy the file of a user's method into the run. Raises UserError if the run began with other code."""
        if resumes and self.method.is_file() and self.method.read_bytes() != file.read_bytes():
            raise UserError(
                f"{file} changed since {self.path} was started",
                f"restore it ({self.method} is the earlier one)",
                START_OVER,
            )
        atomic_write(self.method, file.read_bytes())

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
            # after a resume it is written again: deleting it in place could leave half of it after a kill
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
                final.rename(aside)
            part.rename(final)
            shutil.rmtree(aside, ignore_errors=True)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(part, ignore_errors=True)
            raise UserError(
                f"cannot write the checkpoint of step {step} to {self.checkpoints} ({error}); earlier ones are kept"
            ) from error
        for old in self.steps()[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def last(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, if there are any. Raises UserError if none is complete."""
        folders = self.steps()[::-1]
        for folder in folders:
            if checkpoint := self._read(folder):
                return checkpoint
        if folders:
            raise UserError(
                f"no checkpoint in {self.checkpoints} is complete (files are truncated or of another run)", START_OVER
            )
        return None

    def damaged(self) -> list[str]:
        """Return the names of checkpoints that `last` skips."""
        return [folder.name for folder in self.steps() if self._read(folder) is None]

    def steps(self) -> list[Path]:
        """Return the checkpoints, the oldest first; renamed copies (step-000100-good) do not count."""
        return sorted(path for path in self.checkpoints.glob("step-*") if path.name.removeprefix("step-").isdecimal())

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            state = read_json(folder / "state.json")
            # our own file names, not those in the file, which could lead anywhere
            complete = all(sha256(folder / name) == state["sha256"][name] for name in self.tensors)
            right_name = type(state["step"]) is int and folder.name == f"step-{state['step']:06d}"
            return Checkpoint(folder, state["step"], state) if complete and right_name else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def restore(self, checkpoint: Checkpoint, net: nn.Module, optimizer: Optimizer | None) -> None:
        """Load the weights (and moments) of a checkpoint. Raises UserError if they are for another network."""
        device = next(net.parameters()).device
        try:
            net.load_state_dict(load_file(checkpoint.folder / self.tensors[0], device=str(device)))
            if optimizer is not None:
                restore_optimizer(optimizer, net, load_file(checkpoint.folder / "optimizer.safetensors"))
        except (RuntimeError, ValueError, SafetensorError) as error:
            raise UserError(f"{checkpoint.folder} does not fit this model and recipe", START_OVER) from error

    def save_best(self, net: nn.Module) -> None:
        """Write the current weights as the best. Raises UserError if they cannot be written."""
        try:
            with atomic_file(self.best) as part:
                save_file(net.state_dict(), part)
        except SafetensorError as error:
            raise UserError(f"cannot write {self.best} ({error}); the last checkpoint is kept") from error

    def restore_best(self, net: nn.Module) -> None:
        """Load what `save_best` wrote. Raises UserError if it is not there, or damaged."""
        try:
            net.load_state_dict(load_file(self.best, device=str(next(net.parameters()).device)))
        except (OSError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{self.best} cannot be read ({shortened(error)})", START_OVER) from error

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Append one line of JSON, with null for a number that is not finite. Raises UserError if it cannot be written."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(
                f"cannot write metrics to {self.path}: {error.strerror or error}; the last checkpoint is kept"
            ) from error

    def rows(self) -> list[dict[str, Any]]:
        """Read the logged steps; skips a last line that a kill cut short. Raises UserError if the file is not text, and for
        any other line that is not one of a step."""
        rows: list[dict[str, Any]] = []
        lines = read_text(self.metrics).splitlines() if self.metrics.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                row = parse_json(line)
                if not isinstance(row, dict) or type(row.get("step")) is not int:
                    raise ValueError("it has no step")
            except ValueError as error:
                if number == len(lines):
                    continue
                raise UserError(f"line {number} of {self.metrics} is damaged ({shortened(error)}); delete it") from None
            rows.append(row)
        return rows

    def forget_metrics_after(self, step: int) -> None:
        """Drop the lines of steps that a resumed run repeats (and a last line that a kill cut short)."""
        if self.metrics.exists():
            kept = [row for row in self.rows() if row["step"] <= step]
            atomic_write(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))
