"""Where a converted model can go: one row per target, the choice between them in words, its size before it is written.

To add a target: write when it does not fit, how many bytes it takes and how its files are written; give it a row in TARGETS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting.gguf import Precision, context_length, gguf_bytes, gguf_misfit, gguf_widths, write_gguf
from tomoe.exporting.stock import CARRIERS, Carrier, empty_stock, make_layout, misfit, stock_config, stock_tensors
from tomoe.files import staged
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.recipe.conversion import STOCK_MULTIPLE

SHARD_BYTES = 5 * 10**9
ROOM_TO_SPARE = 1.02  # tokenizer, headers, card

Progress = Callable[[int, int], None]
"""Called as (bytes written, bytes in all)."""


@dataclass(frozen=True)
class Sizes:
    """What an export will be, before it is written."""

    bytes: int
    words: str  # "8 experts of 896 neurons in each of 30 layers"


@dataclass(frozen=True)
class Options:
    """What the user may choose about the files."""

    width_multiple: int = STOCK_MULTIPLE
    precision: Precision = "f16"  # of the weights in a GGUF file


@dataclass(frozen=True)
class Target:
    """One form that a converted model can take."""

    name: str
    about: str
    misfit: Callable[[ToMoEForCausalLM], str | None]  # why it cannot be had for this model, in words
    sizes: Callable[[ToMoEForCausalLM, Options], Sizes]
    write: Callable[[ToMoEForCausalLM, PreTrainedTokenizerBase | None, Path, Options, Progress], None]


@dataclass(frozen=True)
class Choice:
    target: Target
    reason: str


def choose(moe: ToMoEForCausalLM, name: str) -> Choice:
    """The target of that name, or for `auto` the first stock architecture that holds the model exactly, else `hf`.

    Raises UserError, with the reason and what would do, where the named target cannot hold the model.
    """
    if name != "auto":
        if name not in TARGETS:
            raise UserError(f"there is no export target {name!r}; there are auto, {', '.join(TARGETS)}")
        problem = TARGETS[name].misfit(moe)
        if problem:
            fitting = [other for other, target in TARGETS.items() if target.misfit(moe) is None]
            raise UserError(f"{name} cannot hold this model exactly: {problem}; what can: {', '.join(fitting)}")
        return Choice(TARGETS[name], "as asked")
    problems = {}
    for carrier in CARRIERS:
        problem = TARGETS[carrier].misfit(moe)
        if problem is None:
            return Choice(
                TARGETS[carrier], f"{TARGETS[carrier].about} holds it exactly, and loads without code of its own"
            )
        problems[carrier] = problem
    reasons = "; ".join(f"{carrier}: {problem}" for carrier, problem in problems.items())
    return Choice(TARGETS["hf"], f"no stock architecture holds it exactly ({reasons})")


def write_export(
    choice: Choice, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, out: Path, options: Options,
    progress: Progress = lambda done, total: None,
) -> None:  # fmt: skip
    """Write the folder `out`, in place of the export that it may hold. Raises UserError where it cannot be written."""
    try:
        with staged(out, "config.json", ("*",)) as part:
            choice.target.write(moe, tokenizer, part, options, progress)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot write the export to {out}: {reason or error}") from error


def check_place(out: Path, source: Path, needed: int, force: bool) -> None:
    """Raises UserError where `out` is taken, is (or holds) the model that is exported, or its disk lacks the room."""
    here = out.resolve()
    if here == source.resolve() or here in source.resolve().parents:
        raise UserError(f"{out} holds the converted model itself; choose another folder for the export")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not (out / "export.json").is_file():
            raise UserError(f"{out} holds something that is no export; choose another folder")
        if not force:
            raise UserError(f"{out} already holds an export; choose another folder or give --force")
    there = next(p for p in (here, *here.parents) if p.exists())
    free = shutil.disk_usage(there).free
    if needed * ROOM_TO_SPARE > free:
        raise UserError(
            f"the export takes {in_words(needed)}, but the disk of {out} has only {in_words(free)} left; free some, or "
            "convert with `target` set in the recipe, which makes all layers equally wide"
        )


def in_words(size: int) -> str:
    """1272000000 -> "1.27 GB"."""
    for unit, word in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {word}"
    return f"{size} bytes"


def write_checkpoint(tensors: Iterator[tuple[str, Tensor]], folder: Path, total: int, progress: Progress) -> None:
    """safetensors of at most SHARD_BYTES each, with an index where there are several; one shard is in memory at a time."""
    shard: dict[str, Tensor] = {}
    shards: list[list[str]] = []
    held = written = 0

    def flush() -> None:
        save_file(shard, folder / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > SHARD_BYTES:
            flush()
            held = 0
        shard[name] = tensor.detach().cpu().contiguous()
        held, written = held + tensor.nbytes, written + tensor.nbytes
        progress(written, max(total, written))
    flush()
    if len(shards) == 1:
        names = ["model.safetensors"]
    else:
        names = [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
        places = {name: file for file, held_names in zip(names, shards, strict=True) for name in held_names}
        index = {"metadata": {"total_size": written}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    mode = (folder / "config.json").stat().st_mode
    for n, file in enumerate(names):
        (folder / f"shard-{n}").rename(folder / file)
        (folder / file).chmod(mode)  # else only the owner could read it


def _stock_sizes(carrier: Carrier, moe: ToMoEForCausalLM, options: Options) -> Sizes:
    layout = make_layout(moe, carrier, options.width_multiple)
    config = stock_config(moe, carrier, layout)
    weights = sum(p.numel() for p in empty_stock(config).parameters())
    shared = f" and a shared one of {layout.shared:,}" if layout.shared else ""
    words = f"{moe.config.num_experts} experts of {layout.width:,} neurons{shared} in each of {config.num_hidden_layers} layers"
    return Sizes(weights * moe.dtype.itemsize, words)


def _write_stock(
    carrier: Carrier, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
    progress: Progress,
) -> None:  # fmt: skip
    layout = make_layout(moe, carrier, options.width_multiple)
    stock_config(moe, carrier, layout).save_pretrained(folder)
    _write_company(moe, tokenizer, folder)
    total = _stock_sizes(carrier, moe, options).bytes
    write_checkpoint(stock_tensors(moe, carrier, layout), folder, total, progress)


def _write_company(moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Generation config and tokenizer, chat template included."""
    if moe.generation_config is not None:
        moe.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _own_sizes(moe: ToMoEForCausalLM, options: Options) -> Sizes:
    stored = sum(p.nbytes for p in moe.parameters())
    return Sizes(stored, "every neuron stored once, with the modelling code beside the weights")


