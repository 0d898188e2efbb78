"""The method `inputs`: how many inputs of each projection a budget allows.

Shapes, and the letters at the ends of names: T tokens, D inputs of a projection.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from tomoe.budget import attention_params, decoder_params, mlp_params
from tomoe.errors import UserError
from tomoe.methods.base import Method, Task
from tomoe.methods.registry import method
from tomoe.model.activation_memory import activation_bytes
from tomoe.model.hooks import hooked
from tomoe.model.mlp import WeightMatrix
from tomoe.model.projections import KINDS, Group, Kind, Layer, groups_of
from tomoe.model.shape import ModelShape
from tomoe.plans.inputs import InputsPlan, PathPoint
from tomoe.plans.partition.experts import FLOAT32
from tomoe.progress import StageCallback, no_stage_progress, stage_callback
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.target_rules import Form


def group_norms(group: Group) -> Float[Tensor, " D"]:
    """Return the norm of each column of a group's stacked matrices, rounded to a bfloat16 value."""
    norms = torch.cat([WeightMatrix(module).weight.double() for module in group.modules]).norm(dim=0)
    return norms.bfloat16().float()


LEAST_INPUTS = 0.1  # the smallest share of its inputs that a projection gets
LEVELS = tuple(i / 40 for i in range(40, round(40 * LEAST_INPUTS) - 1, -1))
"""Shares of its inputs that a projection can get, from all of them down to a tenth."""
RECORDED = tuple(i / 20 for i in range(19, 1, -1))  # active fractions at which the path is recorded, as far as it goes
THINNED = 4
"""Of so many tokens in a row one is looked at: neighbours tell much the same, and sorting takes as long as the model does."""
REACH = 6
"""Levels that a step of the search may skip, so that a projection whose next step costs more than those after it is not stuck."""
MIN_SHARE = 0.7
"""Least share of a projection's inputs, relative to the mean share: to second order an early error does not harm what is behind
it, so at small budgets the search would starve some projections (docs/lab/log.md)."""

Costs = dict[tuple[int, Kind], Float[Tensor, " levels"]]
"""What a layer's projections of a kind lose at each of LEVELS: nats of KL for each token, to second order."""


def input_costs(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    seed: int,
    progress: StageCallback = no_stage_progress,
) -> Costs:
    """Estimate what each projection loses at every level, from one forward and one backward pass over calibration text.

    Dropping input i changes the log-probability of a text y by g_i x_i, g the gradient with respect to the projection's input.
    With y drawn from the model itself, half of the mean of its square is the KL to second order; what several inputs change is
    taken to be independent, which is less noisy than their sum (docs/lab/log.md).
    """
    norms = {(i, kind): group_norms(group) for i, layer in enumerate(layers) for kind, group in layer.items()}
    sums = {key: torch.zeros(len(LEVELS), dtype=torch.float64) for key in norms}
    tokens = 0
    generator = torch.Generator().manual_seed(seed)
    for b, (row, real) in enumerate(zip(ids, mask, strict=True)):
        inputs = _with_gradients(model, layers, row[real], generator)
        for key, x in inputs.items():
            assert x.grad is not None
            sums[key] += _dropped(x.detach().flatten(0, -2)[::THINNED], x.grad.flatten(0, -2)[::THINNED], norms[key])
        # or the next sequence would run beside those of this one
        del inputs, x
        tokens += len(range(0, int(real.sum()), THINNED))
        progress(b + 1, len(ids))
    return {key: (total / (2 * tokens)).float() for key, total in sums.items()}


def _with_gradients(
    model: PreTrainedModel, layers: Sequence[Layer], ids: Int[Tensor, " S"], generator: torch.Generator
) -> dict[tuple[int, Kind], Tensor]:
    """Return the inputs of all projections, with the gradient of the log-probability of tokens drawn from the model itself."""
    inputs: dict[tuple[int, Kind], Tensor] = {}

    def hooks() -> Iterator[RemovableHandle]:
        # frozen weights alone would leave nothing to differentiate
        embedding = model.get_input_embeddings()
        yield embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
        for i, layer in enumerate(layers):
            for kind, group in layer.items():

                def keep(_: object, args: tuple[Tensor], key: tuple[int, Kind] = (i, kind)) -> None:
                    inputs[key] = args[0]
                    args[0].retain_grad()

                yield group.modules[0].register_forward_pre_hook(keep)

    with hooked(list(hooks())), torch.enable_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        predicted = logits.log_softmax(-1)
        # on the CPU, so that a seed draws alike whatever the device
        drawn = torch.multinomial(predicted.detach().exp().cpu(), 1, generator=generator).to(predicted.device)
        predicted.gather(1, drawn).sum().backward()
    return inputs


