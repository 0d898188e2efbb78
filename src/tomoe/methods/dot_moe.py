"""DOT-MoE (arXiv 2606.01666): learns which neurons form an expert, as a balanced transport from neurons to experts.

Per layer there is an affinity of each neuron to each expert. Sinkhorn iterations turn it into a soft assignment, in which a
neuron counts once and an expert as often as it has room; greedy rounding makes it a hard one, and a straight-through gradient
takes it back. Routers choose the k largest logits, straight-through, too. Trained are affinities and routers, by the KL to the
dense model and the losses of routers; weights stay frozen.

Written from the abstract and a summary, as the paper itself could not be read. The start at the groups of `carve`, the part that
all tokens share (one more column with a capacity of its own), fixed numbers of experts of a token, the exact gradient of the
converged transport and all rates are ours.

Shapes, and the letters at the ends of names: T tokens, D hidden size, F neurons, N experts, C columns (N, and the shared part).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe.errors import Advice, UserError
from tomoe.methods.base import Method, MethodConfig, Task, training_operations
from tomoe.methods.carve import Carve
from tomoe.methods.registry import method
from tomoe.model.activation_memory import activation_bytes
from tomoe.model.running import family_head, hidden_states
from tomoe.model.shape import ModelShape
from tomoe.plans import Plan
from tomoe.plans.layer import LayerPlan
from tomoe.plans.masking import masked
from tomoe.plans.partition.activations import Activations
from tomoe.plans.partition.clusters import balanced_assignment
from tomoe.plans.partition.experts import FLOAT32, SHARED, Experts, FineLayer, Room, planned
from tomoe.plans.partition.layouts import FineLayout
from tomoe.plans.routing import ExpertRouter, Routing, balance_penalty, straight_through
from tomoe.recipe.conversion import Recipe
from tomoe.training.distillation import CHUNK, distill_loss
from tomoe.training.held_out import learning_notes, train_masks_
from tomoe.training.loop import CHECKED, Training
from tomoe.training.run_folder import Checkpoint

AFFINITY_RATE = (
    20.0  # learning rate of affinities, in units of that of routers: a neuron changes its expert where they cross
)


class DotMoEConfig(MethodConfig):
    """The settings of `dot_moe`."""

    groups: Literal["carve", "random"] = "carve"
    """The experts that training starts from: those of `carve`, or neurons dealt out at random with fitted routers."""
    sinkhorn_steps: int = Field(default=50, ge=1)
    """Iterations that balance the assignment."""
    sinkhorn_temperature: float = Field(default=0.2, gt=0)
    """Affinities are divided by it; at the start a neuron's own expert is ahead of all others by 1."""
    z_weight: float = Field(default=1e-4, ge=0)
    """Weight of the mean square of log sum exp of a router's logits, which keeps them small. The weight of the balance of experts
    is loss.balance_weight."""


def sinkhorn(logits: Float[Tensor, "F C"], capacities: Float[Tensor, " C"], steps: int) -> Float[Tensor, "F C"]:
    """Scale rows and columns of exp(logits) so that rows sum to 1 and columns to their capacities. Rows, scaled last, are exact.

    The first step is in log space, where no exp can overflow; the others scale what it gave.
    """
    columns = logits + (capacities.log() - logits.logsumexp(0))
    soft_FC = (columns - columns.logsumexp(1, keepdim=True)).exp()
    row = soft_FC.new_ones(len(soft_FC))
    column = soft_FC.new_ones(soft_FC.shape[1])
    for _ in range(steps - 1):
        column = capacities / (row @ soft_FC)
        row = 1 / (soft_FC @ column)
    return row[:, None] * soft_FC * column


