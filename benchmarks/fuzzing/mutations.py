"""What fuzz.py does to valid inputs: to bytes, to JSON, to values of a config."""

import ast
import copy
import json
import random
import re
from collections.abc import Callable
from typing import Any

HUGE = (2**31, 2**32, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, -1, -(2**63))
# Written into text where a number was; the last has more digits than Python reads.
NUMBERS = ("0", "-1", "1e400", "NaN", "Infinity", "0x10", "1_0", *map(str, HUGE),
           "9" * 5000)  # fmt: skip
NAMES = ("", ".", "..", "/", "a/b", "__class__", "evil.Module", "os.system", "train",
         "text", "é", "\ud800", "\0", "a\nb", "x" * 3000)  # fmt: skip
BYTES = (b"\0", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\r", b"\n", b'"',
         b"[" * 60_000, b'{"a":' * 30_000, b"\xff" * 8, b"\x7f\xff\xff\xff", b"PAR1",
         b"ARROW1", b"cos\nsystem\n(S'echo'\ntR.", b"\x1f\x8b\x08\0")  # fmt: skip

Draw = random.Random


def content(draw: Draw, data: bytes) -> bytes:
    """Mutates bytes one to four times."""
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        data = draw.choice(_OF_BYTES)(draw, data)
    return data


def _place(draw: Draw, data: bytes) -> int:
    """Returns a place in bytes, seldom among zeros, of which some formats have many."""
    for _ in range(50):
        place = draw.randrange(len(data) + 1)
        if data[place : place + 1].strip(b"\0"):
            return place
    return draw.randrange(len(data) + 1)


def _flip(draw: Draw, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 3, 20))):
        place = _place(draw, data)
        if place < len(changed):
            changed[place] = draw.choice((changed[place] ^ (1 << draw.randrange(8)),
                                          draw.randrange(256)))  # fmt: skip
    return bytes(changed)


