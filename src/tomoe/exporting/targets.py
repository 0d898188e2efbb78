"""The targets of an export: which of them hold a model exactly, how many bytes they take, how their files are written.

To add a target, write a function for each of the three and give it a row in TARGETS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tomoe.errors import UserError
from tomoe.exporting import glm4_moe
from tomoe.exporting.engines import check_quantizer
from tomoe.exporting.gguf import (
    Precision,
    context_length,
    gguf_bytes,
    gguf_incompatibility,
    gguf_layout,
    larger_rows,
    write_gguf,
)
from tomoe.exporting.stock import (
    STOCK_ARCHS,
    StockArch,
    empty_stock,
    incompatibility,
    make_layout,
    stock_config,
    stock_tensors,
)
from tomoe.files import atomic_folder, format_bytes
from tomoe.locks import LOCK_FILE
from tomoe.moe.checkpoint import save_tokenizer
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.conversion import FINE_MULTIPLE, STOCK_MULTIPLE

# Of which one is in memory beside the model.
SHARD_BYTES = 10**9
# Disk space beside the weights: tokenizer, headers, card.
OVERHEAD = 1.02


@dataclass(frozen=True)
class Sizes:
    """What an export will be, before it is written.

    bytes: of the weights; words: their layout, "8 experts of 896 neurons in each of 30 layers"; copies: whether neurons that
    experts share are stored more than once, or experts are padded; zeros: experts of zeros in the layer with most of them.
    """

    bytes: int
    words: str
    copies: bool = False
    zeros: int = 0


@dataclass(frozen=True)
class Options:
    """What the user may choose about the files."""

    # Expert widths are multiples of this; None: of 64 if experts overlap; of 8 if they are fine-grained, in a GGUF file as
    # they are.
    width_multiple: int | None = None
    # The type of the weights in a GGUF file.
    precision: Precision = "f16"

    def multiple(self, moe: ToMoEForCausalLM) -> int:
        """What the expert widths of this model become multiples of."""
        return self.width_multiple or (1 if moe.config.expert_form == "fine" else STOCK_MULTIPLE)


@dataclass(frozen=True)
class Target:
    """One form that a converted model can take. `incompatibility` is why it cannot hold a model exactly, or None."""

    name: str
    about: str
    incompatibility: Callable[[ToMoEForCausalLM], str | None]
    sizes: Callable[[ToMoEForCausalLM, Options], Sizes]
    write: Callable[[ToMoEForCausalLM, PreTrainedTokenizerBase | None, Path, Options, StageCallback], None]


@dataclass(frozen=True)
class Choice:
    """A target, and why it was chosen."""

    target: Target
    reason: str


def choose(moe: ToMoEForCausalLM, name: str) -> Choice:
    """The target of that name, or for `auto` the first stock architecture that holds the model exactly, else `hf`.

    Raises UserError, with the reason and the targets that fit, if the named target cannot hold the model.
    """
    if name != "auto":
        if name not in TARGETS:
            raise UserError(f"there is no export target {name!r}; choose one of auto, {', '.join(TARGETS)}")
        problem = TARGETS[name].incompatibility(moe)
        if problem:
            fitting = [other for other, target in TARGETS.items() if target.incompatibility(moe) is None]
            raise UserError(f"{name} cannot hold this model exactly: {problem}; these can: {', '.join(fitting)}")
        return Choice(TARGETS[name], "as requested")
    problems = {}
    for arch in STOCK_ARCHS:
        problem = TARGETS[arch].incompatibility(moe)
        if problem is None:
            how = "up to the rounding of its router" if STOCK_ARCHS[arch].fine else "exactly"
            return Choice(TARGETS[arch], f"{TARGETS[arch].about} holds it {how}, and loads without code of its own")
        problems[arch] = problem
    reasons = "; ".join(f"{arch}: {problem}" for arch, problem in problems.items())
    return Choice(TARGETS["hf"], f"no stock architecture holds it exactly ({reasons})")


def write_export(
    choice: Choice, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, out: Path, options: Options,
    on_progress: StageCallback = no_stage_progress,
) -> None:  # fmt: skip
    """Write the folder `out`, replacing the export that it may hold. Raises UserError if it cannot be written."""
    try:
        with atomic_folder(out, "config.json", ("*",)) as part:
            choice.target.write(moe, tokenizer, part, options, on_progress)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise UserError(f"cannot write the export to {out}: {reason or error}") from error


def padding_notice(moe: ToMoEForCausalLM, sizes: Sizes) -> str | None:
    """What an export with copies or zeros costs, in one or two sentences; None without."""
    if sizes.zeros:
        zeros = "one expert of zeros is" if sizes.zeros == 1 else f"up to {sizes.zeros} experts of zeros are"
        return (
            f"Layers differ in how many experts a token uses, but this form has one number: {zeros} always chosen, which takes "
            "space and time; `--set target=glm4_moe` (or gguf) at conversion needs none."
        )
    if not sizes.copies:
        return None
    dense = sum(p.numel() for p in empty_stock(moe.config.dense_config()).parameters()) * moe.dtype.itemsize
    return (
        f"Experts share neurons, but this form stores a copy for each and pads with zeros: {format_bytes(sizes.bytes)}, while "
        f"the dense model takes {format_bytes(dense)}. It is for loading elsewhere, not for speed; experts.form = fine at "
        "conversion has no copies."
    )


def check_place(out: Path, source: Path, needed: int, force: bool) -> None:
    """Raises UserError if `out` is taken, is (or holds) the exported model, or if its disk has less than `needed` bytes."""
    place = out.resolve()
    if place == source.resolve() or place in source.resolve().parents:
        raise UserError(f"{out} holds the converted model itself; choose another folder for the export")
    if out.exists() and (not out.is_dir() or any(path.name != LOCK_FILE for path in out.iterdir())):
        if not (out / "export.json").is_file():
            raise UserError(f"{out} is not empty and holds no export; choose another folder")
        if not force:
            raise UserError(f"{out} already holds an export; choose another folder or add --force")
    existing = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed * OVERHEAD > free:
        raise UserError(
            f"the export takes {format_bytes(needed)}, but the disk of {out} has only {format_bytes(free)} left; free some, or "
            "convert with `target` set in the recipe, which makes all layers equally wide"
        )


def write_checkpoint(
    tensors: Iterator[tuple[str, Tensor]], folder: Path, total: int, on_progress: StageCallback
) -> None:
    """Write safetensors files of at most SHARD_BYTES each, with an index if there are several; one is in memory at a time."""
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
        on_progress(written, max(total, written))
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
        # else only the owner could read it
        (folder / file).chmod(mode)


def _stock_sizes(arch: StockArch, moe: ToMoEForCausalLM, options: Options) -> Sizes:
    layout = make_layout(moe, arch, options.multiple(moe))
    config = stock_config(moe, arch, layout)
    weights = sum(p.numel() for p in empty_stock(config).parameters())
    shared = f" and a shared one of {layout.shared:,}" if layout.shared else ""
    words = f"{moe.config.num_experts} experts of {layout.width:,} neurons{shared} in each of {config.num_hidden_layers} layers"
    return Sizes(weights * moe.dtype.itemsize, words, _has_copies(moe, layout.width, layout.shared))


def _has_copies(moe: ToMoEForCausalLM, width: int, shared: int = 0) -> bool:
    return moe.config.expert_form == "overlapping" and moe.config.num_experts * width + shared > min(
        moe.config.union_sizes
    )


def _write_stock(
    arch: StockArch, moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
    on_progress: StageCallback,
) -> None:  # fmt: skip
    layout = make_layout(moe, arch, options.multiple(moe))
    stock_config(moe, arch, layout).save_pretrained(folder)
    _write_tokenizer(moe, tokenizer, folder)
    total = _stock_sizes(arch, moe, options).bytes
    write_checkpoint(stock_tensors(moe, arch, layout), folder, total, on_progress)


def _glm4_layout(moe: ToMoEForCausalLM, options: Options) -> glm4_moe.FineLayout:
    return glm4_moe.make_layout(moe, options.width_multiple or FINE_MULTIPLE)


def _glm4_sizes(moe: ToMoEForCausalLM, options: Options) -> Sizes:
    layout = _glm4_layout(moe, options)
    weights = sum(p.numel() for p in empty_stock(glm4_moe.glm4_config(moe, layout)).parameters())
    routers = (len(moe.model.layers) - layout.whole) * layout.experts * moe.config.hidden_size
    size = weights * moe.dtype.itemsize + routers * (torch.float32.itemsize - moe.dtype.itemsize)
    return Sizes(size, glm4_moe.layout_words(moe, layout), zeros=layout.zeros)


def _write_glm4(
    moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path, options: Options,
    on_progress: StageCallback,
) -> None:  # fmt: skip
    layout = _glm4_layout(moe, options)
    glm4_moe.glm4_config(moe, layout).save_pretrained(folder)
    _write_tokenizer(moe, tokenizer, folder)
    write_checkpoint(glm4_moe.glm4_tensors(moe, layout), folder, _glm4_sizes(moe, options).bytes, on_progress)


def _write_tokenizer(moe: ToMoEForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write the generation config and the tokenizer, chat template included."""
    if moe.generation_config is not None:
        moe.generation_config.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def _hf_sizes(moe: ToMoEForCausalLM, options: Options) -> Sizes:
    stored = sum(p.nbytes for p in moe.parameters())
    return Sizes(stored, "every neuron stored once, with the modelling code beside the weights")


