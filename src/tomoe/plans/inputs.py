"""The plan of the form `inputs`: how many inputs each projection uses per token, at every budget.

It holds no tensor: which inputs these are, a token's own numbers tell. plan.json is all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from tomoe.budget import BUDGET_TOLERANCE, decoder_params
from tomoe.errors import Advice, UserError
from tomoe.files import validated
from tomoe.model.projections import Kind
from tomoe.model.shape import Size
from tomoe.plans.manifest import METADATA, Notes, Shape, damage_in_a_sentence, is_of_inputs, read_head, write_head
from tomoe.recipe.target_rules import Form

Counts = Mapping[Kind, Sequence[Size]]
"""A number for each kind of projection and each converted layer; 0 where a layer has no such projection."""
Fraction = Annotated[float, Field(strict=True, gt=0, le=1)]
OWN = ("names", "widths", "columns", "path", "active")  # what plan.json has beside what all plans have

# such a plan comes of a conversion alone: there is no run that one could be extracted from
AGAIN_AS_INPUTS = Advice("method.name", "to convert the model again", "inputs", here=False)


@dataclass(frozen=True)
class PathPoint:
    """One point of the path from all inputs to few."""

    active: Fraction  # of the decoder parameters that is active
    inputs: Counts  # inputs of a token


@dataclass(frozen=True)
class InputsPlan:
    """A validated plan of the form `inputs`. Raises UserError at construction if its parts contradict each other."""

    form: ClassVar[Form] = "inputs"
    prunes_attention: ClassVar[bool] = False  # it is the family's own, with fewer inputs
    shape: Shape  # sizes of the dense model
    names: Mapping[Kind, Sequence[str]]  # the projections of each kind, named from the decoder layer on
    widths: Counts  # inputs of each projection
    columns: Counts  # weights that belong to one input
    path: tuple[PathPoint, ...]  # from all inputs to the fewest, each point with fewer than the one before
    active: Fraction  # of the decoder parameters to use
    source: str = ""  # fingerprint of the dense weights
    dense_config: dict[str, Any] = field(default_factory=dict)  # config of the dense model, as transformers writes it
    recipe: dict[str, Any] = field(default_factory=dict)  # the recipe of the conversion
    notes: Notes = field(default_factory=dict)  # how the plan was made

    def __post_init__(self) -> None:
        if error := self._error():
            raise UserError(f"the plan is broken: {error}", AGAIN_AS_INPUTS)

    def _error(self) -> str | None:
        layers = self.shape.num_layers
        if not self.names or any(set(part) != set(self.names) for part in (self.widths, self.columns)):
            return "it names other kinds of projections than it has sizes of"
        for kind in self.names:
            if any(len(part[kind]) != layers for part in (self.widths, self.columns)):
                return f"it has not {layers} sizes of the {kind} projections"
        if len(self.path) < 2 or self.path[0].inputs != self.widths:
            return "its path does not begin with all inputs"
        for point in self.path:
            if set(point.inputs) != set(self.names) or any(len(numbers) != layers for numbers in point.inputs.values()):
                return "a point of its path lacks numbers"
            if abs(point.active - self.fraction(point.inputs)) > 1e-6:
                return f"a point of its path says {point.active:.4f} active, and its inputs are {self.fraction(point.inputs):.4f}"
        for more, fewer in pairwise(self.path):
            pairs = [pair for kind in self.names for pair in zip(fewer.inputs[kind], more.inputs[kind], strict=True)]
            if not fewer.active < more.active or not all(min(1, b) <= a <= b for a, b in pairs):
                return "its path does not go from more inputs to fewer"
        if not self.path[-1].active - BUDGET_TOLERANCE <= self.active <= 1:
            return f"it is {self.active} active, which its path from 1 to {self.path[-1].active:.3f} does not reach"
        return None

    def fraction(self, inputs: Counts) -> float:
        """Return the fraction of the decoder parameters that these numbers of inputs use."""
        saved = sum(
            (width - used) * columns
            for kind in self.names
            for width, used, columns in zip(self.widths[kind], inputs[kind], self.columns[kind], strict=True)
        )
        return 1 - saved / decoder_params(self.shape)

    def inputs(self) -> Counts:
        """Inputs per token at the plan's budget, interpolated between the nearest points; past the end, those of the last."""
        for more, fewer in pairwise(self.path):
            if self.active > fewer.active:
                part = min(1.0, (more.active - self.active) / (more.active - fewer.active))
                pairs = {kind: zip(more.inputs[kind], fewer.inputs[kind], strict=True) for kind in more.inputs}
                return {kind: [round(a + part * (b - a)) for a, b in pairs[kind]] for kind in pairs}
        return self.path[-1].inputs

    def active_fraction(self) -> float:
        """Return the fraction of decoder parameters that are active per token, the same for all tokens."""
        return self.fraction(self.inputs())

    def totals(self) -> dict[str, Any]:
        """Return totals over all layers: decoder parameters of the dense model, active and stored."""
        total = decoder_params(self.shape)
        return {
            "num_layers": self.shape.num_layers,
            "active_fraction": self.active_fraction(),
            "decoder_params": total,
            "active_decoder_params": round(self.active_fraction() * total),
            "stored_decoder_params": total,
            "router_params": 0,
        }

    def describe(self) -> list[dict[str, Any]]:
        """Return one row per layer, for a table: the share of the inputs of each kind, and of all parameters as `active`."""
        used, total = self.inputs(), decoder_params(self.shape) / self.shape.num_layers
        rows: list[dict[str, Any]] = []
        for i in range(self.shape.num_layers):
            held = {kind: self.widths[kind][i] for kind in self.names}
            saved = sum((held[kind] - used[kind][i]) * self.columns[kind][i] for kind in self.names)
            row: dict[str, Any] = {"layer": i, "active": 1 - saved / total}
            row |= {kind: used[kind][i] / held[kind] if held[kind] else None for kind in self.names}
            rows.append(row)
        return rows

    def save(self, folder: Path) -> None:
        """Write plan.json. Raises UserError if it cannot be written."""
        write_head(folder, self, {name: asdict(self)[name] for name in OWN})

    @classmethod
    def load(cls, folder: Path) -> InputsPlan:
        """Read and check a plan. Raises UserError if the folder holds a damaged one, or one of another form."""
        head = read_head(folder)
        if not is_of_inputs(head):
            raise UserError(f"{folder} holds a plan of experts, not of inputs", AGAIN_AS_INPUTS)
        with damage_in_a_sentence(folder, AGAIN_AS_INPUTS):
            return validated(cls, {name: head[name] for name in (*OWN, "shape", *METADATA)})
