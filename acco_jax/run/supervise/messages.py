"""Messages between the commands of a run: lines of JSON, checked when they are read.

A line is {"Kind": {field: value, ...}}, of a class in this module. A line with another
kind, other fields, another type or a value out of range is a ValueError.

The meeting sends a `Challenge` first. The answer, a `Hello`, proves with an HMAC of the
challenge that its command has the run's token, and `Welcome` proves the same of the
meeting. The token itself is never sent.
"""

import dataclasses
import hashlib
import hmac
import json
import math
import os
import signal
import typing
from typing import Any

from acco_jax.command import exits

TOKEN = "ACCO_TOKEN"  # the environment variable
SHORTEST = 16  # characters of a token: a recorded proof lets a short one be guessed
LONGEST = 4000  # characters of a text in a message
LARGEST = 2**53  # of a number


@dataclasses.dataclass(frozen=True)
class Challenge:
    """The meeting's first message on a connection."""

    nonce: str
    token: bool  # whether the answer must prove a token


@dataclasses.dataclass(frozen=True)
class Hello:
    """A command's first message."""

    process: int
    processes: int
    host: str
    attempt: int  # the last one that it took part in; 0: none
    command: str  # a name that no other command has
    proof: str = ""


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The meeting has admitted a command."""

    host: str  # of process 0
    training: int  # processes that a new command waits for
    proof: str = ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """The meeting does not admit a command."""

    line: str


@dataclasses.dataclass(frozen=True)
class Alive:
    """The meeting's sign of life."""

    half_round: int | None  # of process 0
    awaited: str = ""  # processes that are not there yet


@dataclasses.dataclass(frozen=True)
class Go:
    """An attempt begins, with this place in it."""

    attempt: int
    coordinator: str
    process: int
    processes: int
    absent: str  # processes that do not take part


@dataclasses.dataclass(frozen=True)
class Save:
    """The process is to save and end."""


@dataclasses.dataclass(frozen=True)
class Judgment:
    """Reason why an attempt is over."""

    code: int
    line: str
    process: int | None  # whose end it was; None: nobody's in particular
    again: bool  # whether another attempt follows


@dataclasses.dataclass(frozen=True)
class Over:
    """All processes have ended well, with this code."""

    code: int


@dataclasses.dataclass(frozen=True)
class Beat:
    """A command's sign of life while its process runs."""

    half_round: int | None
    started: bool  # whether the process has given a sign of life
    silent: float  # seconds since the last one


@dataclasses.dataclass(frozen=True)
class Idle:
    """A command's sign of life while it has no process."""

    attempt: int  # the last one that it took part in


@dataclasses.dataclass(frozen=True)
class End:
    """End of a training process."""

    code: int  # an exit code, or minus a signal's number
    error: str = ""  # the line it ended with
    exception: str = ""  # an unexpected exception

    @property
    def good(self) -> bool:
        return self.code in (exits.FINISHED, exits.STOPPED)

    @property
    def suspicion(self) -> int:
        """Rank of the likelihood that this process is at fault; 0: likeliest."""
        if self.error:
            return 0
        if self.code == exits.LOST:  # its watchdog ended it
            return 1
        return 1 if self.code < 0 and self.code != -signal.SIGABRT else 2

    def __str__(self) -> str:
        if self.code >= 0:
            return self.exception or f"it ended with exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:  # a real-time signal has no name
            return f"killed by signal {-self.code}"


Message = (
    Challenge | Hello | Welcome | Refused | Alive | Go | Save | Judgment | Over
    | Beat | Idle | End
)  # fmt: skip
_KINDS = {kind.__name__: kind for kind in typing.get_args(Message)}
_HINTS = {kind: typing.get_type_hints(kind) for kind in _KINDS.values()}


def encode(message: Message) -> bytes:
    """Return a message as a line."""
    fields = dataclasses.asdict(message)
    return (json.dumps({type(message).__name__: fields}) + "\n").encode()


def decode(line: bytes) -> Message:
    """Return the message in a line.

    Raises:
      ValueError: if the line is not such a message.
    """
    try:
        content = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    match content:
        case dict() if len(content) == 1 and (name := next(iter(content))) in _KINDS:
            kind, fields = _KINDS[name], content[name]
        case _:
            raise ValueError("not a message")
    hints = _HINTS[kind]
    if not isinstance(fields, dict) or fields.keys() != hints.keys():
        raise ValueError(f"{name} has other fields")
    for field, value in fields.items():
        if not _fits(value, hints[field], least=-64 if field == "code" else 0):
            raise ValueError(f"{name}.{field} is not valid")
    return kind(**fields)


def _fits(value: Any, hint: Any, least: int) -> bool:
    """Return whether a value is of a type, in range, and safe to print."""
    match value:
        case bool():
            return hint is bool
        case int():
            return hint in (int, float, int | None) and least <= value < LARGEST
        case float():
            return hint is float and math.isfinite(value) and value >= least
        case str():
            return hint is str and len(value) <= LONGEST and value.isprintable()
    return value is None and hint == (int | None)


def printable(text: str) -> str:
    """Return a text that a message may carry: one line, not too long."""
    line = " ".join(text.split())[:LONGEST]
    return "".join(c if c.isprintable() else "?" for c in line)


def token() -> str:
    """Return the run's token, from the environment; "" without one.

    Raises:
      ValueError: if it is short.
    """
    text = os.environ.get(TOKEN, "")
    if text and len(text) < SHORTEST:
        raise ValueError(
            f"{TOKEN} has {len(text)} characters: give at least {SHORTEST} that nobody "
            "guesses, for example those that openssl rand -hex 16 prints."
        )
    return text


def proof(secret: str, role: str, nonce: str, hello: Hello) -> str:
    """Return what shows that the sender of a message has the token.

    Args:
      secret: the token.
      role: of the sender; one's proof does not serve the other.
      nonce: of the challenge.
      hello: the command's answer to it, whose name is as unpredictable.
    """
    fields = dataclasses.asdict(dataclasses.replace(hello, proof=""))
    text = json.dumps([role, nonce, fields], sort_keys=True)
    key = secret.encode(errors="surrogateescape")
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def proves(given: str, expected: str) -> bool:
    """Return, in constant time, whether a proof is the expected one."""
    return hmac.compare_digest(given.encode(), expected.encode())
