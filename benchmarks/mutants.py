"""Fifty faults, each of which some test must notice: see `benchmarks/mutations.py`.

A fault is known by the lines that it changes, not by their file, so that it outlives
moves. Each must occur once in acco_jax/.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault."""

    name: str
    part: str  # methods, layout, exchange, step, data, runner or plan
    before: str  # of the code, as it stands there
    after: str


MUTANTS = (
    # ---- methods
    Mutant(
        "acco commits in the other half",
        "methods",
        "return state.calls_done & 1 == 1",
        "return state.calls_done & 1 == 0",
    ),
    Mutant(
        "acco takes the carried gradient off",
        "methods",
        "both = jax.tree.map(jnp.add, (gradient, totals), before)",
        "both = jax.tree.map(jnp.subtract, (gradient, totals), before)",
    ),
    Mutant(
        "acco counts a commit of nothing",
        "methods",
        "steps=state.steps + jnp.int32(commit & (totals.weight != 0)),",
        "steps=state.steps + jnp.int32(commit),",
    ),
    Mutant(
        "dpu warms up one call longer",
        "methods",
        "overlaps = self.delayed and call >= self.warmup",
        "overlaps = self.delayed and call > self.warmup",
    ),
    Mutant(
        "wp predicts with the old optimizer state",
        "methods",
        "ahead = step(gradient, totals, inner_state, theta)[0]",
        "ahead = step(gradient, totals, state.inner, theta)[0]",
    ),
    Mutant(
        "an outer gradient of the other sign",
        "methods",
        "return weight[0].astype(b.dtype) * difference(a.astype(b.dtype), b)",
        "return weight[0].astype(b.dtype) * difference(b, a.astype(b.dtype))",
    ),
    Mutant(
        "inner steps repeat the first rows",
        "methods",
        "total, start = self.steps * microbatches, h * microbatches",
        "total, start = self.steps * microbatches, h",
    ),
    Mutant(
        "another fragment arrives",
        "methods",
        "return (self.phase - self.overlaps) % self.fragments",
        "return (self.phase + self.overlaps) % self.fragments",
    ),
    # ---- layout
    Mutant(
        "shards by the wrong order of data axes",
        "layout",
        "blocks, i = leaf.cut(x), lax.axis_index(self.reduce_order)",
        "blocks, i = leaf.cut(x), lax.axis_index(self.axis)",
    ),
    Mutant(
        "the slow network is crossed first",
        "layout",
        "return self.axis[::-1]",
        "return self.axis",
    ),
    Mutant(
        "a row without weight is packed as it is",
        "layout",
        "return masked(weight[0] != 0, packed)",
        "return packed",
    ),
    Mutant(
        "padding is not zero",
        "layout",
        "x = jnp.pad(x, _interleave([(0, 0)] * rank, self.padding))",
        "x = jnp.pad(x, _interleave([(0, 0)] * rank, self.padding), constant_values=1)",
    ),
    Mutant(
        "the wire rounds, the parameter does not",
        "layout",
        "for dtype in (self.comm_dtype, self.dtype):",
        "for dtype in (self.comm_dtype,):",
    ),
    Mutant(
        "small leaves are split, large ones stay whole",
        "layout",
        "if best is None or (padding(best) and leaf.size <= SMALL):",
        "if best is None or (padding(best) and leaf.size > SMALL):",
    ),
    Mutant(
        "a counter is taken for a moment",
        "layout",
        "i if i >= 0 and jnp.shape(x) == self.leaves[i].shape else None",
        "i if i >= 0 else None",
    ),
    # ---- exchange
    Mutant(
        "no barrier behind a collective",
        "exchange",
        "compute(k, progress, params)\n"
        "        message, progress, params = barrier((message, progress, params))",
        "compute(k, progress, params)",
    ),
    Mutant(
        "no barrier before a collective",
        "exchange",
        "message, progress, params = barrier((hop.encode(message), progress, params))",
        "message = hop.encode(message)",
    ),
    Mutant(
        "error feedback of the other sign",
        "exchange",
        "left = jnp.where(jnp.isfinite(sent), own - sent, 0)",
        "left = jnp.where(jnp.isfinite(sent), sent - own, 0)",
    ),
    Mutant(
        "a call of nothing changes what rounding left",
        "exchange",
        "return jnp.where(weight != 0, left, before)  # without weight nothing counts",
        "return left",
    ),
    Mutant(
        "bits of estimate and commit are swapped",
        "exchange",
        "bits = (gather_bits[1], gather_bits[0])  # half-round 0 is a commit",
        "bits = (gather_bits[0], gather_bits[1])",
    ),
    Mutant(
        "scales are rounded down",
        "exchange",
        "above = lax.bitcast_convert_type(least, jnp.uint32) + 0xFFFF >> 16",
        "above = lax.bitcast_convert_type(least, jnp.uint32) >> 16",
    ),
    Mutant(
        "model states are summed without weights",
        "exchange",
        "return jnp.where(weight != 0, weight.astype(dtype) * flat, 0)",
        "return jnp.where(weight != 0, flat, 0)",
    ),
    # ---- step
    Mutant(
        "all workers draw the same random numbers",
        "step",
        "key = None if rng is None else jax.random.fold_in(rng, before + i)",
        "key = None if rng is None else jax.random.fold_in(rng, i)",
    ),
    Mutant(
        "arrays that share memory are donated twice",
        "step",
        "            if not seen.isdisjoint(here):\n"
        "                given[i] = jnp.copy(x)",
        "            del i",
    ),
    Mutant(
        "the number of the next call stands still",
        "step",
        "self._counted = state.calls_done, call + 1",
        "self._counted = state.calls_done, call",
    ),
    Mutant(
        "each kind of half-round comes once in a period",
        "step",
        "times[first] = times.get(first, 0) + 1",
        "times[first] = 1",
    ),
    Mutant(
        "a slow worker is dealt its next microbatch too early",
        "step",
        "heapq.heappush(ends, (seconds[i] * (counts[i] + 1), i))",
        "heapq.heappush(ends, (seconds[i] * counts[i], i))",
    ),
    Mutant(
        "the halves are swapped",
        "step",
        "return self.lines[call % 2]",
        "return self.lines[(call + 1) % 2]",
    ),
    Mutant(
        "an adaptive half-round passes its most",
        "step",
        "while done < least or (done < most and exchange and not exchange.done()):",
        "while done < least or (done <= most and exchange and not exchange.done()):",
    ),
    # ---- data
    Mutant(
        "a row lacks its last target",
        "data",
        "part = self._tokens[group[i]][starts[i] : starts[i] + width + 1]",
        "part = self._tokens[group[i]][starts[i] : starts[i] + width]",
    ),
    Mutant(
        "the mask begins a token late",
        "data",
        "self._prompt = answer - self._start - 1  # inputs before the first target",
        "self._prompt = answer - self._start",
    ),
    Mutant(
        "every epoch has the same order",
        "data",
        "return permuted(places, self._size, self._seed, epoch)",
        "return permuted(places, self._size, self._seed)",
    ),
    Mutant(
        "rows that were not computed are lost",
        "data",
        "left.append(old[len(places) :])",
        "left.append([])",
    ),
    Mutant(
        "all processes read the first part",
        "data",
        "return np.arange(batch_size).reshape(workers, -1)[list(own)].ravel()",
        "return np.arange(batch_size).reshape(workers, -1)[: len(own)].ravel()",
    ),
    Mutant(
        "bytes of prompts count as predicted",
        "data",
        "size += sum(len(part[-1].encode()) for part in parts)",
        "size += sum(len(part[0].encode()) for part in parts)",
    ),
    Mutant(
        "a damaged cache passes",
        "data",
        'if _checksum(folder) != counts["checksum"]:',
        "if False:",
    ),
    # ---- runner
    Mutant(
        "every half-round is evaluated",
        "runner",
        "now // every > max(before or 0, 0) // every",
        "now // every >= max(before or 0, 0) // every",
    ),
    Mutant(
        "the best checkpoint is removed",
        "runner",
        "return [step for step in steps[: -self._keep] if step != best]",
        "return steps[: -self._keep]",
    ),
    Mutant(
        "a save that failed counts",
        "runner",
        'raise OSError(f"checkpoint {path} could not be written: {why}") from error',
        "del path, why",
    ),
    Mutant(
        "a changed shard is restored",
        "runner",
        "if crc(shard) != sums[name][place]:",
        "if False:",
    ),
    Mutant(
        "a continued run repeats a row of metrics",
        "runner",
        'if r["kind"] != "final" and r["half_round"] <= done]',
        'if r["kind"] != "final"]',
    ),
    Mutant(
        "repeated time is that of the last fault alone",
        "runner",
        'seconds["repeated"] += _lose(kept, reach)',
        'seconds["repeated"] = _lose(kept, reach)',
    ),
    Mutant(
        "one odd row is a spike",
        "runner",
        "if mean > limit and 2 * high > len(window):",
        "if mean > limit or 2 * high > len(window):",
    ),
    Mutant(
        "a worker too many is dealt one more",
        "runner",
        "return [each + (i < more) for i in range(workers)]",
        "return [each + (i <= more) for i in range(workers)]",
    ),
    # ---- plan
    Mutant(
        "the verdict is the better share",
        "plan",
        "return 1 - max(of_bytes / self.bytes, of_time / (self.seconds or 1.0))",
        "return 1 - min(of_bytes / self.bytes, of_time / (self.seconds or 1.0))",
    ),
    Mutant(
        "a collective without an end passes",
        "plan",
        "if r.status == UNKNOWN or left < 0:",
        "if left < 0:",
    ),
    Mutant(
        "collectives share the network for nothing",
        "plan",
        "start = max(self._clock, self._network_free)",
        "start = self._clock",
    ),
    Mutant(
        "what a loop waits for costs no time",
        "plan",
        "entry.wait(schedule.collectives[i].kind, each[i].exposed)",
        "entry.wait(schedule.collectives[i].kind, 0.0)",
    ),
    Mutant(
        "all work since a checkpoint is lost, not half of it",
        "plan",
        "lost = terms.checkpoint_seconds / apart + apart / 2 / between",
        "lost = terms.checkpoint_seconds / apart + apart / between",
    ),
    Mutant(
        "an all-reduce sends half its bytes",
        "plan",
        '"all_reduce": lambda n: 2 * (n - 1) / n,',
        '"all_reduce": lambda n: (n - 1) / n,',
    ),
)
