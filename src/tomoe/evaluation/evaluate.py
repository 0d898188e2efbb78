"""Evaluate models on the same text; the first, dense one is the reference of the others."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.data.corpus import Sequences
from tomoe.data.evaluation_text import CONTEXT, EvaluationText, held_out_text, load_text
from tomoe.data.sources import find_source
from tomoe.errors import Advice, Note, UserError, shortened
from tomoe.evaluation.compare import compare
from tomoe.evaluation.results import ACTIVE_CURVE, Row, to_json
from tomoe.evaluation.tasks import TaskSet
from tomoe.files import atomic_write
from tomoe.model.compute_dtype import dtype_of
from tomoe.model.loading import load_model, load_tokenizer
from tomoe.model.names import resolve
from tomoe.model.shape import max_positions
from tomoe.moe.active_experts import Setting, apply_setting_, runtime_settings
from tomoe.plans import read_plan
from tomoe.progress import ProgressCallback, no_progress


def evaluate(
    names: Sequence[str | Path | PreTrainedModel] | str | Path,
    text: str | Path | Int[Tensor, "B S"] | None = None,
    *,
    context: int | None = None,
    stride: int | None = None,
    tokens: int | None = None,
    tasks: TaskSet | None = None,
    active: Sequence[float] = (),
    dtype: str = "auto",
    device: str = "auto",
    offload: bool = False,
    on_progress: ProgressCallback = no_progress,
    on_row: Callable[[Row], object] = lambda _: None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> list[Row]:
    """Measure models on the same text, the dense one first: perplexity, KL from the first model, same top-1, routing, size.

    ```python
    dense, moe = tomoe.evaluate(["HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-moe"])
    print(dense.measurement.perplexity, moe.measurement.perplexity, moe.measurement.kl)  # kl in nats
    ```

    Args:
        names: folders, hub ids, known names or models; the first is the reference of the others. Models in memory are measured
            as they are, whatever `dtype`, `device` and `offload` say.
        text: a file, a hub id or a named source such as "wikitext", or B sequences of S token ids; None: what a converted
            folder among `names` held out.
        context: tokens of a sequence (default: 1024, less if the model is made for less, or that of the held-out text).
        stride: tokens from one sequence to the next; if it is smaller than `context`, sequences overlap, and each token is
            predicted from at least `context - stride` others. None: sequences stand side by side.
        tokens: tokens of the text to use, at most. tasks: for every model, see `tomoe.evaluation.tasks.TaskSet`.
        active: fractions of the decoder parameters; models with fine-grained experts are measured with the number of
            experts that is nearest to each. All models but the first must have such experts.
        dtype: of the weights: "float32", "bfloat16", "float16"; or "auto": as they are stored, computed with in float32 by
            processors that have no instructions for 16 bits.
        offload: keep decoder layers on disk and read each once for the whole text, for models larger than memory.
        on_row: gets each row as soon as it is measured, so that an error of a later model does not lose it.
        tokenizer: reads the text, if the first model is in memory and its name leads to none.

    Returns one `Row` for each model, or for each of its numbers of experts, in the order of `names`. Several processes (torchrun)
    divide the sequences and each returns all numbers; tasks, and their scores, are process 0's alone. Raises UserError if a model
    or text is not found, or the text does not fit the models: also if a tokenizer means another text by the same tokens.
    """
    named = [names] if isinstance(names, str | Path) else list(names)
    given = {_label(i, model): model for i, model in enumerate(named) if isinstance(model, PreTrainedModel)}
    _check_arguments(named, context, stride, tokens, dtype, active if given else ())
    settings = settings_to_measure([_label(i, model) for i, model in enumerate(named)], active)
    loaded = _loaded(settings, dtype, device, offload, given)
    if isinstance(text, str | Path) and context is None:
        find_source(str(text))  # before a model is loaded for nothing
        first = next(loaded)  # its config is at hand; to read one alone takes seconds from a .gguf file
        context = min(CONTEXT, max_positions(first.config) or CONTEXT)
        loaded = itertools.chain([first], loaded)
    evaluation = _evaluation_text(settings, text, context, stride, tokens, given, tokenizer)
    rows = []
    for row in compare([name for name, _ in settings], loaded, evaluation, on_progress, tasks):
        on_row(row)
        rows.append(row)
    return rows


def _check_arguments(
    names: Sequence[object],
    context: int | None,
    stride: int | None,
    tokens: int | None,
    dtype: str,
    active_in_memory: Sequence[float],
) -> None:
    if active_in_memory:
        raise UserError("active is for models that are named; set the experts of a model in memory in its config")
    if not names:
        raise UserError("no model is named; give the dense model first, then converted ones")
    for what, number, least in (("context", context, 8), ("stride", stride, 1), ("tokens", tokens, 8)):
        if number is not None and number < least:
            raise UserError(f"{what} is {number}, but it should be at least {least}")
    if dtype != "auto":
        dtype_of(dtype)


def settings_to_measure(models: Sequence[str], active: Sequence[float]) -> list[tuple[str, Setting | None]]:
    """Return the models to measure, in order, once per number of experts nearest to one of `active`; if the only model has
    fine-grained experts, the dense model that its plan names comes first. Raises UserError for models without them."""
    if not active:
        return [(name, None) for name in models]
    first, *others = models
    if not others:
        # refused if it has no such experts
        runtime_settings(first)
        first, others = _dense_of(first), [first]
    settings: list[tuple[str, Setting | None]] = [(first, None)]
    for name in others:
        runtime = runtime_settings(name)
        settings += [(name, point) for point in dict.fromkeys(runtime.nearest(fraction) for fraction in active)]
    return settings


def save_active_curves(settings: Sequence[tuple[str, Setting | None]], rows: Sequence[Row]) -> list[Path]:
    """Save rows of several numbers of experts, one for each of `settings`, in the measured folders (active.json), unless the
    reference is not a dense model. Returns the files. Raises UserError if one cannot be written."""
    if rows[0].usage is not None:
        return []
    by_folder: dict[str, list[Row]] = {}
    for (name, point), row in zip(settings, rows, strict=True):
        if point is not None:
            by_folder.setdefault(name, []).append(row)
    return [
        atomic_write(Path(name) / ACTIVE_CURVE, to_json([rows[0], *own]))
        for name, own in by_folder.items()
        if len(own) > 1 and Path(name).is_dir()
    ]


def _loaded(
    settings: Sequence[tuple[str, Setting | None]],
    dtype: str,
    device: str,
    offload: bool,
    given: Mapping[str, PreTrainedModel],
) -> Iterator[PreTrainedModel]:
    """Load each model when needed, once for all of its settings, unless it is given."""
    for name, points in itertools.groupby(settings, key=lambda setting: setting[0]):
        model = given.get(name) or load_model(name, dtype, device, offload)
        for _, point in points:
            if point is not None:
                apply_setting_(model, point)
            yield model
        del model  # before the next one is loaded


def _label(i: int, model: str | Path | PreTrainedModel) -> str:
    """Name a model for a table."""
    return f"model {i + 1} ({type(model).__name__})" if isinstance(model, PreTrainedModel) else str(model)


def _dense_of(folder: str) -> str:
    """Return the dense model of a converted folder. Raises UserError if it is not known or not found."""
    name = ""
    if (Path(folder) / "plan.json").is_file():
        name = str(read_plan(Path(folder)).recipe.get("model", ""))
    with contextlib.suppress(UserError):
        if name:
            resolve(name)
            return name
    raise UserError(f"the dense model that {folder} was made from was not found; name it first, before {folder}")


def _evaluation_text(
    settings: Sequence[tuple[str, Setting | None]],
    text: str | Path | Int[Tensor, "B S"] | None,
    context: int | None,
    stride: int | None,
    tokens: int | None,
    given: Mapping[str, PreTrainedModel],
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluationText:
    """Tokenize the text as the first model does, and as all other named models do."""
    models = list(dict.fromkeys(name for name, _ in settings))
    if isinstance(text, Tensor):
        sequences = Sequences(text, torch.ones_like(text, dtype=torch.bool))
        return EvaluationText(sequences if tokens is None else sequences.truncate(tokens), "token ids")
    if text is None:
        evaluation = held_out_text(models)
        size = evaluation.sequences.input_ids.shape[1]
        if context not in (None, size) or stride is not None:
            raise UserError(
                f"the held-out text is in separate sequences of {size} tokens",
                Advice("text", "for another context or a stride", "FILE"),
            )
        if tokens is not None:
            evaluation = replace(evaluation, sequences=evaluation.sequences.truncate(tokens))
    else:
        assert context is not None
        if stride is not None and not 0 < stride <= context:
            raise UserError(f"the stride is {stride}, but it should be between 1 and the context ({context})")
        first = models[0] if models[0] not in given else str(given[models[0]].name_or_path)
        found = load_text(str(text), tokenizer or load_tokenizer(first), context, tokens)
        evaluation = replace(found, stride=stride, reader="" if models[0] in given else first)
    check_readers([name for name in models if name not in given], evaluation)
    return evaluation


READ_AGAIN = 4096  # tokens of the text that each tokenizer divides anew


def check_readers(names: Sequence[str], text: EvaluationText) -> None:
    """Raise UserError if a model's tokenizer has other words for the text's tokens than the one that made them. A Note warns if
    it would split the text differently, or cannot be loaded."""
    others = [name for name in dict.fromkeys(names) if name != text.reader]
    if not text.reader or not others:
        return
    ids = text.sequences.input_ids[text.sequences.mask]
    first = load_tokenizer(text.reader)
    for name in others:
        try:
            tokenizer = load_tokenizer(name)
        except UserError as error:
            # weights alone can be measured in the tokens of another model
            warnings.warn(f"{name} reads the text in the tokens of {text.reader}: {error.wrong}", Note, stacklevel=2)
            continue
        _check(name, tokenizer, text.reader, first, ids.unique().tolist(), ids[:READ_AGAIN].tolist())


def _check(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    reader: str,
    first: PreTrainedTokenizerBase,
    used: list[int],
    beginning: list[int],
) -> None:
    special = {*first.all_special_ids, *tokenizer.all_special_ids}
    plain = [token for token in used if token not in special]
    pairs = zip(plain, *(each.convert_ids_to_tokens(plain) for each in (first, tokenizer)), strict=True)
    differ = next((pair for pair in pairs if pair[1] != pair[2]), None)
    if differ:
        token, one, other = differ
        raise UserError(
            f"the tokenizers of {reader} and {name} differ: the token {token} is {shortened(repr(one))} in the one and "
            f"{shortened(repr(other))} in the other, so the same tokens are not the same text; measure {name} by itself"
        )
    again = first.decode(beginning, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    one, other = (each(again, add_special_tokens=False, verbose=False)["input_ids"] for each in (first, tokenizer))
    if one != other:
        warnings.warn(
            f"{name} reads the text in the tokens of {reader}; its own tokenizer would split it differently",
            Note,
            stacklevel=3,
        )
