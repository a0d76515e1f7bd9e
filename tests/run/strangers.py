"""A stranger at the port of a run's meeting: python tests/run/strangers.py PORT ...

It opens connections and sends what a scanner, a broken or a hostile program might send,
for some seconds, and prints how many connections it has made. Seed and number alone
determine what a connection sends.
"""

import argparse
import collections
import contextlib
import json
import random
import socket
import struct
import time

VALUES = (
    -1, 0, 1, 2, 2**31, 2**53, 10**30, -(10**9), 1.5, -0.0, 1e308, float("nan"),
    float("inf"), True, False, None, "", "0", "x" * 5000, "\0\x1b[31m", "\ud800", [],
    {}, [[]], {"a": 1},
)  # fmt: skip
KINDS = {
    "Hello": {"process": 1, "processes": 3, "host": "h", "attempt": 0, "command": "c",
              "proof": ""},
    "Beat": {"half_round": 3, "started": True, "silent": 0.5},
    "End": {"code": -9, "error": "", "exception": ""},
    "Idle": {"attempt": 0},
    "Judgment": {"code": 5, "line": "lost", "process": 0, "again": False},
    "Go": {"attempt": 1, "coordinator": "h:1", "process": 0, "processes": 3,
           "absent": ""},
    "Over": {"code": 0}, "Save": {}, "Alive": {"half_round": 1, "awaited": ""},
    "Challenge": {"nonce": "n", "token": True}, "Refused": {"line": "no"},
    "Welcome": {"host": "h", "training": 0, "proof": ""},
}  # fmt: skip
HTTP = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
TLS = bytes.fromhex("16030100c8010000c40303") + b"\x5a" * 200


def line(kind, fields):
    return (json.dumps({kind: fields}) + "\n").encode("utf-8", "surrogatepass")


def lines(draw, *, seats):
    """Lines of one connection; without `seats` none that takes a process's place."""
    sent = []
    for number in range(draw.randint(1, 6)):
        kind = "Hello" if number == 0 and draw.random() < 0.8 else draw.choice([*KINDS])
        fields = dict(KINDS[kind])
        for _ in range(draw.randint(0, 2) if seats else 1):
            if fields:
                fields[draw.choice([*fields])] = draw.choice(VALUES)
        if draw.random() < 0.1:
            fields[str(draw.random())] = draw.choice(VALUES)
        if kind == "Hello" and not seats:
            number = draw.choice([-1, 3, 10**9, True, None, "1"])
            how_many = {"processes": draw.choice([0, 2, 4, -3])}
            attempt = {"attempt": draw.choice([-1, 9, 10**9])}
            fields |= draw.choice([{"process": number}, attempt, how_many])
        sent.append(line(kind, fields))
    return sent


def damaged(draw, data):
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data))
        match draw.randrange(3):
            case 0:
                data[place] = draw.randrange(256)
            case 1:
                del data[place : place + draw.randint(1, 9)]
            case 2:
                data[place:place] = draw.randbytes(draw.randint(1, 9))
        data = data or bytearray(b"\n")
    return bytes(data)


def contents(draw, *, seats):
    """What one connection sends, and its kind."""
    kind = draw.choice(
        ["lines"] * 6 + ["damaged"] * 4
        + ["noise", "zeros", "deep", "HTTP", "TLS", "nothing", "long", "number"]
    )  # fmt: skip
    match kind:
        case "lines":
            return kind, lines(draw, seats=seats)
        case "damaged":
            return kind, [damaged(draw, x) for x in lines(draw, seats=False)]
        case "noise":
            return kind, [draw.randbytes(draw.randint(1, 9999))]
        case "zeros":
            return kind, [b"\0" * draw.choice([1, 10**4, 10**7])]
        case "deep":
            deep = draw.choice([b"[", b'{"a":']) * draw.randint(1000, 10000)
            return kind, [deep + b"\n"]
        case "long":
            text = b'{"Hello": "' + b"x" * draw.choice([60000, 66000, 10**6]) + b'"}\n'
            return kind, [text]
        case "number":
            digits = draw.choice([20, 4000, 60000])
            return kind, [b'{"Idle": {"attempt": ' + b"9" * digits + b"}}\n"]
        case _:
            return kind, [{"HTTP": HTTP, "TLS": TLS}.get(kind, b"")]


def connect(address, draw, kept, *, seats):
    """Makes one connection; some stay open."""
    kind, data = contents(draw, seats=seats)
    there = socket.create_connection(address, timeout=2)
    there.settimeout(0.5)
    with contextlib.suppress(OSError):
        if draw.random() < 0.3:
            there.recv(4096)  # the challenge
        for part in data:
            there.sendall(part)
        if draw.random() < 0.2:
            there.shutdown(socket.SHUT_WR)
        if draw.random() < 0.2:
            there.recv(4096)
    if draw.random() < 0.2:  # a reset instead of an end
        there.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if draw.random() < 0.3:
        kept.append(there)
        if len(kept) > 200:
            kept.popleft().close()
    else:
        there.close()
    return kind


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.002, help="between two")
    parser.add_argument("--seats", action="store_true", help="claim processes' places")
    args = parser.parse_args()
    until = time.monotonic() + args.seconds
    made, kept, number = collections.Counter(), collections.deque(), 0
    while time.monotonic() < until:
        draw = random.Random(f"{args.seed} {number}")
        number += 1
        try:
            address = ("127.0.0.1", args.port)
            made[connect(address, draw, kept, seats=args.seats)] += 1
        except OSError:  # nobody listens, between two runs
            made["refused"] += 1
            time.sleep(0.05)
        time.sleep(args.pause)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
