"""The tasks that a data set is read for: continue documents, or answer instructions."""

import re
from collections.abc import Mapping
from typing import Any

TASKS = ("pretrain", "instruct")

# A text, or a prompt and the answer to it.
Document = str | tuple[str, str]

# The columns of Alpaca's format, of which `input` may be missing or empty.
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"

_HALF = re.compile("[\ud800-\udfff]")  # no UTF-8, but an escape in JSON
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
    """Return the columns of text that a data set must have for a task."""
    return (text_feature,) if task == "pretrain" else (INSTRUCTION, OUTPUT)


def optional_columns(task: str) -> tuple[str, ...]:
    """Return the columns that are also read if a data set has them."""
    return () if task == "pretrain" else (INPUT,)


def document(record: Mapping[str, Any], task: str, text_feature: str) -> Document:
    """Return the document of a data set's record, whose columns are text."""
    if task == "pretrain":
        return _encodable(record[text_feature])
    context = _encodable(record.get(INPUT) or "")
    prompt = alpaca_prompt(_encodable(record[INSTRUCTION]), context)
    return prompt, _encodable(record[OUTPUT])


def _encodable(text: str) -> str:
    """Return a text without byte order mark, halves of surrogates as U+FFFD."""
    if text.isascii():
        return text
    return _HALF.sub("\ufffd", text.lstrip("\ufeff"))


def texts(document: Document) -> tuple[str, ...]:
    """Return the texts of a document: itself, or its prompt and its answer."""
    return (document,) if isinstance(document, str) else document
