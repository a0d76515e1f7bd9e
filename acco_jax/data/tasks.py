"""What a data set is read for: documents to go on with, or answers to instructions."""

from collections.abc import Mapping
from typing import Any

TASKS = ("pretrain", "instruct")

# A text, or a prompt and the answer to it.
Document = str | tuple[str, str]

# The columns of Alpaca's format, of which `input` may be missing or empty.
INSTRUCTION, INPUT, OUTPUT = "instruction", "input", "output"

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
    """Return the columns that are read too where a data set has them."""
    return () if task == "pretrain" else (INPUT,)


def document(record: Mapping[str, Any], task: str, text_feature: str) -> Document:
    """Return the document of a data set's record, whose columns are text."""
    if task == "pretrain":
        return record[text_feature]
    context = record.get(INPUT) or ""
    return alpaca_prompt(record[INSTRUCTION], context), record[OUTPUT]


def texts(document: Document) -> tuple[str, ...]:
    """Return the texts of a document: itself, or its prompt and its answer."""
    return (document,) if isinstance(document, str) else document
