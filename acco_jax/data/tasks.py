"""The tasks that a data set is read for: documents, instructions, conversations."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

TASKS = ("pretrain", "instruct", "chat")


class Chat(NamedTuple):
    """A conversation."""

    messages: tuple[tuple[str, str], ...]  # role and content of each


# A text, a prompt and the answer to it, or a conversation.
Document = str | tuple[str, str] | Chat

MESSAGES = "messages"  # the column of conversations
ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool")

# The columns of Alpaca's format, of which `input` may be missing or empty.
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"

_HALF = re.compile("[\ud800-\udfff]")  # no UTF-8, but an escape in JSON
_MARK = re.compile("[\ufdd0\ufdd1]")  # noncharacters, which mark turns in `chat`
_WITH_INPUT = """\
Below is an instruction that describes a task, paired with an input that provides \
further context. Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:
"""
_WITHOUT_INPUT = """\
Below is an instruction that describes a task. Write a response that appropriately \
completes the request.

### Instruction:
{instruction}

### Response:
"""


def alpaca_prompt(instruction: str, context: str = "") -> str:
    """Return the prompt of an instruction, and of its input if it has one.

    Source: Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model", 2023.
    """
    if context:
        return _WITH_INPUT.format(instruction=instruction, input=context)
    return _WITHOUT_INPUT.format(instruction=instruction)


def columns(task: str, text_feature: str) -> tuple[str, ...]:
    """Return the columns that a data set must have for a task: of text, or MESSAGES."""
    known = {"instruct": (INSTRUCTION, OUTPUT), "chat": (MESSAGES,)}
    return known.get(task, (text_feature,))


def optional_columns(task: str) -> tuple[str, ...]:
    """Return the columns that are also read if a data set has them."""
    return (INPUT,) if task == "instruct" else ()


def document(record: Mapping[str, Any], task: str, text_feature: str) -> Document:
    """Return the document of a record: of texts, or of a `conversation`."""
    if task == "chat":
        chat: Chat = record[MESSAGES]
        return chat
    if task == "pretrain":
        return _encodable(record[text_feature])
    context = _encodable(record.get(INPUT) or "")
    prompt = alpaca_prompt(_encodable(record[INSTRUCTION]), context)
    return prompt, _encodable(record[OUTPUT])


def conversation(messages: Any) -> Chat:
    """Return a conversation.

    Raises:
      ValueError: `messages` are no list of roles and texts. The message continues a
        sentence about the record.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"has no list in {MESSAGES!r}: write one of role and content, or set "
            "data.task to what the columns are for"
        )
    found = []
    for number, message in enumerate(messages, 1):
        role, text = (
            message.get(name) if isinstance(message, dict) else None
            for name in ("role", "content")
        )
        if role not in ROLES:
            raise ValueError(
                f"has message {number} with role {role!a:.100}: choose one of "
                f"{', '.join(ROLES)}"
            )
        if not isinstance(text, str):
            raise ValueError(
                f"has message {number} with content {text!a:.100}: write a string"
            )
        found.append((str(role), _MARK.sub("\ufffd", _encodable(text))))
    if ASSISTANT not in dict(found):
        raise ValueError(f"has {MESSAGES!r} without one of the assistant: leave it out")
    return Chat(tuple(found))


def _encodable(text: str) -> str:
    """Return a text without byte order mark, halves of surrogates as U+FFFD."""
    if text.isascii():
        return text
    return _HALF.sub("\ufffd", text.lstrip("\ufeff"))


def texts(document: Document) -> tuple[str, ...]:
    """Return the texts of a document: itself, prompt and answer, or roles and texts."""
    if isinstance(document, Chat):
        return tuple(text for message in document.messages for text in message)
    return (document,) if isinstance(document, str) else document
