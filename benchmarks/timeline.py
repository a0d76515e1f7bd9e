"""What a synchronous method and acco do when: as boxes, as a figure, as an animation.

benchmarks/pictures.py writes the animation, colab/how_acco_works.ipynb the figure. The
caller gives the times.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from acco_jax.command import palette

NETWORK = ("reduce-scatter", "all-gather")


class Box(NamedTuple):
    """Work from `begin` to `end`, in the unit of the caller."""

    name: str  # computation, waiting or a collective
    begin: float
    end: float


def boxes(
    method: str, computation: float, communication: float, until: float
) -> list[Box]:
    """Return what begins before `until`.

    Args:
      method: zero1, or one that overlaps: acco or dpu.
      computation: time of a step's gradients.
      communication: time to reduce the gradients and to gather the parameters once.
      until: when to end.
    """
    whole = {"zero1": 1.0, "dpu": 1.0, "acco": 0.5}[method] * computation
    found, begin, call = [], 0.0, 0
    while begin < until:
        end = begin + whole
        found.append(Box("computation", begin, end))
        # the first call of a method that overlaps has nothing to send
        sends = end if method == "zero1" else begin
        done = sends + communication
        if method == "zero1" or call:
            middle = sends + communication / 2
            found += [Box(NETWORK[0], sends, middle), Box(NETWORK[1], middle, done)]
        else:
            done = end
        if done > end:
            found.append(Box("waiting", end, done))
        begin, call = max(end, done), call + 1
    return found


def computed(found: Sequence[Box], time: float) -> float:
    """Return the time that was spent on gradients before `time`."""
    work = (x for x in found if x.name == "computation")
    return sum(max(0.0, min(x.end, time) - x.begin) for x in work)


def color(name: str) -> str:
    """Return a box's colour."""
    return {"computation": palette.COMPUTATION, **palette.COLLECTIVES}[name]


def draw(ax: Any, found: Sequence[Box], until: float, title: str) -> None:
    """Draw boxes on axes of Matplotlib: computation above the network."""
    for name, begin, end in found:
        lane = 1 if name in ("computation", "waiting") else 0
        style = (
            {"fc": "none", "ec": "#9aa0a6", "hatch": "////", "lw": 0}
            if name == "waiting"
            else {"color": color(name), "ec": "white"}
        )
        ax.barh(lane, end - begin, 0.8, begin, **style)
    ax.set(xlim=(0, until), ylim=(-0.6, 1.6))
    ax.set_yticks([1, 0], ["compute", "network"])
    ax.tick_params(axis="y", length=0)
    ax.grid(visible=False)
    ax.set_title(title, loc="left", fontsize=10)


# ---- the animation

WIDTH, PANEL, LEFT, RIGHT, LANE = 720, 122, 76, 16, 30
SECONDS, MOVES = 6, 0.9  # of which so much moves; then the end is shown
TICKS = 54  # values of a counter while it moves