class _Transport(torch.autograd.Function):
    """`sinkhorn` with the gradient at convergence, from one small system instead of all iterations."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, capacities: Tensor, steps: int) -> Tensor:
        soft = sinkhorn(logits, capacities, steps)
        ctx.save_for_backward(soft)
        return soft

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (soft,) = ctx.saved_tensors
        return transport_gradient(soft, grads[0]), None, None


def transport_gradient(soft_FC: Float[Tensor, "F C"], grad_FC: Float[Tensor, "F C"]) -> Float[Tensor, "F C"]:
    """Return the gradient to the logits of a converged transport P, from the gradient G to P.

    It is P (G - a - b) with the a of a row and the b of a column that leave no row and no column a sum: the factors of `sinkhorn`
    would undo it.
    """
    weighted_FC = soft_FC * grad_FC
    rows_F, columns_C = soft_FC.sum(1), soft_FC.sum(0)
    scaled_FC = soft_FC / rows_F[:, None]
    system_CC = (columns_C.diag() - soft_FC.T @ scaled_FC).double()
    # one number may be added to all b, and taken from all a: fix the sum of b at 0
    system_CC += columns_C.mean().double() / len(columns_C)
    wanted_C = weighted_FC.sum(0) - scaled_FC.T @ weighted_FC.sum(1)
    b_C = torch.linalg.solve(system_CC, wanted_C.double()).to(soft_FC.dtype)
    a_F = (weighted_FC.sum(1) - soft_FC @ b_C) / rows_F
    return weighted_FC - soft_FC * (a_F[:, None] + b_C)


class LearnedGroups(nn.Module):
    """Affinities and routers of all layers, in float32; the number of experts per token is that of the start."""

    routers: Sequence[ExpertRouter]
    experts_per_token: Int[Tensor, " L"]

    def __init__(self, shape: ModelShape, layout: FineLayout, config: DotMoEConfig):
        super().__init__()
        self.shape, self.layout, self.config = shape, layout, config
        n = layout.num_experts
        self.capacities = [layout.shared] * bool(layout.shared) + [layout.expert_size] * n
        affinity = torch.zeros(shape.num_layers, shape.mlp_size, len(self.capacities))
        self.affinity = nn.Parameter(affinity)
        made = [ExpertRouter(shape.hidden_size, n, bias=True) for _ in range(shape.num_layers)]
        self.routers = nn.ModuleList(made)  # type: ignore[assignment]
        for router in made:
            assert router.bias is not None
            router.bias.requires_grad_(layout.router_bias)
        self.register_buffer("experts_per_token", torch.ones(shape.num_layers, dtype=torch.long))

    @torch.no_grad()
    def initialize_(self, plan: Plan) -> None:
        """Start from the groups and routers of a plan."""
        for i, layer in enumerate(plan.layers):
            assert layer.shared_mask is not None
            assert layer.router_bias is not None
            columns = [layer.shared_mask[None]] * bool(self.layout.shared) + [layer.expert_masks]
            self.affinity[i] = torch.cat(columns).T.float()
            self.routers[i].weight.copy_(layer.router_weight)
            bias = self.routers[i].bias
            assert bias is not None
            bias.copy_(layer.router_bias)
            self.experts_per_token[i] = layer.top_k

    def chooses(self, i: int) -> bool:
        """Whether tokens of a layer leave any expert out; otherwise there is nothing to train."""
        return int(self.experts_per_token[i]) < self.layout.num_experts

    def soft(self, i: int) -> Float[Tensor, "F C"]:
        """Return the soft assignment of layer i."""
        capacities = self.affinity.new_tensor(self.capacities)
        logits = self.affinity[i] / self.config.sinkhorn_temperature
        assigned: Tensor = _Transport.apply(logits, capacities, self.config.sinkhorn_steps)
        return assigned

    def assignment(self, i: int) -> Float[Tensor, "F C"]:
        """Return the hard assignment of layer i, 0/1, with a straight-through gradient to the soft one."""
        soft_FC = self.soft(i)
        hard_FC = F.one_hot(self.columns(soft_FC), len(self.capacities)).to(soft_FC.dtype)
        return hard_FC + (soft_FC - soft_FC.detach())

    def columns(self, soft_FC: Float[Tensor, "F C"]) -> Int[Tensor, " F"]:
        """Assign each neuron to a column by greedy rounding, within the columns' capacities."""
        return balanced_assignment(soft_FC.detach(), self.capacities)

    @torch.no_grad()
    def plan(self) -> Plan:
        """Make the plan of what was learned."""
        return Plan(self.shape, tuple(self._layer(i) for i in range(self.shape.num_layers)))

    def _layer(self, i: int) -> LayerPlan:
        router = self.routers[i]
        assert router.bias is not None
        # the shared part is the first column, and SHARED is -1
        expert_F = self.columns(self.soft(i)) - int(self.layout.shared > 0)
        grouped = FineLayer(router.weight, router.bias, expert_F, torch.zeros(0, dtype=torch.float64))
        return planned(self.shape, grouped, int(self.experts_per_token[i]))


