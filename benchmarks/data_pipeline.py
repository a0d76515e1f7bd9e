"""Rows and tokens a second that the data pipeline reads on one core.

python benchmarks/data_pipeline.py --consumed=29000

Times batches of the shape that experiments/quickstart.py trains on (and, with --length
and --batch, any other) out of a file of random tokens, larger than the processor's
caches, on one core without a thread that reads ahead; and prints the ratio to what the
quickstart consumes, `tokens_per_second` of its metrics.jsonl on the same machine. Exits
with 1 if that is less than five times as much.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from acco_jax import data
from acco_jax.data import stored

# The median of tokens_per_second that `make train` has logged on two free cores.
CONSUMED = 29_000


def corpus(path, tokens):
    """A corpus of random bytes, about 1,000 to a document."""
    draw = np.random.default_rng(0)
    with open(path, "wb") as file:
        for start in range(0, tokens, 2**22):
            part = draw.integers(0, 256, min(2**22, tokens - start), np.uint16)
            part[draw.random(len(part)) < 1e-3] = 256
            file.write(part.tobytes())
    train = stored.Tokens(path, "uint16", stored.block_sums(path))
    tokenizer = data.ByteTokenizer()
    return data.Corpus(tokenizer, train, train[:1000], tokens, 1000, 1, 1, 0)


def measure(held, args, **options):
    """The fastest of three times, in tokens/s: other processes only take time."""
    batches = data.train_iterator(
        held, length=args.length, batch_size=args.batch, seed=0,
        prefetch=False, **options,
    )  # fmt: skip
    next(batches)
    number = max(args.rows // args.batch, 1)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(number):
            next(batches)
        seconds.append(time.perf_counter() - start)
    return number * args.batch * args.length / min(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200_000_000, help="in the file")
    parser.add_argument("--rows", type=int, default=8000, help="to time")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="rows of a global batch")
    parser.add_argument(
        "--consumed", type=float, default=CONSUMED, help="tokens/s of the quickstart"
    )
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    worst = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        held = corpus(Path(folder) / "tokens", args.tokens)
        for name, options in {
            "packed": {},
            "document_mask": {"document_mask": True},
            "skew": {"skew": 0.5, "workers": 4},
        }.items():
            rate = measure(held, args, **options)
            worst = min(worst, rate / args.consumed)
            print(json.dumps({
                "pipeline": name,
                "rows_per_second": round(rate / args.length),
                "tokens_per_second": round(rate),
                "times_what_the_quickstart_consumes": round(rate / args.consumed, 1),
            }))  # fmt: skip
    sys.exit(0 if worst >= 5 else 1)


if __name__ == "__main__":
    main()
