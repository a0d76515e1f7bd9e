"""The sweep: what it takes, what it keeps, what it says, in runs that are stand-ins."""

import dataclasses
import json
import signal
import subprocess
import time
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acco_jax.command import exits, signals
from acco_jax.run.compare import comparison, pool, tuning
from tests.examples import examples

SWEEP = tuning.parse(["optimizer.learning_rate=1e-3, 2e-3,4e-3,8e-3"])
LENGTH = tuning.Length(80, 8000, {s: 2 * s + 1 for s in range(10, 81, 10)})


def sweep_of(*methods, sweep=SWEEP):
    found = [
        c for m in methods
        for c in tuning.candidates(m, (f"--config.method={m}",), sweep)
    ]  # fmt: skip
    return found, dict.fromkeys(found, LENGTH)


class Runs:
    """A pool whose runs write, at once, the losses that `loss` says."""

    def __init__(self, loss, fails=()):
        self.loss, self.fails, self.ran = loss, fails, []

    def run(self, tasks):
        return {task: self.one(task) for task in tasks}

    def one(self, task):
        self.ran.append(task)
        flags = dict(f.split("=", 1) for f in task.flags)
        rate = float(flags["--config.optimizer.learning_rate"])
        if rate in self.fails:
            return exits.FAILED
        calls = int(flags.get("--stop_after", 161))
        step, task_loss = (calls - 1) // 2, self.loss(flags["--config.method"], rate)
        if task_loss is None:
            task.folder.mkdir(parents=True, exist_ok=True)
            return exits.DIVERGED
        task.folder.mkdir(parents=True, exist_ok=True)
        row = {"kind": "validation", "half_round": calls, "step": step,
               "loss": task_loss + 1 / step, "tokens": 9, "seconds": 1.0}  # fmt: skip
        with (task.folder / "metrics.jsonl").open("a") as rows:
            rows.write(json.dumps(row) + "\n")
        if step < LENGTH.steps:
            return exits.STOPPED
        summary = {"loss": task_loss, "bytes_sent_per_worker": 1}
        (task.folder / "summary.json").write_text(json.dumps(summary))
        return exits.FINISHED


def best_at(**rates):
    return lambda method, rate: 2 + abs(rate - rates[method])