def _dropped(
    x_TD: Float[Tensor, "T D"], gradient_TD: Float[Tensor, "T D"], norms_D: Float[Tensor, " D"]
) -> Float[Tensor, " levels"]:
    """Sum (g_i x_i)^2 over tokens and over the inputs that they drop, at every level, in float64."""
    order_TD = (x_TD.float().abs() * norms_D).argsort(dim=-1, stable=True)
    changes_TD = (x_TD.float() * gradient_TD.float()).square().gather(-1, order_TD)
    # the smallest are dropped first, so one cumulative sum has the loss at every level; over so many tokens float32 would drift
    dropped_D = F.pad(changes_TD.sum(0, dtype=torch.float64).cumsum(0), (1, 0))
    width = x_TD.shape[-1]
    return dropped_D[[width - inputs_at_level(width, level) for level in range(len(LEVELS))]].cpu()


def inputs_at_level(width: int, level: int) -> int:
    """Return inputs per token at a level, at least one."""
    return max(1, round(LEVELS[level] * width))


class _Search:
    """Levels of all projections, lowered one step at a time: always the step with the lowest cost per saved weight that leaves
    its projection at least MIN_SHARE of the mean share."""

    def __init__(self, layers: Sequence[Layer], costs: Costs, total: int):
        self.layers, self.costs, self.total = layers, costs, total
        # of the projections whose inputs are chosen
        self.chosen = sum(group.width * group.columns for layer in layers for group in layer.values())
        self.levels = dict.fromkeys(costs, 0)
        self.saved = 0
        # the next step of each projection that may still go lower: the least share falls with the mean
        self.steps: dict[tuple[int, Kind], tuple[float, int, Kind, int]] = {}
        self._look()

    def _look(self) -> None:
        """Find a next step for the projections without one."""
        least = MIN_SHARE * (1 - self.saved / self.chosen)
        for key in self.levels.keys() - self.steps.keys():
            if (step := self._best(key, least)) is not None:
                self.steps[key] = step

    def _saving(self, key: tuple[int, Kind], last: int) -> int:
        i, kind = key
        group = self.layers[i][kind]
        return (inputs_at_level(group.width, self.levels[key]) - inputs_at_level(group.width, last)) * group.columns

    def _best(self, key: tuple[int, Kind], least: float) -> tuple[float, int, Kind, int] | None:
        """Return a projection's cheapest next step that keeps `least`; None if no number of inputs within REACH is smaller."""
        cost = self.costs[key]
        now = self.levels[key]
        steps = [
            (max(0.0, float(cost[level] - cost[now])) / saving, *key, level)
            for level in range(now + 1, min(now + REACH, len(LEVELS) - 1) + 1)
            if LEVELS[level] >= least and (saving := self._saving(key, level))
        ]
        return min(steps, default=None)

    def step(self) -> None:
        _, i, kind, level = min(self.steps.values())
        self.saved += self._saving((i, kind), level)
        self.levels[i, kind] = level
        del self.steps[i, kind]
        self._look()

    def active_after(self) -> float:
        """Return the active fraction after the next step."""
        _, i, kind, level = min(self.steps.values())
        return 1 - (self.saved + self._saving((i, kind), level)) / self.total

    def point(self, active: float | None = None) -> PathPoint:
        """Return what tokens use now, or with the part of the next step that reaches the fraction `active`."""
        inputs: dict[Kind, list[int]] = {
            kind: [
                inputs_at_level(layer[kind].width, self.levels[i, kind]) if kind in layer else 0
                for i, layer in enumerate(self.layers)
            ]
            for kind in KINDS
            if any(kind in layer for layer in self.layers)
        }
        saved = self.saved
        if active is not None:
            _, i, kind, _ = min(self.steps.values())
            columns = self.layers[i][kind].columns
            fewer = round((1 - saved / self.total - active) * self.total / columns)
            inputs[kind][i] -= fewer
            saved += fewer * columns
        return PathPoint(1 - saved / self.total, inputs)


