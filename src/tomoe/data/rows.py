"""Rows of data as documents: each row is checked by itself, and the rows left out are counted and reported.

Chats, in any of their usual spellings, become text through the chat template of the model that reads them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tomoe.errors import Note, UserError, shortened
from tomoe.files import is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

CHAT_COLUMNS = ("messages", "conversations", "conversation")
_INSTRUCTION = ("instruction", "input", "context", "output", "response")
_TRIED = 1000  # rows that are looked at before a source counts as one without text
# what ShareGPT calls the roles of chat templates
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
_TEXT_PARTS = (None, "text", "input_text", "output_text")  # parts of a content that are text
_PROBE = "tomoeprobe"  # stands for a text, to see how a template writes it


def document_of(row: Row, column: str | None = None) -> str | Chat:
    """Return the text or chat of a row; "" if it holds only a blank text. Raises RowError if it holds neither."""
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
    """Join an instruction and its input and output by newlines."""
    given = {name: row[name] for name in _INSTRUCTION if not is_empty(row.get(name))}
    texts = {name: text_of(value) for name, value in given.items()}
    for name, text in texts.items():
        if text is None:
            raise RowError(f"holds a {type(given[name]).__name__} in its column {name!r}, but it should hold text")
    if not texts:
        raise RowError("holds nothing in its column 'instruction'")
    return "\n".join(text for text in texts.values() if text)


def without_filled_nulls(row: Row) -> dict[str, Any]:
    """Drop the nulls inside the values of an Arrow row: a column's schema gives every object the keys of all others."""
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


class RowError(ValueError):
    """Why one row of data cannot be read, in words that follow its number; other rows may be fine."""


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    messages: list[dict[str, Any]]
    """Each has `role` and `content`, which is text. Calls of tools have their arguments as objects, if they are any."""
    tools: list[Any] | None = None  # the tools that the model was offered


def is_empty(value: Any) -> bool:
    """Whether a value is empty or null, including null as pandas writes it."""
    return value is None or value in ("", [], {}) or (isinstance(value, float) and value != value)


