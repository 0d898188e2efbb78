"""The training loop: steps of forward passes, one optimizer, checkpoints that resume bit by bit.

The loop does not know what it trains: the step function computes gradients, the run folder keeps the state.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.errors import Advice, UserError, enough_memory
from tomoe.model.shape import ceil_div
from tomoe.progress import ProgressCallback
from tomoe.recipe.finetuning import TunedTrainSection
from tomoe.recipe.shared import LoopSection
from tomoe.training.run_folder import RunFolder

StepRow = dict[str, Any]
LESS_MEMORY = (
    Advice("train.gradient_checkpointing", "to keep fewer activations", "true"),
    Advice("data.seq_len", "for shorter sequences", "N"),
)
_NONFINITE = "bad_steps"  # the key of state.json that counts steps in a row without a finite loss
CHECKED = "best"  # the key of state.json that says what the checks on held-out text found


@runtime_checkable
class BatchSource(Protocol):
    """A corpus to read batches from: the same (step, micro) always gives the same sequences."""

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Any: ...


StepFn = Callable[[Any, int, int], Mapping[str, Tensor | float]]
"""Runs forward and backward on (batch, step, micro): adds gradients (of the mean over a step's batches), returns loss terms,
as numbers or as tensors without shape, which are read once a step."""


def learning_rate(train: LoopSection, step: int, peak: float) -> float:
    """Return the learning rate of step 0, 1, ...: linear warm-up to `peak`, then constant or half a cosine down to zero."""
    warmup = min(1.0, (step + 1) / train.warmup_steps) if train.warmup_steps else 1.0
    decay = 0.5 * (1 + math.cos(math.pi * step / train.steps)) if train.schedule == "cosine" else 1.0
    return peak * warmup * decay


def make_optimizer(
    net: nn.Module, train: LoopSection, fused: bool = False, scales: Mapping[str, float] | None = None
) -> torch.optim.Optimizer:
    """Return AdamW for the trainable parameters; fused: in one pass over memory, with slightly different rounding (always on
    CUDA); scales: of the learning rate of the parameters with these names."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, p in net.named_parameters():
        if p.requires_grad:
            groups.setdefault((scales or {}).get(name, 1.0), []).append(p)
    scaled = [{"params": params, "scale": scale} for scale, params in groups.items()]
    settings: dict[str, Any] = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    if isinstance(train, TunedTrainSection) and train.optimizer == "adamw8bit":
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]

        return AdamW8bit(scaled, **settings)
    fused = fused or any(p.is_cuda for p in net.parameters())
    return torch.optim.AdamW(scaled, **settings, fused=fused or None)


def check_accumulation(train: LoopSection) -> None:
    """Raise UserError if the processes cannot divide the forward passes of a step evenly."""
    passes = train.gradient_accumulation_steps
    processes = distributed.world_size()
    if train.steps and passes % processes:
        raise UserError(
            f"a step has {passes} forward passes (train.gradient_accumulation_steps), which {processes} processes cannot "
            f"share evenly; set it to {processes} or a multiple"
        )


@dataclass
class BestWeights:
    """Measures a run on held-out text as it trains, and keeps the best weights in a file of the run. After a resume checks repeat
    bitwise, so the file may be of a later step than the checkpoint."""

    net: nn.Module
    run: RunFolder
    steps: int
    held_out_loss: Callable[[], float]  # of `net` as it is, in nats
    checks: int  # how often the run is checked, besides its start
    keeps: bool = True  # whether the best weights go into a file; without it `restore_best_` cannot be asked
    start: float = float("nan")  # the loss before the first step
    loss: float = float("nan")
    """The smallest loss, and the step that it was found after: 0 if no step was better than the start."""
    step: int = 0
    checked: int = -1

    def state(self) -> dict[str, Any]:
        return {"start": self.start, "loss": self.loss, "step": self.step, "checked": self.checked}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state in a checkpoint, if any."""
        if not state:
            return
        self.start, self.loss = float(state["start"]), float(state["loss"])
        self.step, self.checked = int(state["step"]), int(state["checked"])

    def check(self, step: int) -> dict[str, float]:
        """Measure after step 0, `checks` times on the way and after the last; return the loss for the step's row."""
        due = step % ceil_div(max(1, self.steps), self.checks) == 0 or step == self.steps
        if not due or step == self.checked:
            return {}
        loss = self.held_out_loss()
        self.checked = step
        if step == 0:
            self.start = self.loss = loss
        elif loss < self.loss:
            self.loss, self.step = loss, step
            if self.keeps:
                distributed.on_rank_zero(lambda: self.run.save_best(self.net))
        return {"held_out": loss}

    @property
    def improved(self) -> bool:
        """Whether some step was better than the start; true for a run without steps."""
        return not self.steps or self.step > 0

    def restore_best_(self) -> None:
        """Replace the last weights by the best, if some step `improved` them."""
        if self.step != self.steps:
            self.run.restore_best(self.net)


