"""A converted model that learns on: as the MoE itself, or as the pseudo-MoE (app. pmoe), all weights or adapters of low rank.

Both forms hold the same weights and decide as inference does, without noise, so they learn the same. The chosen expert
counts 1 + P_i - stop_grad(P_i): exactly 1, with the gradient of its probability P_i, by which the router learns.

Letters: T tokens, t real tokens, D hidden size, N experts, F neurons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe.errors import UserError
from tomoe.model.structure import ModelShape, layer_parts
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plan import LayerPlan, Plan
from tomoe.pruning.gumbel import derive_seed
from tomoe.pruning.losses import Routed, balance_penalty, fidelity_loss
from tomoe.pruning.masking import PlannedLayerMasks, masked
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training.teacher import hidden_states

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROWS = ("gate_proj", "up_proj", "down_proj")  # matrices of the shared neurons
Teacher = Callable[[Int[Tensor, "B S"], Bool[Tensor, "B S"]], Float[Tensor, "T D"]]


class Learned(nn.Module):
    """All that learns, in float32: weights of another dtype keep their sum of updates here, which is rounded back into them.

    Their gradients are summed here, too. In bfloat16 most updates would be smaller than half a unit in the last place.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        super().__init__()
        self.copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, weight in named:
            weight.requires_grad_(True)
            exact = weight
            if weight.dtype != torch.float32:
                exact = nn.Parameter(weight.detach().float())
                weight.register_post_accumulate_grad_hook(partial(_hand_over, exact))
                self.copies.append((exact, weight))
            self.register_parameter(name.replace(".", "/"), exact)  # no name of a parameter may hold a dot

    @torch.no_grad()
    def write_(self) -> None:
        """Round what was learned into the weights that run."""
        for exact, weight in self.copies:
            weight.copy_(exact)


def _hand_over(exact: nn.Parameter, weight: nn.Parameter) -> None:
    assert weight.grad is not None
    gradient = weight.grad.float()
    exact.grad = gradient if exact.grad is None else exact.grad + gradient
    weight.grad = None


@dataclass(frozen=True)
class RoutedTokens:
    """What one router did with the real tokens of a batch."""

    assignment: Float[Tensor, "t N"]  # one-hot
    route_probs: Float[Tensor, "t N"]

    @classmethod
    def of(cls, logits: Float[Tensor, "T N"], valid: Bool[Tensor, " T"]) -> RoutedTokens:
        probs = logits[valid].softmax(-1)
        return cls(F.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs.dtype), probs)


class TunedLayerMasks(PlannedLayerMasks):
    """A plan's masks with a router that learns. It is a copy: the plan stays what it is."""

    def __init__(self, layer: LayerPlan, shape: ModelShape, device: torch.device):
        super().__init__(replace(layer, router_weight=layer.router_weight.clone()), shape, device)
        self.router.requires_grad_(False)
        if self.value_router is not None:
            self.value_router.requires_grad_(False)
        self.valid: Bool[Tensor, " T"] | None = None
        self.routed: RoutedTokens | None = None

    def neurons(self, x: Float[Tensor, "T D"]) -> Float[Tensor, "T F"]:
        logits = self.router(x)
        assert self.valid is not None, "nobody said which tokens are real"
        self.routed = RoutedTokens.of(logits, self.valid)
        expert_ids = logits.argmax(-1)
        masks = self.expert_masks[expert_ids]
        if not self.router.weight.requires_grad:
            return masks
        chosen = logits.softmax(-1).gather(1, expert_ids[:, None])
        return masks * (1 + (chosen - chosen.detach()))


