"""Conversion of text to token ids and back: bytes, a trained BPE, or a file's own."""

from __future__ import annotations

import abc
import contextlib
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from absl import logging

from acco_jax.command.paths import expanded
from acco_jax.core import small_files
from acco_jax.data import beside

_BYTES = 256
_MOST_GROWTH = 1000  # characters that normalizers make of one; "ﷺ" becomes 18
_MOST_IDS = 2**24  # more than any vocabulary has

# Ends of text of well-known tokenizers, in the order in which they are looked for.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(abc.ABC):
    """A conversion of text to token ids and back.

    Attributes:
      vocab_size: ids are 0 .. vocab_size - 1.
      end_of_text: the id that ends a text; no text is encoded to it.
      fingerprint: names the tokenizer; fit for a file name.
      prefix: ids that models published with it see before a text; often none.
    """

    vocab_size: int
    end_of_text: int
    fingerprint: str
    prefix: tuple[int, ...] = ()

    @property
    def text_vocab_size(self) -> int:
        """Ids of texts, of the prefix and of the end of text are less than this."""
        return self.vocab_size

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, int32 (n,), without an end-of-text id."""
        return self.encode_batch([text])[0]

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of several texts, each int32 (n,)."""

    @abc.abstractmethod
    def decode(self, ids: np.ndarray) -> str:
        """Return the text of ids, integers (n,).

        Ends of text, and ids beyond the vocabulary, are left out.
        Bytes that are not UTF-8 (a text cut in the middle) become U+FFFD.
        """

    @abc.abstractmethod
    def export(
        self, folder: Path, max_length: int, special: Mapping[str, int]
    ) -> dict[str, int]:
        """Write it into a folder in the form that AutoTokenizer of transformers reads.

        Args:
          folder: where it is written.
          max_length: of the model, in tokens.
          special: ids of tokens that `beside.SPECIAL` names, as far as they are known.

        Returns:
          The ids of the tokens that the folder names now, by their names.
        """


class ByteTokenizer(Tokenizer):
    """A tokenizer with a token for every byte of the UTF-8 text; id 256 ends a text."""

    vocab_size = _BYTES + 1
    end_of_text = _BYTES
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < _BYTES].astype(np.uint8).tobytes().decode(errors="replace")

    def export(
        self, folder: Path, max_length: int, special: Mapping[str, int]
    ) -> dict[str, int]:
        plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(_BYTES, 2 * _BYTES))
        vocabulary = {chr(b if b in plain else next(others)): b for b in range(_BYTES)}
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        return _export(folder, bpe, max_length, special)


class BpeTokenizer(Tokenizer):
    """A tokenizer of a byte-level BPE; the id after its last ends a text.

    The end of text is not a string of the vocabulary, so no text can contain it.

    Source: Sennrich, Haddow, Birch, "Neural Machine Translation of Rare Words with
    Subword Units" (2016); over bytes as in GPT-2 (Radford et al., 2019).
    """

    def __init__(self, bpe: tokenizers.Tokenizer):
        self._bpe = bpe
        self.end_of_text = bpe.get_vocab_size()
        self.vocab_size = self.end_of_text + 1
        digest = hashlib.sha256(bpe.to_str().encode()).hexdigest()
        self.fingerprint = f"bpe-{digest[:16]}"

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
        """Train on texts until there are `vocab_size` ids, end of text included.

        Raises:
          ValueError: if only the bytes need more ids, or the texts give fewer.
        """
        if vocab_size <= _BYTES:
            raise ValueError(
                f"data.vocab_size {vocab_size} is smaller than the {_BYTES} bytes and "
                f"the end of text: set it to {_BYTES + 1} or more"
            )
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(texts, trainer)
        tokenizer = cls(bpe)
        if tokenizer.vocab_size != vocab_size:
            raise ValueError(
                f"the training documents give a BPE of {tokenizer.vocab_size} tokens, "
                f"not data.vocab_size {vocab_size}: lower it, or train on more text"
            )
        return tokenizer

    @classmethod
    def load(cls, path: str | os.PathLike) -> BpeTokenizer:
        """Read a tokenizer.json.

        Raises:
          ValueError: if it is not one, or its ids have gaps.
        """
        bpe = _read(Path(path))
        if {*bpe.get_vocab().values()} != {*range(bpe.get_vocab_size())}:
            raise ValueError(f"{path} is damaged: its ids have gaps; restore it")
        return cls(bpe)

    def save(self, path: str | os.PathLike) -> None:
        """Write a tokenizer.json, whole or not at all."""
        beside.write(Path(path), self._bpe.to_str())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _no_panic("the tokenizer"):
            encodings = self._bpe.encode_batch_fast(list(texts))  # in parallel threads
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return self._bpe.decode(ids[ids < self.end_of_text].tolist())

    def export(
        self, folder: Path, max_length: int, special: Mapping[str, int]
    ) -> dict[str, int]:
        bpe = tokenizers.Tokenizer.from_str(self._bpe.to_str())
        return _export(folder, bpe, max_length, special)


