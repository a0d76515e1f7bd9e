"""What ACCO's estimate costs: variants of its recurrence, learning on one device.

    python benchmarks/estimates.py --runs=RUNS.jsonl --out=OUT.jsonl [--part=0/2]

The recurrence of acco_jax/methods/acco.py, written down a second time for one device (a
step is the body of a loop, the whole run one program), with what might bring it closer
to zero1. A line of RUNS is a JSON object with fields of `Run`; what OUT has already is
not run again, and `--part=0/2` takes every second line, for two processes. The model is
experiments/quickstart.py's (0.45M parameters, float32, the source of Python's standard
library), a step 4,096 tokens; experiments/dynamics.py's (1.1M, 2,048 tokens); or
`small` (0.27M, 2,048 tokens), also on `headers`, the C headers in this environment's
packages. Without --runs it does SHOWN.

`--tune=adamw,muon` looks for each variant's best rate instead, by its mean loss on the
seeds of TUNING: from a rate in the middle to its neighbours, a factor of 1.5 away,
until the best is not at an edge. `--together=10` makes one program of ten runs, which
suits an accelerator (JAX_PLATFORMS=cuda JAX_DEFAULT_MATMUL_PRECISION=highest).
`--pairs=20` then runs each variant at its best rate on as many seeds more. Variants are
named as the tables do: zero1, acco, f.75, f.75s1.15.

Each line of OUT is the run with its held-out loss (nats per token, of the same 199k
targets), the loss of its last 60 steps, and how far the point that it computed at was
from the commit, as a part of the commit's own way.

`--table=OUT.jsonl` prints two tables: each variant at its own best rate, by the tuning
seeds that it has, against zero1 at its own, on the other seeds; and differences to
zero1 of equal optimizer, rate, steps, warm-up, batch, experiment and seed.
"""

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import re
import runpy
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

from acco_jax.core.gradients import with_arrays  # noqa: E402
from acco_jax.methods.optimizer import choose  # noqa: E402
from acco_jax.run import preparation, prepared  # noqa: E402
from acco_jax.run.build import optimizers  # noqa: E402

