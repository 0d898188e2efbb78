"""Fine-tuning: which weights of a converted model are trained, and one training step.

The model routes as at inference, without noise; `route` gives routers their gradient. The paper's pseudo-MoE, the dense
model under the plan's masks (Eq. 17, Appendix B.3), gets the same gradients; the tests keep it as the reference. Where tokens
choose inputs, every token of every pass does, and gradients flow through the chosen inputs.

Letters: B sequences, S tokens of one, T tokens, D hidden size, N experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tomoe import distributed
from tomoe.data.corpus import Sequences
from tomoe.errors import UserError
from tomoe.model.hooks import hooked
from tomoe.model.running import family_head, hidden_states
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM, column_norms, matrix_of
from tomoe.plans import AnyPlan, LayerPlan, Plan
from tomoe.plans.routing import ExpertRouter, Routing, balance_penalty, bfloat16_values, route
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.seeds import derive_seed
from tomoe.training.distillation import distill_loss
from tomoe.version import install_extra

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ROWS = ("gate_proj", "up_proj", "down_proj")  # matrices of the shared neurons
LEAST_SCALE = 1e-3  # as in Adafactor (Shazeer and Stern 2018, section 8): what is zero has to leave it


class Fp32MasterWeights(nn.Module):
    """Float32 master copies of all trained weights; weights of another dtype are rounded from them.

    Gradients are summed here, too. In bfloat16 most updates would be smaller than half a unit in the last place. The
    weights with the ids in `rounded` are float32 and run with bfloat16 values.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rounded: Collection[int] = ()):
        super().__init__()
        self.rounded = rounded
        self.copies: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, weight in named:
            weight.requires_grad_(True)
            master = weight
            if weight.dtype != torch.float32 or id(weight) in rounded:
                master = nn.Parameter(weight.detach().to(torch.float32, copy=True))
                weight.register_post_accumulate_grad_hook(partial(_accumulate_into_master, master))
                self.copies.append((master, weight))
            # PyTorch allows no dot in a parameter's name
            self.register_parameter(name.replace(".", "/"), master)

    def scales(self) -> dict[str, float]:
        """RMS of each matrix or vector by its name, which its steps are relative to; not of adapters, half of which begin as
        zeros."""
        return {
            name: 1.0 if "lora_" in name else max(LEAST_SCALE, float(p.detach().square().mean().sqrt()))
            for name, p in self.named_parameters()
        }

    @torch.no_grad()
    def write_(self) -> None:
        """Round the master copies into the weights that run."""
        for master, weight in self.copies:
            weight.copy_(bfloat16_values(master) if id(weight) in self.rounded else master)


def _accumulate_into_master(master: nn.Parameter, weight: nn.Parameter) -> None:
    assert weight.grad is not None
    gradient = weight.grad.float()
    master.grad = gradient if master.grad is None else master.grad + gradient
    weight.grad = None


Balance = Callable[[], Float[Tensor, ""]]  # the balance term of the forward pass before


