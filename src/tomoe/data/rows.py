"""Rows of data as documents: each row is judged by itself, and what is left out is counted and said."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tomoe.data.chats import Chat, ChatWriter, RowError, answered, chat_of, from_json, is_empty, text_of
from tomoe.errors import Note, UserError, shortened

Row = Mapping[str, Any]

CHAT_COLUMNS = ("messages", "conversations", "conversation")
_INSTRUCTION = ("instruction", "input", "context", "output", "response")
_TRIED = 1000  # rows that are looked at before a source counts as one without text


@dataclass(frozen=True)
class RowReader:
    """How the rows of a source become documents."""

    column: str | None  # the column that holds text or chats; None: the usual ones
    writer: ChatWriter

    def texts(self, rows: Iterable[Row], origin: str, column: str | None = None) -> Iterator[str]:
        """The text of each row that holds some; `column` is where a named source has it, `origin` names the rows. Warns with
        the number of rows that are left out. Raises UserError if none of the first thousand can be read, and without a chat
        template for chats."""
        looked, left_out, first = 0, 0, ""
        try:
            for row in rows:
                looked += 1
                try:
                    document = document_of(row, self.column or column)
                    yield self.writer.write(document) if isinstance(document, Chat) else document
                except RowError as error:
                    left_out += 1
                    first = first or f"row {looked} {error}: {shortened(dict(row))}"
                    if left_out == looked == _TRIED:
                        break
        finally:
            if 0 < left_out < looked:
                warnings.warn(
                    f"{left_out:,} of {looked:,} rows of {origin} are left out; the first: {first}", Note, stacklevel=2
                )
        if 0 < left_out == looked:
            raise UserError(
                f"none of the {looked:,} rows of {origin} that were looked at can be read; the first: {first}; "
                "mend the rows, or name the column that holds text or chats with data.text_column in a recipe"
            )


def document_of(row: Row, column: str | None = None) -> str | Chat:
    """The text or the chat of a row; "" if it holds a blank text and nothing else. Raises RowError for what is neither."""
    if column is not None:
        return _value(row, column)
    if not is_empty(row.get("text")):
        return _value(row, "text")
    for name in CHAT_COLUMNS:
        if not is_empty(row.get(name)):
            return _value(row, name, row.get("system"))
    if "prompt" in row and "completion" in row:
        found = answered(row["prompt"], row["completion"], row.get("tools"))
        if found is None:
            raise RowError("holds no text or chat in its columns 'prompt' and 'completion'")
        return found
    if "instruction" in row:
        return _instruction(row)
    return _value(row, next((name for name in CHAT_COLUMNS if name in row and "text" not in row), "text"))


def _value(row: Row, column: str, system: Any = None) -> str | Chat:
    if column not in row:
        raise RowError(f"has no column {column!r}, its columns are {', '.join(map(repr, row)) or 'none'}")
    value = row[column]
    chat = chat_of(value, row.get("tools"), system)
    if chat is not None:
        return chat
    if value == "":
        return ""
    if is_empty(value):
        raise RowError(f"holds nothing in its column {column!r}")
    text = text_of(value)
    # a list without messages is no text to learn from, in whatever form it comes
    if text is None or (column in CHAT_COLUMNS and from_json(value) is not value):
        kind = "list or object as JSON text" if text else type(value).__name__
        raise RowError(
            f"holds a {kind} in its column {column!r}, but it should hold text, or a list of messages with role and content"
        )
    return text


def _instruction(row: Row) -> str:
    """An instruction and what belongs to it, joined by newlines."""
    given = {name: row[name] for name in _INSTRUCTION if not is_empty(row.get(name))}
    texts = {name: text_of(value) for name, value in given.items()}
    for name, text in texts.items():
        if text is None:
            raise RowError(f"holds a {type(given[name]).__name__} in its column {name!r}, but it should hold text")
    if not texts:
        raise RowError("holds nothing in its column 'instruction'")
    return "\n".join(text for text in texts.values() if text)


def without_filled_nulls(row: Row) -> dict[str, Any]:
    """A row of Arrow without the nulls inside its values: a column's schema gives every object the keys of all others."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
