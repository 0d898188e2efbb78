"""A GGUF file for llama.cpp and everything built on it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import repeat
from pathlib import Path

import torch
from gguf import GGUFWriter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.errors import Advice, UserError
from tomoe.exporting.gguf.archs import GgufArch, Glm4Moe, Llama
from tomoe.exporting.gguf.families import FAMILY_ARCHS
from tomoe.exporting.gguf.file import FILE_TYPES, TensorEntry, Weights, make_entry, write_tensors
from tomoe.exporting.gguf.importance import Importance, of_folder
from tomoe.exporting.gguf.llama_cpp import check_quantizer
from tomoe.exporting.gguf.tokenizer import check_merges, write_tokenizer
from tomoe.exporting.gguf.verify import Comparison, verify_file
from tomoe.exporting.stock.architecture import StockLayout
from tomoe.exporting.target import Job, Options, Precision, Sizes, Target
from tomoe.exporting.verify import Check, Proof
from tomoe.model.loading import load_tokenizer
from tomoe.moe.checkpoint import load_moe
from tomoe.moe.modeling_tomoe import ToMoEForCausalLM
from tomoe.progress import ProgressCallback, StageCallback, no_stage_progress


class Gguf(Target):
    """One file, in the llama.cpp architecture that supports the experts."""

    name = "gguf"

    def supports(self, moe: ToMoEForCausalLM) -> str | None:
        return _arch(moe).problem(moe)

    def supports_dense(self, dense: PreTrainedModel, form: str) -> str | None:
        return arch_of(dense.config.get_text_config().model_type, form).dense_problem(dense)

    def is_adjustable(self, moe: ToMoEForCausalLM) -> bool:
        return _arch(moe).stock.is_adjustable(moe)

    def sizes(self, moe: ToMoEForCausalLM, options: Options) -> Sizes:
        check_quantizer(options.precision)
        arch = _arch(moe)
        tensors = list(entries(moe, options.precision, options.width_multiple))
        types = f"{options.precision}{_weights(moe, options.precision).larger_rows(tensors)}"
        more = f", {types}, for contexts of up to {arch.context_length(moe):,} tokens"
        return arch.layout(moe, options.width_multiple).sizes(moe, sum(entry.nbytes for entry in tensors), more)

    def write(self, job: Job, folder: Path) -> None:
        if job.tokenizer is not None:
            check_merges(job.tokenizer)
        options, file = job.options, self.file(folder, job.options)
        write_gguf(
            job.moe, job.tokenizer, file, options.precision, options.width_multiple, job.on_progress, job.statistics
        )

    def statistics(
        self, folder: Path, options: Options, tokens: int, device: str, offload: bool, on_progress: ProgressCallback
    ) -> Importance | None:
        if "_k" not in options.precision:
            return None
        return of_folder(folder, tokens, device, offload, on_progress)

    def check_verifier(self) -> None:
        if find_spec("xllamacpp") is None:
            raise UserError(
                "a GGUF file is compared with the model by llama.cpp, which is not installed: pip install xllamacpp",
                Advice("unverified", "to write the file without a comparison"),
            )

    def verify(self, folder: Path, out: Path, options: Options, check: Check) -> Proof:
        moe = load_moe(folder, "float32", check.device, check.offload)
        tokenizer = load_tokenizer(str(folder))
        arch = _arch(moe)
        file = self.file(out, options)
        comparison = Comparison(file, options.precision, moe, tokenizer, arch.context_length(moe), check)
        return verify_file(comparison, arch.stock.form)

    def how_to_load(self, folder: Path, options: Options) -> str:
        return f"llama-cli -m {shlex.quote(str(self.file(folder, options)))}"

    @staticmethod
    def file(folder: Path, options: Options) -> Path:
        return folder / f"model-{options.precision}.gguf"


def arch_of(kind: str, form: str) -> GgufArch:
    """Return the architecture for experts of this form (experts.form) in a model, dense or converted, with this config."""
    return Llama() if form == "overlapping" else FAMILY_ARCHS.get(kind) or Glm4Moe()


def _arch(moe: ToMoEForCausalLM) -> GgufArch:
    return arch_of(moe.config.tomoe_dense_type, moe.config.tomoe_expert_form)


def _weights(moe: ToMoEForCausalLM, precision: Precision) -> Weights:
    experts = _arch(moe).layout(moe, 1).experts
    return Weights(precision, moe.config.num_hidden_layers, experts, moe.config.tie_word_embeddings)


@torch.no_grad()
def entries(
    moe: ToMoEForCausalLM, precision: Precision, multiple: int | None, importance: Importance | None = None
) -> Iterator[TensorEntry]:
    """Yield every tensor of the file in order; an entry makes its tensor when written."""
    arch = _arch(moe)
    weights, layout = _weights(moe, precision), arch.layout(moe, multiple)
    columns = (
        repeat(None) if importance is None else (make for _, make, _ in arch.parts(importance.as_weights(moe), layout))
    )
    for (name, make, shape), of_columns in zip(arch.parts(moe, layout), columns, strict=False):
        yield make_entry(name, weights, make, shape, of_columns)


def write_gguf(
    moe: ToMoEForCausalLM,
    tokenizer: PreTrainedTokenizerBase | None,
    path: Path,
    precision: Precision,
    multiple: int | None = None,
    on_progress: StageCallback = no_stage_progress,
    importance: Importance | None = None,
) -> None:
    """Write one file, tensor by tensor. Raises UserError for a tokenizer that llama.cpp would read differently."""
    arch = _arch(moe)
    writer = GGUFWriter(None, arch.name)
    write_keys(writer, moe, arch.layout(moe, multiple), path.stem, precision)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, moe.config.vocab_size)
    if importance is not None:
        # as llama-quantize writes them
        writer.add_string("quantize.imatrix.dataset", "text of the conversion")
        writer.add_int32("quantize.imatrix.entries_count", len(importance.squares))
    write_tensors(writer, path, list(entries(moe, precision, multiple, importance)), on_progress)


def write_keys(writer: GGUFWriter, moe: ToMoEForCausalLM, layout: StockLayout, name: str, precision: Precision) -> None:
    """Write the keys of a file, except those of its tokenizer."""
    arch = _arch(moe)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(FILE_TYPES[precision])
    writer.add_quantization_version(2)
    writer.add_block_count(moe.config.num_hidden_layers)
    writer.add_context_length(arch.context_length(moe))
    arch.write_sizes(writer, moe, layout)
