"""Conversations as tokens: a tokenizer's chat template, and the assistant's turns."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from acco_jax.data.tasks import ASSISTANT, Chat
from acco_jax.data.tokenizers import FileTokenizer, Tokenizer

# Around what a template's {% generation %} holds: no text has these noncharacters.
_MARKS = "\ufdd0", "\ufdd1"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class ChatTemplate:
    """The chat template of a tokenizer.json, in a sandbox, as transformers renders it.

    It differs from transformers in one function: `strftime_now` is undefined, so that
    equal conversations give equal tokens on every day.

    Attributes:
      fingerprint: names the template and its special tokens; fit for a file name.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Compile the template that lies beside a tokenizer's file.

        Raises:
          ValueError: there is none, or it cannot be read.
        """
        if not isinstance(tokenizer, FileTokenizer):
            raise ValueError(
                "data.task='chat' needs a tokenizer.json with a chat template: set "
                "data.tokenizer to its path, or to 'init_from'"
            )
        self._tokenizer, self._path = tokenizer, tokenizer.path
        said = tokenizer.described()
        self._source = _default(said.pop("chat_template"), tokenizer.path)
        self._special = said
        self._marked = _GENERATION.search(self._source) is not None
        try:
            self._template = _environment().from_string(self._source)
        except Exception as error:  # of jinja2's parser, and Python's on what it makes
            raise self._failed("cannot be read", error) from error
        named = json.dumps([self._source, self._special], sort_keys=True)
        self.fingerprint = f"chat-{hashlib.sha256(named.encode()).hexdigest()[:16]}"

    def encode_batch(
        self, chats: Sequence[Chat]
    ) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield the tokens of conversations, and which of them the assistant says.

        Yields:
          ids, int32 (n,); uint8 (n,), 1 where a token has a character of the
          assistant's; and the number of bytes of these.

        Raises:
          ValueError: the template fails, or its texts do not show the assistant's part.
        """
        found = [self.rendered(chat) for chat in chats]
        encoded = self._tokenizer.encode_rendered([text for text, _ in found])
        for chat, (text, spans), (ids, offsets) in zip(
            chats, found, encoded, strict=True
        ):
            targets = np.zeros(len(ids), np.uint8)
            for start, end in spans:
                targets |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
            targets[:1] = 0  # nothing comes before it
            if not targets.any():
                raise ValueError(
                    f"{self._path} has a chat template that renders nothing of the "
                    f"assistant {_where(chat)}: leave the conversation out"
                )
            size = sum(len(text[start:end].encode()) for start, end in spans)
            yield ids, targets, size

    def rendered(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and the parts that the assistant says.

        They are what {% generation %} holds. In a template without it they are what
        each of the assistant's messages adds to the messages before it, with the
        template's generation prompt.

        Raises:
          ValueError: as `encode_batch`.
        """
        whole = self._render(chat)
        if self._marked:
            text, spans = "", []
            for i, part in enumerate(re.split("[" + "".join(_MARKS) + "]", whole)):
                if i % 2:
                    spans.append((len(text), len(text) + len(part)))
                text += part
            return text, spans
        return whole, list(self._added(chat, whole))

    def _added(self, chat: Chat, whole: str) -> Iterator[tuple[int, int]]:
        """Yield what each of the assistant's messages adds to a text."""
        for i, (role, _) in enumerate(chat.messages):
            if role != ASSISTANT:
                continue
            before = self._render(Chat(chat.messages[:i]), add_generation_prompt=True)
            after = self._render(Chat(chat.messages[: i + 1]))
            if not after.startswith(before) or not whole.startswith(after):
                raise ValueError(
                    f"{self._path} has a chat template that renders message {i + 1} "
                    "in another way before later ones, or after its prompt, "
                    f"{_where(chat)}: mark the assistant's part in it with "
                    "{% generation %}"
                )
            yield len(before), len(after)

    def _render(self, chat: Chat, *, add_generation_prompt: bool = False) -> str:
        fields = {
            "messages": [
                {"role": role, "content": text} for role, text in chat.messages
            ],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render({**self._special, **fields})
            text.encode()  # raises for half a surrogate
        except Exception as error:  # whatever the template raises
            raise self._failed(f"fails {_where(chat)}", error) from error
        return text

    def _failed(self, what: str, error: Exception) -> ValueError:
        why = " ".join(str(error).split())[:300] or type(error).__name__
        return ValueError(
            f"{self._path} has a chat template that {what} ({why}): correct one of them"
        )


def _where(chat: Chat) -> str:
    begins = next((text for role, text in chat.messages if role == "user"), "")
    return f"at a conversation with the user's {begins[:60]!a}"


def _default(template: object, path: Path) -> str:
    """Return the template for conversations, of the one or the several of a file.

    Raises:
      ValueError: there is none.
    """
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f"{path} has no chat template: add chat_template.jinja beside it, or set "
            "data.task='instruct'"
        )
    return template


def _environment() -> Any:
    """Return an environment with what transformers gives to templates."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """The block {% generation %}, whose content is put between marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_marked")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return str(caller()).join(_MARKS)

    def tojson(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