def text_of(value: Any) -> str | None:
    """Return a text unchanged, a number as JSON writes it; None for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return str(value) if isinstance(value, Decimal) else None


def chat_of(value: Any, tools: Any = None, system: Any = None) -> Chat | None:
    """Return the chat in a value; None if it holds no messages (role and content, or ShareGPT's from and value): as a list, as
    lists of their roles and contents, or as JSON text of either. `tools` and `system` come from the same row. Raises RowError for
    messages whose content is not text, and for tools that are not a list."""
    found = _listed(from_json(value))
    if not found or not all(isinstance(message, Mapping) and _speaks(message) for message in found):
        return None
    messages = [_message(message) for message in found]
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, _tools(tools))


def answered(prompt: Any, completion: Any, tools: Any = None) -> str | Chat | None:
    """Join a prompt with its completion: two texts, concatenated, or two parts of one chat; None if they are neither."""
    asked, said = (_listed(from_json(value)) for value in (prompt, completion))
    texts = text_of(prompt), text_of(completion)
    if asked is None and said is None:
        return None if texts[0] is None or texts[1] is None else texts[0] + texts[1]
    asked = [{"role": "user", "content": texts[0]}] if asked is None and texts[0] is not None else asked
    said = [{"role": "assistant", "content": texts[1]}] if said is None and texts[1] is not None else said
    return None if asked is None or said is None else chat_of(asked + said, tools)


def from_json(value: Any) -> Any:
    """Parse the JSON text of a list or an object; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _listed(value: Any) -> list[Any] | None:
    """Return items as a list; older data sets hold an object of lists instead. None for anything else."""
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        lengths = {len(column) for column in value.values()}
        if len(lengths) == 1:
            return [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    return list(value) if isinstance(value, list) else None


def _speaks(message: Mapping[str, Any]) -> bool:
    """Whether this is a message. Its content may be null, in which case even the key may be missing."""
    if isinstance(message.get("role"), str):
        return len(message) == 1 or "content" in message or "tool_calls" in message
    return isinstance(message.get("from"), str) and "value" in message


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates read it. Null values are dropped: some templates only ask whether a key exists."""
    kept = {key: value for key, value in message.items() if value is not None}
    if "role" not in kept:
        role, said = kept.pop("from"), kept.pop("value", None)
        if role == "function_call" and isinstance(from_json(said), dict | list):
            calls = from_json(said)
            kept |= {"role": "assistant", "tool_calls": calls if isinstance(calls, list) else [calls]}
        else:
            kept |= {"role": _ROLES.get(role, role), "content": said}
    kept["content"] = _content(kept.get("content"), kept["role"])
    called = from_json(kept.pop("tool_calls", None))
    if not is_empty(called):
        kept["tool_calls"] = [_call(call) for call in called] if isinstance(called, list) else called
    return kept


def _content(content: Any, role: str) -> str:
    """Return the text of a message, whose content may come in parts. Raises RowError if it is not text."""
    if content is None or (text := text_of(content)) is not None:
        return "" if content is None else text or ""
    parts = content if isinstance(content, list) else [content]
    texts = [_part(part) for part in parts]
    if all(text is not None for text in texts):
        return "\n".join(text for text in texts if text is not None)
    if role == "tool":
        return json.dumps(content, ensure_ascii=False, default=str)
    kinds = (part.get("type") or "unknown" if isinstance(part, Mapping) else type(part).__name__ for part in parts)
    odd = next(kind for kind, text in zip(kinds, texts, strict=True) if text is None)
    raise RowError(f"holds a message of {shortened(role)} with a part of the kind {shortened(odd)}, which is not text")


def _part(part: Any) -> str | None:
    if isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS:
        part = part.get("text")
    return part if isinstance(part, str) else None


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, even if they were written as JSON text."""
    if not isinstance(call := from_json(call), Mapping):
        return call
    if "function" not in call and "arguments" in call:
        call = {"type": "function", "function": call}
    function = from_json(call.get("function"))
    return dict(call) | {"function": _with_arguments(function, from_json)} if isinstance(function, Mapping) else call


def _with_arguments(function: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return dict(function) | ({"arguments": change(function["arguments"])} if "arguments" in function else {})


def _tools(tools: Any) -> list[Any] | None:
    """Return tools as a list of objects. Raises RowError if they are neither that nor its JSON text."""
    if is_empty(tools):
        return None
    found = from_json(tools)
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, list):
        raise RowError(f"holds tools that are neither a list nor JSON text of one ({shortened(repr(tools))})")
    return [from_json(tool) for tool in found] or None


def opening_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what the tokenizer itself puts before a text: bos, or nothing."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("a").input_ids[:1]) == [bos] else []


class RowReader:
    """Turns the rows of a source into documents.

    Chats are written as the text that a model was trained on, by its chat template, without the token that the tokenizer puts
    before every text. Content goes in as text and arguments of calls as objects, unless the template takes parts of a
    content, or arguments as text.
    """

    def __init__(self, column: str | None, tokenizer: PreTrainedTokenizerBase | None, source: str):
        """column: holds texts or chats; None: the usual ones. The source is named in errors."""
        self.column = column
        self.tokenizer = tokenizer
        self.source = source

    def texts(self, rows: Iterable[Row], origin: str, column: str | None = None) -> Iterator[str]:
        """Yield the text of each row that has one; `column` is where a named source has it, `origin` names the rows. Warns with
        the number of rows left out. Raises UserError if none of the first thousand can be read, and for chats without a chat
        template."""
        looked, left_out, first = 0, 0, ""
        try:
            for row in rows:
                looked += 1
                try:
                    document = document_of(row, self.column or column)
                    text = self._written(document) if isinstance(document, Chat) else document
                    if not is_whole(text):
                        raise RowError("holds half a character (one half of a surrogate pair)")
                    yield text
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
                "fix the rows, or name the column that holds text or chats with data.text_column in a recipe"
            )

    def _written(self, chat: Chat) -> str:
        """Render a document as text. Raises UserError without a template, and RowError if it refuses this chat."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise UserError(
                f"{self.source} holds chats (messages with roles), and this model's tokenizer has no chat template to "
                "write them with; take a model that was trained on chats, or write them out as text"
            )
        try:
            return self._rendered(self._typed(chat, self._takes_parts, self._takes_text)).removeprefix(self._opening)
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in chat.messages[:4])
            cause = shortened(" ".join(str(error).split()))
            raise RowError(
                f"holds a chat that the model's chat template refuses ({cause}) and that begins with the roles {shortened(roles)}"
            ) from error

    def _rendered(self, chat: Chat) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False))

    def _tried(self, chat: Chat) -> str:
        """Render a probe chat to see what the template does with it; "" if it refuses it."""
        try:
            return self._rendered(chat)
        except Exception:
            return ""

    @staticmethod
    def _typed(chat: Chat, parts: bool, text: bool) -> Chat:
        """Return the chat with contents in parts and arguments as text, if the template needs them."""
        messages = [dict(message) for message in chat.messages]
        for message in messages:
            if parts:
                message["content"] = [{"type": "text", "text": message["content"]}]
            if text and isinstance(message.get("tool_calls"), list):
                message["tool_calls"] = [_call_as_text(call) for call in message["tool_calls"]]
        return Chat(messages, chat.tools)

    @cached_property
    def _opening(self) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.bos_token) if opening_of(self.tokenizer) else ""

    @cached_property
    def _takes_parts(self) -> bool:
        chat = Chat([{"role": "user", "content": _PROBE}])
        return _PROBE not in self._tried(chat) and _PROBE in self._tried(self._typed(chat, parts=True, text=False))

    @cached_property
    def _takes_text(self) -> bool:
        function = {"name": "look", "arguments": {_PROBE: "x"}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        chat = Chat([{"role": "user", "content": _PROBE}, called])
        as_objects = self._tried(self._typed(chat, self._takes_parts, text=False))
        # refused, or as Python prints an object
        wrong = _PROBE not in as_objects or f"'{_PROBE}'" in as_objects
        return wrong and f'"{_PROBE}"' in self._tried(self._typed(chat, self._takes_parts, text=True))


def _call_as_text(call: Any) -> Any:
    def written(arguments: Any) -> Any:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)

    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    return dict(call) | {"function": _with_arguments(call["function"], written)}
