"""Turns text into token sequences: disjoint training, calibration and evaluation parts, in a stateless order.

Shapes: B sequences, S tokens of one, T and U tokens of a stream.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.data.sampling import ROW_TOKENS, sample_documents
from tomoe.data.sources import SELF, documents, evaluation_documents, find_source, overlap
from tomoe.errors import UserError, shortened
from tomoe.files import atomic_file, basename, parse_json
from tomoe.model.shape import ceil_div
from tomoe.model.tokens import check_text
from tomoe.progress import StageCallback, no_stage_progress
from tomoe.recipe.shared import DataSection

_FORMAT = 1
_PARTS = ("train", "calibration", "evaluation")
_SHUFFLE_CHARACTERS = 2**24  # held in memory to shuffle documents
_TOKENIZE_CHARACTERS = 2**18  # passed to the tokenizer at once


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of tokens."""

    input_ids: Int[Tensor, "B S"]
    mask: Bool[Tensor, "B S"]  # True on real tokens, False on padding (at the end of a sequence only)

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> int:
        """Number of real tokens."""
        return int(self.mask.sum())

    def select(self, indices: Int[Tensor, " n"]) -> Sequences:
        """The sequences with these indices, in that order."""
        return Sequences(self.input_ids[indices], self.mask[indices])

    def truncate(self, tokens: int) -> Sequences:
        """Keep the first sequences up to this many tokens, at least one."""
        return self.select(torch.arange(min(len(self), max(1, ceil_div(tokens, self.input_ids.shape[1])))))


def _read_part(tensors: dict[str, Tensor], part: str) -> Sequences:
    """Read one part of a corpus file. Raises KeyError or ValueError if it holds no sequences."""
    ids = tensors[f"{part}.input_ids"]
    mask = tensors[f"{part}.mask"]
    valid = ids.dim() == 2 and ids.shape == mask.shape and ids.dtype == torch.int32 and mask.dtype == torch.bool
    if not valid or bool((ids < 0).any()):
        raise ValueError(f"{part} is {tuple(ids.shape)} of {ids.dtype}")
    return Sequences(ids.long(), mask)