def test_each_method_gets_its_own_best(tmp_path, caplog):
    found, lengths = sweep_of("acco", "zero1")
    runs = Runs(best_at(acco=2e-3, zero1=4e-3))
    chosen = tuning.tune(found, lengths, [5, 6], None, tmp_path, runs)
    assert {m: c.name for m, c in chosen.items()} == {
        "acco": "optimizer.learning_rate=2e-3",
        "zero1": "optimizer.learning_rate=4e-3",
    }
    assert "--config.optimizer.learning_rate=4e-3" in chosen["zero1"].flags
    assert len(runs.ran) == 2 * 4 * 2
    assert not any("--stop_after" in f for t in runs.ran for f in t.flags)
    text = (tmp_path / "tuning" / "table.md").read_text()
    assert (
        "| **acco**  | **optimizer.learning_rate=2e-3** | **80** | **2.0000** " in text
    )
    assert (tmp_path / "tuning" / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_half_of_them_go_on_within_the_budget(tmp_path):
    found, lengths = sweep_of("acco", "zero1")
    runs = Runs(best_at(acco=2e-3, zero1=4e-3))
    # four to a half, two of them to the end: 4/2 + 2/2 runs of each method
    tuning.tune(found, lengths, [5], 48_000, tmp_path, runs)
    stops = [f for t in runs.ran for f in t.flags if f.startswith("--stop_after")]
    assert stops == ["--stop_after=81"] * 8 and len(runs.ran) == 12
    rates = {c.split("=")[-1] for t in runs.ran[8:] for c in t.flags if "rate" in c}
    assert rates == {"1e-3", "2e-3", "4e-3"}
    again = Runs(None)
    chosen = tuning.tune(found, lengths, [5], 48_000, tmp_path, again)
    assert chosen["zero1"].name.endswith("4e-3") and not again.ran


def test_a_smaller_budget_halves_twice_and_a_tiny_one_is_refused(tmp_path):
    found, lengths = sweep_of("acco")
    runs = Runs(best_at(acco=2e-3))
    # 4/4 + 2/4 + 1/2 runs
    tuning.tune(found, lengths, [5], 16_000, tmp_path, runs)
    assert [len([t for t in runs.ran if f"step {n}" in t.name]) for n in (20, 40, 80)] \
        == [4, 2, 1]  # fmt: skip
    with pytest.raises(ValueError, match=r"--budget is 15,999 .*at least 16,000"):
        tuning.tune(found, lengths, [5], 15_999, tmp_path, runs)


def test_what_diverges_is_remembered_and_never_best(tmp_path, caplog):
    found, lengths = sweep_of("acco")
    loss = best_at(acco=4e-3)
    runs = Runs(lambda m, rate: None if rate > 3e-3 else loss(m, rate))
    chosen = tuning.tune(found, lengths, [0], None, tmp_path, runs)
    assert chosen["acco"].name.endswith("2e-3")
    assert (tmp_path / "tuning" / "table.md").read_text().count("diverged") == 2
    again = Runs(None)
    tuning.tune(found, lengths, [0], None, tmp_path, again)
    assert not again.ran
    with pytest.raises(ValueError, match="every run of acco in the sweep has diverged"):
        tuning.tune(found, lengths, [1], None, tmp_path, Runs(lambda m, rate: None))


class LateDivergence(Runs):
    """Runs of which some diverge after half of their steps."""

    def __init__(self, loss, *diverging):
        super().__init__(loss)
        self.diverging = tuple(f"learning_rate={rate}" for rate in diverging)

    def one(self, task):
        code = super().one(task)
        late = code == exits.FINISHED and task.folder.parent.name.endswith(
            self.diverging
        )
        if late:
            (task.folder / "summary.json").unlink()
        return exits.DIVERGED if late else code


def test_a_later_divergence_leaves_earlier_judgements(tmp_path):
    found, lengths = sweep_of("acco")
    runs = LateDivergence(best_at(acco=2e-3), "2e-3")
    chosen = tuning.tune(found, lengths, [5], 24_000, tmp_path, runs)
    again = Runs(None)
    assert tuning.tune(found, lengths, [5], 24_000, tmp_path, again) == chosen
    assert chosen["acco"].name.endswith("1e-3") and not again.ran


def test_where_all_that_went_on_diverge_the_table_is_written(tmp_path):
    found, lengths = sweep_of("acco")
    runs = LateDivergence(best_at(acco=2e-3), "1e-3", "2e-3")
    with pytest.raises(
        ValueError, match=r"values of acco that went on have div.*, or raise --budget"
    ):
        tuning.tune(found, lengths, [5], 24_000, tmp_path, runs)
    text = (tmp_path / "tuning" / "table.md").read_text()
    assert text.count("diverged") == 2 and "**" not in text


def test_what_diverged_is_tried_again_under_other_limits(tmp_path):
    found, lengths = sweep_of("acco")
    loss = best_at(acco=4e-3)
    runs = Runs(lambda m, rate: None if rate > 3e-3 else loss(m, rate))
    tuning.tune(found, lengths, [0], None, tmp_path, runs)
    other = dict.fromkeys(found, dataclasses.replace(LENGTH, limits="off"))
    again = Runs(loss)
    chosen = tuning.tune(found, other, [0], None, tmp_path, again)
    assert chosen["acco"].name.endswith("4e-3")
    assert {t.folder.parent.name[-4:] for t in again.ran} == {"4e-3", "8e-3"}


def test_a_run_that_fails_ends_it_by_name(tmp_path):
    found, lengths = sweep_of("acco")
    runs = Runs(best_at(acco=2e-3), fails=(1e-3,))
    with pytest.raises(pool.RunFailed, match="learning_rate=1e-3, seed 0"):
        tuning.tune(found, lengths, [0], None, tmp_path, runs)


def test_the_end_of_a_sweep_is_no_best(tmp_path, caplog):
    found, lengths = sweep_of("acco", "zero1")
    runs = Runs(best_at(acco=1e-3, zero1=2e-3))
    chosen = tuning.tune(found, lengths, [0], None, tmp_path, runs)
    groups = {m: [c for c in found if c.method == m] for m in ("acco", "zero1")}
    edge = ("optimizer.learning_rate", "1e-3")
    assert tuning.at_the_edge(groups["acco"], chosen["acco"]) == [edge]
    assert tuning.at_the_edge(groups["zero1"], chosen["zero1"]) == []


def test_what_has_nothing_to_tune_is_not_run(tmp_path):
    sweep = tuning.parse(["method_options.warmup_steps=0,40"])
    found, lengths = sweep_of("dpu", "zero1", sweep=sweep)
    runs = Runs(lambda method, rate: 2.0)
    runs.one = lambda task: Runs.one(runs, dataclasses.replace(
        task, flags=(*task.flags, "--config.optimizer.learning_rate=1")))  # fmt: skip
    chosen = tuning.tune(found, lengths, [0], None, tmp_path, runs)
    assert set(chosen) == {"dpu", "zero1"} and chosen["zero1"].point == ()
    assert {t.folder.parent.parent.name for t in runs.ran} == {"dpu"}
    with pytest.raises(ValueError, match="--tune names no option of these methods"):
        tuning.tune(found[2:], lengths, [0], None, tmp_path, runs)


def test_a_method_that_is_none_is_left_to_the_check():
    assert len(sweep_of("aco")[0]) == 4


def test_an_option_is_swept_over_the_methods_that_have_it():
    sweep = tuning.parse(["method_options.warmup_steps=0,40", *["seedling=1,2"]])
    assert [c.name for c in sweep_of("dpu", sweep=sweep[:1])[0]] == [
        "method_options.warmup_steps=0",
        "method_options.warmup_steps=40",
    ]
    assert [c.name for c in sweep_of("zero1", sweep=sweep[:1])[0]] == [""]
    assert len(sweep_of("dpu", sweep=sweep)[0]) == 4


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("acco(config.optimizer.learning_rate=1e-4)", ""),
        ("dpu(warmup_steps=40)", "optimizer.learning_rate=1e-3"),
    ],
)
def test_a_field_that_a_method_sets_is_not_swept(name, left):
    (entry,) = comparison.parse(name)
    sweep = tuning.parse(["method_options.warmup_steps=0,80"]) + SWEEP
    first, *_ = tuning.candidates(name, entry.flags, sweep)
    assert first.name == left and first.flags[: len(entry.flags)] == entry.flags


