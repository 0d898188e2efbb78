"""The stages of a conversion, each reading and writing files: train -> plan -> fold, and all of them in one go.

recipe -> RUN (recipe, corpus, metrics, masks/step-N) -> PLAN (plan.json, plan.safetensors) -> OUT (a Hugging Face folder)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import tomoe
from tomoe import distributed
from tomoe.data.corpus import Blocks, Corpus, prepare
from tomoe.data.sources import SELF
from tomoe.errors import UserError
from tomoe.exporting.stock import dense_misfit
from tomoe.files import own_name, read_json, staged
from tomoe.model.loading import fingerprint, load_dense, load_tokenizer
from tomoe.model.structure import check_output, shape_of
from tomoe.moe.checkpoint import refuse_overwriting, save_moe
from tomoe.moe.fold import fold
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plan import FINETUNED, Plan
from tomoe.pruning.carving import carve_
from tomoe.pruning.extract import extract_plan, least_active
from tomoe.pruning.mask_network import MaskNetwork
from tomoe.recipe.conversion import Recipe
from tomoe.recipe.finetuning import FinetuneRecipe
from tomoe.training import tracking
from tomoe.training.cost import write_cost
from tomoe.training.loop import Training
from tomoe.training.run_folder import RunFolder

Listener = Callable[[str, int, int, dict[str, Any]], None]
"""Called as (stage, done, total, what is known) whenever a long stage gets on."""


def silent(stage: str, done: int, total: int, known: dict[str, Any]) -> None:
    """The listener of a caller who does not listen."""


def pick_device(name: str) -> str:
    """`auto` is CUDA where there is one, else the CPU. Raises UserError for a device that is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError:
        raise UserError(f"there is no device {name!r} that torch knows; use device=cpu, cuda or auto") from None
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"the recipe asks for device {name!r}, but torch sees no CUDA GPU here; use device=cpu or auto")
    return name