@dataclass(eq=False)
class Training:
    """One run: the trainable modules `net`, their optimizer and step count, with `model`, which runs, and `best`, if any, which
    checks the result on held-out text; `fused` and `scales` are for `make_optimizer`. `find_peak` returns the peak learning rate
    after the check before the first step; without it, the recipe's."""

    model: PreTrainedModel
    net: nn.Module
    loop: LoopSection
    seed: int
    corpus: BatchSource
    run: RunFolder
    step_fn: StepFn
    fused: bool = False
    scales: Mapping[str, float] | None = None
    best: BestWeights | None = None
    find_peak: Callable[[], float] | None = None
    peak: float = field(init=False)
    step: int = field(default=0, init=False)
    nonfinite_steps: int = field(default=0, init=False)
    saved: int = field(default=-1, init=False)
    updating: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.optimizer = make_optimizer(self.net, self.loop, self.fused, self.scales)
        self.peak = self.loop.learning_rate

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one."""
        checkpoint = self.run.last()
        if checkpoint is None:
            return
        self.run.restore(checkpoint, self.net, self.optimizer)
        self.step = checkpoint.step
        self.nonfinite_steps = int(checkpoint.state[_NONFINITE])
        if self.best:
            self.best.restore(checkpoint.state.get(CHECKED, {}))
        distributed.on_rank_zero(lambda: self.run.forget_metrics_after(self.step))

    def save(self) -> None:
        """Write a checkpoint; only process 0 does. Raises UserError if it cannot be written."""
        if distributed.rank():
            return
        self.saved = self.step
        best = {CHECKED: self.best.state()} if self.best else {}
        self.run.save(self.step, self.net, self.optimizer, {_NONFINITE: self.nonfinite_steps} | best)

    def train(self, on_step: Callable[[StepRow], None] | None = None) -> None:
        """Train to the last step of the recipe and save on the way; an interrupt loses no step. Raises UserError after too many
        consecutive steps without a finite loss, for non-finite values, and if another process of the run is gone."""
        train = self.loop
        with activation_checkpointing(self.model) if train.gradient_checkpointing else nullcontext():
            # also of a step that was stopped before its check
            self._check()
            if self.find_peak:
                self.peak = self.find_peak()
            if self.step == 0:
                self.save()
            while self.step < train.steps:
                with self._saved_if_interrupted(), enough_memory(*LESS_MEMORY):
                    row = self.one_step()
                    row |= self._check()
                    due = self.step % train.log_every == 0 or self.step == train.steps or row["skipped"]
                    if due and distributed.rank() == 0:
                        self.run.append_metrics(row)
                    if on_step:
                        on_step(row)
                if self.nonfinite_steps >= train.max_nonfinite_steps:
                    raise UserError(
                        f"the loss was not finite in {self.nonfinite_steps} steps in a row (up to step {self.step}); the last "
                        f"good checkpoint is kept in {self.run.checkpoints}: resume with a smaller train.learning_rate or "
                        "float32"
                    )
                # not after a skipped step: only the last checkpoint may count any in a row
                if self.step == train.steps or (self.step % train.save_every == 0 and not row["skipped"]):
                    # the update before a checkpoint, whose loss no step has seen
                    if not self._learned_is_finite():
                        raise UserError(
                            f"what was learned is not finite after step {self.step}; the last good checkpoint is kept in "
                            f"{self.run.checkpoints}: resume with a smaller train.learning_rate or train.weight_decay"
                        )
                    self.save()

    def _check(self) -> dict[str, float]:
        return self.best.check(self.step) if self.best else {}

    def _learned_is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.net.parameters())

    @contextmanager
    def _saved_if_interrupted(self) -> Iterator[None]:
        """Save after an interrupt, a lost process or a lack of memory, unless within an update or with non-finite values."""
        try:
            yield
        except BaseException:
            finished = not self.updating and not self.nonfinite_steps
            if finished and self.step > self.saved and self._learned_is_finite():
                self.save()
            raise

    def one_step(self) -> StepRow:
        """Run the forward passes of a step (this process its share), then one update, unless something is not finite."""
        start = time.perf_counter()
        train = self.loop
        rate = learning_rate(train, self.step, self.peak)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["scale"]
        self.optimizer.zero_grad(set_to_none=True)
        rows = []
        tokens = 0
        for micro in range(distributed.rank(), train.gradient_accumulation_steps, distributed.world_size()):
            batch = self.corpus.batch(self.step, micro, train.batch_size, train.gradient_accumulation_steps, self.seed)
            tokens += int(batch.mask.sum())
            rows.append(self.step_fn(batch, self.step, micro))
        distributed.sum_gradients_(self.net)
        norm = nn.utils.get_total_norm([p.grad for p in self.net.parameters() if p.grad is not None])
        *sums, gradient_norm = _read([*([row[name] for row in rows] for name in rows[0]), [norm]], norm.device)
        *terms, all_tokens = distributed.all_reduce_scalars([*sums, tokens])
        row: StepRow = {
            name: term / train.gradient_accumulation_steps for name, term in zip(rows[0], terms, strict=True)
        }
        skipped = not (math.isfinite(row["loss"]) and math.isfinite(gradient_norm))
        self.nonfinite_steps = self.nonfinite_steps + 1 if skipped else 0
        self.updating = True
        if not skipped:
            if train.gradient_clip:
                nn.utils.clip_grads_with_norm_(self.net.parameters(), train.gradient_clip, norm)
            self.optimizer.step()
        self.step += 1
        self.updating = False
        seconds = time.perf_counter() - start
        return {
            "step": self.step,
            **row,
            "learning_rate": rate,
            "gradient_norm": gradient_norm,
            "tokens": int(all_tokens),
            "seconds": seconds,
            "tokens_per_second": all_tokens / seconds,
            "skipped": skipped,
        }


def run_training(training: Training, stage: str, on_progress: ProgressCallback) -> None:
    """Train from the newest checkpoint to the last step; all processes start with the same weights."""
    training.resume()
    distributed.broadcast_(training.net.state_dict().values())
    training.train(lambda row: on_progress(stage, row["step"], training.loop.steps, row))


def _read(terms: Sequence[Sequence[Tensor | float]], device: torch.device) -> list[float]:
    """Return the sum of each list of numbers and scalar tensors; transferred from the device together."""
    numbers = [[t.to(device, torch.float64) if isinstance(t, Tensor) else t for t in term] for term in terms]
    sums = [torch.as_tensor(sum(term), dtype=torch.float64) for term in numbers]
    return [float(value) for value in torch.stack([t.to(device) for t in sums]).tolist()]


@contextmanager
def activation_checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Recompute layers in the backward pass inside the `with` block, instead of keeping their activations. transformers does so
    only in training mode, so dropout is set to zero."""
    for module in model.modules():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    # newer versions of transformers have another name for it, and warn of the old one
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        model.eval()
        disable = getattr(model, "activation_checkpointing_disable", None)
        (disable or model.gradient_checkpointing_disable)()