def cheapest_path(layers: Sequence[Layer], costs: Costs, total: int, active: float) -> tuple[PathPoint, ...]:
    """Return the path from all inputs to few, with a point at the budget if it reaches that."""
    search = _Search(layers, costs, total)
    path = [search.point()]
    wanted = sorted({fraction for fraction in (*RECORDED, active) if fraction < 1}, reverse=True)
    while wanted and search.steps:
        if search.active_after() > wanted[0]:
            search.step()
            continue
        point = search.point(wanted.pop(0))
        if point.active < path[-1].active:
            path.append(point)
    last = search.point()
    if last.active < path[-1].active:
        path.append(last)
    return tuple(path)


def check_reach(layers: Sequence[Layer], total: int, active: float) -> None:
    """Raise UserError if the fewest inputs of all projections exceed the budget."""
    saved = sum(
        (group.width - inputs_at_level(group.width, len(LEVELS) - 1)) * group.columns
        for layer in layers
        for group in layer.values()
    )
    if active < (least := 1 - saved / total):
        raise UserError(
            f"active is {active}, but with a tenth of the inputs of every projection {least:.3f} of this model's decoder "
            "parameters are active; set a larger active"
        )


def plan_inputs(
    model: PreTrainedModel,
    shape: ModelShape,
    ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    active: float,
    seed: int = 0,
    progress: StageCallback = no_stage_progress,
) -> InputsPlan:
    """Choose how many inputs every projection uses, on calibration text, for `active` and for every budget around it. Raises
    UserError if no projection fits, or if the budget cannot be reached."""
    layers = groups_of(model)
    check_reach(layers, decoder_params(shape), active)
    costs = input_costs(model, layers, ids, mask, seed, progress)
    path = cheapest_path(layers, costs, decoder_params(shape), active)
    widths = path[0].inputs
    return InputsPlan(
        shape=shape,
        names={kind: next(layer[kind].names for layer in layers if kind in layer) for kind in widths},
        widths=widths,
        columns={kind: [layer[kind].columns if kind in layer else 0 for layer in layers] for kind in widths},
        path=path,
        active=active,
    )


@method("inputs", paper="https://arxiv.org/abs/2408.14690")
class Inputs(Method):
    """Each token uses the largest inputs of every projection. The weights stay dense; the budget is allocated by a second-order
    estimate of what dropping inputs costs."""

    kind: ClassVar[Form] = "inputs"
    stage: ClassVar[str] = "choosing inputs"
    # nothing is refitted, and text only divides the budget: a little that is at hand does, and nothing is sampled, which would
    # take longer than all else
    defaults: ClassVar[Mapping[str, Any]] = {
        "repair.mode": "none",
        "data.sources": ("python-docs",),
        "data.seq_len": 256,
        "data.calibration_tokens": 2048,
        "data.evaluation_tokens": 2048,
    }
    requires: ClassVar[Mapping[str, Any]] = {
        "start": "carved",
        "train.steps": 0,
        "repair.mode": "none",
        "attention.pruning": "off",
        "train.shard": False,
        "offload": False,
    }

    def plan(self, task: Task) -> InputsPlan:
        recipe, text = task.recipe, task.calibration(task.model)
        progress = stage_callback(task.on_progress, self.stage)
        plan = plan_inputs(task.model, task.shape, *text, recipe.active, recipe.seed, progress)
        task.ended(self.stage)
        return plan

    def layout(self, recipe: Recipe, shape: ModelShape) -> None:
        return None

    def least_active(self, recipe: Recipe, shape: ModelShape) -> float:
        # a tenth of the inputs of attention and MLPs
        cut = mlp_params(shape, shape.mlp_size) + attention_params(shape, shape.head_dim, shape.head_dim)
        return 1 - (1 - LEAST_INPUTS) * float(shape.num_layers * cut) / decoder_params(shape)

    def operations(self, recipe: Recipe, shape: ModelShape, output: int) -> float:
        # forward, and backward to the inputs of each layer
        return 4 * recipe.data.calibration_tokens * (decoder_params(shape) + output)

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        tokens = min(recipe.data.seq_len, recipe.data.calibration_tokens)
        return {
            "activations of one sequence": activation_bytes(shape, dtype, tokens),
            # and their gradient, and the log-probabilities with theirs
            "logits of one sequence": 4 * tokens * vocabulary * FLOAT32,
        }