def open_dense(
    recipe: Recipe, shares: int = 1, stream: bool | None = False, base: str = "dense"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The dense model and its tokenizer: whole, shared out over so many processes, read layer by layer, or packed (`base`).

    Raises UserError where model or budget do not fit.
    """
    if not recipe.model:
        raise UserError(
            "the recipe names no model; give a hub id, a folder, a .gguf file or a name that `tomoe fetch` knows"
        )
    dtype, device = getattr(torch, recipe.train.dtype), pick_device(recipe.device)
    model = load_dense(recipe.model, dtype, device, shares=shares, stream=stream, base=base)
    shape = shape_of(model)
    check_output(model)
    if recipe.target != "hf" and (problem := dense_misfit(model, recipe.target)):
        raise UserError(f"target {recipe.target} cannot hold what this model becomes: {problem}; choose another, or hf")
    least = least_active(shape, recipe.experts.width_multiple, recipe.experts.attention)
    if recipe.active < least:
        whole = " with attention kept whole (experts.attention = none)" if recipe.experts.attention == "none" else ""
        raise UserError(
            f"active is {recipe.active}, but this model{whole} can reach {least:.3f} of its blocks at the least; ask for more"
        )
    return model, load_tokenizer(recipe.model)


def begin(
    recipe: Recipe, run: RunFolder, goes_on: bool, listen: Listener, same_text: Path | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Corpus]:
    """Open model and text, then begin the run or go on with it.

    `same_text` is what another run prepared from the same model and recipe of text. Nothing is written, and nothing of an
    older run goes, before model and text turned out to be of use. Raises UserError where the run was begun with other weights.
    """
    tracking.check(recipe.track)
    model, tokenizer = open_dense(recipe, _shares(recipe), recipe.stream, recipe.train.base)

    def text() -> Corpus | None:
        if goes_on and run.corpus.exists():
            return None
        if same_text is not None:
            return Corpus.load(same_text)
        return prepare(recipe.data, tokenizer, recipe.seed, model, lambda done, total: listen("text", done, total, {}))

    # sampling is shared out; a model that is shared out samples with all processes or not at all
    sampled = text() if distributed.size() > 1 and SELF in recipe.data.sources else None

    def begin_run() -> None:
        weights = fingerprint(model if _is_whole(recipe) else _original(recipe))
        if goes_on:
            run.check_origin(weights, recipe.model)
        corpus = sampled or text()
        if corpus is not None:
            run.begin(recipe, goes_on, weights)
            corpus.save(run.corpus)

    distributed.first(begin_run)
    return model, tokenizer, Corpus.load(run.corpus)


def _original(recipe: Recipe) -> PreTrainedModel:
    """The weights as they are, read layer by layer if that can be: nobody needs more than one of them at a time."""
    return load_dense(recipe.model, getattr(torch, recipe.train.dtype), pick_device(recipe.device), stream=None)


def _is_whole(recipe: Recipe) -> bool:
    """Whether the model that is learned from holds the original weights, and all of them."""
    return _shares(recipe) == 1 and recipe.train.base == "dense"


def _shares(recipe: Recipe) -> int:
    """Processes that the base is shared out over."""
    return distributed.size() if recipe.train.shard else 1


def make_network(recipe: Recipe, model: PreTrainedModel, calibration: Blocks, listen: Listener = silent) -> MaskNetwork:
    """The mask network at its start: random, or carved from calibration statistics."""
    net = MaskNetwork(shape_of(model), recipe.experts, recipe.sampling, recipe.seed).to(model.device)
    if recipe.start == "carved":
        ids, mask = calibration.input_ids.to(model.device), calibration.mask.to(model.device)

        def heard(done: int, total: int) -> None:
            listen("carve", done, total, {})

        carve_(net, model, ids, mask, recipe.active, recipe.seed, heard, one_width=recipe.common_multiple > 0)
    return net


def train(recipe: Recipe, out: Path, resume: bool = False, force: bool = False, listen: Listener = silent) -> Path:
    """Learn masks and routers; returns the run folder. Raises UserError for whatever the user can mend."""
    run = RunFolder(out)
    goes_on = distributed.first(lambda: run.goes_on(recipe, resume, force))
    model, _, corpus = begin(recipe, run, goes_on, listen)
    _train(recipe, model, corpus, run, listen)
    return out


def _train(recipe: Recipe, model: PreTrainedModel, corpus: Corpus, run: RunFolder, listen: Listener) -> MaskNetwork:
    # a checkpoint holds the start too, so a resumed run need not carve again
    begun = any(run.checkpoints.glob("step-*"))
    start = recipe.model_copy(update={"start": "random"}) if begun else recipe
    packed = recipe.train.base != "dense" and start.start == "carved"
    net = make_network(start, _original(recipe) if packed else model, corpus.calibration, listen)
    run_training(Training(model, net, recipe, corpus, run), recipe, "train", listen)
    return net


def run_training(training: Training, recipe: Recipe | FinetuneRecipe, stage: str, listen: Listener) -> None:
    """Go on where the run stands, to its last step; every process begins with the same weights, and the trackers hear of it."""
    run = training.run
    training.resume()
    distributed.copy_(training.net.state_dict().values())
    kind = recipe.track if distributed.rank() == 0 else tracking.NONE
    name = own_name(run.path.parent if run.path.name == "run" else run.path)
    with tracking.tracked(kind, run.path, recipe.leaves(), run.rows(), name) as run.follow:
        training.train(lambda row: listen(stage, row["step"], recipe.train.steps, row))


def plan(run_path: Path, out: Path, active: float | None = None, force: bool = False) -> Plan:
    """Extract the plan of a run's newest checkpoint; `active` other than the trained one is allowed.

    Raises UserError where there is no such run, its dense model changed, or `out` holds a model (or, without `force`, a plan).
    """
    if not (run_path / "recipe.json").is_file():
        raise UserError(f"{run_path} holds no run (no recipe.json); make one with `tomoe train`")
    if (out / "config.json").exists():
        raise UserError(f"{out} holds a model, whose plan must stay the one it was made by; choose another folder")
    if (out / "plan.json").exists() and not force:
        raise UserError(f"{out} already holds a plan; choose another folder or give --force")
    run, recipe = RunFolder(run_path), Recipe.load(run_path / "recipe.json")
    asked = recipe if active is None else recipe.changed([f"active={active}"])
    checkpoint = run.last()
    if checkpoint is None:
        raise UserError(f"{run_path} holds no checkpoint yet; run `tomoe train` first, with --resume if it was cut off")
    model = _original(recipe)
    weights = fingerprint(model)
    run.check_origin(weights, recipe.model)
    corpus = Corpus.load(run.corpus)
    net = make_network(recipe.model_copy(update={"start": "random"}), model, corpus.calibration)
    run.restore(checkpoint, net, None)
    made = finish_plan(net, model, asked, corpus, checkpoint.step, weights)
    with staged(out, "plan.json", ()) as part:
        made.save(part)
    return made


def finish_plan(
    net: MaskNetwork, model: PreTrainedModel, recipe: Recipe, corpus: Corpus, steps: int, weights: str
) -> Plan:
    """The plan with its papers: fingerprint of the dense weights, dense config, recipe, versions."""
    calibration = corpus.calibration.input_ids.to(model.device), corpus.calibration.mask.to(model.device)
    bare = extract_plan(net, model, recipe.active, calibration, common_multiple=recipe.common_multiple)
    notes = bare.notes | {
        "steps": steps,
        "block_size": recipe.data.block_size,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tomoe": tomoe.__version__,
    }
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    return Plan(bare.shape, bare.layers, weights, config, recipe.model_dump(mode="json"), notes)


def fold_plan(
    plan_path: Path, model_name: str | None, out: Path, dtype: str | None = None, force: bool = False
) -> Plan:
    """Fold a plan into a model and save the Hugging Face folder. Raises UserError for a plan of another model."""
    made = Plan.load(plan_path)
    if FINETUNED in made.notes:
        raise UserError(
            f"the plan in {plan_path} belongs to weights that were fine-tuned after folding, which only their own model folder "
            "holds; apply the plan of the conversion, then fine-tune again"
        )
    recipe = Recipe(**made.recipe) if made.recipe else Recipe()
    name = model_name or recipe.model
    refuse_overwriting(out, force, name)
    model = load_dense(name, getattr(torch, dtype or recipe.train.dtype), stream=None)
    if made.source and made.source != (found := fingerprint(model)):
        raise UserError(
            f"the plan was made for other weights (hash {made.source[:12]}) than these (hash {found[:12]}); "
            "fold it with the model it was made for"
        )
    _save(made, model, load_tokenizer(name), out, force)
    return made


def _save(made: Plan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, force: bool) -> None:
    save_moe(fold(model, made, tomoe.__version__, lazily=True), made, tokenizer, out, force)
    Recipe(**made.recipe).save(out / "recipe.json")


def stored_dtype(folder: Path) -> str:
    """That of a converted model's weights. Raises UserError for a folder that holds none."""
    try:
        config = read_json(folder / "config.json")
        stored, kind = str(config.get("dtype") or "float32"), config.get("model_type")
    except UserError as error:
        raise UserError(
            f"{folder} holds no converted model (no config.json that can be read); give what `tomoe convert` wrote"
        ) from error
    if kind != "tomoe":
        raise UserError(f"{folder} holds a {kind!r} model, which is none that `tomoe convert` wrote; give one that is")
    if stored not in ("float32", "bfloat16", "float16"):
        raise UserError(f"{folder} says that its weights are {stored[:40]!r}; its config is damaged, make it again")
    return stored


def load_moe(folder: Path, dtype: str | None, device: str = "auto") -> ToMoEForCausalLM:
    """The converted model in `dtype`, or in the one it is stored in. Raises UserError for anything else than one."""
    stored = stored_dtype(folder)
    moe = load_dense(str(folder), getattr(torch, dtype or stored), pick_device(device))
    assert isinstance(moe, ToMoEForCausalLM)
    return moe


def convert(recipe: Recipe, out: Path, resume: bool = False, force: bool = False, listen: Listener = silent) -> Plan:
    """Dense model in, MoE folder out: see `convert_dense`."""
    return convert_dense(recipe, out, resume, force, listen)[0]


def convert_dense(
    recipe: Recipe, out: Path, resume: bool = False, force: bool = False, listen: Listener = silent,
    same_text: Path | None = None,
) -> tuple[Plan, PreTrainedModel | None]:  # fmt: skip
    """Text, start, training (none if `train.steps` is 0), plan, fold; returns the plan, and the dense model where it is whole.

    The run is kept in OUT/run, so that a killed conversion resumes and a finished one can be planned again. `same_text`:
    see `begin`. Raises UserError for whatever the user can mend; what was written before stays.
    """
    run = RunFolder(out / "run")
    refuse_overwriting(out, force or (resume and run.recipe.exists()), recipe.model)
    goes_on = distributed.first(lambda: run.goes_on(recipe, resume, force))
    began = time.perf_counter()
    model, tokenizer, corpus = begin(recipe, run, goes_on, listen, same_text)
    text_ready = time.perf_counter()
    net = _train(recipe, model, corpus, run, listen)
    learned = time.perf_counter()

    def finish() -> None:
        whole = model if _is_whole(recipe) else _original(recipe)
        made = finish_plan(net, whole, recipe, corpus, recipe.train.steps, run.origin_fingerprint())
        _save(made, whole, tokenizer, out, force or goes_on)
        write_cost(run.path / "cost.json", recipe.train, whole, corpus, (began, text_ready, learned), goes_on)

    distributed.first(finish)
    return Plan.load(out), model if _is_whole(recipe) else None
