"""Text -> token blocks: disjoint training, calibration and evaluation parts, in an order that needs no saved state.

Shapes: B blocks, S tokens of a block.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tomoe.data.sampling import sample_documents
from tomoe.data.sources import SELF, documents, find
from tomoe.errors import UserError
from tomoe.files import own_name
from tomoe.recipe.conversion import DataSection

_FORMAT = 1
_PARTS = ("train", "calibration", "evaluation")
_SHUFFLE_CHARACTERS = 2**24  # held in memory to shuffle documents
_TOKENIZE_CHARACTERS = 2**18  # handed to the tokenizer at once

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks of tokens. `mask` is True on real tokens, False on padding (at the end of a block only)."""

    input_ids: Int[Tensor, "B S"]
    mask: Bool[Tensor, "B S"]
    source_ids: Int[Tensor, " B"] | None = None  # of `Corpus.sources`; None where that was not kept

    def __len__(self) -> int:
        return self.input_ids.shape[0]

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return int(self.mask.sum())

    def pick(self, block_ids: Int[Tensor, " n"]) -> Blocks:
        """Those blocks, in that order."""
        sources = None if self.source_ids is None else self.source_ids[block_ids]
        return Blocks(self.input_ids[block_ids], self.mask[block_ids], sources)

    def first(self, tokens: int) -> Blocks:
        """As many blocks from the beginning as so many tokens fill, as far as there are."""
        return self.pick(torch.arange(min(len(self), max(1, -(-tokens // self.input_ids.shape[1])))))


def _blocks(tensors: dict[str, Tensor], part: str) -> Blocks:
    """One part of a corpus file. Raises KeyError or ValueError where it holds no blocks."""
    ids, mask, sources = (tensors.get(f"{part}.{name}") for name in ("input_ids", "mask", "source_ids"))
    if ids is None or mask is None:
        raise KeyError(part)
    whole = ids.dim() == 2 and ids.shape == mask.shape and ids.dtype == torch.int32 and mask.dtype == torch.bool
    known = sources is None or (sources.dtype == torch.int32 and sources.shape == ids.shape[:1])
    if not whole or not known or bool((ids < 0).any()):
        raise ValueError(f"{part} is {tuple(ids.shape)} of {ids.dtype}")
    return Blocks(ids.long(), mask, sources)


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of one conversion. No block is in two parts."""

    train: Blocks
    calibration: Blocks
    evaluation: Blocks
    sources: tuple[str, ...]
    tokenizer: str
    seed: int

    def batch(self, step: int, micro: int, batch_size: int, accumulation: int, seed: int) -> Blocks:
        """Training blocks of forward pass `micro` (of `accumulation`) of step `step`, both from 0.

        Each epoch is a permutation drawn from (seed, epoch) alone: a resumed run sees the same batches.
        """
        first = (step * accumulation + micro) * batch_size
        count = len(self.train)
        order = [_permutation(count, seed, index // count)[index % count] for index in range(first, first + batch_size)]
        return self.train.pick(torch.stack(order))

    def digest(self) -> str:
        """Sha256 (hex) of all ids and masks."""
        sha = hashlib.sha256()
        for name, tensor in sorted(self._tensors().items()):
            sha.update(f"{name} {tuple(tensor.shape)}".encode())
            sha.update(tensor.numpy().tobytes())
        return sha.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write one .safetensors file, under a temporary name first. Raises UserError where that fails."""
        path = Path(path)
        about = {
            "format": _FORMAT,
            "sources": list(self.sources),
            "tokens": {part: getattr(self, part).tokens for part in _PARTS},
            "tokenizer": self.tokenizer,
            "seed": self.seed,
            "sha256": self.digest(),
        }
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            # One metadata key: safetensors writes several of them in an order that changes from run to run.
            save_file(self._tensors(), temporary, metadata={"tomoe_corpus": json.dumps(about, sort_keys=True)})
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink()
            raise UserError(f"cannot write the tokens to {path}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Read what `save` wrote. Raises UserError for a missing, truncated, foreign or altered file."""
        if not Path(path).is_file():
            raise UserError(f"there are no prepared tokens at {path}")
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {}).get("tomoe_corpus", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise UserError(f"{path} is not a whole file of prepared tokens ({error}); prepare them again") from None
        if not isinstance(about, dict) or about.get("format") != _FORMAT:
            raise UserError(f"{path} holds no tokens prepared by this version (format {_FORMAT}); prepare them again")
        try:
            parts = {part: _blocks(tensors, part) for part in _PARTS}
            corpus = cls(**parts, sources=tuple(about["sources"]), tokenizer=about["tokenizer"], seed=about["seed"])
            whole = corpus.digest() == about["sha256"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{path} holds no blocks of tokens ({error}); prepare them again") from None
        if not whole:
            raise UserError(f"the tokens in {path} are not those that were written; prepare them again")
        return corpus

    def _tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for part in _PARTS:
            blocks: Blocks = getattr(self, part)
            tensors[f"{part}.input_ids"] = blocks.input_ids.int().contiguous()
            tensors[f"{part}.mask"] = blocks.mask.contiguous()
            if blocks.source_ids is not None:
                tensors[f"{part}.source_ids"] = blocks.source_ids.int().contiguous()
        return tensors


def pack(
    tokenizer: PreTrainedTokenizerBase, documents: Iterable[str], block_size: int, max_tokens: int | None = None
) -> Blocks:
    """Documents, each followed by eos, as one stream of at most `max_tokens` tokens, cut into blocks.

    The tokenizer's own convention decides whether bos opens a document. The last block is kept where it is only partly
    filled: padding follows, and its mask is False there. Raises UserError when there is no text.
    """
    stream = _stream(_tokenized(tokenizer, documents), tokenizer.eos_token_id, max_tokens)
    if len(stream) == 0:
        raise UserError("there is no text: every document is empty")
    return _cut(stream, block_size, _padding(tokenizer))


def prepare(
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    model: PreTrainedModel | None = None,
    progress: Progress | None = None,
) -> Corpus:
    """Training, calibration and evaluation blocks from the recipe's sources, in equal parts by tokens.

    A source with a split of its own for evaluation gives that; of any other the first shuffled documents are held
    out. Calibration blocks are drawn from what is left, so they are of the training text's kind. Where a source has
    fewer tokens than its part, all sources shrink alike: 1:1:1 stays 1:1:1, and so does training to evaluation.
    The source `self` needs the dense `model`; `progress(done, total)` hears of its sampling.

    Raises UserError: unknown or repeated source, no text, too little of it for three blocks, hub out of reach.
    """
    if len(set(data.sources)) < len(data.sources):
        raise UserError(f"data.sources names a source twice: {', '.join(data.sources)}")
    taken = [_take(source, data, tokenizer, seed, model, progress) for source in data.sources]
    fraction = min(own.fraction for own in taken)
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, list[Blocks]] = {part: [] for part in _PARTS}
    for own in taken:
        for part, blocks in own.split(fraction, data, _padding(tokenizer), generator).items():
            parts[part].append(blocks)
    texts = {part: joined(blocks) for part, blocks in parts.items()}
    return Corpus(  # in random order, so that any run of blocks is a mixture
        **{part: text.pick(torch.randperm(len(text), generator=generator)) for part, text in texts.items()},
        sources=data.sources,
        tokenizer=own_name(tokenizer.name_or_path),
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class _Taken:
    """What one source gave: its stream, and the stream of its own evaluation split where it has one."""

    source: str
    stream: Int[Tensor, " T"]
    asked: int
    held_out: Int[Tensor, " U"] | None = None
    held_out_asked: int = 0

    @property
    def fraction(self) -> float:
        """Share of what was asked for that is there."""
        own = len(self.stream) / self.asked
        return own if self.held_out is None else min(own, len(self.held_out) / self.held_out_asked)

    def split(self, fraction: float, data: DataSection, padding: int, generator: torch.Generator) -> dict[str, Blocks]:
        """Disjoint parts of `fraction` of what was asked for."""
        blocks = _cut(self.stream[: round(self.asked * fraction)], data.block_size, padding)
        needed = 3 if self.held_out is None else 2
        if len(blocks) < needed:
            raise UserError(
                f"the source {self.source} gives {blocks.tokens} tokens, that is {len(blocks)} blocks of "
                f"{data.block_size}, but training, calibration and evaluation need one each: "
                "give more text or a smaller data.block_size"
            )

        def share(tokens: int) -> int:
            return max(1, round(tokens * fraction / len(data.sources) / data.block_size))

        if self.held_out is None:
            first = min(share(data.evaluation_tokens), len(blocks) - 2)
            evaluation = blocks.pick(torch.arange(first))
        else:
            first = 0
            evaluation = _cut(self.held_out[: round(self.held_out_asked * fraction)], data.block_size, padding)
        order = first + torch.randperm(len(blocks) - first, generator=generator)
        calibration = min(share(data.calibration_tokens), len(order) - 1)
        return {
            "train": blocks.pick(order[calibration:].sort().values),
            "calibration": blocks.pick(order[:calibration].sort().values),
            "evaluation": evaluation,
        }


def _take(
    source: str,
    data: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    model: PreTrainedModel | None,
    progress: Progress | None,
) -> _Taken:
    """The part of one source, as long as there is text: whole blocks' worth of tokens."""
    asked, eos = _whole_blocks(data.tokens / len(data.sources), data.block_size), tokenizer.eos_token_id
    if source == SELF:
        if model is None:
            raise UserError("the source self is sampled from the dense model, so it cannot be read without one")
        sampled = sample_documents(model, tokenizer, asked, seed, progress=progress)
        return _Taken(source, _stream(sampled, eos, asked), asked)
    held_out_split = find(source).held_out
    held_out, held_out_asked = None, 0
    if held_out_split is not None:
        held_out_asked = _whole_blocks(data.evaluation_tokens / len(data.sources), data.block_size)
        texts = documents(source, held_out_split, data.text_column)
        held_out = _stream(_tokenized(tokenizer, texts), eos, held_out_asked)
        asked = max(data.block_size, asked - held_out_asked)
    texts = _shuffled(documents(source, "train", data.text_column), seed)
    stream = _stream(_tokenized(tokenizer, texts), eos, asked)
    if len(stream) == 0 or (held_out is not None and len(held_out) == 0):
        raise UserError(f"the source {source} holds no text")
    return _Taken(source, stream, asked, held_out, held_out_asked)


def _whole_blocks(tokens: float, block_size: int) -> int:
    return max(1, -(-int(tokens) // block_size)) * block_size


def _shuffled(texts: Iterable[str], seed: int) -> Iterator[str]:
    """The documents in random order, within windows that fit in memory."""
    generator = torch.Generator().manual_seed(seed)
    for window in _windows(texts, _SHUFFLE_CHARACTERS):
        yield from (window[index] for index in torch.randperm(len(window), generator=generator).tolist())


def _windows(texts: Iterable[str], characters: int) -> Iterator[list[str]]:
    window: list[str] = []
    held = 0
    for text in texts:
        window.append(text)
        held += len(text)
        if held >= characters:
            yield window
            window, held = [], 0
    if window:
        yield window


def _tokenized(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[list[int]]:
    # verbose=False: a document may well be longer than the model's context, since it is cut into blocks.
    for window in _windows(texts, _TOKENIZE_CHARACTERS):
        yield from tokenizer(window, verbose=False)["input_ids"]


def _stream(token_lists: Iterable[list[int]], eos: int | None, max_tokens: int | None) -> Int[Tensor, " T"]:
    """Token lists end to end, each closed by eos."""
    ids = array("q")
    for tokens in token_lists:
        ids.extend(tokens)
        if eos is not None and tokens[-1:] != [eos]:
            ids.append(eos)
        if max_tokens is not None and len(ids) >= max_tokens:
            break
    return torch.tensor(ids[:max_tokens], dtype=torch.long)


def _cut(stream: Int[Tensor, " T"], block_size: int, padding: int) -> Blocks:
    short = -len(stream) % block_size
    input_ids = torch.nn.functional.pad(stream, (0, short), value=padding).view(-1, block_size)
    mask = (torch.arange(input_ids.numel()) < len(stream)).view(-1, block_size)
    return Blocks(input_ids, mask)


def _padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """What fills the place of missing tokens; never looked at."""
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def joined(texts: Sequence[Blocks]) -> Blocks:
    """All blocks, padded to the longest; their sources are the texts by number."""
    size = max(text.input_ids.shape[1] for text in texts)
    ids, masks = (
        torch.cat([torch.nn.functional.pad(t, (0, size - t.shape[1])) for t in tensors])
        for tensors in zip(*((text.input_ids, text.mask) for text in texts), strict=True)
    )
    return Blocks(ids, masks, torch.cat([torch.full((len(text),), i) for i, text in enumerate(texts)]))


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> Int[Tensor, " n"]:
    mixed = int.from_bytes(hashlib.sha256(f"{seed} {epoch}".encode()).digest()[:8], "big")
    return torch.randperm(count, generator=torch.Generator().manual_seed(mixed >> 1))
