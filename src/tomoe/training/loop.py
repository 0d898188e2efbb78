"""The loop that learns masks and routers: frozen dense model as teacher and student, four terms, one optimizer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import UserError
from tomoe.pruning.gumbel import derive_seed
from tomoe.pruning.losses import fidelity_loss, objective
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.pruning.masking import masked
from tomoe.recipe.conversion import LoopSection, Recipe
from tomoe.training.run_folder import RunFolder
from tomoe.training.teacher import TeacherCache, hidden_states

Row = dict[str, Any]


@runtime_checkable
class Batches(Protocol):
    """Where token blocks come from: the same (step, micro) always gives the same blocks."""

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Any: ...


@runtime_checkable
class Course(Protocol):
    """What the loop reads in a recipe, of whatever kind."""

    @property
    def seed(self) -> int: ...
    @property
    def train(self) -> LoopSection: ...


@runtime_checkable
class Lesson(Protocol):
    """Forward and backward of one batch: leaves gradients (of the mean over a step's batches), tells the terms of the loss."""

    def __call__(self, blocks: Any, step: int, micro: int) -> dict[str, float]: ...


def learning_rate(train: LoopSection, step: int) -> float:
    """Of step 0, 1, ...: linear warm-up, then constant or half a cosine down to zero."""
    warm = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
    fall = 0.5 * (1 + math.cos(math.pi * step / train.steps)) if train.schedule == "cosine" else 1.0
    return train.learning_rate * warm * fall


def budget_target(recipe: Recipe, step: int) -> float:
    """The active fraction asked at a step: from 1 down to `active` over the budget warm-up."""
    warm = recipe.train.budget_warmup_steps
    done = min(1.0, step / warm) if warm else 1.0
    return 1.0 - (1.0 - recipe.active) * done


def make_optimizer(net: nn.Module, train: LoopSection) -> torch.optim.AdamW:
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=train.learning_rate, weight_decay=train.weight_decay)


def micro_step(
    model: PreTrainedModel,
    net: MaskNetwork,
    recipe: Recipe,
    blocks: Any,
    step: int,
    micro: int,
    taught: Callable[[PreTrainedModel, Tensor, Tensor], Tensor] = hidden_states,
) -> dict[str, float]:
    """Forward and backward of one batch; leaves gradients (of the mean over micro-batches) in `net`.

    `taught` gives the dense model's final hidden states [T, D] of ids and mask [B, S].
    """
    ids, mask = blocks.input_ids.to(model.device), blocks.mask.to(model.device)
    masks = net(derive_seed(recipe.seed, "step", step), derive_seed(recipe.seed, "tokens", step, micro))
    valid = None if bool(mask.all()) else mask.flatten()
    for m in masks:
        m.valid = valid
    teacher = None
    if recipe.loss.objective == "kl":
        with torch.no_grad():
            teacher = taught(model, ids, mask)
    with masked(model, masks):  # around the backward pass too: activation checkpointing runs layers again there
        student = hidden_states(model, ids, mask)
        fidelity = fidelity_loss(student, teacher, ids, mask, model.lm_head)
        loss, terms = objective(
            fidelity,
            masks,
            net.shape,
            budget_target(recipe, step),
            recipe.loss,
            layers_alike=recipe.common_multiple > 0,
        )
        (loss / recipe.train.gradient_accumulation).backward()
    return {"loss": loss.item(), **{name: t.item() for name, t in terms.items()}}


def mask_lesson(model: PreTrainedModel, net: nn.Module, recipe: Course) -> Lesson:
    """Learns masks and routers; the teacher is the dense model itself."""
    assert isinstance(net, MaskNetwork)
    assert isinstance(recipe, Recipe)
    kept = recipe.train.teacher_cache
    taught = TeacherCache(Path(kept), model) if kept else hidden_states
    return lambda blocks, step, micro: micro_step(model, net, recipe, blocks, step, micro, taught)