TARGETS = 400_000  # bound the evaluation
TUNING = 10, 100, 101  # the seeds that choose rates
SEEDS = 5  # that compare, at least
MICROBATCH = 4  # rows whose activations a core's cache holds
OPTIMIZERS = {
    "adamw": functools.partial(optax.adamw, b2=0.95, weight_decay=0.1),
    "nadamw": functools.partial(optax.nadamw, weight_decay=0.1),
    "muon": lambda rate, mask: optax.contrib.muon(
        rate, weight_decay=0.1, weight_decay_mask=mask
    ),
    "adan": functools.partial(optax.adan, weight_decay=0.1),
    "lion": functools.partial(optax.lion, weight_decay=1.0),
    "sgd": lambda rate, mask: optax.sgd(rate, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """A variant, and how it learns."""

    name: str = "acco"
    opt: str = "adamw"
    lr: float = 1.5e-3
    warm: int = 30  # steps of a rising rate, before a cosine
    seed: int = 0
    f: float = 0.5  # share of a step in the second half, computed at the estimate
    s: float = 1.0  # extrapolation: the estimate goes so many times as far
    k: int = 0  # the first steps are synchronous; as many as there are: zero1
    r: float = 0.0  # weight of the mean gradient of former steps in an estimate's
    q: float = 0.0  # an estimate also goes on with so much of the last step
    clip: bool = False  # an estimate's gradient is no longer than the last commit's
    follow: bool = False  # s follows the projection of past commits on past estimates
    batch: int = 1  # times the experiment's own
    experiment: str = "quickstart"
    corpus: str = "stdlib"
    steps: int = 300

    @property
    def setting(self) -> str:
        """What runs that are compared have in common."""
        text = f"{self.opt}, warm-up {self.warm}"
        text += f", batch x {self.batch}" if self.batch > 1 else ""
        text += f", {self.steps:,} steps" if self.steps != Run.steps else ""
        text += SIZES.get(self.experiment, "")
        return text + (f", {self.corpus}" if self.corpus != "stdlib" else "")

    @property
    def numbers(self) -> tuple[float, ...]:
        """What a program takes, so that runs of equal `opt` and `f` share one."""
        shared = self.lr, self.warm, self.s, self.k, self.r, self.q
        return *shared, self.clip, self.follow


SIZES = {"dynamics": ", 1.1M", "small": ", 0.27M"}
MIDDLE = {"sgd": 0.15, "lion": 3e-4, "muon": 6e-3}  # rates where tuning starts
ZERO1 = {"name": "zero1", "k": 10**6}
SHOWN = [{}, ZERO1, {"name": "f.75", "f": 0.75}, {"name": "s1.3", "s": 1.3}]


def trainer(opt: str, f: float):  # type: ignore[no-untyped-def]
    """Returns a program: (loss, parameters, tokens, a run's numbers) -> end, errors."""

    def train(loss_fn, params, tokens, lr, warm, s, k, r, q, clip, follow):  # type: ignore[no-untyped-def]
        steps = tokens.shape[0] - 1
        cut = round(tokens.shape[1] * (1 - f))

        def rate(t: jax.Array) -> jax.Array:
            part = jnp.clip((t - warm) / (steps - warm), 0, 1)
            cosine = lr * 0.5 * (1 + jnp.cos(jnp.pi * part))
            return jnp.where(t < warm, lr * (t + 1) / (warm + 1), cosine)

        decayed = functools.partial(optimizers._decayed, None)
        inner = OPTIMIZERS[opt](rate, mask=decayed)

        def step(theta, state, gradient, limit=1.0):  # type: ignore[no-untyped-def]
            norm = optax.tree.norm(gradient)
            factor = jnp.minimum(1, limit / jnp.maximum(norm, 1e-9))
            gradient = jax.tree.map(lambda g: g * factor, gradient)
            updates, state = inner.update(gradient, state, theta)
            return optax.apply_updates(theta, updates), state, norm

        def gradient(theta, rows):  # type: ignore[no-untyped-def]
            def found(microbatch):  # type: ignore[no-untyped-def]
                def summed(p):  # type: ignore[no-untyped-def]
                    return loss_fn(p, {"tokens": microbatch}, None)[:2]

                return jax.value_and_grad(summed, has_aux=True)(theta)

            def add(total, microbatch):  # type: ignore[no-untyped-def]
                return jax.tree.map(jnp.add, total, found(microbatch)), None

            few = rows.reshape(-1, math.gcd(MICROBATCH, len(rows)), *rows.shape[1:])
            none = jax.tree.map(jnp.zeros_like, jax.eval_shape(found, few[0]))
            ((nats, targets), grads), _ = jax.lax.scan(add, none, few)
            return nats / targets, jax.tree.map(lambda g: g / targets, grads)

        def one_step(carry, x):  # type: ignore[no-untyped-def]
            theta, state, second, mean, moved, norm, found = carry
            t, rows = x
            past = jnp.where(t > 0, r, 0.0)
            bias = jnp.maximum(1 - 0.9**t, 1e-6)
            guess = jax.tree.map(
                lambda g, m: (g + past * m / bias) / (1 + past), second, mean
            )
            limit = jnp.where(clip, jnp.minimum(norm, 1.0), 1.0)
            ahead = step(theta, state, guess, limit)[0]
            far = jnp.where(follow, found, s)
            point = jax.tree.map(
                lambda a, b, d: a + far * (b - a) + q * d, theta, ahead, moved
            )
            point = choose(t < k, theta, point)
            loss, fresh = gradient(theta, rows[:cut])
            other, after = gradient(point, rows[cut:])
            arrived = choose(t < k, after, second)
            whole = jax.tree.map(lambda a, b: (1 - f) * a + f * b, fresh, arrived)
            mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, whole)
            new, state, norm = step(theta, state, whole)
            moved = jax.tree.map(jnp.subtract, new, theta)
            error = optax.tree.norm(jax.tree.map(jnp.subtract, point, new))
            way = jax.tree.map(jnp.subtract, ahead, theta)
            projection = optax.tree.vdot(way, moved) / optax.tree.vdot(way, way)
            found = 0.9 * found + 0.1 * projection
            here = (1 - f) * loss + f * other, error / optax.tree.norm(moved)
            return (new, state, after, mean, moved, norm, found), here

        zeros = jax.tree.map(jnp.zeros_like, params)
        first = gradient(params, tokens[0, cut:])[1]
        one = jnp.ones_like(optax.tree.norm(first))
        start = params, inner.init(params), first, zeros, zeros, one, one
        steps_of = jnp.arange(steps), tokens[1:]
        (theta, *_), found = jax.lax.scan(one_step, start, steps_of)
        return theta, found

    return train


def headers(folder: Path) -> None:
    """Writes the distinct C headers of installed packages as files of text."""
    packages = Path(sysconfig.get_path("purelib"))
    texts = {path.read_bytes() for path in packages.rglob("*.h")}
    for i, text in enumerate(sorted(texts)):
        (folder / f"{i:05}.txt").write_bytes(text)


class Data:
    """What runs of a seed learn from."""

    def __init__(
        self, experiment: str, corpus: str, seed: int, batch: int, steps: int
    ) -> None:
        small = experiment == "small"
        path = ROOT / "experiments" / f"{'quickstart' if small else experiment}.py"
        c = runpy.run_path(str(path))["get_config"]()
        if small:
            c.model.width, c.microbatch_size = 96, 2
        c.model.attention = "xla"  # in float32, also on a GPU
        rows = batch * c.devices * c.microbatch_size * c.microbatches_per_step
        c.devices, c.method, c.seed, c.steps = 1, "zero1", seed, steps
        c.microbatch_size, c.microbatches_per_step = rows // 2, 2
        with tempfile.TemporaryDirectory() as folder:
            if corpus == "headers":
                c.data.name, c.data.path = "text_folder", str(Path(folder, "text"))
                Path(c.data.path).mkdir()
                headers(Path(c.data.path))
                c.data.data_dir = str(Path(folder, "tokens"))
            e = preparation.prepare(c, Path(folder), jax.devices()[:1])
            batches = prepared.batches(e)
            self.tokens = jnp.stack([next(batches)["tokens"] for _ in range(steps + 1)])
            self.params = prepared.initial(e)[0]
            limit = TARGETS // (rows * c.length)
            self.held_out = list(prepared.held_out_batches(e, limit))
        self.loss_fn = with_arrays(e.loss_fn)


@jax.jit
def evaluated(loss_fn, params, tokens):  # type: ignore[no-untyped-def]
    return jnp.stack(loss_fn(params, {"tokens": tokens}, None)[:2])


def named(name: str) -> dict[str, float]:
    """Returns the fields of a variant's name."""
    if name in ("acco", "zero1"):
        return {"k": ZERO1["k"]} if name == "zero1" else {}
    found = re.fullmatch(r"(?:f([.\d]+))?(?:s([.\d]+))?", name)
    assert found, name
    return {k: float(x) for k, x in zip("fs", found.groups(), strict=True) if x}


def _rate(middle: float, step: int) -> float:
    return float(f"{middle * 1.5**step:.3g}")


def tune(runs: list[Run], out: Path, together: int) -> None:
    """Climbs to the best rate of each run's variant, from the run's own."""
    for run in runs:
        losses: dict[int, float] = {}
        best, wanted = 0, {-1, 0, 1}
        while wanted:
            tried = {
                step: [
                    dataclasses.replace(run, lr=_rate(run.lr, step), seed=seed)
                    for seed in TUNING
                ]
                for step in sorted(wanted, key=abs)
            }
            run_all([each for few in tried.values() for each in few], out, together)
            for step, few in tried.items():
                found = [r["loss"] for r in done(out) if Run(**r["run"]) in few]
                losses[step] = statistics.fmean(found)
            best = min(losses, key=lambda i: math.inf if math.isnan(losses[i]) else
                       losses[i])  # fmt: skip
            wanted = {best - 1, best + 1} - set(losses)


def done(out: Path) -> list[dict]:
    if not out.exists():
        return []
    return [json.loads(line) for line in out.read_text().splitlines()]


data = functools.lru_cache(32)(Data)


@functools.cache
def programs(opt: str, f: float):  # type: ignore[no-untyped-def]
    """Returns a program of several runs."""
    numbers = len(Run().numbers)
    return jax.jit(jax.vmap(trainer(opt, f), in_axes=(None, *[0] * (2 + numbers))))


def run_all(runs: list[Run], out: Path, together: int = 1) -> None:
    """Does the runs that `out` lacks; those of one program side by side."""
    known = {Run(**row["run"]) for row in done(out)}
    alike: dict[Any, list[Run]] = collections.defaultdict(list)
    for run in dict.fromkeys(runs):
        if run not in known:
            kind = run.opt, run.f, run.experiment, run.corpus, run.batch, run.steps
            alike[kind if together > 1 else run].append(run)
    for few in alike.values():
        for i in range(0, len(few), together):
            run_some(few[i : i + together], out, together)


def run_some(runs: list[Run], out: Path, together: int) -> None:
    """Does runs of one program, which has always as many."""
    padded = [*runs, *[runs[-1]] * (together - len(runs))]
    sets = [data(r.experiment, r.corpus, r.seed, r.batch, r.steps) for r in padded]
    loss_fn = sets[0].loss_fn
    params = jax.tree.map(lambda *xs: jnp.stack(xs), *[d.params for d in sets])
    tokens = jnp.stack([d.tokens for d in sets])
    numbers = map(jnp.asarray, zip(*[run.numbers for run in padded], strict=True))
    program = programs(runs[0].opt, runs[0].f)
    ends, (losses, errors) = program(loss_fn, params, tokens, *numbers)
    for i, (run, d) in enumerate(zip(runs, sets, strict=False)):
        theta = jax.tree.map(lambda x, i=i: x[i], ends)
        nats, targets = np.sum(
            [evaluated(loss_fn, theta, x["tokens"]) for x in d.held_out], 0, float
        )
        row = {
            "run": dataclasses.asdict(run),
            "loss": nats / targets,
            "train": float(losses[i, -60:].mean()),
            "error": float(errors[i, 20:].mean()),
        }
        with out.open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


Losses = dict[tuple[str, float, str], dict[int, float]]  # setting, rate, name; seed


def by_seed(rows: list[dict]) -> Losses:
    found: Losses = collections.defaultdict(dict)
    for row in rows:
        run = Run(**row["run"])
        found[run.setting, run.lr, run.name][run.seed] = row["loss"]
    return found


def percents(found: dict[int, float], base: dict[int, float]) -> list[float]:
    """Returns the differences of equal seeds."""
    return [100 * (found[i] / base[i] - 1) for i in found if i in base]


def against(found: dict[int, float], base: dict[int, float]) -> str:
    """Returns the mean difference of equal seeds and its standard error."""
    parts = percents(found, base)
    if not parts:
        return "-"
    text = f"{statistics.fmean(parts):+.2f}"
    if len(parts) > 1:
        text += f" ± {statistics.stdev(parts) / len(parts) ** 0.5:.2f}"
    return f"{text} %"


def table(rows: list[dict]) -> str:
    """Returns Markdown: each variant against zero1, seed by seed and on average."""
    losses = by_seed(rows)
    lines = [
        "| learning | rate | variant | loss, by seed | against zero1 |",
        "|---|---|---|---|---|",
    ]
    for (setting, lr, name), found in losses.items():
        base = losses.get((setting, lr, "zero1"), {})
        shown = ", ".join(f"{found[i]:.4f}" for i in sorted(found))
        text = "" if name == "zero1" else against(found, base)
        lines.append(f"| {setting} | {lr:g} | {name} | {shown} | {text} |")
    return "\n".join(lines)


class Tuned(NamedTuple):
    """A variant at its own best rate, and zero1 at its own: losses by seed."""

    setting: str
    name: str
    rate: float
    losses: dict[int, float]
    base: dict[int, float]

    def percents(self) -> list[float]:
        """Differences of equal seeds."""
        return percents(self.losses, self.base)


def best_rates(losses: Losses) -> dict[tuple[str, str], float]:
    """Returns the best rate of the tuning seeds, by setting and variant.

    Only rates with the most of these seeds count.
    """
    ranks: dict[tuple[str, str], tuple[int, float]] = {}
    rates: dict[tuple[str, str], float] = {}
    for (setting, lr, name), found in losses.items():
        of = [found[seed] for seed in TUNING if seed in found]
        rank = -len(of), statistics.fmean(of) if of else math.inf
        if rank <= ranks.get((setting, name), rank):
            ranks[setting, name], rates[setting, name] = rank, lr
    return rates


def tuned(losses: Losses) -> list[Tuned]:
    """Returns each variant at its own best rate, of variants with five seeds there.

    The rate is the best of the tuning seeds, the losses are of all others.
    """
    rates = best_rates(losses)
    every = []
    for (setting, name), lr in rates.items():
        found, base = (
            {i: x for i, x in losses[setting, at, n].items() if i not in TUNING}
            for n, at in ((name, lr), ("zero1", rates.get((setting, "zero1"), lr)))
        )
        if len(found) >= SEEDS:
            every.append(Tuned(setting, name, lr, found, base))
    return every


def best(rows: list[dict]) -> str:
    """Returns Markdown: each variant at its own best rate, against zero1 at its own."""
    losses = by_seed(rows)
    lines = [
        "| learning | variant | its best rate | of | loss | against zero1 |",
        "|---|---|---|---|---|---|",
    ]
    for setting, name, lr, found, base in tuned(losses):
        tried = [k[1] for k in losses if (k[0], k[2]) == (setting, name)]
        rates = ", ".join(f"{x:g}" for x in sorted(set(tried)) if
                          TUNING[0] in losses[setting, x, name])  # fmt: skip
        text = "" if name == "zero1" else against(found, base)
        mean = statistics.fmean(found.values())
        lines.append(f"| {setting} | {name} | {lr:g} | {rates} | {mean:.4f} | {text} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, help="a JSON object a line; default SHOWN")
    parser.add_argument("--out", type=Path, default=Path("estimates.jsonl"))
    parser.add_argument("--tune", help="optimizers whose rates to look for")
    parser.add_argument("--pairs", type=int, default=0, help="seeds at the best rates")
    parser.add_argument("--together", type=int, default=1, help="runs of a program")
    parser.add_argument("--variants", default="zero1,acco,f.75s1.15")
    parser.add_argument("--experiment", default="small")
    parser.add_argument("--corpus", default="stdlib", choices=("stdlib", "headers"))
    parser.add_argument("--part", default="0/1", help="I/N: every N-th line from I on")
    parser.add_argument("--table", type=Path, help="print a table of this and stop")
    args = parser.parse_args()
    if args.table:
        print(f"{best(done(args.table))}\n\n{table(done(args.table))}")
        return
    if args.tune:
        asked_runs = [
            Run(name=name, opt=opt, lr=MIDDLE.get(opt, 3e-3), seed=TUNING[0],
                experiment=args.experiment, corpus=args.corpus, **named(name))  # type: ignore[arg-type]
            for opt in args.tune.split(",") for name in args.variants.split(",")
        ]  # fmt: skip
        tune(asked_runs, args.out, args.together)
        rates = best_rates(by_seed(done(args.out)))
        run_all(
            [
                dataclasses.replace(run, lr=rates[run.setting, run.name], seed=seed)
                for seed in (i for i in range(args.pairs + 1) if i not in TUNING)
                for run in asked_runs
            ],
            args.out,
            args.together,
        )
        return
    asked = SHOWN
    if args.runs:
        asked = [json.loads(x) for x in args.runs.read_text().splitlines()]
    part, parts = map(int, args.part.split("/"))
    asked_runs = [Run(**fields) for fields in asked[part::parts]]
    run_all(asked_runs, args.out, args.together)


if __name__ == "__main__":
    main()
