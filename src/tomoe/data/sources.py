"""Sources of text: the documentation of Python, data sets, hub ids, local files and folders. Each yields documents."""

from __future__ import annotations

import ast
import difflib
import importlib
import itertools
import json
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from tomoe.data.rows import Row, RowReader, without_filled_nulls
from tomoe.errors import Note, UserError, shortened
from tomoe.files import basename
from tomoe.folders import listed
from tomoe.model.names import HUB_ID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SELF = "self"
"""The source that samples its text from the dense model (sampling.py)."""

PUBLISHED = {"wikitext": ("\n\n", None), "wikitext-103": ("\n\n", None), "ptb": (" ", None), "c4": (" ", 1100)}
"""Published perplexities use one stream: documents (at most so many) joined by this separator, without end-of-text tokens."""

LOCAL_SUFFIXES = (".txt", ".jsonl", ".parquet")
# kinds of data that others publish, which a Note names if they lie beside those that are read
_OTHER_DATA = (".json", ".csv", ".tsv", ".arrow", ".gz", ".zst", ".bz2", ".xz", ".zip")
# how data sets name the files and folders of their splits
_SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
# Parts of a long .txt file: longer than any sequence, short enough that a shuffle mixes the parts of a single file.
_PART_CHARACTERS = 2**16

# Of the documentation of Python: paragraphs of a document, and characters of a docstring that is worth reading.
_PARAGRAPHS = 16
_LONG_DOCSTRING = 500

# Of the installed packages: what is text, and the bytes of a file that is worth reading and is no table of data.
_PACKAGE_SUFFIXES = (".py", ".rst", ".md")
_PACKAGE_FILE = (500, 200_000)


@dataclass(frozen=True)
class Source:
    """A source and how to read it."""

    read: Callable[[str, RowReader], Iterator[str]]  # `read(split, reader)` yields documents
    held_out: str | None = None  # its split for evaluation, if it has one that is large enough to stand for its text
    small_held_out: str | None = None  # the same of any size: a text to evaluate on, but not beside this source
    hub_id: str | None = None  # its data set on the hub, with `:config` if that has several; None for local text


def _hub(split: str, reader: RowReader, *, name: str, column: str | None = None, **load: Any) -> Iterator[str]:
    return reader.texts(hub_rows(name, split, **load), f"the source {name}", column)


def _wikitext(split: str, reader: RowReader, *, config: str) -> Iterator[str]:
    """Yield articles of WikiText, which begin with a first-level heading; joined by blank lines they are the text that published
    perplexities are computed on."""
    article: list[str] = []
    for line in reader.texts(hub_rows("Salesforce/wikitext", split, config=config), "the source wikitext", "text"):
        if re.fullmatch(r" = [^=].* = \n?", line) and any(earlier.strip() for earlier in article):
            yield "\n\n".join(article)
            article = []
        article.append(line)
    if any(line.strip() for line in article):
        yield "\n\n".join(article)


def _ptb(split: str, reader: RowReader) -> Iterator[str]:
    """Penn Treebank. Its loader on the hub is a script, which `datasets` no longer runs: read the converted files."""
    folder = "hf://datasets/ptb-text-only/ptb_text_only@refs%2Fconvert%2Fparquet/penn_treebank"
    rows = hub_rows("parquet", split, data_files={split: f"{folder}/{split}/*.parquet"})
    return reader.texts(rows, "the source ptb", "sentence")


def _python_docs(split: str, _: RowReader) -> Iterator[str]:
    """The language reference and the long docstrings of the standard library, a few paragraphs a document. Each paragraph
    comes once, so that none is both fitted to and held out."""
    try:
        topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError:
        raise UserError(
            "this Python has no pydoc_data, which the source python-docs reads; name a text file instead, or the source self"
        ) from None
    seen: set[str] = set()
    for text in itertools.chain((topics[name] for name in sorted(topics)), _docstrings()):
        paragraphs = [part for part in dict.fromkeys(text.split("\n\n")) if part.strip() and part not in seen]
        seen.update(paragraphs)
        for first in range(0, len(paragraphs), _PARAGRAPHS):
            yield "\n\n".join(paragraphs[first : first + _PARAGRAPHS])