def _digest(tensors: dict[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tuple(tensor.shape)}".encode())
        sha.update(tensor.numpy().tobytes())
    return sha.hexdigest()


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of one conversion. No sequence is in two parts."""

    train: Sequences
    calibration: Sequences
    evaluation: Sequences
    sources: tuple[str, ...]
    tokenizer: str
    seed: int
    evaluation_name: str | None = None  # the text to evaluate on; None: it was held out from the sources

    @property
    def tokens_of_sources(self) -> int:
        """Tokens of all parts that come from the sources."""
        held_out = self.evaluation.tokens if self.evaluation_name is None else 0
        return self.train.tokens + self.calibration.tokens + held_out

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Sequences:
        """Training sequences of forward pass `micro` (of `accumulation`) of step `step`, both from 0. Each epoch is a
        permutation that depends on (seed, epoch) only, so a resumed run sees the same batches."""
        first = (step * accumulation + micro) * batch_size
        count = len(self.train)
        order = [_permutation(count, seed, index // count)[index % count] for index in range(first, first + batch_size)]
        return self.train.select(torch.stack(order))

    def fitting_text(self, tokens: int) -> Sequences:
        """Select the text that a repair is fitted to: up to this many tokens of training, then calibration text."""
        return joined([self.train, self.calibration]).truncate(tokens)

    def digest(self) -> str:
        """SHA-256 (hex) of all ids and masks."""
        return _digest(self._tensors())

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, atomically. Raises UserError if that fails."""
        metadata = {
            "format": _FORMAT,
            "sources": list(self.sources),
            "tokens": {part: getattr(self, part).tokens for part in _PARTS},
            "tokenizer": self.tokenizer,
            "seed": self.seed,
            **({} if self.evaluation_name is None else {"evaluation_name": self.evaluation_name}),
            "sha256": self.digest(),
        }
        try:
            with atomic_file(Path(path)) as part:
                # one metadata key: safetensors writes several of them in an order that changes from run to run
                save_file(self._tensors(), part, metadata={"tomoe_corpus": json.dumps(metadata, sort_keys=True)})
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Read what `save` wrote. Raises UserError for a missing, truncated, foreign or altered file."""
        if not Path(path).is_file():
            raise UserError(f"there are no prepared tokens at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = parse_json((file.metadata() or {}).get("tomoe_corpus", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            if metadata.get("format") != _FORMAT:
                raise ValueError(f"it holds no tokens prepared by this version, of format {_FORMAT}")
            if _digest(tensors) != metadata["sha256"]:
                raise ValueError("its tokens were altered after they were written")
            return cls(
                **{part: _read_part(tensors, part) for part in _PARTS},
                sources=tuple(metadata["sources"]),
                tokenizer=metadata["tokenizer"],
                seed=metadata["seed"],
                evaluation_name=metadata.get("evaluation_name"),
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise UserError(
                f"{path} is not a complete file of prepared tokens ({shortened(error)}); prepare them again"
            ) from None

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for part in _PARTS:
            sequences: Sequences = getattr(self, part)
            tensors[f"{part}.input_ids"] = sequences.input_ids.int().contiguous()
            tensors[f"{part}.mask"] = sequences.mask.contiguous()
        return tensors


def pack(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], seq_len: int, max_tokens: int | None = None
) -> Sequences:
    """Concatenate documents, each followed by eos, to a stream of at most `max_tokens` tokens, and cut it into sequences, the
    last one perhaps padded (mask False). The tokenizer decides whether bos opens a document. Raises UserError without text."""
    stream = _stream(_tokenized(tokenizer, documents), tokenizer.eos_token_id, max_tokens)
    if len(stream) == 0:
        raise UserError("there is no text: every document is empty")
    # of a text shorter than that one sequence is made, without room for what is not there
    return _cut(stream, min(seq_len, len(stream)), _padding(tokenizer))


def prepare_corpus(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    model: PreTrainedModel | None = None,
    progress: StageCallback = no_stage_progress,
) -> Corpus:
    """Read training, calibration and evaluation sequences from the recipe's sources, in equal parts by tokens.

    A source with its own split for evaluation uses that; of any other the first shuffled documents are held out, unless there
    is `data.evaluation_source`. Calibration sequences are drawn from the rest. If a source has fewer tokens than its part,
    all shrink alike. The source `self` needs the dense `model`. Raises UserError: unknown or repeated source, no text, too
    little of it for three sequences, hub out of reach.
    """
    if twice := next((pair for pair in itertools.combinations(data.sources, 2) if overlap(*pair)), None):
        raise UserError(
            f"data.sources names a source twice, as {' and '.join(twice)}: what is held out of the one would be learned from "
            "the other; leave one out"
        )
    # before text is sampled in vain
    name, evaluation = evaluation_part(data, tokenizer)
    sources = [_read_source(source, data, tokenizer, seed, model, progress) for source in data.sources]
    fraction = min(source.fraction for source in sources)
    generator = torch.Generator().manual_seed(seed)
    split = [source.split(fraction, data, _padding(tokenizer), generator) for source in sources]
    texts = {part: joined([of_source[part] for of_source in split]) for part in _PARTS}
    # in random order, so that any run of sequences is a mixture
    mixed = {part: text.select(torch.randperm(len(text), generator=generator)) for part, text in texts.items()}
    if evaluation is not None:
        mixed["evaluation"] = evaluation
    return Corpus(
        **mixed,
        sources=data.sources,
        tokenizer=basename(tokenizer.name_or_path),
        seed=seed,
        evaluation_name=name,
    )


def evaluation_part(data: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Sequences] | tuple[None, None]:
    """Read the recipe's evaluation text, if it names one. Raises UserError if it is missing or among the sources."""
    if data.evaluation_source is None:
        return None, None
    for source in data.sources:
        if overlap(source, data.evaluation_source):
            raise UserError(
                f"data.evaluation_source is {data.evaluation_source}, which data.sources names, too ({source}); name another "
                "text, or leave it out, and a part of the sources is held out"
            )
    name, texts = evaluation_documents(data.evaluation_source, tokenizer)
    return name, pack(tokenizer, texts, data.seq_len, data.evaluation_tokens)


@dataclass(frozen=True, eq=False)
class _SourceTokens:
    """The tokens of one source: its stream, and that of its own evaluation split, if any."""

    source: str
    stream: Int[Tensor, " T"]
    requested: int
    held_out: Int[Tensor, " U"] | None = None
    held_out_requested: int = 0

    @property
    def fraction(self) -> float:
        """The available share of the requested tokens."""
        share = len(self.stream) / self.requested
        return share if self.held_out is None else min(share, len(self.held_out) / self.held_out_requested)

    def split(self, fraction: float, data: DataSection, pad: int, generator: torch.Generator) -> dict[str, Sequences]:
        sequences = _cut(self.stream[: round(self.requested * fraction)], data.seq_len, pad)
        holds_out = self.held_out is None and data.evaluation_source is None
        needed = 3 if holds_out else 2
        if len(sequences) < needed:
            raise UserError(
                f"the source {self.source} gives {sequences.tokens} tokens, which fill {len(sequences)} of the sequences of "
                f"{data.seq_len} that are cut from it, but training, calibration and evaluation need one each: "
                "use more text or a smaller data.seq_len"
            )

        def count(tokens: int) -> int:
            return max(1, round(tokens * fraction / len(data.sources) / data.seq_len))

        first = min(count(data.evaluation_tokens), len(sequences) - 2) if holds_out else 0
        evaluation = sequences.select(torch.arange(first))
        if self.held_out is not None:
            evaluation = _cut(self.held_out[: round(self.held_out_requested * fraction)], data.seq_len, pad)
        order = first + torch.randperm(len(sequences) - first, generator=generator)
        calibration = min(count(data.calibration_tokens), len(order) - 1)
        return {
            "train": sequences.select(order[calibration:].sort().values),
            "calibration": sequences.select(order[:calibration].sort().values),
            "evaluation": evaluation,
        }


def _read_source(
    source: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    model: PreTrainedModel | None,
    progress: StageCallback,
) -> _SourceTokens:
    """Read the part of one source, while there is text, in complete sequences."""
    requested = _whole_sequences(data.tokens / len(data.sources), data.seq_len)
    eos = tokenizer.eos_token_id
    if source == SELF and model is not None:
        # of little text short rows leave more of them for one product
        length = min(data.seq_len, ROW_TOKENS)
        sampled = sample_documents(model, tokenizer, requested, seed, length=length, progress=progress)
        return _SourceTokens(source, _stream(sampled, eos, requested), requested)
    held_out_split = find_source(source).held_out
    held_out = None
    held_out_requested = 0
    if held_out_split is not None and data.evaluation_source is None:
        held_out_requested = _whole_sequences(data.evaluation_tokens / len(data.sources), data.seq_len)
        texts = documents(source, held_out_split, data.text_column, tokenizer)
        held_out = _stream(_tokenized(tokenizer, texts), eos, held_out_requested)
        requested = max(data.seq_len, requested - held_out_requested)
    texts = documents(source, "train", data.text_column, tokenizer)
    stream = _stream(_tokenized(tokenizer, _shuffled(texts, seed)), eos, requested)
    if len(stream) == 0 or (held_out is not None and len(held_out) == 0):
        raise UserError(f"the source {source} holds no text")
    return _SourceTokens(source, stream, requested, held_out, held_out_requested)


def _whole_sequences(tokens: float, seq_len: int) -> int:
    """Round a number of tokens up to complete sequences."""
    return max(1, ceil_div(int(tokens), seq_len)) * seq_len


def _shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """Shuffle the documents within windows that fit in memory."""
    generator = torch.Generator().manual_seed(seed)
    for window in _windows(texts, _SHUFFLE_CHARACTERS):
        yield from (window[index] for index in torch.randperm(len(window), generator=generator).tolist())


def _windows(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    window: list[str] = []
    size = 0
    for text in texts:
        window.append(text)
        size += len(text)
        if size >= characters:
            yield window
            window = []
            size = 0
    if window:
        yield window


def _tokenized(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    # verbose=False: a document may be longer than the model's context, because it is cut into sequences
    for window in _windows(texts, _TOKENIZE_CHARACTERS):
        for ids in tokenizer(window, verbose=False)["input_ids"]:
            check_text(ids, tokenizer)
            yield ids


def _stream(token_lists: Iterable[list[int]], eos: int | None, max_tokens: int | None) -> Int[Tensor, " T"]:
    """Concatenate token lists, each closed by eos."""
    ids = array("q")
    for tokens in token_lists:
        ids.extend(tokens)
        if eos is not None and tokens[-1:] != [eos]:
            ids.append(eos)
        if max_tokens is not None and len(ids) >= max_tokens:
            break
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def _cut(stream: Int[Tensor, " T"], seq_len: int, padding: int) -> Sequences:
    input_ids = torch.nn.functional.pad(stream, (0, -len(stream) % seq_len), value=padding).view(-1, seq_len)
    mask = (torch.arange(input_ids.numel()) < len(stream)).view(-1, seq_len)
    return Sequences(input_ids, mask)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token id used where the mask is False."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def joined(texts: Sequence[Sequences]) -> Sequences:
    """Concatenate sequences, padded to the longest."""
    length = max(text.input_ids.shape[1] for text in texts)
    ids, masks = (
        torch.cat([torch.nn.functional.pad(t, (0, length - t.shape[1])) for t in tensors])
        for tensors in zip(*((text.input_ids, text.mask) for text in texts), strict=True)
    )
    return Sequences(ids, masks)


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    mixed = int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "big")
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed >> 1))