def _write_own(
    moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options, progress: Progress
) -> None:
    moe.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def gguf_file(folder: Path, options: Options) -> Path:
    """The GGUF file of an export."""
    return folder / f"model-{options.precision}.gguf"


def _gguf_sizes(moe: ToMoEForCausalLM, options: Options) -> Sizes:
    layers = f"{moe.config.num_experts} experts of {gguf_widths(moe, options.width_multiple):,} neurons in each layer"
    words = f"{layers}, {options.precision}, for contexts of up to {context_length(moe):,} tokens"
    return Sizes(gguf_bytes(moe, options.precision, options.width_multiple), words)


def _write_gguf(
    moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options, progress: Progress
) -> None:
    write_gguf(moe, tokenizer, gguf_file(folder, options), options.precision, options.width_multiple, progress)


def _stock_target(carrier: Carrier) -> Target:
    return Target(
        carrier.name,
        carrier.config_class.__name__.removesuffix("Config"),
        partial(misfit, carrier=carrier),
        partial(_stock_sizes, carrier),
        partial(_write_stock, carrier),
    )


TARGETS = {
    **{name: _stock_target(carrier) for name, carrier in CARRIERS.items()},
    "gguf": Target("gguf", "a GGUF file for llama.cpp", gguf_misfit, _gguf_sizes, _write_gguf),
    "hf": Target("hf", "ToMoE with its own modelling code", lambda moe: None, _own_sizes, _write_own),
}