class Training:
    """One run: what is trained (`net`), its optimizer and how many steps they have behind them.

    `model` is what runs; without a `lesson`, `net` is a mask network and learns its masks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        net: nn.Module,
        recipe: Course,
        corpus: Batches,
        run: RunFolder,
        lesson: Lesson | None = None,
    ):
        passes, processes = recipe.train.gradient_accumulation, distributed.size()
        if recipe.train.steps and passes % processes:
            raise UserError(
                f"a step has {passes} forward passes (train.gradient_accumulation), which {processes} processes cannot share "
                f"evenly; set it to {processes} or a multiple"
            )
        self.model, self.net, self.recipe, self.corpus, self.run = model, net, recipe, corpus, run
        self.optimizer = make_optimizer(net, recipe.train)
        self.lesson = lesson or mask_lesson(model, net, recipe)
        self.step, self.bad_steps = 0, 0
        self.saved, self.updating = -1, False

    def resume(self) -> bool:
        """Go to the newest whole checkpoint; False where there is none yet."""
        checkpoint = self.run.last()
        if checkpoint is None:
            return False
        self.run.restore(checkpoint, self.net, self.optimizer)
        self.step, self.bad_steps = checkpoint.step, int(checkpoint.state["bad_steps"])
        distributed.first(lambda: self.run.forget_metrics_after(self.step))
        return True

    def save(self) -> None:
        if distributed.rank():
            return
        self.saved = self.step
        self.run.save(self.step, self.net, self.optimizer, {"bad_steps": self.bad_steps})

    def train(self, on_step: Callable[[Row], None] | None = None) -> None:
        """Run to the last step of the recipe, saving on the way; whoever stops it in between loses no step.

        Raises UserError after too many bad steps in a row, and where another process of the run is gone.
        """
        train = self.recipe.train
        with _checkpointing(self.model) if train.gradient_checkpointing else nullcontext():
            if self.step == 0:
                self.save()
            while self.step < train.steps:
                with self._saved_if_cut_off():
                    row = self.one_step()
                    if self.step % train.log_every == 0 or self.step == train.steps or row["skipped"]:
                        self._log(row)
                    if on_step:
                        on_step(row)
                if self.bad_steps >= train.max_bad_steps:
                    raise UserError(
                        f"the loss was not finite in {self.bad_steps} steps in a row (up to step {self.step}); the last good "
                        f"checkpoint is kept in {self.run.checkpoints}: resume with a smaller train.learning_rate or float32"
                    )
                # not after a bad step: the count of bad steps in a row must be zero in every checkpoint but the last
                if self.step == train.steps or (self.step % train.save_every == 0 and not row["skipped"]):
                    self.save()

    @contextmanager
    def _saved_if_cut_off(self) -> Iterator[None]:
        """A stop, a lost process or a lack of memory may come at any moment: all but the update itself leaves a whole step."""
        try:
            yield
        except BaseException:
            if not self.updating and not self.bad_steps and self.step > self.saved:
                self.save()
            raise

    def _log(self, row: Row) -> None:
        if distributed.rank() == 0:
            self.run.append_metrics(row)

    def one_step(self) -> Row:
        """All forward passes of a step (this process takes its share), then one update, unless something is not finite."""
        began, train = time.perf_counter(), self.recipe.train
        rate = learning_rate(train, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        rows, tokens = [], 0
        for micro in range(distributed.rank(), train.gradient_accumulation, distributed.size()):
            blocks = self.corpus.batch(
                self.step, micro, train.batch_size, train.gradient_accumulation, self.recipe.seed
            )
            tokens += int(blocks.mask.sum())
            rows.append(self.lesson(blocks, self.step, micro))
        distributed.sum_gradients_(self.net)
        norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])
        *terms, all_tokens = distributed.sums([*(sum(row[name] for row in rows) for name in rows[0]), tokens])
        row: Row = {name: term / train.gradient_accumulation for name, term in zip(rows[0], terms, strict=True)}
        skipped = not (math.isfinite(row["loss"]) and bool(norm.isfinite()))
        self.bad_steps = self.bad_steps + 1 if skipped else 0
        self.updating = True
        if not skipped:
            if train.gradient_clip:
                nn.utils.clip_grads_with_norm_(self.net.parameters(), train.gradient_clip, norm)
            self.optimizer.step()
        self.step += 1
        self.updating = False
        seconds = time.perf_counter() - began
        return {
            "step": self.step, **row, "learning_rate": rate, "gradient_norm": float(norm), "tokens": int(all_tokens),
            "seconds": seconds, "tokens_per_second": all_tokens / seconds, "skipped": skipped,
        }  # fmt: skip


class _checkpointing:
    """Activation checkpointing for the time of a block. It runs in training mode only, so dropout is set to zero."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __enter__(self) -> None:
        for module in self.model.modules():
            for name in ("p", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        # newer versions of transformers have another name for it, and warn of the old one
        enable = (
            getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        self.model.train()

    def __exit__(self, *_: object) -> None:
        self.model.eval()
        disable = getattr(self.model, "activation_checkpointing_disable", None)
        (disable or self.model.gradient_checkpointing_disable)()
