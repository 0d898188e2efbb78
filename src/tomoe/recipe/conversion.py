"""The recipe of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from tomoe.errors import UserError
from tomoe.recipe.base import Section
from tomoe.recipe.shared import DataSection, LoopSection, RunRecipe
from tomoe.recipe.target_rules import TARGET_RULES, Format

# Experts by their form, unless the recipe says how many; fine-grained ones depend on the model.
USUAL_NUMBERS = {"overlapping": 8}
# Ridge of a repair on one token for each neuron of a layer, and the least one.
RIDGE_PER_NEURON, LEAST_RIDGE = 4.0, 1e-2


def _usual_number(section: dict[str, Any]) -> int:
    return USUAL_NUMBERS.get(section.get("form", ""), 0)


class MethodSection(Section):
    """The method, and its settings, which `tomoe methods NAME` lists."""

    model_config = ConfigDict(extra="allow")
    name: str = ""
    """A name that `tomoe methods` lists, or FILE.py:CLASS. Empty: `tomoe` if the recipe trains, prunes attention, has a random
    start or overlapping experts, else `carve`."""


class ExpertsSection(Section):
    """The experts of an MLP, for every method."""

    form: Literal["fine", "overlapping"] = "fine"
    """`fine`: a token uses a shared part and several of many small experts; `overlapping` (the paper's): one of a few experts
    that share neurons. A random start and the target mixtral imply `overlapping`."""
    num_experts: int = Field(default_factory=_usual_number, ge=0, le=256)
    """Experts per MLP (N). Overlapping: 8. Fine-grained: 0 chooses 256, 128 or 64, at most 1/18 of a layer's neurons; for gpu
    a power of two from 16 to 256; for a stock target up to 64, at most 30 of them per token; for gguf up to 64 of a width
    divisible by 32."""
    expert_size: int = Field(default=0, ge=0)
    """Neurons of a fine-grained expert; 0: chosen by `shared`."""
    shared: float = Field(default=0.4, ge=0, le=1)
    """Size of the shared part, as a fraction of a token's neurons, approximately (fine-grained experts without `expert_size`).
    Stock targets imply 0.75, which engines run faster; gemma4 and flex_olmo imply 0."""
    dense_layers: int = Field(default=1, ge=0)
    """The number of first layers that a stock target keeps dense (fine-grained experts); targets with experts in every layer
    imply 0."""
    embedding_size: int = Field(default=128, ge=2, multiple_of=2)
    """Size of an expert embedding (E) in the hypernetwork, both directions together."""
    width_multiple: int = Field(default=32, ge=1)
    """Expert widths are multiples of this: grouped kernels need 8, K-quants 256."""


class AttentionSection(Section):
    """Pruning of attention."""

    pruning: Literal["off", "static", "per_token"] = "off"
    """`off`: attention stays dense; `static`: the same Q/K and V/O dims for all tokens; `per_token`: the same Q/K dims, V/O dims
    chosen per token (the paper's, Section 3.3)."""
    embedding: Literal["global", "local"] = "global"
    """`global`: attention embeddings come from the hypernetwork; `local`: each layer has its own (ablation)."""
    rotate_values: bool = True
    """Rotate V and O of every head into the basis in which pruned dims matter least (not in the paper). A random start with
    per_token implies false, because it trains better in the model's own basis."""
    share: float = Field(default=1 / 3, ge=0, le=1)
    """Attention's part of the reduction, for a carved start: it keeps 1 - share x (1 - active) of its dims."""


class SamplingSection(Section):
    """The noise of the masks during training; there is none afterwards (Appendix A.3)."""

    temperature: float = Field(default=0.4, gt=0)
    """Temperature of the relaxed masks (tau, Eqs. 14, 15)."""
    keep_bias: float = 3.0
    """Added to every mask logit (b), so that training starts from a nearly dense model."""


class LossSection(Section):
    """The objective: distillation or language modeling, plus weighted penalties (Eq. 10, Section 3.5)."""

    objective: Literal["kl", "lm"] = "kl"
    """`kl`: KL(teacher || student); `lm`: the language-modeling loss (ablation)."""
    budget_weight: float = Field(default=16.0, ge=0)
    """Weight of R_P (alpha, Eq. 8): keeps the active parameters at the budget."""
    coverage_weight: float = Field(default=2.0, ge=0)
    """Weight of R_U (beta, Eq. 7): keeps every neuron in some expert."""
    balance_weight: float = Field(default=1.0, ge=0)
    """Weight of R_L (gamma, Eq. 9): spreads tokens evenly over experts."""


class RepairSection(Section):
    """Refitting projections in closed form to the plan's masks."""

    mode: Literal["none", "full", "low_rank"] = "full"
    """`none`: keep the dense matrices; `full`: store refitted matrices in the plan; `low_rank`: store a low-rank change, which is
    smaller."""
    rank: int = Field(default=64, ge=1)
    """Rank of the change (low_rank)."""
    ridge: float = Field(default=0.0, ge=0)
    """Ridge towards the dense matrix, relative to the mean diagonal of the Gram matrix. 0: 4 x neurons of a layer / tokens, at
    least 0.01."""
    target: Literal["auto", "local", "half"] = "auto"
    """Fit a layer to the dense layer's output on the same input (`local`), or half-way between that and the dense model's hidden
    states, which corrects errors of earlier layers (`half`). `auto`: `local` after training, else `half`."""
    tokens: int = Field(default=65_536, ge=1)
    """Maximum number of tokens to fit to: training text first, then calibration text."""

    def ridge_for(self, tokens: int, neurons: int) -> float:
        """Return the ridge for this many tokens and neurons per layer: the fewer tokens, the larger."""
        return self.ridge or max(LEAST_RIDGE, RIDGE_PER_NEURON * neurons / tokens)

    def target_after(self, steps: int) -> Literal["local", "half"]:
        """Return the target for masks trained for this many steps."""
        if self.target != "auto":
            return self.target
        return "local" if steps else "half"


class TrainSection(LoopSection):
    """The training loop of masks and routers."""

    budget_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the budget falls linearly from 1 to `active`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of the frozen base; everything trainable is float32. float16 only without training (steps = 0)."""
    compute_dtype: Literal["auto", "stored", "float32"] = "auto"
    """Dtype of the frozen base's products: `stored` (as `dtype`), `float32`, or `auto`: float32 on a processor without bfloat16
    instructions, two to six times as fast and in twice the memory, else `stored`. A base that is sharded computes as stored."""
    shard: bool = False
    """Shard the frozen base over the ranks of torchrun (FSDP2)."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        # there is no loss scaling
        if self.dtype == "float16" and self.steps:
            raise UserError(
                f"train.dtype is float16, in which small gradients are lost, but train.steps is {self.steps}; choose "
                "bfloat16 or float32, or do not train (train.steps = 0)"
            )
        return self


class Recipe(RunRecipe):
    """Everything that determines a conversion."""

    NOT_IN_DIGEST: ClassVar[frozenset[str]] = RunRecipe.NOT_IN_DIGEST | {"offload", "train.shard"}
    OPEN: ClassVar[frozenset[str]] = frozenset({"method"})
    model: str = ""
    """Hub id, local folder, .gguf file, or a known name (smollm2-135m)."""
    active: float = Field(default=0.7, gt=0, le=1)
    """The budget: the parameters that a token uses, routers included, as a fraction of the dense decoder's. A random start, the
    paper's, counts projection weights alone (p, Eq. 8)."""
    start: Literal["carved", "random"] = "carved"
    """Initial masks and routers: `carved` from calibration statistics, or `random` (the paper's)."""
    offload: bool = False
    """Load one decoder layer at a time, for checkpoints larger than RAM; only with train.steps = 0."""
    target: Literal[Format, "gpu"] = "hf"
    """The format that the conversion must fit. `hf`, tomoe's own, fits every plan; `gpu` is `hf` with few wide experts. The
    others need the same layout in all layers, and most need dense attention; docs/guide/export.md lists families and experts."""
    method: MethodSection = MethodSection()
    experts: ExpertsSection = ExpertsSection()
    attention: AttentionSection = AttentionSection()
    repair: RepairSection = RepairSection()
    sampling: SamplingSection = SamplingSection()
    loss: LossSection = LossSection()
    train: TrainSection = TrainSection()
    data: DataSection = DataSection()

    @property
    def counts_routers(self) -> bool:
        """Whether `active` counts routers, decided here alone: all budgets do but the paper's, that of a random start."""
        return self.start != "random"

    def fitted_tokens(self) -> int:
        """Maximum tokens of training and calibration text that the repair is fitted to."""
        return 0 if self.repair.mode == "none" else self.repair.tokens

    def _imply(self, section: str, values: Mapping[str, Any]) -> None:
        """Set keys of a section that others imply, unless given; they still count as not given."""
        given: Section = getattr(self, section)
        values = {key: value for key, value in values.items() if key not in given.model_fields_set}
        implied = type(given)(**values, **given.model_dump(exclude_unset=True))
        implied.model_fields_set.difference_update(values)
        # a frozen model is changed in its dictionary
        self.__dict__[section] = implied

    @model_validator(mode="after")
    def _keys_that_fit(self) -> Self:
        """Imply the forms and dims of a random start, and the form and shared part for a stock target."""
        rules = TARGET_RULES[self.target]
        # a random start learns masks of overlapping experts; otherwise the first form that the target has a place for
        experts: dict[str, Any] = {"form": "overlapping" if self.start == "random" else rules.forms[0]}
        if rules.num_experts:
            experts["num_experts"] = rules.num_experts
        if rules.shared is not None:
            experts["shared"] = rules.shared
        if not rules.dense_layers:
            experts["dense_layers"] = 0
        self._imply("experts", experts)
        if self.start == "random" and self.attention.pruning == "per_token":
            self._imply("attention", {"rotate_values": False})
        return self

    @model_validator(mode="after")
    def _check_keys_together(self) -> Self:
        # a method may have other defaults, which `with_defaults` knows
        if not self.method.name:
            self._check()
        return self

    def _check(self) -> None:
        """Raise UserError for keys that are incompatible."""
        for problem in (*self._problems_of_target(), *self._problems_of_learning()):
            raise UserError(problem)

    def with_defaults(self, defaults: Mapping[str, Any], method: Mapping[str, Any]) -> Self:
        """Return a copy with other defaults (`section.key` -> value) where no value was given, and a method's settings. Raises
        UserError for a key or value that is not allowed."""
        values = self.model_dump(exclude_unset=True)
        for key, value in defaults.items():
            section, _, leaf = key.rpartition(".")
            (values.setdefault(section, {}) if section else values).setdefault(leaf, value)
        changed = type(self)(**values | {"method": dict(method)})
        changed._check()
        return changed

    def _problems_of_target(self) -> Iterator[str]:
        rules, form = TARGET_RULES[self.target], self.experts.form
        if rules.uniform and self.attention.pruning == "per_token":
            yield (
                f"target {self.target} cannot choose V/O dims for each token (attention.pruning = per_token); set "
                "attention.pruning to static or off, or target to hf"
            )
        if rules.whole_attention and self.attention.pruning != "off":
            yield (
                f"target {self.target} needs dense attention, but attention.pruning is {self.attention.pruning}; set it "
                "to off, or target to hf"
            )
        if rules.num_experts and self.experts.num_experts != rules.num_experts:
            yield (
                f"target {self.target} holds {rules.num_experts} expert a layer, the same neurons for every token, but "
                f"experts.num_experts is {self.experts.num_experts}; leave it out, or set target to hf"
            )
        if form not in rules.forms:
            *others, last = (name for name, other in TARGET_RULES.items() if form in other.forms)
            which = f"{', '.join(others)} or {last}" if others else last
            yield f"target {self.target} does not support experts.form = {form}; set target to {which}"
        if not rules.holds_shared and self.experts.shared:
            yield (
                f"target {self.target} has no shared part of neurons for all tokens (experts.shared = {self.experts.shared:g}); "
                "set experts.shared to 0, or leave it out"
            )
        if not rules.dense_layers and self.experts.dense_layers:
            yield (
                f"target {self.target} has experts in every layer, but experts.dense_layers is {self.experts.dense_layers}; set "
                "it to 0, or leave it out"
            )

    def _problems_of_learning(self) -> Iterator[str]:
        if self.experts.form == "fine" and self.start == "random":
            yield (
                "experts.form = fine needs start = carved: calibration text decides which neurons form an expert, and "
                "learning starts from there; set start to carved, or experts.form to overlapping"
            )
        if self.start == "random" and not self.train.steps:
            yield (
                "start = random leaves random masks without training (train.steps = 0); set train.steps, or "
                "start to carved"
            )
        if self.experts.form in USUAL_NUMBERS and not self.experts.num_experts:
            yield (
                "experts.num_experts is 0, which chooses a number for fine-grained experts, but experts.form is "
                f"{self.experts.form}; set experts.num_experts to 1 or more, or experts.form to fine"
            )
        if self.offload and self.train.steps:
            yield (
                "offload reads every layer from disk in every pass, and training takes thousands of passes (train.steps is "
                f"{self.train.steps}); do not train (train.steps = 0)"
            )
        if self.offload and "self" in self.data.sources:
            yield (
                "offload reads every layer from disk in every pass, and the source self takes one pass per token; name a "
                "text with data.sources"
            )
        if self.offload and self.train.shard:
            yield "offload and train.shard cannot be combined: one keeps the layers on disk, the other spreads them over ranks"
