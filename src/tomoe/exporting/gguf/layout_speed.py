"""Time a model and its possible conversions in llama.cpp: files of a few layers of random numbers, run in turn.

Only the config of the model is read. The files have the architecture, the types and the rows that an export would have.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from gguf import GGUFWriter
from jaxtyping import Shaped
from transformers import PreTrainedConfig

from tomoe.errors import Note, UserError
from tomoe.exporting.gguf.experts import MERGED
from tomoe.exporting.gguf.file import TensorEntry, Weights, make_entry, write_tensors
from tomoe.exporting.gguf.llama_cpp import check_quantizer, quantize
from tomoe.exporting.gguf.target import arch_of, write_keys
from tomoe.exporting.stock.architecture import StockLayout, empty_stock
from tomoe.exporting.target import Precision
from tomoe.files import format_bytes
from tomoe.model.loading import load_config
from tomoe.model.shape import ModelShape, text_config
from tomoe.model.structure import shape_of
from tomoe.moe.fold import moe_config
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.plans.partition.layouts import FineLayout, layout_of
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.conversion import Recipe
from tomoe.version import __version__

FORMAT = "tomoe-layouts-1"
NUMBERS = (0, 16, 32, 64)
"""Experts of the layouts that are tried; 0: what a conversion chooses."""
TOKENS = 6  # that a run writes after its prompt
_VOCABULARY = 4096  # of the files, so that layers are what is timed
_TILE = 64  # rows of random numbers, which repeat: what is read and computed depends on no value
_MEMORY_SHARE = 0.8  # of what is free, for the files
_NEED = "timing llama.cpp needs it compiled for this processor: pip install llama-cpp-python"


@dataclass(frozen=True)
class Candidate:
    """A file to time; layout: None for the dense model."""

    precision: Precision
    active: float
    layout: FineLayout | None
    bytes: float  # of weights that a token reads in the timed layers
    full_bytes: float  # the same of all layers and of the output matrix
    file_bytes: int  # of the timed layers
    target: str  # of a conversion to such a file

    @property
    def words(self) -> str:
        if (x := self.layout) is None:
            return "dense"
        return f"{x.num_experts} of {x.expert_size:,}, {x.top_k} per token, {x.shared:,} shared"


@dataclass(frozen=True)
class Timed:
    """A candidate with its seconds per token and for the prompt, one of each per round."""

    candidate: Candidate
    dense: Candidate
    tokens: tuple[float, ...]
    prompts: tuple[float, ...]
    token_ratios: tuple[float, ...]  # dense / this, round by round
    prompt_ratios: tuple[float, ...]

    @property
    def bound(self) -> float:
        """The ratio if a token cost only the bytes of weights that it reads."""
        return self.dense.bytes / self.candidate.bytes

    @property
    def tokens_per_second(self) -> float:
        """Estimated for all layers and the output matrix, by their bytes."""
        return self.candidate.bytes / self.candidate.full_bytes / statistics.median(self.tokens)


def best(rows: Sequence[Timed]) -> Timed:
    """Return the layout that decodes fastest among those that read prompts at least as fast as the dense model, if any."""
    converted = [row for row in rows if row.candidate.layout is not None]
    fast = [row for row in converted if statistics.median(row.prompt_ratios) >= 1]
    return max(fast or converted, key=lambda row: statistics.median(row.token_ratios))


def how_to_convert(model: str, row: Timed) -> str:
    """Return the command that converts a model to this layout."""
    layout = row.candidate.layout
    assert layout is not None
    settings = f"--set target={row.candidate.target} --set experts.num_experts={layout.num_experts}"
    return f"tomoe convert {shlex.quote(model)} --active {row.candidate.active:g} {settings}"


class _Model:
    """A model without weights, all its layers or a few of them, with experts of a layout."""

    def __init__(self, config: PreTrainedConfig, layers: int | None = None):
        config = copy.deepcopy(text_config(config))
        config.tie_word_embeddings = False
        if layers is not None:
            config.num_hidden_layers = layers
            config.vocab_size = _VOCABULARY
            config.bos_token_id = config.eos_token_id = config.pad_token_id = None
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:layers]
        self.dense = empty_stock(config)
        self.shape: ModelShape = shape_of(self.dense)
        self.arch = arch_of(self.dense.config.get_text_config().model_type, "fine")
        self.target = self.arch.own_target

    def moe(self, layout: FineLayout) -> ToMoEForCausalLM:
        sizes = SimpleNamespace(
            expert_size=layout.expert_size, union=self.shape.mlp_size, shared_size=layout.shared, top_k=layout.top_k,
            value_embedding=0,
        )  # fmt: skip
        plan: Any = SimpleNamespace(
            form="fine", source=None, num_experts=layout.num_experts, prunes_attention=False,
            counts=[sizes] * self.shape.num_layers,
        )  # fmt: skip
        with torch.device("meta"):
            moe = ToMoEForCausalLM(moe_config(self.dense, plan, ""))
        if problem := self.arch.stock.decoder.problem(moe) or self.arch.engine_problem(moe):
            raise UserError(f"llama.cpp does not support this model with experts: {problem}")
        return moe

    def entries(self, moe: ToMoEForCausalLM, stored: StockLayout, precision: Precision) -> list[TensorEntry]:
        weights = Weights(precision, self.shape.num_layers, stored.experts)
        return [make_entry(name, weights, make, shape) for name, make, shape in self.arch.parts(moe, stored)]


def candidates(
    config: PreTrainedConfig, actives: Sequence[float], precision: Precision, layers: int
) -> Iterator[tuple[Candidate, Callable[[Path], None]]]:
    """Yield the dense file and one per layout and active fraction, with its writer. Raises UserError if no layout meets one of
    the fractions, or if llama.cpp cannot run the model."""
    full, few = _Model(config), _Model(config, layers)
    dense_yet = False
    for active in actives:
        seen: set[FineLayout] = set()
        for number in NUMBERS:
            recipe = Recipe().changed([f"target={full.target}", f"active={active}", f"experts.num_experts={number}"])
            try:
                layout = cast(FineLayout, layout_of(recipe, full.shape))
            except UserError:
                if number:
                    continue
                raise
            if layout in seen:
                continue
            seen.add(layout)
            if not dense_yet:
                dense_yet = True
                yield _candidate(full, few, layout, None, 1.0, precision)
            yield _candidate(full, few, layout, layout, active, precision)


def _candidate(
    full: _Model, few: _Model, layout: FineLayout, converted: FineLayout | None, active: float, precision: Precision
) -> tuple[Candidate, Callable[[Path], None]]:
    read = []
    for model in (few, full):
        moe = model.moe(layout)
        stored = model.arch.layout(moe, None)
        if converted is None:
            # the same architecture without experts
            stored = replace(stored, dense_layers=model.shape.num_layers)
        tensors = model.entries(moe, stored, precision)
        share = stored.top_k / stored.experts
        parts = (t.nbytes * (share if "_exps." in t.name else 1) for t in tensors if t.name != "token_embd.weight")
        read.append((moe, stored, tensors, sum(parts)))
    moe, stored, tensors, nbytes = read[0]
    name = MERGED[few.arch.name].arch if converted is None else few.arch.name

    def write(path: Path) -> None:
        writer = GGUFWriter(None, name)
        write_keys(writer, moe, stored, path.stem, precision)
        _write_vocabulary(writer)
        rng = np.random.default_rng(0)
        write_tensors(writer, path, tensors, no_stage_progress, lambda entry: _random(entry, rng))

    file_bytes = sum(entry.nbytes for entry in tensors)
    return Candidate(precision, active, converted, nbytes, read[1][3], file_bytes, few.target), write


def _random(entry: TensorEntry, rng: np.random.Generator) -> Shaped[np.ndarray, ...]:
    rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
    numbers = np.ones((1, columns)) if "norm" in entry.name else 0.02 * rng.standard_normal((min(rows, _TILE), columns))
    # a router must not repeat itself: equal experts would be chosen together
    if "ffn_gate_inp" in entry.name:
        numbers = rng.standard_normal((rows, columns))
    tile = quantize(numbers.astype(np.float32), entry.type)
    return np.resize(tile, (rows, tile.shape[1])).reshape(*entry.shape[:-1], tile.shape[1])


def _write_vocabulary(writer: GGUFWriter) -> None:
    special, single = [b"<unk>", b"<s>", b"</s>"], [b"<0x%02X>" % i for i in range(256)]
    others = [b"t%d" % i for i in range(_VOCABULARY - len(special) - len(single))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *single, *others])
    writer.add_token_scores([0.0] * _VOCABULARY)
    writer.add_token_types([2, 3, 3] + [6] * len(single) + [1] * len(others))


def check_engine(precisions: Sequence[Precision]) -> None:
    """Raise UserError if there is no llama.cpp to time, or to make K-quants."""
    if find_spec("llama_cpp") is None:
        raise UserError(_NEED)
    for precision in precisions:
        check_quantizer(precision)


def fitting_layers(
    config: PreTrainedConfig, actives: Sequence[float], precision: Precision, layers: int, memory: int
) -> int:
    """Return how many layers, at most `layers`, the files of all candidates can have if they share so many bytes of free memory.
    Raises UserError if not even one fits."""
    free = int(_MEMORY_SHARE * memory)
    needed = sum(candidate.file_bytes for candidate, _ in candidates(config, actives, precision, 1))
    if needed > free:
        raise UserError(
            f"one layer in all layouts takes {format_bytes(needed)}, and {format_bytes(free)} of memory can be used; name fewer "
            "fractions"
        )
    if (fitting := free // needed) < layers:
        warnings.warn(f"memory is short: the files have {fitting} of {layers} layers", Note, stacklevel=2)
    return min(fitting, layers)


def time_layouts(
    model: str,
    actives: Sequence[float],
    precisions: Sequence[Precision] = ("q8_0", "q4_k_m"),
    *,
    layers: int = 4,
    prompt: int = 256,
    rounds: int = 5,
    threads: int = 1,
    memory: int | None = None,
    on_progress: StageCallback = no_stage_progress,
    open_file: Callable[[Path, int, int], Callable[[int], tuple[float, float]]] | None = None,
) -> list[Timed]:
    """Time `layers` layers of a model's shape, dense and converted, in llama.cpp: a prompt, then TOKENS tokens, file by file in
    turn. model: a folder, hub id or .gguf file, of which only the config is read. threads: with 1, CPU time counts, else wall
    time. memory: free bytes; fewer layers are timed, with a Note, if all files do not fit into them. open_file: runs a file
    instead of llama.cpp. Raises UserError as `candidates`, if llama.cpp is missing, and if not even one layer fits."""
    if open_file is None:
        check_engine(precisions)
    config = load_config(model)
    layers = min(layers, text_config(config).num_hidden_layers)
    if memory is not None:
        layers = min(fitting_layers(config, actives, precision, layers, memory) for precision in precisions)
    found: list[Timed] = []
    for number, precision in enumerate(precisions):
        with TemporaryDirectory(prefix="tomoe-layouts-") as folder:
            runs = []
            for candidate, write in candidates(config, actives, precision, layers):
                path = Path(folder, "timed.gguf")
                write(path)
                runs.append((candidate, (open_file or _opened)(path, prompt + TOKENS, threads)))
                path.unlink()
            timed = []
            for done in range(rounds + 1):
                timed.append([run(prompt) for _, run in runs])
                on_progress(number * (rounds + 1) + done + 1, len(precisions) * (rounds + 1))
            # the first round warms up
            found += _compared([candidate for candidate, _ in runs], timed[1:])
    return found


def _compared(candidates: Sequence[Candidate], timed: Sequence[Sequence[tuple[float, float]]]) -> Iterator[Timed]:
    for i, candidate in enumerate(candidates):
        prompts, tokens = zip(*(one_round[i] for one_round in timed), strict=True)
        ratios = [tuple(one[0][part] / one[i][part] for one in timed) for part in (0, 1)]
        yield Timed(candidate, candidates[0], tokens, prompts, ratios[1], ratios[0])


def _opened(path: Path, context: int, threads: int) -> Callable[[int], tuple[float, float]]:
    """Return what runs a file, which may then be deleted: seconds for a prompt of so many tokens, and for one token after it."""
    from llama_cpp import Llama

    clock = time.process_time if threads == 1 else time.perf_counter
    engine = Llama(
        str(path),
        n_ctx=context,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        use_mmap=False,
        verbose=False,
    )
    ids = [300 + 7919 * i % (_VOCABULARY - 300) for i in range(context)]

    def run(prompt: int) -> tuple[float, float]:
        engine.reset()
        began = clock()
        engine.eval(ids[:prompt])
        read = clock()
        for token in ids[prompt : prompt + TOKENS]:
            engine.eval([token])
        return read - began, (clock() - read) / TOKENS

    return run


def to_json(model: str, threads: int, rows: Sequence[Timed]) -> str:
    """Serialize all timings."""
    what = {"format": FORMAT, "model": model, "threads": threads, "tomoe": __version__}
    values = [asdict(row) | {"bound": row.bound, "tokens_per_second": row.tokens_per_second} for row in rows]
    for value in values:
        del value["dense"]
    return json.dumps(what | {"rows": values}, indent=1) + "\n"


def table(rows: Sequence[Timed]) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells, one line per file."""
    titles = [
        "weights",
        "active",
        "experts of a layer",
        "token\nms",
        "times\ndense",
        "bound",
        "prompt\ntimes dense",
        "tokens/s",
    ]
    return titles, [_shown(row) for row in rows]


def _shown(row: Timed) -> list[str]:
    low, high = min(row.token_ratios), max(row.token_ratios)
    times = f"{statistics.median(row.token_ratios):.2f} ({low:.2f}-{high:.2f})"
    c = row.candidate
    dense = c.layout is None
    return [
        c.precision,
        f"{c.active:.0%}",
        c.words,
        f"{1e3 * statistics.median(row.tokens):.2f}",
        "" if dense else times,
        "" if dense else f"{row.bound:.2f}",
        "" if dense else f"{statistics.median(row.prompt_ratios):.2f}",
        f"{row.tokens_per_second:.1f}",
    ]