def test_the_picture_has_a_panel_for_each_field(tmp_path, monkeypatch):
    """A method without the field is only in its legend."""
    options = ["method_options.warmup_steps=0,40", "optimizer.learning_rate=1e-3,2e-3"]
    found, _ = sweep_of("dpu", "zero1", sweep=tuning.parse(options))
    groups = {m: [c for c in found if c.method == m] for m in ("dpu", "zero1")}
    scores = dict.fromkeys(found, tuning.TuningScore(80, 1.0, (2.0,)))
    figures = []
    monkeypatch.setattr(tuning, "legend_below", figures.append)
    chosen = {m: group[0] for m, group in groups.items()}
    tuning.draw(groups, scores, chosen, tmp_path / "loss.png")
    drawn = {
        ax.get_xlabel(): (
            [tick.get_text() for tick in ax.get_xticklabels()],
            [line.get_label() for line in ax.lines if len(line.get_xdata()) > 1],
        )
        for ax in figures[0].axes
    }
    assert drawn == {
        "method_options.warmup_steps": (["0", "40"], ["dpu"]),
        "optimizer.learning_rate": (["1e-3", "2e-3"], ["dpu", "zero1"]),
    }


@examples(25)
@given(
    counts=st.lists(st.integers(2, 9), min_size=1, max_size=4),
    seeds=st.integers(1, 3),
    budget=st.integers(1, 600_000),
)
@pytest.mark.slow
def test_what_is_run_is_within_the_budget(counts, seeds, budget, tmp_path_factory):
    names = ["acco", "zero1", "dpu", "wp"][: len(counts)]
    found, lengths = [], {}
    for name, count in zip(names, counts, strict=True):
        values = ",".join(f"{k + 1}e-3" for k in range(max(count, 2)))
        sweep = tuning.parse([f"optimizer.learning_rate={values}"])
        group = sweep_of(name, sweep=sweep)[0][:count]
        found += group
        lengths |= dict.fromkeys(group, LENGTH)
    runs = Runs(best_at(**dict.fromkeys(names, 3e-3)))
    folder = tmp_path_factory.mktemp("budget")
    try:
        tuning.tune(found, lengths, range(seeds), budget, folder, runs)
    except ValueError:  # before any run, and for the budget alone
        assert not runs.ran
        tuning.tune(found, lengths, range(seeds), None, folder, runs)
        return
    reached: dict[Path, int] = {}
    for task in runs.ran:
        reached[task.folder] = int(task.name.split()[-1])
    taken = sum(reached.values()) * LENGTH.tokens // LENGTH.steps
    assert taken <= budget


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["optimizer.learning_rate"], "FIELD=VALUE"),
        (["optimizer.learning_rate=1e-3"], "at least two"),
        (["=1,2"], "FIELD=VALUE"),
        (["steps=1,,2"], "FIELD=VALUE"),
        (["steps=1,1"], "twice"),
        (["data.path=/a,/b"], "no /"),
        (["seed=1,2"], "not the seed"),
        (["steps=1,2", "config.steps=3,4"], "each field once"),
    ],
)
def test_what_is_no_sweep_is_refused_in_one_line(texts, message):
    with pytest.raises(ValueError, match=message) as error:
        tuning.parse(texts)
    assert "\n" not in str(error.value)


