"""Causes of exposed communication, as far as a schedule tells, and advice."""

from typing import NamedTuple

from acco_jax.schedule.costs import Spent
from acco_jax.schedule.machines import SMALL_BYTES, Machine
from acco_jax.schedule.schedules import Collective, Loop, Schedule

COVERED = 0.01  # of a collective's time: exposed though it counts as overlapped
_REDUCTIONS = ("reduce-scatter", "all-reduce")


class Cause(NamedTuple):
    """A likely cause, and what to try; both "" for an overlapped collective."""

    text: str
    advice: str


def explained(cause: Cause) -> str:
    """Return a cause and its advice as one text."""
    return f"{cause.text} - try: {cause.advice}" if cause.advice else cause.text


def likely(c: Collective, spent: Spent, schedule: Schedule, machine: Machine) -> Cause:
    """Return why a collective, or a part of it, is exposed."""
    if c.asynchronous and c.done is None:
        return Cause(
            "unknown: the text does not say where it ends",
            "read the text where it is named, and report the form",
        )
    if c.hidden:
        return _too_little(c, spent)
    if c.asynchronous and spent.exposed <= COVERED * spent.seconds:
        return Cause(
            "beside operations without matrix products, which last as long", ""
        )
    taken = _slot(c, schedule) or _slot_in_loops(c, schedule)
    if taken is not None:
        return _taken(c, taken, machine)
    if c.where == "ENTRY":
        cause = _in_entry(c, schedule)
    else:
        cause = _in_loop(c, machine, schedule)
    cause = cause or _at_once(c, machine)
    if c.bytes < SMALL_BYTES:
        return Cause(
            f"{cause.text}; of {c.bytes} bytes it is only latency",
            "more computation in each execution, or send it with something larger",
        )
    accumulating = _accumulation(c, schedule)
    if accumulating is not None and c.kind in _REDUCTIONS:
        times = accumulating.iterations
        loop = (
            f"{'' if times is None else f'{times} '}iterations of {accumulating.name}"
        )
        return Cause(
            f"{cause.text}; and gradients are reduced in each of the {loop}",
            f"{cause.advice}; sum over the microbatches on each device (shard_map) and "
            "reduce once",
        )
    return cause


def _too_little(c: Collective, spent: Spent) -> Cause:
    if spent.exposed <= COVERED * spent.seconds:
        return Cause("", "")
    share = 1 - spent.exposed / spent.seconds
    text = f"too little compute beside it: enough for {share:.0%} of its time"
    if c.flops_carried is not None and c.flops_carried < c.flops_between:
        text += ", which goes on only in the fusions that carry it"
    advice = "more rows or microbatches beside it, fewer bytes, or a faster network"
    return Cause(text, advice)


def _slot(c: Collective, schedule: Schedule) -> Collective | None:
    """Return a collective under way at c's launch, or instead of c until it ends.

    Compilers run one asynchronous collective at a time unless options allow more.
    """
    end = c.start if c.done is None else c.done
    for o in schedule.collectives:
        if o is c or o.where != c.where or not o.asynchronous or o.done is None:
            continue
        if o.start < c.start < o.done or c.start < o.start < o.done <= end:
            return o
    return None


def _slot_in_loops(c: Collective, schedule: Schedule) -> Collective | None:
    """Return an asynchronous collective in a loop that synchronous c could overlap.

    A loop with collectives of its own occupies the slot while it runs.
    """
    if c.asynchronous or c.where != "ENTRY":
        return None
    inside = (o for o in schedule.collectives if o.asynchronous and o.where != "ENTRY")
    others = (o for o in inside if o.groups != c.groups)
    return max(others, key=lambda o: o.bytes * o.times, default=None)


def _taken(c: Collective, other: Collective, machine: Machine) -> Cause:
    smaller = other.bytes < c.bytes
    size = "a smaller one" if smaller else "another one"
    if other.where != c.where:
        size += f" in the loop's body {other.where}"
    advice = "compute the small one before, with an optimization_barrier after it"
    if not smaller:
        advice = "pin the order with optimization_barrier, a piece of work behind each"
    if machine.topology.platform == "gpu":
        advice += ", or set xla_gpu_experimental_parallel_collective_overlap_limit"
    return Cause(f"the slot is taken by {size}, {other.kind} {other.name}", advice)


def _in_entry(c: Collective, schedule: Schedule) -> Cause | None:
    products = [o.position for o in schedule.operations if o.flops]
    end = c.start if c.done is None else c.done
    if not products:
        return Cause("the program has no matrix products", "audit the train step")
    if end < products[0]:
        return Cause(
            "every product comes after it",
            "send it at the end of the step before, or behind the first products",
        )
    if c.start < products[-1]:
        return None
    if c.kind in _REDUCTIONS and c is not _last(schedule):
        return Cause(
            "every product comes before it: it sends what they have computed",
            "a method that sends one half-batch's gradients beside the next one's "
            "computation (acco, dpu)",
        )
    return Cause(
        "the last one: every product comes before it",
        "a method that gathers beside computation (acco); if it is one, fewer rows in "
        "a microbatch and more microbatches: at large ones memory moves it to the end",
    )


def _accumulation(c: Collective, schedule: Schedule) -> Loop | None:
    """Return the outermost loop around a collective, if it is over microbatches.

    A loop over microbatches holds loops over layers, and the gradient's operations. If
    JAX's names put the gradient around the loop, the loop is over layers.
    """
    before, gradient, _ = c.op_name.partition("transpose(")
    if gradient and "/while/" not in before:
        return None
    around = [loop for loop in schedule.loops if loop.body == c.where]
    while around:  # up to ENTRY, or to what is called or is a conditional's branch
        outer = [x for x in schedule.loops if x.body == around[-1].where]
        if not outer:
            break
        around.append(outer[0])
    if not around:
        return None
    outermost = around[-1]
    inside = (x for x in schedule.loops if x.where == outermost.body)
    return outermost if any(x.flops_per_trip for x in inside) else None


def _last(schedule: Schedule) -> Collective | None:
    """Return the last collective of ENTRY of at least half the largest's bytes."""
    own = [c for c in schedule.collectives if c.where == "ENTRY"]
    largest = max((c.bytes for c in own), default=0)
    return next((c for c in reversed(own) if 2 * c.bytes >= largest), None)


def _in_loop(c: Collective, machine: Machine, schedule: Schedule) -> Cause | None:
    inside = any(loop.body == c.where for loop in schedule.loops)
    if machine.topology.platform != "gpu" or not inside:
        return None
    kind, advice = c.kind.replace("-", "_"), "unroll the loop by 2"
    if c.kind in (*_REDUCTIONS, "all-gather"):
        advice += (
            ", so that one trip's lies beside another's products; before jax 0.11 "
            f"xla_gpu_enable_pipelined_{kind}=True is another way"
        )
    return Cause(f"{_how(c)} in the loop's body: what comes next needs it", advice)


def _at_once(c: Collective, machine: Machine) -> Cause:
    if machine.topology.platform == "gpu":
        return Cause(
            f"{_how(c)}: what comes next needs it, or its order is not pinned",
            "a piece of work that does not depend on it, and optimization_barrier",
        )
    return Cause(
        f"{_how(c)} for {machine.topology.chip.title}",
        "the options of acco_jax.compiler_options; one packed buffer of rows of 1024",
    )


def _how(c: Collective) -> str:
    if c.asynchronous:
        return "no matrix product between its launch and its end"
    return "made synchronous by this compiler"