class MoEStudent:
    """The converted model itself, with shared neurons, on the expert backend in its config."""

    def __init__(self, moe: ToMoEForCausalLM, plan: AnyPlan, recipe: FinetuneRecipe):
        self.model, self.plan = moe, plan
        self.mlps = moe.mlps()
        self.routers: list[nn.Linear] = [mlp.router for mlp in self.mlps]
        frozen = {id(p) for name, p in moe.named_parameters() if "router." in name} | _frozen_embeddings(moe)
        self.adapters = _adapt(moe, recipe)
        # what the plan will hold, so that a bias is learned for these values
        rounded = {id(router.weight) for router in self.routers if router.bias is not None}
        self.learned = Fp32MasterWeights(
            _trained_weights(moe, frozen, self.adapters) + _trained_routers(self.routers, recipe), rounded
        )
        self.prompts, moe.config.tomoe_prompts = moe.config.tomoe_prompts, "chosen"

    def write_(self) -> None:
        """Update the running model to what was learned: weights, and the norms that tokens choose inputs by."""
        self.learned.write_()
        _renew_norms_(self.model)

    @contextmanager
    def running(self, valid: Bool[Tensor, " T"] | None) -> Iterator[Balance]:
        """Track the routing of the `valid` tokens (None: all) in every layer; the yielded function returns the balance term after
        a forward pass: 0 without routers."""
        routings: dict[int, Routing] = {}

        def note(i: int, _: nn.Module, __: tuple[Tensor, ...], logits: Tensor) -> None:
            routings[i] = route(logits if valid is None else logits[valid], self.mlps[i].top_k)

        def balance() -> Float[Tensor, ""]:
            seen = [routings[i] for i in range(len(self.routers))]
            return balance_penalty(seen) if seen else torch.zeros(())

        with hooked(router.register_forward_hook(partial(note, i)) for i, router in enumerate(self.routers)):
            yield balance

    def finish(self, version: str, dtype: torch.dtype = torch.float32) -> tuple[ToMoEForCausalLM, AnyPlan]:
        """Return the trained model with ordinary weights of `dtype`, and its plan with the current routers."""
        moe = _merged(self.model, self.learned, self.adapters)
        plan = self.plan
        if isinstance(plan, Plan):
            plan = replace(plan, layers=tuple(_with_routers(plan, self.routers)))
            for router, layer in zip(self.routers, plan.layers, strict=True):
                router.weight.data = layer.router_weight.to(router.weight.device)
                if layer.router_bias is not None:
                    router.bias.data = layer.router_bias.to(router.bias.device)
        for name, p in moe.named_parameters():
            if "router." not in name:
                p.data = p.data.to(dtype)
        _renew_norms_(moe)
        moe.config.tomoe_version, moe.config.tomoe_prompts = version, self.prompts
        return moe, plan


class FinetuneStep:
    """Forward and backward of one batch; leaves gradients (of the mean over a step's batches) in `student.learned`. The
    teacher is the dense model."""

    def __init__(self, student: MoEStudent, recipe: FinetuneRecipe, teacher: PreTrainedModel | None):
        assert (teacher is None) == (recipe.loss.objective == "lm")
        self.student, self.recipe, self.teacher = student, recipe, teacher

    def __call__(self, batch: Any, step: int, micro: int) -> dict[str, Tensor]:
        model, recipe = self.student.model, self.recipe
        ids = batch.input_ids.to(model.device)
        # asked where the mask is, as a device would have to be waited for
        mask = None if bool(batch.mask.all()) else batch.mask.to(model.device)
        self.student.write_()
        teacher_hidden = None
        if self.teacher is not None:
            with torch.inference_mode():
                teacher_hidden = hidden_states(self.teacher, ids, mask)
        valid = None if mask is None else mask.flatten()
        with self.student.running(valid) as balance_term:
            hidden = hidden_states(model, ids, mask)
            distill = distill_loss(hidden, teacher_hidden, ids, mask, family_head(model))
            balance = balance_term()
            loss = distill
            if recipe.loss.balance_weight and recipe.routers == "learned":
                loss = distill + recipe.loss.balance_weight * balance
            (loss / recipe.train.gradient_accumulation_steps).backward()
        terms = {"loss": loss.detach(), "distill": distill.detach()}
        return terms | ({"balance": balance.detach()} if self.student.routers else {})


class HeldOutLoss:
    """The student's loss on held-out text, in nats; processes divide it. The teacher runs once."""

    def __init__(self, step: FinetuneStep, text: Sequences):
        self.step, self.text = step, text
        self.expected: dict[int, Tensor | None] = {}

    @torch.no_grad()
    def __call__(self) -> float:
        student, teacher, total = self.step.student, self.step.teacher, 0.0
        model = student.model
        student.write_()
        for i in range(distributed.rank(), len(self.text), distributed.world_size()):
            ids, mask = (t[i : i + 1].to(model.device) for t in (self.text.input_ids, self.text.mask))
            if i not in self.expected:
                self.expected[i] = None if teacher is None else hidden_states(teacher, ids, mask)
            hidden = hidden_states(model, ids, mask)
            loss = distill_loss(hidden, self.expected[i], ids, mask, family_head(model))
            total += loss.item() * int(mask.sum())
        return distributed.all_reduce_scalars([total])[0] / self.text.tokens


def _frozen_embeddings(model: PreTrainedModel) -> set[int]:
    """Return ids of embeddings and output matrix: student and teacher share them, so logits need no second matrix."""
    modules: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    return {id(p) for module in modules for p in module.parameters()}