def test_slots_divide_the_cores(monkeypatch):
    monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _: {3, 5, 7, 9})
    monkeypatch.setattr(pool, "_gpus", list)
    monkeypatch.setattr(pool, "_free_bytes", lambda: 100 << 30)
    assert pool.slots(1) == [pool.Slot()]
    assert [s.cores for s in pool.slots(2)] == [{3, 7}, {5, 9}]
    assert [s.cores for s in pool.slots(0)] == [{3}, {5}, {7}, {9}]
    with pytest.raises(
        ValueError, match="--at_once is 5, and this machine has 4 cores"
    ):
        pool.slots(5)
    monkeypatch.setattr(pool, "_free_bytes", lambda: 5 << 30)
    assert len(pool.slots(0)) == 2
    monkeypatch.setattr(pool, "_gpus", lambda: ["0", "3"])
    assert [s.environment for s in pool.slots(0)] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "3"},
    ]


def test_a_pool_fills_its_slots_and_reports_every_code(tmp_path):
    started = []

    def start(task, slot):
        started.append((task.name, slot.cores))
        return [subprocess.Popen(["sh", "-c", f"exit {code}"]) for code in task.flags]

    places = [pool.Slot(cores=frozenset([k])) for k in range(2)]
    tasks = [
        pool.Task(name, tmp_path, codes)
        for name, codes in [("a", ("0",)), ("b", ("0", "4")), ("c", ("75",))]
    ]
    codes = pool.Pool(start, places).run(tasks)
    assert [codes[t] for t in tasks] == [0, 4, 75]
    assert [name for name, _ in started] == ["a", "b", "c"]
    assert started[0][1] != started[1][1]


def test_a_signal_while_a_run_starts_reaches_it(tmp_path):
    def start(task, slot):
        running.signal(signal.SIGTERM, None)
        started.append(subprocess.Popen(["sleep", "60"]))
        return started

    started = []
    running = pool.Pool(start, [pool.Slot()])
    with pytest.raises(exits.Stopped):
        running.run([pool.Task("a", tmp_path, ())])
    assert started[0].wait() == -signal.SIGTERM


def test_a_pool_passes_on_a_signal_once(monkeypatch):
    """A terminal that closes sends SIGHUP by its shell and by the kernel."""
    clock = [100.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: clock[0])
    process, running = mock.Mock(), pool.Pool(mock.Mock(), [pool.Slot()])
    process.poll.return_value = None
    running._running[0] = mock.Mock(), [process]
    for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGINT, signal.SIGINT):
        running.signal(number, None)
    assert [call.args[0] for call in process.send_signal.call_args_list] == [
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGINT,
    ]


def test_a_stopped_pool_names_the_runs_that_saved_nothing(tmp_path):
    def start(task, slot):
        if task.name == "b":
            running.signal(signal.SIGTERM, None)
        trap = f"trap 'exit {task.flags[0]}' TERM; while :; do sleep 0.1; done"
        found = [subprocess.Popen(["sh", "-c", trap])]
        time.sleep(0.3)  # until it has its trap
        return found

    running = pool.Pool(start, [pool.Slot(), pool.Slot()])
    tasks = [pool.Task("a", tmp_path, ("75",)), pool.Task("b", tmp_path, ("1",))]
    with pytest.raises(exits.Stopped) as error:
        running.run(tasks)
    said = "stopped: the same command continues, b from an earlier checkpoint."
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1"]),  # whatever their files are called
        ("3,1", ["3", "1"]),
        ("GPU-8f, MIG-1", ["GPU-8f", "MIG-1"]),
        ("1,-1,0", ["1"]),
        ("-1", []),
        ("", []),
    ],
)
def test_gpus_have_the_names_that_cuda_gives_them(monkeypatch, visible, names):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    files = [pool.Path("/dev/nvidia2"), pool.Path("/dev/nvidia7")]
    monkeypatch.setattr(pool.Path, "glob", lambda *_: iter(files))
    assert pool._gpus() == names


@pytest.mark.parametrize(("limit", "free"), [("max", 8), ("6", 3), ("60", 8)])
def test_a_container_s_memory_is_what_is_free(monkeypatch, tmp_path, limit, free):
    limit = limit if limit == "max" else str(int(limit) << 30)
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(4 << 30))
    (tmp_path / "memory.stat").write_text(f"anon 7\ninactive_file {1 << 30}\n")
    monkeypatch.setattr(pool, "_CGROUP", tmp_path)
    line = mock.mock_open(read_data=f"MemTotal: 9 kB\nMemAvailable: {8 << 20} kB\n")
    monkeypatch.setattr("builtins.open", line)
    assert pool._free_bytes() == free << 30


@pytest.mark.parametrize(
    "waits", ["sleep 60", "trap 'exit 75' TERM; while :; do sleep 0.1; done"]
)
def test_the_code_of_a_run_is_that_of_the_process_that_failed(tmp_path, waits):
    # the first one waits for the other and is told to stop: 75 is no failure
    def start(task, slot):
        return [subprocess.Popen(["sh", "-c", c]) for c in (waits, "sleep 0.2; exit 5")]

    task = pool.Task("a", tmp_path, ())
    assert pool.Pool(start, [pool.Slot()]).run([task]) == {task: 5}