class FileTokenizer(Tokenizer):
    """A tokenizer of any tokenizer.json, with an end of text of its own.

    Special tokens are not recognised in texts: "<|endoftext|>" in a text is encoded as
    its characters. If the vocabulary still makes the end of text of these characters,
    they are encoded in two parts. An end of text that a normalizer still makes is left
    out.
    """

    file = "tokenizer.json"

    def __init__(self, path: str | os.PathLike, end_of_text: str | None = None):
        """Read a tokenizer.json, and the files beside it that name its end of text.

        Args:
          path: of the file.
          end_of_text: a token of it; None: the eos_token of tokenizer_config.json or
            special_tokens_map.json beside it, or else a well-known one.

        Raises:
          ValueError: if it cannot be read, or no end of text is known.
        """
        path = Path(path)
        self._model = model = _read(path)
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True  # encodes them as text
        self.end_string, self.end_of_text = _end_of_text(path, model, end_of_text)
        self.vocab_size = 1 + max(model.get_vocab(with_added_tokens=True).values())
        with _no_panic(path):
            self.prefix = _prefix(model)
        named = f"{self.end_string}\n{model.to_str()}"
        digest = hashlib.sha256(named.encode()).hexdigest()
        self.fingerprint = f"file-{digest[:16]}"
        self.path = path
        self._check_end()

    def _check_end(self) -> None:
        """Raise a ValueError for an end that texts make and that cannot be cut."""
        spelled = self._model.decode([self.end_of_text], skip_special_tokens=False)
        self._spelled = spelled or self.end_string
        parts = [part for part in (spelled[:1], spelled[1:]) if part]
        if _is_cut(spelled, self.end_string) or any(
            self.end_of_text in ids for ids in self._encode(parts)
        ):
            raise _lost(self.path, self.end_string)

    @property
    def text_vocab_size(self) -> int:
        known = self._model.get_vocab(with_added_tokens=False).values()
        added = self._model.get_added_tokens_decoder().items()
        plain = [number for number, token in added if not token.special]
        return 1 + max(*known, *plain, *self.prefix, self.end_of_text)

    def save(self, folder: Path) -> None:
        """Copy the file into a folder, with the configuration beside it.

        The configuration is in tokenizer_config.json, with its end of text and its chat
        template.
        """
        said = beside.kept(self.path) | {"eos_token": self.end_string}
        beside.write(folder / beside.CONFIG, json.dumps(said) + "\n")
        beside.write(folder / self.file, self.path.read_text(encoding="utf-8"))

    def described(self) -> dict[str, Any]:
        """Return its chat template, and its special tokens as text."""
        said = beside.kept(self.path) | {"eos_token": self.end_string}
        return beside.special(said) | {"chat_template": said.get("chat_template")}

    def export(
        self, folder: Path, max_length: int, special: Mapping[str, int]
    ) -> dict[str, int]:
        self.save(folder)
        said = beside.read(folder / beside.CONFIG) | beside.as_it_is(max_length)
        return beside.written(folder, said, special, self._model)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = self._encode(texts)
        for i in (i for i, ids in enumerate(found) if self.end_of_text in ids):
            head, *tail = texts[i].split(self._spelled)
            cut, rest = self._spelled[:1], self._spelled[1:]
            parts = [head, *(rest + part for part in tail)]
            parts[:-1] = [part + cut for part in parts[:-1]]
            ids = np.concatenate(self._encode(parts))
            found[i] = ids[ids != self.end_of_text]
        return found

    def encode_rendered(
        self, texts: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of texts in which special tokens are spelled, with places.

        Returns:
          For each text its ids, int32 (n,), and where the characters of each token
          begin and end, int64 (n, 2).
        """
        self._model.encode_special_tokens = False
        # without special tokens it only trims the places, of spaces
        post, self._model.post_processor = self._model.post_processor, None
        try:
            with _no_panic(self.path):
                found = self._model.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._model.encode_special_tokens = True
            self._model.post_processor = post
        ids = (np.asarray(e.ids, np.int32) for e in found)
        places = (np.asarray(e.offsets, np.int64).reshape(-1, 2) for e in found)
        return list(zip(ids, places, strict=True))

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with _no_panic(self.path):
            encodings = self._model.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.asarray(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        kept: list[int] = ids[ids != self.end_of_text].tolist()
        with _no_panic(self.path):
            return self._model.decode(kept, skip_special_tokens=False)


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer of a SentencePiece model's pieces; its "</s>" ends a text.

    SentencePiece never makes this piece of characters in a text. It normalizes texts as
    the model specifies: runs of spaces may become one.
    """

    file = "tokenizer.model"

    def __init__(self, path: str | os.PathLike, end_of_text: str | None = None):
        """Read a `.model` file.

        Args:
          path: of the file.
          end_of_text: a piece of it; None: the eos_token of tokenizer_config.json or
            special_tokens_map.json beside it, or else its own end of sentence.

        Raises:
          ValueError: if it cannot be read, or has no end of text.
        """
        try:
            import sentencepiece
        except ImportError as error:
            raise ValueError(
                f"{path} needs sentencepiece: pip install 'acco-jax[sentencepiece]'"
            ) from error
        self._path, self._model = Path(path), sentencepiece.SentencePieceProcessor()
        try:
            proto = small_files.content(path, small_files.TOKENIZER)
            self._model.LoadFromSerializedProto(proto)
            for number in range(self._model.get_piece_size()):
                self._model.id_to_piece(number)  # is not text in a damaged file
        except (OSError, RuntimeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{path} is not a SentencePiece model: give a .model file"
            ) from error
        named = beside.named_end(self._path) if end_of_text is None else end_of_text
        end = self._model.eos_id() if named is None else self.token_to_id(named)
        if end is None or end < 0:
            raise ValueError(
                f"{path} has no end of text {named or ''!r}: set data.end_of_text to "
                "one of its pieces"
            )
        self.end_of_text = end
        self.end_string = self._model.id_to_piece(end)
        spelled = self._model.decode([end])
        # a whole symbol of the user's has no score, and texts hold it by accident
        known = len(spelled) == 1 or self._model.get_score(end) != 0
        if _is_cut(spelled, self.end_string) or (
            known and end in self._model.encode(spelled)
        ):
            raise _lost(self._path, self.end_string)
        self.vocab_size = self._model.get_piece_size()
        said = beside.read(self._path.with_name(beside.CONFIG))
        if said.get("add_bos_token") is True and self._model.bos_id() >= 0:
            self.prefix = (self._model.bos_id(),)
        digest = hashlib.sha256(proto + bytes(str(end), "ascii"))
        self.fingerprint = f"sentencepiece-{digest.hexdigest()[:16]}"

    def save(self, folder: Path) -> None:
        """Copy the file and its configuration into a folder, as `FileTokenizer`."""
        said = beside.kept(self._path) | {"eos_token": self.end_string}
        beside.write(folder / beside.CONFIG, json.dumps(said) + "\n")
        beside.write(folder / self.file, self._path.read_bytes())

    def export(
        self, folder: Path, max_length: int, special: Mapping[str, int]
    ) -> dict[str, int]:
        if self._model.normalize("a  \ufb01") != "\u2581a\u2581\u2581\ufb01":
            logging.warning(
                "%s changes characters or spaces before it looks for pieces, which "
                "transformers' LlamaTokenizer does not: texts have other tokens there",
                self._path,
            )
        self.save(folder)
        said = beside.read(folder / beside.CONFIG) | beside.as_it_is(
            max_length, "LlamaTokenizer"
        )
        # transformers puts one before each text where nothing is said
        said |= {"add_bos_token": bool(self.prefix), "add_eos_token": False}
        return beside.written(folder, said, special, self)

    def token_to_id(self, token: str) -> int | None:
        number = self._model.piece_to_id(token)
        return None if number == self._model.unk_id() else number

    def id_to_token(self, number: int) -> str | None:
        return self._model.id_to_piece(number) if number < self.vocab_size else None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = [np.asarray(x, np.int32) for x in self._model.encode(list(texts))]
        return [ids[ids != self.end_of_text] for ids in found]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        known = (ids != self.end_of_text) & (ids < self.vocab_size)  # a model has more
        return self._model.decode(ids[known].tolist())


def _is_cut(spelled: str, piece: str) -> bool:
    """Return whether a piece holds a part of a character, which is not text."""
    return "\ufffd" in spelled and "\ufffd" not in piece


def _lost(path: Path, end: str) -> ValueError:
    return ValueError(
        f"{path} makes the end of text {end!r} of texts' own characters, which would "
        "be lost: set data.end_of_text to a token that texts do not hold"
    )


def read_tokenizer(
    path: str | os.PathLike, end_of_text: str | None = None
) -> FileTokenizer | SentencePieceTokenizer:
    """Read a tokenizer.json or a SentencePiece `.model`, by the file's name.

    Raises:
      ValueError: if there is no such file, or it has no end of text.
    """
    path = expanded(path).absolute()
    if not path.is_file():
        raise ValueError(
            f"no tokenizer {path}: set data.tokenizer to 'bytes', 'bpe', or the path "
            "of a tokenizer.json or of a SentencePiece .model"
        )
    if path.suffix == ".model":
        return SentencePieceTokenizer(path, end_of_text)
    return FileTokenizer(path, end_of_text)


def _read(path: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer.json.

    Raises:
      ValueError: if it is not one, or is unsafe to use.
    """
    try:
        small_files.check(path, small_files.TOKENIZER)
        with _no_panic(path):
            model = tokenizers.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # tokenizers raises Exception itself
        why = small_files.reason(error).strip() or type(error).__name__
        why = why.splitlines()[0]
        raise ValueError(
            f"{path} is not a tokenizer.json ({why}): give a file that Hugging Face's "
            "tokenizers wrote"
        ) from error
    _check_growth(path, beside.read(path, small_files.TOKENIZER))
    largest = max(model.get_vocab().values(), default=0)
    if largest > _MOST_IDS:  # tokenizers makes a list that long of them
        raise ValueError(
            f"{path} is damaged: it has the id {largest}, above {_MOST_IDS}; restore it"
        )
    return model


def _check_growth(path: Path, said: dict[str, Any]) -> None:
    """Raise a ValueError if a tokenizer.json makes long texts of single characters.

    Raises:
      ValueError: it makes more than `_MOST_GROWTH` characters of one.
    """
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (size := _growth(said.get(part))) > _MOST_GROWTH:
            raise ValueError(
                f"{path} has a {part} that makes {size:.3g} characters of one, more "
                f"than {_MOST_GROWTH}: give a tokenizer without its replacements"
            )


def _growth(node: object) -> float:
    """Return the most characters that the replacements in a node may make of one."""
    parts = node if isinstance(node, list) else []
    own = 0
    if isinstance(node, dict):
        parts = [part for part in node.values() if isinstance(part, dict | list)]
        texts = (node.get("content"), node.get("prepend"))
        own = sum(len(text) for text in texts if isinstance(text, str))
    return max(own, 1.0) * math.prod(map(_growth, parts), start=1.0)


@contextlib.contextmanager
def _no_panic(what: str | Path) -> Iterator[None]:
    """Turn a panic of tokenizers' Rust, not an Exception, into a ValueError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        why = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{what} fails at a text ({why[:200]}): correct its regular expressions, "
            "or give another tokenizer"
        ) from error


def copied(folder: Path) -> FileTokenizer | SentencePieceTokenizer | None:
    """Return the tokenizer that `save` has copied into a folder, None without one."""
    kinds = FileTokenizer, SentencePieceTokenizer
    paths = [folder / kind.file for kind in kinds]
    path = next((path for path in paths if path.exists()), None)
    if path is None or not (folder / beside.CONFIG).exists():
        return None
    return read_tokenizer(path, beside.eos(folder / beside.CONFIG))


def _export(
    folder: Path, bpe: tokenizers.Tokenizer, max_length: int, special: Mapping[str, int]
) -> dict[str, int]:
    """Write a BPE whose next id becomes a special token that ends a text."""
    names = (f"<|endoftext{i or ''}|>" for i in itertools.count())
    end = next(name for name in names if bpe.token_to_id(name) is None)
    bpe.add_special_tokens([end])
    said = beside.as_it_is(max_length) | {"eos_token": end, "bos_token": end}
    beside.write(folder / "tokenizer.json", bpe.to_str())
    return beside.written(folder, said, special, bpe)


def _end_of_text(
    path: Path, model: tokenizers.Tokenizer, named: str | None
) -> tuple[str, int]:
    """Return the token that ends a text: the one named, or else the file's own."""
    named = beside.named_end(path) if named is None else named
    for token in _ENDS if named is None else (named,):
        if (number := model.token_to_id(token)) is not None:
            return token, number
    raise ValueError(
        f"{path} has no token {named!r}: set data.end_of_text to one that it has"
        if named is not None
        else f"{path} has no end of text that is known: set data.end_of_text to the "
        "token that ends its texts"
    )


def _prefix(model: tokenizers.Tokenizer) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer.json puts before a text."""
    encoded = model.encode("a")
    special = zip(encoded.ids, encoded.special_tokens_mask, strict=True)
    return tuple(i for i, _ in itertools.takewhile(lambda pair: pair[1], special))
