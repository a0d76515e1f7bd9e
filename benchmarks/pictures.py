"""Draws the site's pictures from results, from arrays' shapes, and by a small run.

    python benchmarks/pictures.py

Writes into docs/site/assets, light and dark:

    gaps*.svg      final losses against zero1: experiments/results/estimates.jsonl
    held*.svg      bytes per parameter between calls: benchmarks/methods_table.py
    paths*.svg     gradient descent of three methods on a quadratic in two dimensions
    streams*.svg   five half-rounds of acco, a drawing
    moving*.svg    zero1 and acco in six seconds: experiments/results/network.md

benchmarks/network_sweep.py draws speedup*.svg and step*.svg, benchmarks/peers.py draws
peers*.svg, benchmarks/network_map.py map*.svg.
"""

import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np

from acco_jax.command import palette
from acco_jax.command.charts import subplots

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
ASSETS = ROOT / "docs" / "site" / "assets"


class Style(NamedTuple):
    ink: str  # of text and marks
    lines: str  # of axes and grids
    waits: str  # of what waits


STYLES = {  # by the ending of a file's name
    "": Style("#24292f", "#d0d7de", "#c4c9cf"),
    "_dark": Style("#e6edf3", "#3d444d", "#5a626b"),
}


def styled() -> Iterator[str]:
    """Yields each ending of STYLES, with Matplotlib set to its colours."""
    mpl.rcParams["svg.hashsalt"] = "acco-jax"  # the same file from the same figures
    for ending, (ink, lines, _) in STYLES.items():
        names = (
            "text.color",
            "axes.labelcolor",
            "xtick.labelcolor",
            "ytick.labelcolor",
        )
        mpl.rcParams |= dict.fromkeys(names, ink)
        names = ("grid.color", "axes.edgecolor", "xtick.color", "ytick.color")
        mpl.rcParams |= dict.fromkeys(names, lines)
        yield ending


def save(figure: Any, name: str) -> None:
    """Writes a picture; the page's colour shows through."""
    figure.savefig(ASSETS / name, transparent=True, metadata={"Date": None})


def both(name: str, alt: str) -> str:
    """Returns Markdown of a result, of which GitHub and the site show one picture."""
    folder = "../../docs/site/assets"
    return (
        f"![{alt}]({folder}/{name}.svg#gh-light-mode-only)\n"
        f"![{alt}]({folder}/{name}_dark.svg#gh-dark-mode-only)"
    )


# ---- final losses

SETTINGS = {  # of estimates.jsonl
    "adamw, warm-up 30": "AdamW",
    "adamw, warm-up 15, batch x 4, 150 steps": "AdamW, batch x 4",
    "adamw, warm-up 100, 1,000 steps, 1.1M": "AdamW, 1.1M parameters",
    "nadamw, warm-up 30": "NAdamW",
}
VARIANTS = {
    "acco": "acco",
    "f.75s1.15": "halves 1 : 3, extrapolation 1.15",
    "f.875": "halves 1 : 7",
}
QUANTILE = {5: 2.776, 34: 2.035}  # of Student's t, 97.5 %, by the number of seeds


def gaps() -> list[tuple[str, str, float, float, int]]:
    """Returns setting, variant, mean difference in %, half of its interval, seeds."""
    from benchmarks import estimates

    rows = estimates.done(ROOT / "experiments" / "results" / "estimates.jsonl")
    found = []
    for one in estimates.tuned(estimates.by_seed(rows)):
        if one.name != "zero1":
            x, n = one.percents(), len(one.percents())
            error = statistics.stdev(x) / n**0.5
            where = SETTINGS[one.setting], VARIANTS[one.name]
            found.append((*where, statistics.fmean(x), QUANTILE[n] * error, n))
    settings, variants = list(SETTINGS.values()), list(VARIANTS.values())
    return sorted(found, key=lambda x: (settings.index(x[0]), variants.index(x[1])))


def draw_gaps(ending: str) -> None:
    ink, rows = STYLES[ending].ink, gaps()
    figure, (ax,) = subplots(7.2, 4.2, 1)
    ax.axvline(0, color=palette.METHODS["zero1"], lw=1.5)
    y, names, before = 0.0, {}, ""
    for setting, variant, mean, half, n in rows:
        y -= 1.0 if setting == before or not before else 1.6
        before = setting
        names[y] = f"{setting}\n{variant}"
        ax.errorbar(
            mean, y, xerr=half, fmt="o" if variant == "acco" else "D", ms=6, capsize=3,
            color=palette.METHODS["acco"], mfc=None if variant == "acco" else "none",
        )  # fmt: skip
        ax.text(1.02, y, f"{mean:+.1f} ± {half:.1f} %  (n = {n})", color=ink,
                transform=ax.get_yaxis_transform(), va="center")  # fmt: skip
    ax.set_yticks(list(names), list(names.values()))
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("final loss against zero1, %")
    save(figure, f"gaps{ending}.svg")


