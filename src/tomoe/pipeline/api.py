"""The steps of a conversion as functions of models: `plan`, `repair`, `fold`, `save`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.data.corpus import Corpus, Sequences, prepare_corpus
from tomoe.errors import UserError
from tomoe.methods.base import Method, Task
from tomoe.methods.registry import resolve_method
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.moe import fold as folding
from tomoe.moe.checkpoint import save_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.pipeline import steps
from tomoe.plans import AnyPlan, Plan
from tomoe.plans.repair.plan import repair_plan
from tomoe.progress import ProgressCallback, no_progress, stage_callback
from tomoe.recipe.conversion import Recipe, RepairSection
from tomoe.report.card import write_card
from tomoe.training.run_folder import RunFolder
from tomoe.version import __version__

Model = PreTrainedModel | str | Path
Text = str | Path | Sequence[str] | Int[Tensor, "B S"]
"""A file, hub id or named source, several of them, or B sequences of S token ids."""


def plan(
    model: Model,
    method: str | Method | type[Method] = "",
    text: Text | None = None,
    *,
    active: float = 0.7,
    recipe: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_progress: ProgressCallback = no_progress,
) -> AnyPlan:
    """Choose what each token uses of a dense model; the model stays as it is.

    ```python
    plan = tomoe.plan("smollm2-135m", "carve", "text.txt", active=0.5)
    moe = tomoe.fold("smollm2-135m", tomoe.repair(plan, "smollm2-135m", "text.txt"))
    ```

    Args:
        model: the dense model, or its hub id, folder or known name.
        method: a name that `tomoe methods` lists, FILE.py:CLASS, or a class of `Method`, with settings as an object of it.
        text: what the method calibrates on (default: the method's own).
        active: fraction of the decoder parameters that are active for a token.
        recipe: other keys of the recipe, such as `{"target": "gguf", "experts.num_experts": 16, "seed": 1}`.
        tokenizer: of the model, if it is not found under the model's name.

    Raises UserError for whatever the caller can fix.
    """
    name = _name(model)
    keys = {"model": name, "active": active} | dict(recipe or {})
    made = None
    if not isinstance(method, str):
        own = {key: keys.pop(key) for key in list(keys) if key.startswith("method.")}
        made = _made(method, {key.removeprefix("method."): value for key, value in own.items()})
    if isinstance(model, PreTrainedModel):
        keys.setdefault("train.dtype", str(model.dtype).removeprefix("torch."))
    if isinstance(method, str) and method:
        keys["method.name"] = method
    if isinstance(text, str | Path):
        keys["data.sources"] = [str(text)]
    elif isinstance(text, Sequence):
        keys["data.sources"] = list(text)
    chosen, settings = resolve_method(Recipe.of(keys), made)
    dense = _dense(model, getattr(torch, settings.train.dtype))
    if isinstance(text, Tensor):
        sequences = Sequences(text, torch.ones_like(text, dtype=torch.bool))
        corpus = Corpus(sequences, sequences, sequences, ("tokens of the caller",), "", settings.seed)
    else:
        reads = tokenizer or load_tokenizer(name)
        corpus = prepare_corpus(settings.data, reads, settings.seed, dense, stage_callback(on_progress, "text"))
    with TemporaryDirectory(prefix="tomoe-run-") as folder:
        run = RunFolder(Path(folder))
        run.begin(settings, resume=False)
        task = Task(dense, settings, corpus, run, on_progress=on_progress)
        return steps.with_origin(chosen.plan(task), chosen, task, fingerprint(dense))


def repair(
    plan: AnyPlan,
    model: Model,
    text: Text,
    *,
    tokens: int = 65_536,
    seq_len: int = 512,
    settings: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    on_progress: ProgressCallback = no_progress,
) -> Plan:
    """Refit the down projections in closed form to the masks of a plan of experts, on at most `tokens` tokens of a text.

    `settings`: keys of the recipe's section `repair`, such as `{"mode": "low_rank", "rank": 32}`. Raises UserError if the plan
    has no experts, or was made for another model.
    """
    if not isinstance(plan, Plan):
        raise UserError(
            "this plan chooses inputs of the dense weights, so there is nothing to repair; leave it as it is"
        )
    dense = _dense(model, None)
    if isinstance(text, Tensor):
        sequences = Sequences(text, torch.ones_like(text, dtype=torch.bool)).truncate(tokens)
    else:
        sources = [str(text)] if isinstance(text, str | Path) else list(text)
        keys = {"data.sources": sources, "data.seq_len": seq_len, "data.evaluation_tokens": seq_len}
        data = Recipe.of(keys | {"repair.tokens": tokens, "data.calibration_tokens": tokens}).data
        corpus = prepare_corpus(data, tokenizer or load_tokenizer(_name(model)), plan.recipe.get("seed", 0), dense)
        sequences = corpus.fitting_text(tokens)
    section = RepairSection(**{"tokens": tokens, **(settings or {})})
    ids, mask = sequences.input_ids.to(dense.device), sequences.mask.to(dense.device)
    return repair_plan(plan, dense, ids, mask, section, on_progress)


def fold(model: Model, plan: AnyPlan) -> ToMoEForCausalLM:
    """Apply a plan to the dense model that it was made for: a transformers model with the weights in the same dtype and device.

    Raises UserError if the plan was made for a model of other sizes.
    """
    return folding.fold(_dense(model, None), plan, __version__)


def save(
    moe: ToMoEForCausalLM,
    plan: AnyPlan,
    out: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    force: bool = False,
) -> Path:
    """Write a folder that `AutoModelForCausalLM.from_pretrained`, `tomoe.evaluate` and `tomoe.export` read; returns it.

    tokenizer: by default that of the plan's model. Raises UserError if the folder is taken, or if the model that is loaded
    from it computes something else.
    """
    out = Path(out)
    name = str(plan.recipe.get("model", ""))
    reads = tokenizer or (load_tokenizer(name) if name else None)
    save_moe(moe, plan, reads, out, force, check=True)
    if plan.recipe:
        Recipe(**plan.recipe).save(out / "recipe.json")
    write_card(out, plan)
    return out


def _made(method: Method | type[Method], settings: Mapping[str, Any]) -> Method:
    """Raise UserError for settings of an object, which has its own."""
    if isinstance(method, type):
        return method(**settings)
    if settings:
        raise UserError(
            f"the method is an object with settings of its own; give {', '.join(settings)} when you make it"
        )
    return method


def _name(model: Model) -> str:
    return str(model.name_or_path) if isinstance(model, PreTrainedModel) else str(model)


def _dense(model: Model, dtype: torch.dtype | None) -> PreTrainedModel:
    """Return the model, loaded if it is a name, in `dtype` or in bfloat16."""
    return model if isinstance(model, PreTrainedModel) else load_dense(str(model), dtype or torch.bfloat16)
