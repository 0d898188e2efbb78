"""Models beside each other, the dense one first: measured by one code on the same sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from tomoe.evaluation.param_counts import model_facts
from tomoe.evaluation.perplexity import Predictions, measure, new_tokens
from tomoe.evaluation.results import Row, TaskScore
from tomoe.evaluation.usage import ExpertCounter
from tomoe.files import basename
from tomoe.moe.active_experts import is_fine
from tomoe.moe.modeling_tomoe import choosing_all
from tomoe.progress import ProgressCallback, no_progress, stage_callback


def compare(
    models: Iterable[tuple[str, nn.Module]],
    input_ids: Int[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    stride: int | None = None,
    data: str = "",
    seed: int | None = None,
    tasks: Callable[[str, Any], Sequence[TaskScore]] | None = None,
    on_progress: ProgressCallback = no_progress,
) -> list[Row]:
    """Measure (name, model) pairs on the same sequences; the first, dense one, which runs once, is the reference of all
    others. `models` may load as it goes: beside the reference one is alive at a time. A name that is a path shows as its last
    part. `tasks` gives the scores of a (name, model). Several processes divide the sequences. Raises UserError as `measure`
    does."""
    rows: list[Row] = []
    reference = None
    for model_name, model in models:
        path = Path(model_name)
        name = basename(path) if path.exists() else model_name
        number = experts_per_token(model)
        config: Any = model.config
        if number is not None and number != config.planned_top_k:
            # else rows of one folder had one name
            name += f", {number} of {config.tomoe_num_experts} experts"
        counter = ExpertCounter(model)

        def count(group: list[int], counter: ExpertCounter = counter) -> None:
            counter.count(torch.stack([new_tokens(mask, b, stride) for b in group]))

        predictions = Predictions(model, keep=reference is None)
        # also in prompts and batches, which decoding on its own would run whole
        with choosing_all(model), counter:
            measured = measure(
                predictions,
                input_ids,
                mask,
                reference,
                stage_callback(on_progress, f"evaluating {name}"),
                ran=count,
                stride=stride,
                name=name,
                data=data,
                seed=seed,
            )
        counter.collect()
        with choosing_all(model):
            scores = tuple(tasks(model_name, model)) if tasks else ()
        facts = model_facts(model, path if path.exists() else None)
        rows.append(Row(measured, facts, counter.usage(), None, scores, number))
        reference = reference or predictions
        del model, predictions, counter, count  # before the next one is loaded
    return rows


def experts_per_token(model: Any) -> int | None:
    """The most fine-grained experts that a token uses in any layer; None for other models."""
    return getattr(model.config, model.config.top_k_key) if is_fine(getattr(model, "config", None)) else None