# ---- memory

PARTS = {
    "parameters": palette.COMPUTATION,
    "master weights": "#54a24b",
    "optimizer state": "#72b7b2",
    "in-flight gradients": "#f58518",
    "other state": "#b279a2",
}


def held() -> dict[str, dict[str, float]]:
    """Returns the bytes of each part, by method."""
    from benchmarks import methods_table

    found = {
        methods_table.label(*method): methods_table.parts(*method, workers=8)
        for method in methods_table.METHODS
    }
    return dict(sorted(found.items(), key=lambda x: sum(x[1].values())))


def draw_held(found: dict[str, dict[str, float]], ending: str) -> None:
    figure, (ax,) = subplots(7.2, 4.4, 1)
    left = np.zeros(len(found))
    for part, color in PARTS.items():
        width = np.array([x[part] for x in found.values()])
        ax.barh(range(len(found)), width, 0.7, left, color=color, lw=0, label=part)
        left += width
    for y, total in enumerate(left):
        ax.annotate(f"{total:.3g}", (total, y), (4, 0), textcoords="offset points",
                    va="center", fontsize=9)  # fmt: skip
    ax.set_yticks(range(len(found)), list(found))
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False, axis="y")
    ax.set_axisbelow(True)
    ax.set_xlabel("bytes per parameter")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5,
                  columnspacing=1, handlelength=1.2)  # fmt: skip
    save(figure, f"held{ending}.svg")


# ---- paths

CURVATURES = (1.0, 0.15)
BEGIN, RATE, STEPS, NOISE = (-3.0, 2.0), 0.6, 12, 1.0