def _cut(draw: Draw, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _remove(draw: Draw, data: bytes) -> bytes:
    start = _place(draw, data)
    return data[:start] + data[start + draw.randrange(1, 40) :]


def _insert(draw: Draw, data: bytes) -> bytes:
    place = _place(draw, data)
    some = draw.choice((*BYTES, draw.randbytes(draw.randrange(1, 40))))
    return data[:place] + some + data[place:]


def _repeat(draw: Draw, data: bytes) -> bytes:
    start = _place(draw, data)
    part = data[start : start + draw.randrange(1, 400)]
    return data[:start] + part * draw.choice((2, 2, 50)) + data[start:]


def _overwrite(draw: Draw, data: bytes) -> bytes:
    place = _place(draw, data)
    some = draw.choice((b"\xff" * 4, b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7,
                        b"\xff" * 4 + b"\x7f", b"\x80" * 9 + b"\1"))  # fmt: skip
    return data[:place] + some + data[place + len(some) :]


def _number(draw: Draw, data: bytes) -> bytes:
    """Puts another number where one is written in decimal digits."""
    found = list(re.finditer(rb"\d+(\.\d+)?", data[:200_000]))
    if not found:
        return _overwrite(draw, data)
    match = draw.choice(found)
    return data[: match.start()] + draw.choice(NUMBERS).encode() + data[match.end() :]


def _structure(draw: Draw, data: bytes) -> bytes:
    """Mutates JSON, one value or a value a line; what is no JSON as bytes."""
    lines = data.splitlines(keepends=True)
    try:
        return dumped(tree(draw, json.loads(data)))
    except (ValueError, RecursionError):
        pass
    try:
        number = draw.randrange(len(lines))
        lines[number] = dumped(tree(draw, json.loads(lines[number]))) + b"\n"
        return b"".join(lines)
    except (ValueError, RecursionError):
        return _flip(draw, data)


_OF_BYTES: tuple[Callable[[Draw, bytes], bytes], ...] = (
    _flip, _flip, _cut, _remove, _insert, _repeat, _overwrite, _number, _structure,
    _structure, _structure, _structure,
)  # fmt: skip


def dumped(value: Any) -> bytes:
    """Writes JSON; half a surrogate, which UTF-8 does not have, stays an escape."""
    return json.dumps(value).encode()


def any_value(draw: Draw) -> Any:
    """Returns a JSON value of any type."""
    return draw.choice((
        None, True, False, 0, 1, -1, 0.5, 1e308, float("nan"), float("inf"),
        draw.choice(HUGE), draw.choice(NAMES), draw.choice(NAMES), "1", [], {}, [None],
        [[]], {"": 0}, {"a": {"b": []}}, [1, "a", None], list(range(50)),
        nested(draw.choice((3, 50, 400))),
    ))  # fmt: skip


def nested(depth: int) -> Any:
    """Returns lists, one in the other."""
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def tree(draw: Draw, value: Any) -> Any:
    """Mutates one node of a JSON value: its type, its name, whether it is there."""
    value = copy.deepcopy(value)
    nodes = [node for node in _containers(value) if node]
    if not nodes or draw.random() < 0.05:
        return any_value(draw)
    node = draw.choice(nodes)
    key = (
        draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
    )
    match draw.randrange(6):
        case 0 | 1:
            node[key] = any_value(draw)
        case 2:
            node[key] = _near(draw, node[key])
        case 3:
            del node[key]
        case 4 if isinstance(node, dict):
            node[draw.choice(NAMES)] = node.pop(key)
        case 4:
            node.insert(key, any_value(draw))
        case _ if isinstance(node, dict):
            node[draw.choice(NAMES)] = any_value(draw)
        case _:
            node.append(copy.deepcopy(node[key]))
    return value


def _near(draw: Draw, value: Any) -> Any:
    """Returns a value of the same type, often an extreme one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return draw.choice((0, -value, value + 1, value * 10**6, *HUGE))
    if isinstance(value, str):
        return draw.choice((value[:-1], value + value, value.upper(), *NAMES))
    return type(value)() if value is not None else 0


def _containers(value: Any) -> list[Any]:
    found, left = [], [value]
    while left:
        node = left.pop()
        if isinstance(node, dict | list):
            found.append(node)
            left += node.values() if isinstance(node, dict) else node
    return found


# Values of config fields and flags, as they would be written in Python.
LITERALS = (
    "None", "True", "False", "0", "1", "2", "3", "7", "8", "-1", "0.5", "1.5", "-0.5",
    "1e-30", "1e308", "nan", "inf", "-inf", "2147483648", "9223372036854775808",
    "1" + "0" * 30, "1" + "0" * 400, "''", "'x'", "'auto'", "'float32'", "'float64'",
    "'int8'", "'bytes'", "'bpe'", "'acco'", "'diloco'", "'cellm'", "'adaptive'",
    "'replay:nowhere'", "'replay:'", "'a\\nb'", "'\\x00'", "'\\ud800'", "'('",
    "'/'", "'.'", "'nowhere'", "'nowhere.json'", "'records.jsonl'", "'workdir'",
    "'os:nothing'", "'nowhere:f'", "':'", "'.:f'", "'a..b:f'", "b'bytes'", "()", "(1,)",
    "(0, 0)", "(1, 'x')", "((),)", "(('a', 1),)", "(('(', 1),)", "(('a', {}),)",
    "(('a', {'learning_rate': None}),)", "(('a', {'b1': 'x'}),)", "[]", "[1, [2]]",
    "{}", "{'a': 1}", "{1: 2}", "{'': {}}", "{'b1': None}", "{'b1': 2}",
    "{'mask': 1}", "{'learning_rate': 1}", "{'momentum': 'x'}", "'" + "x" * 3000 + "'",
)  # fmt: skip


def literal(text: str) -> Any:
    """Returns the value that is written so in Python, nan and inf among them."""
    try:
        return (
            float(text) if text.strip("-") in ("nan", "inf") else ast.literal_eval(text)
        )
    except (ValueError, SyntaxError):
        return text


def argument(draw: Draw, text: str) -> str:
    """Mutates one argument of a command line, which cannot hold NUL."""
    name, equals, value = text.partition("=")
    match draw.randrange(6):
        case 0:
            return f"{name}={draw.choice(LITERALS)}".replace("\0", "")
        case 1:
            return f"{name}={draw.choice((*NAMES, *NUMBERS))}".replace("\0", "")
        case 2:
            return name
        case 3:
            name = _text(draw, name)
        case _:
            value = _text(draw, value)
    return f"{name}{equals}{value}"[:2000].replace("\0", "")


def _text(draw: Draw, text: str) -> str:
    data = content(draw, text.encode(errors="surrogatepass"))
    return data.decode(errors="surrogateescape")
