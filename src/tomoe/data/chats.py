"""Chats in rows of data, as text: through the chat template of the model that reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tomoe.errors import UserError, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# what ShareGPT calls the roles of chat templates
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "function_response": "tool"}


@dataclass(frozen=True)
class Chat:
    """One conversation."""

    messages: list[dict[str, Any]]
    """Each has `role` and `content`, as chat templates read them."""
    tools: list[Any] | None = None
    """The tools that the model was offered."""


def chat_of(value: Any, tools: Any = None, system: Any = None) -> Chat | None:
    """The chat that a column holds: a list of messages with role and content, or ShareGPT's from and value; else None.

    `tools` and `system` are what the row says of them beside the chat.
    """
    if not isinstance(value, list) or not value:
        return None
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    )
    for message in value:
        if not isinstance(message, Mapping):
            return None
        if isinstance(message.get("role"), str) and "content" in message:
            messages.append(dict(message))
        elif isinstance(message.get("from"), str) and "value" in message:
            role = message["from"]
            messages.append({"role": _ROLES.get(role, role), "content": message["value"]})
        else:
            return None
    return Chat(messages, tools if isinstance(tools, list) else None)


def answered(prompt: Any, completion: Any, tools: Any = None) -> str | Chat | None:
    """A prompt with its completion: two texts, joined as they are, or two parts of one chat; None if they are neither."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt + completion
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return chat_of(asked + said, tools) if isinstance(asked, list) and isinstance(said, list) else None


def chat_writer(tokenizer: PreTrainedTokenizerBase | None, origin: str) -> Callable[[Chat], str]:
    """What writes chats as the text that the model was trained on; `origin` names them in errors.

    A token that the template begins with is left out if the tokenizer puts it before every text itself. The function raises
    UserError if there is no template, or if the template refuses a chat.
    """
    opening = ""
    if tokenizer is not None and tokenizer.bos_token_id is not None:
        opens = list(tokenizer("a").input_ids[:1]) == [tokenizer.bos_token_id]
        opening = str(tokenizer.bos_token) if opens else ""

    def write(chat: Chat) -> str:
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                f"{origin} holds chats (messages with roles), and this model's tokenizer has no chat template to write them "
                "with; take a model that was trained on chats, or write them out as text"
            )
        try:
            text = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in chat.messages[:4])
            cause = shortened(" ".join(str(error).split()))
            raise UserError(
                f"the model's chat template refuses a chat of {origin} ({cause}), which begins with the roles "
                f"{shortened(roles)}; change the chats, or write them out as text"
            ) from error
        return str(text).removeprefix(opening)

    return write