def path(method: str) -> np.ndarray:
    """Returns committed parameters, one row an optimizer step, of the library itself.

    A step has two microbatches, each with a minimum of its own. All methods see the
    same ones, in the same order.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import acco_jax

    def loss_fn(params: dict, batch: jax.Array, rng: jax.Array) -> jax.Array:
        away = params["x"] - batch[0]
        return jnp.sum(jnp.array(CURVATURES) * away**2) / 2

    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    tx = getattr(acco_jax, method)(optax.sgd(RATE), mesh=mesh)
    rows = 2 // tx.calls_per_step  # of a call
    step = acco_jax.make_train_step(loss_fn, tx, microbatches=rows)
    params, state = acco_jax.start(tx, {"x": jnp.array(BEGIN)})
    minima = NOISE * np.random.default_rng(0).normal(size=(4 * STEPS, 2))
    found, call = {0: np.array(BEGIN)}, 0
    while max(found) < STEPS:
        batch = jnp.array(minima[call * rows : (call + 1) * rows])
        params, state, metrics = step(params, state, batch)
        committed = acco_jax.committed_params(state, params)["x"]
        found[int(metrics["step"])] = np.array(committed)
        call += 1
    return np.array([found[i] for i in range(STEPS + 1)])


def paths_figure(paths: dict[str, np.ndarray], style: Style = STYLES[""]) -> Any:
    """Returns a figure of paths, by method."""
    figure, (ax,) = subplots(7.2, 3.2, 1)
    x, y = np.meshgrid(np.linspace(-3.4, 2.6, 200), np.linspace(-0.5, 2.4, 150))
    loss = (CURVATURES[0] * x**2 + CURVATURES[1] * y**2) / 2
    ax.contour(x, y, loss, [0.02, 0.1, 0.3, 0.7, 1.3, 2.2, 3.4, 5], linewidths=0.7,
               colors=style.lines)  # fmt: skip
    for method, line in paths.items():
        width = 3.5 if method == "zero1" else 1.6  # acco's lies on it in parts
        ax.plot(*line.T, "o-", ms=width + 2, lw=width, color=palette.METHODS[method],
                label=method)  # fmt: skip
    ax.plot(0, 0, "+", ms=10, mew=1.5, color=style.ink)
    ax.grid(visible=False)
    ax.set_xlabel("parameter of the large curvature")
    ax.set_ylabel("of the small one")
    ax.legend(frameon=False, loc="upper right")
    return figure


# ---- half-rounds

HALF_ROUNDS = (  # name, computed, on the network, its effect
    ("pipeline fill", "g(−1) at θ(0)", "", ""),
    ("estimate", "g′(0) at θ(0)", "g(−1) → θ~(1)", "looks ahead from θ(0)"),
    ("commit", "g(0) at θ~(1)", "g′(0) → θ(1)", "advances the optimizer"),
    ("estimate", "g′(1) at θ(1)", "g(0) → θ~(2)", "looks ahead from θ(1)"),
    ("commit", "g(1) at θ~(2)", "g′(1) → θ(2)", "advances the optimizer"),
)


def draw_streams(ending: str) -> None:
    ink, lines, _ = STYLES[ending]
    figure, (ax,) = subplots(9.6, 3.1, 1)
    blue, orange, green = palette.COMPUTATION, "#c96a12", "#54a24b"
    text = {"ha": "center", "va": "center"}

    def arrow(begin: tuple, end: tuple, color: str, bend: float = 0.0) -> None:
        shape = {"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkA": 0,
                 "shrinkB": 0, "connectionstyle": f"arc3,rad={bend}"}  # fmt: skip
        ax.annotate("", end, begin, arrowprops=shape)

    for i, (name, computed, sent, effect) in enumerate(HALF_ROUNDS):
        ax.text(i, 1.55, name, weight="bold", **text)
        ax.barh(1, 0.9, 0.44, i - 0.45, color=blue, lw=0)
        ax.text(i, 1, computed, color="white", **text)
        fill = {"color": orange, "lw": 0} if sent else {"fc": "none", "ec": lines}
        ax.barh(0, 0.9, 0.44, i - 0.45, **fill)
        ax.text(i, 0, sent or "nothing to send", color="white" if sent else ink, **text)
        ax.text(i, -0.4, effect, fontsize=9, **text)
        if i:
            ax.axvline(i - 0.5, color=lines, lw=0.8, ls=":", ymin=0.3)
            arrow((i - 0.72, 0.78), (i - 0.28, 0.22), blue)
        if i > 1:
            arrow((i - 0.72, 0.22), (i - 0.28, 0.78), orange)
    for i in (1, 3):
        arrow((i, -0.55), (i + 1, -0.55), green, bend=0.3)
        ax.text(i + 0.5, -1.0, "its sum is kept for the commit", fontsize=9, **text)
    meanings = (
        (0, blue, "gradients that the next half-round sends"),
        (2.3, orange, "parameters that it computes at"),
    )
    for i, color, what in meanings:
        arrow((i - 0.45, -1.35), (i - 0.2, -1.35), color)
        ax.text(i - 0.12, -1.35, what, fontsize=9, va="center")
    ax.set(xlim=(-0.5, 4.5), ylim=(-1.5, 1.7), xticks=[])
    ax.set_yticks([1, 0], ["compute", "network"])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    save(figure, f"streams{ending}.svg")


# ---- the animation

MOVING = "6"  # Gbit/s, a row of the table
TOKENS = 1_572_864  # of a step there


def predicted() -> tuple[float, float, float]:
    """Returns ms: zero1's and acco's computation of a step, zero1's communication."""
    text = (ROOT / "experiments" / "results" / "network.md").read_text()
    row = re.search(rf"^\| {MOVING} \|(.*)$", text, re.M)
    zero1, acco, exposed, little = (float(x) for x in row[1].split("|")[:4])
    assert little < 0.001 * acco, "the animation has nothing exposed of acco's"
    return zero1 - exposed, acco, exposed


def draw_moving(ending: str) -> None:
    from benchmarks import timeline

    style = STYLES[ending]
    zero1, acco, communication = predicted()
    methods = {
        "zero1": ("waits for the network", zero1),
        "acco": ("computes the next half-batch meanwhile", acco),
    }
    until = 3 * (zero1 + communication)
    found = timeline.animation(
        methods, communication, until, TOKENS, style.ink, style.waits
    )
    (ASSETS / f"moving{ending}.svg").write_text(found)


def main() -> None:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    parts = held()
    paths = {method: path(method) for method in ("zero1", "dpu", "acco")}
    for ending in styled():
        draw_gaps(ending)
        draw_held(parts, ending)
        save(paths_figure(paths, STYLES[ending]), f"paths{ending}.svg")
        draw_streams(ending)
        draw_moving(ending)
    for row in gaps():
        print(*row)
    for method, line in paths.items():
        print(method, *np.round(line, 3).tolist())


if __name__ == "__main__":
    main()