class TrueMoE:
    """The converted model itself, neurons shared, on whatever expert backend its config names."""

    def __init__(self, moe: ToMoEForCausalLM, plan: Plan, recipe: FinetuneRecipe):
        self.model, self.plan = moe, plan
        base: Any = moe.model
        self.routers: list[nn.Linear] = [layer.mlp.router for layer in base.layers]
        frozen = {id(p) for name, p in moe.named_parameters() if "router." in name} | _ends(moe)
        names = [name for name, _ in moe.named_parameters()]
        attention = [n.removesuffix(".weight") for n in names if n.endswith(tuple(f"{a}.weight" for a in ATTENTION))]
        rows = [name for name in names if name.endswith(ROWS)]
        self.adapters = _adapt(moe, recipe, attention, rows)
        self.learned = Learned(_learning(moe, frozen, self.adapters) + _routers(self.routers, recipe))

    @contextmanager
    def running(self, valid: Bool[Tensor, " T"]) -> Iterator[Callable[[], Sequence[Routed]]]:
        seen: dict[int, RoutedTokens] = {}

        def note(i: int, _: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> None:
            seen[i] = RoutedTokens.of(logits, valid)

        handles = [router.register_forward_hook(partial(note, i)) for i, router in enumerate(self.routers)]
        try:
            yield lambda: [seen[i] for i in range(len(handles))]
        finally:
            for handle in handles:
                handle.remove()

    def finish(self, version: str) -> tuple[ToMoEForCausalLM, list[LayerPlan]]:
        moe = _merged(self.model, self.learned, self.adapters)
        weights = [_rounded(router.weight) for router in self.routers]
        for router, weight in zip(self.routers, weights, strict=True):
            router.weight.data = weight
        moe.config.tomoe_version = version
        return moe, _with_routers(self.plan, weights)


class PseudoMoE:
    """The dense model under the plan's masks: every product is dense, and what learns is what the plan keeps of it."""

    def __init__(self, dense: PreTrainedModel, plan: Plan, recipe: FinetuneRecipe):
        self.model, self.plan = dense, plan
        self.masks = [TunedLayerMasks(layer, plan.shape, dense.device) for layer in plan.layers]
        self.routers = [m.router for m in self.masks]
        parts = [(p.gate, p.up, p.down, p.q, p.k, p.v, p.o) for p in layer_parts(dense)]
        chosen = {id(module) for layer in parts for module in layer}
        frozen = _ends(dense)
        self.adapters = _adapt(dense, recipe, [name for name, m in dense.named_modules() if id(m) in chosen], [])
        self.learned = Learned(_learning(dense, frozen, self.adapters) + _routers(self.routers, recipe))

    @contextmanager
    def running(self, valid: Bool[Tensor, " T"]) -> Iterator[Callable[[], Sequence[Routed]]]:
        for m in self.masks:
            m.valid = valid
        with masked(self.model, self.masks):
            yield lambda: [m.routed for m in self.masks if m.routed is not None]

    def finish(self, version: str) -> tuple[ToMoEForCausalLM, list[LayerPlan]]:
        dense = _merged(self.model, self.learned, self.adapters)
        layers = _with_routers(self.plan, [_rounded(router.weight) for router in self.routers])
        return fold(dense, replace(self.plan, layers=tuple(layers)), version), layers


class Healing:
    """One lesson: forward and backward of a batch; leaves gradients (of the mean over a step's batches) in `student.learned`."""

    def __init__(self, student: TrueMoE | PseudoMoE, recipe: FinetuneRecipe, taught: Teacher | None):
        assert (taught is None) == (recipe.loss.objective == "lm")
        self.student, self.recipe, self.taught = student, recipe, taught

    def __call__(self, blocks: Any, step: int, micro: int) -> dict[str, float]:
        model, recipe = self.student.model, self.recipe
        ids, mask = blocks.input_ids.to(model.device), blocks.mask.to(model.device)
        self.student.learned.write_()
        head: Any = model.get_output_embeddings()
        teacher = None
        if self.taught is not None:
            with torch.no_grad():
                teacher = self.taught(ids, mask)
        with self.student.running(mask.flatten()) as routed:
            hidden = hidden_states(model, ids, mask)
            fidelity = fidelity_loss(hidden, teacher, ids, mask, head)
            balance = balance_penalty(routed())
            loss = fidelity
            if recipe.loss.balance_weight and recipe.routers == "learned":
                loss = fidelity + recipe.loss.balance_weight * balance
            (loss / recipe.train.gradient_accumulation).backward()
        return {"loss": loss.item(), "fidelity": fidelity.item(), "balance": balance.item()}


def _ends(model: PreTrainedModel) -> set[int]:
    """Embeddings and output matrix: student and teacher share them, so that logits need no second matrix."""
    ends: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for end in ends for p in end.parameters()}


Named = list[tuple[str, nn.Parameter]]


def _learning(model: nn.Module, frozen: set[int], adapters: Any) -> Named:
    """Adapters where there are any, else all that is not frozen."""
    named = [(name, p) for name, p in model.named_parameters() if id(p) not in frozen]
    return named if adapters is None else [(name, p) for name, p in named if "lora_" in name]


def _routers(routers: Sequence[nn.Module], recipe: FinetuneRecipe) -> Named:
    learned = recipe.routers == "learned"
    return [(f"router.{i}.{name}", p) for i, r in enumerate(routers) for name, p in r.named_parameters() if learned]


def check_adapters(recipe: FinetuneRecipe) -> None:
    """Raises UserError where adapters are asked for and peft is not installed."""
    if recipe.weights == "lora":
        try:
            import peft  # noqa: F401
        except ImportError:
            raise UserError(
                "weights = lora needs the package peft, which is not installed; install it with: "
                "pip install 'tomoe-llm[finetune]', or take weights = full"
            ) from None


def _adapt(model: PreTrainedModel, recipe: FinetuneRecipe, modules: list[str], parameters: list[str]) -> Any:
    """Put adapters beside these parts of `model`, in place; None where all weights learn."""
    if recipe.weights == "full":
        return None
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, lora_dropout=0.0, bias="none",
        target_modules=modules, target_parameters=parameters or None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "adapters"))
        return get_peft_model(model, config)


def _merged(model: Any, learned: Learned, adapters: Any) -> Any:
    """The model as ordinary weights that learn no more."""
    learned.write_()
    model = model if adapters is None else adapters.merge_and_unload()
    return model.requires_grad_(False)


def _rounded(weight: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """bfloat16 values: every carrier of the router can hold them exactly."""
    return weight.detach().bfloat16().float()


def _with_routers(plan: Plan, weights: Sequence[Float[Tensor, "N D"]]) -> list[LayerPlan]:
    return [replace(layer, router_weight=w.cpu()) for layer, w in zip(plan.layers, weights, strict=True)]