Named = list[tuple[str, nn.Parameter]]


def _trained_weights(model: nn.Module, frozen: set[int], adapters: Any) -> Named:
    """Return the adapters if there are any, else all weights that are not frozen."""
    named = [(name, p) for name, p in model.named_parameters() if id(p) not in frozen]
    return named if adapters is None else [(name, p) for name, p in named if "lora_" in name]


def _trained_routers(routers: Sequence[nn.Module], recipe: FinetuneRecipe) -> Named:
    learned = recipe.routers == "learned"
    return [(f"router.{i}.{name}", p) for i, r in enumerate(routers) for name, p in r.named_parameters() if learned]


def check_packages(recipe: FinetuneRecipe) -> None:
    """Raise UserError if peft, for adapters, or bitsandbytes, for its optimizer, is needed and not installed."""
    for key, value, other, package, extra in (
        ("weights", "lora", "full", "peft", "finetune"),
        ("train.optimizer", "adamw8bit", "adamw", "bitsandbytes", "quantized"),
    ):
        if recipe.flatten()[key] == value and find_spec(package) is None:
            raise UserError(
                f"{key} = {value} needs the package {package}, which is not installed; set {key} = {other}, or "
                + install_extra(extra)
            )


def _adapt(model: ToMoEForCausalLM, recipe: FinetuneRecipe) -> Any:
    """Add adapters to attention and MLPs of `model`, in place; None if all weights are trained."""
    if recipe.weights == "full":
        return None
    from peft import LoraConfig, get_peft_model

    names = [name for name, _ in model.named_parameters()]
    modules = [n.removesuffix(".weight") for n in names if n.endswith(tuple(f"{a}.weight" for a in ATTENTION))]
    if model.config.chooses_inputs:
        chosen = {id(projection) for _, projections in model.choices() for projection in projections}
        modules = [name for name, module in model.named_modules() if id(module) in chosen or name in modules]
    config = LoraConfig(
        r=recipe.lora.rank, lora_alpha=recipe.lora.alpha, lora_dropout=0.0, bias="none",
        target_modules=modules, target_parameters=[name for name in names if name.endswith(ROWS)] or None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(recipe.seed, "adapters"))
        adapters = get_peft_model(model, config)
    _let_choose_before_(model)
    return adapters


def _let_choose_before_(model: ToMoEForCausalLM) -> None:
    """Let tokens choose inputs before adapters, which receive what their projections receive."""
    for choice, projections in model.choices():
        for projection in projections:
            hooks = projection.base_layer._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if hook == choice.before]:
                del hooks[key]
    model.let_choose()


def _merged(model: Any, learned: Fp32MasterWeights, adapters: Any) -> Any:
    """Return the model with ordinary, frozen weights."""
    learned.write_()
    if adapters is not None:
        model = adapters.merge_and_unload()
        model.let_choose()
    return model.requires_grad_(False)


@torch.no_grad()
def _renew_norms_(model: ToMoEForCausalLM) -> None:
    """Update the norms that tokens choose inputs by to the current weights."""
    for choice, projections in model.choices():
        choice.norms.copy_(column_norms([_with_adapters(projection) for projection in projections]))


def _with_adapters(projection: Any) -> Float[Tensor, "n D"]:
    """Merge a projection and its adapters into one matrix."""
    matrix = matrix_of(getattr(projection, "base_layer", projection))
    for name in getattr(projection, "active_adapters", ()):
        matrix = matrix + projection.lora_B[name].weight @ projection.lora_A[name].weight * projection.scaling[name]
    return matrix


def _with_routers(plan: Plan, routers: Sequence[nn.Linear | ExpertRouter]) -> list[LayerPlan]:
    """Return the plan's layers with these routers, whose weights become bfloat16 values: every stock router can hold them."""
    layers = []
    for layer, router in zip(plan.layers, routers, strict=True):
        weight, bias = bfloat16_values(router.weight.detach().cpu()), None
        if layer.router_bias is not None and router.bias is not None:
            # an expert that every token uses stays one
            bias = torch.where(layer.always_used, layer.router_bias, router.bias.detach().cpu())
        # refitted matrices were merged into weights that have been trained since
        layers.append(replace(layer, router_weight=weight, router_bias=bias, refit={}))
    return layers