class LearnedMasks:
    """The masks of one layer in one training step, with gradients to its affinities and its router."""

    attention = None

    def __init__(self, net: LearnedGroups, i: int, temperature: float):
        self.router, self.top_k, self.temperature = net.routers[i], int(net.experts_per_token[i]), temperature
        self.size = net.shape.mlp_size
        self.assignment_FC = net.assignment(i) if net.chooses(i) else None
        self.routing: Routing | None = None  # of the last forward pass; None in a layer that leaves nothing out
        self.logits_TN: Tensor | None = None

    def neurons(self, x_TD: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        if self.assignment_FC is None:
            return x_TD.new_ones(len(x_TD), self.size)
        self.logits_TN = self.router(x_TD)
        self.routing = straight_through(self.logits_TN, self.top_k, self.temperature)
        chosen_TC = self.routing.assignment
        if self.assignment_FC.shape[1] > chosen_TC.shape[1]:
            chosen_TC = F.pad(chosen_TC, (1, 0), value=1.0)
        return chosen_TC @ self.assignment_FC.T

    def z_loss(self) -> Float[Tensor, ""]:
        """Mean square of log sum exp of the router's logits."""
        assert self.logits_TN is not None
        return self.logits_TN.logsumexp(-1).square().mean()


@dataclass(eq=False)
class GroupStep:
    """The step function: the KL to the dense model, and the losses of the routers."""

    model: PreTrainedModel
    net: LearnedGroups
    recipe: Recipe

    def __call__(self, batch: Any, step: int, micro: int) -> dict[str, Tensor]:
        model, recipe = self.model, self.recipe
        ids = batch.input_ids.to(model.device)
        mask = None if bool(batch.mask.all()) else batch.mask.to(model.device)
        teacher = None
        if recipe.loss.objective == "kl":
            with torch.no_grad():
                teacher = hidden_states(model, ids, mask)
        temperature = recipe.sampling.temperature
        masks = [LearnedMasks(self.net, i, temperature) for i in range(self.net.shape.num_layers)]
        # around the backward pass, too: activation checkpointing runs layers again there
        with masked(model, masks):
            student = hidden_states(model, ids, mask)
            distill = distill_loss(student, teacher, ids, mask, family_head(model))
            valid = None if mask is None else mask.flatten()
            choosing = [layer for layer in masks if layer.routing is not None]
            balance = balance_penalty([layer.routing.select(valid) for layer in choosing if layer.routing])
            z = torch.stack([layer.z_loss() for layer in choosing]).mean()
            loss = distill + recipe.loss.balance_weight * balance + self.net.config.z_weight * z
            (loss / recipe.train.gradient_accumulation_steps).backward()
        terms = {"loss": loss, "distill": distill, "balance": balance, "z": z}
        return {name: term.detach() for name, term in terms.items()}


@method("dot_moe", paper="https://arxiv.org/abs/2606.01666")
class DotMoE(Method):
    """Learns with the routers which neurons form an expert, as a balanced transport of neurons."""

    Config = DotMoEConfig
    config: DotMoEConfig
    trains: ClassVar[str] = "assignment, routers"
    stage: ClassVar[str] = "training"
    defaults: ClassVar[dict[str, Any]] = {
        "train.steps": 300,
        "train.learning_rate": 1e-3,
        "train.warmup_steps": 10,
        "train.weight_decay": 0.0,
    }
    requires: ClassVar[dict[str, Any]] = {"start": "carved", "attention.pruning": "off", "experts.form": "fine"}

    def experts(self, seen: Activations, room: Room) -> Experts:
        """Make the groups that training starts from."""
        if self.config.groups == "carve":
            return Carve().experts(seen, room)
        of_each = [room.shared] + [room.expert_size] * room.num_experts
        expert_F = torch.arange(SHARED, room.num_experts).repeat_interleave(torch.tensor(of_each))
        dealt = torch.randperm(len(expert_F), generator=torch.Generator().manual_seed(room.seed))
        return Experts(expert_F[dealt].to(seen.x_TD.device))

    def plan(self, task: Task) -> Plan:
        net, notes = self._trained(task)
        return replace(net.plan(), notes=notes)

    def train(self, task: Task) -> None:
        self._trained(task)

    def extract(self, task: Task, checkpoint: Checkpoint, trained_for: float) -> Plan:
        recipe = task.recipe
        if recipe.active != trained_for:
            raise UserError(
                f"{task.run.path} learned which neurons form an expert for active = {trained_for}, so a plan for {recipe.active} "
                "needs a run of its own",
                Advice("active", "when the model runs, which then uses other numbers of them", "FRACTION", here=False),
            )
        net = self._network(task)
        task.run.restore(checkpoint, net, None)
        return replace(net.plan(), notes=learning_notes(checkpoint.step, checkpoint.state.get(CHECKED, {})))

    def _network(self, task: Task) -> LearnedGroups:
        layout = self.layout(task.recipe, task.shape)
        assert isinstance(layout, FineLayout)
        return LearnedGroups(task.shape, layout, self.config).to(task.model.device)

    def _trained(self, task: Task) -> tuple[LearnedGroups, dict[str, Any]]:
        """Train from the last checkpoint, or else from the start, to the last step; return the result and plan notes."""
        recipe, net = task.recipe, self._network(task)
        # otherwise a checkpoint holds it
        if not task.run.steps():
            start = super().plan(replace(task, ended=lambda _: task.ended("carving")))
            assert isinstance(start, Plan)
            net.initialize_(start)
            if not any(net.chooses(i) for i in range(task.shape.num_layers)):
                raise UserError(
                    f"active = {recipe.active} leaves no expert of any layer out, so dot_moe has nothing to learn; set a smaller "
                    "active, or method to carve"
                )
        step = GroupStep(task.model, net, recipe)
        scales = {"affinity": AFFINITY_RATE}
        training = Training(task.model, net, recipe.train, recipe.seed, task.text, task.run, step, scales=scales)
        notes = train_masks_(training, net.plan, task.text.evaluation, recipe.loss.objective, task.on_progress)
        task.ended("learning")
        return net, notes

    def operations(self, recipe: Recipe, shape: ModelShape, output: int) -> float:
        return super().operations(recipe, shape, output) + training_operations(recipe, shape, output)

    def peak(self, recipe: Recipe, shape: ModelShape, dtype: torch.dtype, vocabulary: int) -> dict[str, int]:
        layout, train, parts = self.layout(recipe, shape), recipe.train, super().peak(recipe, shape, dtype, vocabulary)
        assert isinstance(layout, FineLayout)
        columns = layout.num_experts + bool(layout.shared)
        affinities = shape.num_layers * shape.mlp_size * columns
        routers = shape.num_layers * layout.num_experts * (shape.hidden_size + 1)
        tokens = train.batch_size * recipe.data.seq_len
        learning = {
            # with their gradients and AdamW's two moments
            "affinities, routers and their optimizer": 4 * FLOAT32 * (affinities + routers),
            # the soft assignment, the hard one, and the gradient that both get
            "assignments": 3 * FLOAT32 * affinities,
            "activations for the backward pass": activation_bytes(
                shape, dtype, tokens, train.gradient_checkpointing, "off", layout.num_experts
            ),
            "masks of tokens": FLOAT32 * shape.num_layers * tokens * (shape.mlp_size + 3 * layout.num_experts),
            "logits": 4 * CHUNK * vocabulary * FLOAT32,
        }
        return max(parts, learning, key=lambda some: sum(some.values())) if train.steps else parts