def animation(
    methods: dict[str, tuple[str, float]],
    communication: float,
    until: float,
    tokens: float,
    ink: str,
    lines: str,
) -> str:
    """Return SVG in which time passes over the methods' boxes, with a counter each.

    Args:
      methods: what to write beside each name, and its computation as for `boxes`.
      communication: as for `boxes`.
      until: when to end.
      tokens: of a step.
      ink: colour of text.
      lines: colour of axes, and of what waits.
    """
    scale = (WIDTH - LEFT - RIGHT) / until
    height = PANEL * len(methods) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="14">',
        f"<style>{_motion()}text{{fill:{ink}}}</style>",
        '<defs><pattern id="wait" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V7" stroke="{lines}" '
        'stroke-width="4"/></pattern><clipPath id="past"><rect class="past" '
        f'x="{LEFT}" width="{WIDTH - LEFT - RIGHT}" height="{height}"/></clipPath>',
        "</defs>",
    ]
    for row, (method, (words, computation)) in enumerate(methods.items()):
        found = boxes(method, computation, communication, until)
        top = row * PANEL
        hue = palette.METHODS[method]
        parts += [
            f'<text x="{LEFT}" y="{top + 24}"><tspan font-weight="bold" '
            f'style="fill:{hue}">{method}</tspan> {words}</text>',
            *_counter(found, until, tokens / computation, top + 24),
        ]
        for lane, word in enumerate(("compute", "network")):
            y = top + 38 + lane * (LANE + 6) + LANE / 2
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 5:g}" text-anchor="end">{word}</text>'
            )
        drawn = [_rect(box, top, scale, until) for box in found if box.begin < until]
        parts += ['<g opacity="0.22">', *drawn, "</g>"]
        parts += ['<g clip-path="url(#past)">', *drawn, "</g>"]
    bottom = PANEL * len(methods)
    marks = "".join(
        f"M{LEFT} {34 + row * PANEL}v{2 * LANE + 14}" for row in range(len(methods))
    )
    parts += [
        f'<path class="now" d="{marks}" stroke="{ink}"/>',
        *_legend(bottom + 18, lines),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _motion() -> str:
    """CSS: the past grows, a line moves, each number is shown in its turn."""
    end, way = f"{MOVES:.0%}", WIDTH - LEFT - RIGHT
    tick = 100 * MOVES / TICKS - 0.001  # before the next number appears
    return (
        f".past{{transform-origin:{LEFT}px 0}}"
        f".past{{animation:grow {SECONDS}s linear infinite}}"
        f".now{{animation:move {SECONDS}s linear infinite}}"
        f".n{{opacity:0;animation:show {SECONDS}s step-end infinite}}"
        f".last{{animation:last {SECONDS}s step-end infinite}}"
        f"@keyframes grow{{0%{{transform:scaleX(0)}}{end},100%{{transform:none}}}}"
        f"@keyframes move{{{end},100%{{transform:translateX({way}px)}}}}"
        f"@keyframes show{{0%{{opacity:1}}{tick:.4f}%,100%{{opacity:0}}}}"
        f"@keyframes last{{0%{{opacity:0}}{end},100%{{opacity:1}}}}"
        "@media(prefers-reduced-motion:reduce){*{animation:none!important}"
        f".now{{transform:translateX({way}px)}}}}"
    )


def _counter(
    found: Sequence[Box], until: float, rate: float, y: float
) -> Iterator[str]:
    place = f'x="{WIDTH - RIGHT}" y="{y:g}" text-anchor="end" font-weight="bold"'
    for i in range(TICKS + 1):
        number = f"{rate * computed(found, until * i / TICKS) / 1e6:.1f}M tokens"
        delay = SECONDS * MOVES * i / TICKS
        how = f'class="n" style="animation-delay:{delay:.2f}s"'
        if i == TICKS:
            how = 'class="last"'
        yield f"<text {place} {how}>{number}</text>"


def _rect(box: Box, top: float, scale: float, until: float) -> str:
    lane = box.name in NETWORK
    y = top + 38 + lane * (LANE + 6)
    fill = "url(#wait)" if box.name == "waiting" else color(box.name)
    x, end = LEFT + box.begin * scale, LEFT + min(box.end, until) * scale
    return (
        f'<rect x="{x + 0.5:.1f}" y="{y}" width="{max(end - x - 1, 0):.1f}" '
        f'height="{LANE}" rx="2" fill="{fill}"/>'
    )


def _legend(y: float, lines: str) -> Iterator[str]:
    names = ("computation", *NETWORK, "waiting")
    for i, name in enumerate(names):
        x = LEFT + i * 150
        fill = "url(#wait)" if name == "waiting" else color(name)
        yield f'<rect x="{x}" y="{y - 11}" width="14" height="14" fill="{fill}"/>'
        yield f'<text x="{x + 20}" y="{y}">{name}</text>'