def _docstrings() -> Iterator[str]:
    """Yield the docstrings of single-file modules of the standard library, in the order of their names."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if len(text) >= _LONG_DOCSTRING:
                    yield text


def _python_packages(split: str, _: RowReader) -> Iterator[str]:
    """Programs and documentation of the installed packages, each text once, in the order of the hashes of their paths, so
    that any number of them is a mixture of all packages."""
    root = Path(sysconfig.get_path("purelib"))
    seen = set[bytes]()
    files = [file for file in root.rglob("*") if file.suffix in _PACKAGE_SUFFIXES and file.is_file()]
    for file in sorted(files, key=lambda file: sha256(file.relative_to(root).as_posix().encode()).digest()):
        if not _PACKAGE_FILE[0] <= file.stat().st_size <= _PACKAGE_FILE[1]:
            continue
        content = file.read_bytes()
        if (digest := sha256(content).digest()) in seen:
            continue
        seen.add(digest)
        try:
            yield content.decode("utf-8")
        except UnicodeDecodeError:
            continue
    if not seen:
        raise UserError(f"no packages with text are installed in {root}; name a text file, or the source python-docs")


SOURCES: dict[str, Source] = {
    "python-docs": Source(_python_docs),
    "python-packages": Source(_python_packages),
    "wikitext": Source(
        partial(_wikitext, config="wikitext-2-raw-v1"), held_out="test", hub_id="Salesforce/wikitext:wikitext-2-raw-v1"
    ),
    "wikitext-103": Source(
        partial(_wikitext, config="wikitext-103-raw-v1"),
        held_out="test",
        hub_id="Salesforce/wikitext:wikitext-103-raw-v1",
    ),
    "c4": Source(
        partial(_hub, name="allenai/c4", config="en", streaming=True), held_out="validation", hub_id="allenai/c4:en"
    ),
    "ptb": Source(_ptb, held_out="test", hub_id="ptb-text-only/ptb_text_only"),
    "alpaca": Source(partial(_hub, name="tatsu-lab/alpaca", column="text"), hub_id="tatsu-lab/alpaca"),
    "code-alpaca": Source(partial(_hub, name="sahil2801/CodeAlpaca-20k"), hub_id="sahil2801/CodeAlpaca-20k"),
}


def find_source(source: str) -> Source:
    """Return the source of that name, else that file or folder, else that hub id (owner/name, or owner/name:config). Raises
    UserError for anything else, and for `self`, which has no text to read."""
    if source == SELF:
        raise UserError("the source self is sampled from the dense model, so it cannot be read without one")
    if source in SOURCES:
        return SOURCES[source]
    path = Path(source).expanduser()
    if path.is_dir():
        splits = _splits(path)
        return Source(
            partial(_folder, path=path, splits=splits),
            small_held_out=next(
                (split for split in ("test", "validation") if "train" in splits and split in splits), None
            ),
        )
    if path.exists():
        return Source(partial(_local, path=path))
    if path.suffix.lower() in (*LOCAL_SUFFIXES, *_OTHER_DATA) or source.startswith((".", "/", "~")):
        raise UserError(f"there is no file or folder {source} to read text from")
    name, _, config = source.partition(":")
    if HUB_ID.fullmatch(name):
        return Source(partial(_hub, name=name, config=config or None, streaming=True), hub_id=source)
    near = difflib.get_close_matches(source, [*SOURCES, SELF], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(
        f"there is no source {source!r}; sources are {', '.join([*SOURCES, SELF])}, a hub id (owner/name), "
        f"a {', '.join(LOCAL_SUFFIXES)} file, or a folder of such files{hint}"
    )


def overlap(one: str, other: str) -> bool:
    """Whether two names refer to one source, or to a folder and a file in it."""
    first, second = (PurePath(_identity(source)) for source in (one, other))
    return first.is_relative_to(second) or second.is_relative_to(first)


def _identity(source: str) -> str:
    """Return one name for all spellings of a source."""
    if source in SOURCES:
        return SOURCES[source].hub_id or source
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def documents(
    source: str, split: str = "train", text_column: str | None = None, tokenizer: PreTrainedTokenizerBase | None = None
) -> Iterator[str]:
    """Yield the documents of a source in its own order, without blank ones.

    A .txt file is one document, or several separated by two blank lines; longer ones come in parts of about 65,536
    characters. A row of other sources is one: its `text_column`, else the first of these that holds something: `text`, a chat
    in `messages`, `conversations` or `conversation`, `prompt` and `completion`, `instruction`, `input` and `output`. Named
    sources know their columns. Rows that cannot be read are left out, with a warning. Raises UserError, also while iterating:
    no such source, hub out of reach, broken file, no row that can be read, no chat template.
    """
    reader = RowReader(None if source in SOURCES else text_column, tokenizer, source)
    return (text for text in find_source(source).read(split, reader) if text.strip())


def evaluation_documents(source: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Iterable[str]]:
    """Return name and documents of an evaluation text, as published. Raises UserError as `documents` does."""
    found = find_source(source)
    held_out = found.held_out or found.small_held_out
    name = basename(source) if Path(source).expanduser().exists() else source
    if held_out or found.hub_id:
        # of a data set that has no name here, nobody knows the splits before it is loaded
        name += f" ({held_out or 'train'})"
    texts: Iterable[str] = documents(source, held_out or "train", tokenizer=tokenizer)
    if source in PUBLISHED:
        separator, most = PUBLISHED[source]
        texts = [separator.join(itertools.islice(texts, most))]
    return name, texts


def hub_rows(name: str, split: str, config: str | None = None, **load: Any) -> Iterator[Row]:
    """Yield rows of a data set on the hub. Raises UserError if it cannot be loaded."""
    # it takes seconds, and only data sets on the hub need it
    import datasets  # type: ignore[import-untyped]

    try:
        yield from map(without_filled_nulls, datasets.load_dataset(name, config, split=split, **load))
    except Exception as error:
        reason = str(error).strip().split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__
        address = load.get("data_files", {}).get(split) or (f"{name}:{config}" if config else name)
        raise UserError(
            f"cannot load {address} ({split}) from the hub: {reason}; "
            f"use a local {', '.join(LOCAL_SUFFIXES)} file instead, or the source self"
        ) from None


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Return the readable files of a folder by the split in their names; files without one are training data. Without training
    files, all are: somebody made the folder of them. Raises UserError if there are no files."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not _is_hidden(path.relative_to(folder))]
    files = [path for path in found if path.suffix.lower() in LOCAL_SUFFIXES]
    if not files:
        raise UserError(f"the folder {folder} holds no {', '.join(LOCAL_SUFFIXES)} file")
    others = [path.name for path in found if path.suffix.lower() in _OTHER_DATA and path.name != "dataset_infos.json"]
    if others:
        warnings.warn(
            f"the folder {folder} holds {len(others)} files that are not read ({listed(others)}); those that are read end in "
            f"{', '.join(LOCAL_SUFFIXES)}",
            Note,
            stacklevel=4,
        )
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = re.findall("[a-z]+", file.relative_to(folder).as_posix().lower())
        # the name of the file says more than that of a folder around it
        split = next((_SPLIT_WORDS[word] for word in reversed(words) if word in _SPLIT_WORDS), "train")
        splits.setdefault(split, []).append(file)
    return splits if "train" in splits else {"train": files}


def _is_hidden(path: Path) -> bool:
    """Whether a file was put beside the data by a program: notebook checkpoints, resource forks, caches."""
    return any(part.startswith((".", "__")) for part in path.parts)


def _folder(split: str, reader: RowReader, *, path: Path, splits: dict[str, list[Path]]) -> Iterator[str]:
    if split == "train" and len(splits) > 1:
        others = [file.name for name, files in splits.items() if name != "train" for file in files]
        warnings.warn(
            f"the folder {path} has splits: of it, {listed([file.name for file in splits['train']])} are read to learn from, "
            f"and {listed(others)} are not; name a file to read that one",
            Note,
            stacklevel=4,
        )
    for file in splits[split]:
        yield from _local(split, reader, path=file)


def _local(_: str, reader: RowReader, *, path: Path) -> Iterator[str]:
    kind = path.suffix.lower()
    if kind not in LOCAL_SUFFIXES:
        raise UserError(f"cannot read text from {path}: it should end in {', '.join(LOCAL_SUFFIXES)}")
    try:
        if kind == ".txt":
            for text in _parts(path):
                yield from text.split("\n\n\n")
        else:
            rows = jsonl(path) if kind == ".jsonl" else _parquet(path)
            yield from reader.texts(rows, str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _parts(file: Path) -> Iterator[str]:
    """Split a long text at line ends. Raises UserError if it is not UTF-8."""
    with file.open(encoding="utf-8-sig") as lines:
        try:
            while part := "".join(lines.readlines(_PART_CHARACTERS)):
                if "\0" in part:
                    raise UserError(f"{file} is not text in UTF-8: it holds null characters, as text in UTF-16 does")
                yield part
        except UnicodeDecodeError:
            raise UserError(f"{file} is not text in UTF-8") from None


def jsonl(file: Path) -> Iterator[Row]:
    """Yield the objects of a .jsonl file. Raises UserError for a line that is not one, and for text that is not UTF-8."""
    # line by line, because `datasets` infers one schema for all lines and fails if a field is null at first
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(_decoded(lines, file), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"line {number} of {file} is not valid JSON: {shortened(error)}") from None
            if not isinstance(row, dict):
                raise UserError(f"line {number} of {file} is a {type(row).__name__}, but it should be an object")
            yield row


def _decoded(lines: Iterable[str], file: Path) -> Iterator[str]:
    try:
        yield from lines
    except UnicodeDecodeError:
        raise UserError(f"{file} is not text in UTF-8") from None


def _parquet(file: Path) -> Iterable[Row]:
    from pyarrow import parquet  # type: ignore[import-untyped]

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches():
                yield from map(without_filled_nulls, batch.to_pylist())
    except Exception as error:
        raise UserError(f"{file} is not a readable parquet file: {str(error).rstrip('.')}") from None