def _write_hf(
    moe: ToMoEForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    options: Options,
    on_progress: StageCallback,
) -> None:
    moe.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def gguf_file(folder: Path, options: Options) -> Path:
    """The path of the GGUF file in an export."""
    return folder / f"model-{options.precision}.gguf"


def _gguf_sizes(moe: ToMoEForCausalLM, options: Options) -> Sizes:
    check_quantizer(options.precision)
    width, layers, zeros = gguf_layout(moe, options.multiple(moe))
    types = f"{options.precision}{larger_rows(moe, options.precision, options.multiple(moe))}"
    words = f"{layers}, {types}, for contexts of up to {context_length(moe):,} tokens"
    return Sizes(gguf_bytes(moe, options.precision, options.multiple(moe)), words, _has_copies(moe, width), zeros)


def _write_gguf(
    moe: ToMoEForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    options: Options,
    on_progress: StageCallback,
) -> None:
    write_gguf(moe, tokenizer, gguf_file(folder, options), options.precision, options.multiple(moe), on_progress)


def _stock_target(arch: StockArch) -> Target:
    sizes, write = (
        (_glm4_sizes, _write_glm4) if arch.fine else (partial(_stock_sizes, arch), partial(_write_stock, arch))
    )
    about = arch.config_class.__name__.removesuffix("Config")
    return Target(arch.name, about, partial(incompatibility, arch=arch), sizes, write)


TARGETS = {
    **{name: _stock_target(arch) for name, arch in STOCK_ARCHS.items()},
    "gguf": Target("gguf", "a GGUF file for llama.cpp", gguf_incompatibility, _gguf_sizes, _write_gguf),
    "hf": Target("hf", "ToMoE with its own modelling code", lambda moe: None, _hf_sizes, _write_hf),
}
