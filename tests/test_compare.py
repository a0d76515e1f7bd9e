"""The command: runs every method and seed once, continues, and refuses in a line."""

import contextlib
import csv
import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax
import pytest

from acco_jax.command import exits
from acco_jax.run import preparation
from acco_jax.run.compare import comparison, network, pool, results, tuning
from acco_jax.run.config import fields, parsing
from acco_jax.run.observe import metrics
from acco_jax.run.state.workdir import claimed
from tests import programs
from tests.lines import refusal

ROOT = Path(__file__).parent.parent
CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.devices, c.steps, c.length, c.microbatch_size = 2, 60, 16, 1
    c.microbatches_per_step, c.log_every = 2, 1
    c.eval_every, c.eval_batches, c.checkpoint_every = 20, 2, 1000
    c.model.family, c.model.width, c.model.layers, c.model.heads = "llama", 8, 1, 2
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "text_folder", {texts!r}, 0.2
    c.data.data_dir = {data!r}
    return c
"""
QUICKSTART = ROOT / "experiments" / "quickstart.py"
RATE = "config.optimizer.learning_rate=0.002"
METHODS = f"acco,zero1({RATE})"
# ml_collections loads config files as Python 3.12 no longer does
LOADS = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
CLOCKS = ("seconds", "tokens_per_second", "goodput")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    (folder / "texts").mkdir()
    for i in range(12):
        text = "".join(f"{j} squared is {j * j}, said {i}.\n" for j in range(i, 60))
        (folder / "texts" / f"{i}.txt").write_text(text)
    texts, data = str(folder / "texts"), str(folder / "data")
    (folder / "tiny.py").write_text(CONFIG.format(texts=texts, data=data))
    return folder


@pytest.fixture(scope="module")
def environment():
    return programs.environment()


@pytest.fixture(scope="module")
def start(place, environment):
    """start(*flags): the command, started."""

    def popen(*flags, methods=METHODS, seeds=2, workdir="out", **env):
        return subprocess.Popen(
            [sys.executable, "-m", "acco_jax.compare", "--config=tiny.py",
             f"--methods={methods}", f"--seeds={seeds}", f"--workdir={workdir}",
             *flags],
            env={**environment, **env},
            cwd=place, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return popen


def rows_of(folder):
    return [
        {k: v for k, v in row.items() if k not in CLOCKS}
        for row in metrics.read(folder)
    ]


@pytest.fixture(scope="module")
def stopped(start, place):
    """What a comparison prints that is told to stop in the middle of its first run."""
    process = start()
    first, deadline = place / "out" / "acco" / "seed-0", time.monotonic() + 500
    while len(metrics.read(first)) < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=500)
    assert process.returncode == exits.STOPPED and out == "", (out, err)
    return err


@pytest.fixture(scope="module")
def finished(stopped, start):
    """What the same command prints when it then runs to its end."""
    process = start()
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.slow
def test_told_to_stop_leaves_a_checkpoint_and_says_how_to_go_on(stopped):
    assert re.search(r"stopped after half-round \d+ of 121", stopped), stopped
    assert stopped.splitlines()[-1] == "error: stopped: the same command continues."
    assert "finished" not in stopped and "zero1" not in stopped


@pytest.mark.slow
def test_continues_and_runs_every_method_and_seed(finished, place):
    out, err = finished
    assert re.search(r"continuing after half-round \d+ of 121", err), err
    assert out == (place / "out" / "table.md").read_text()
    with (place / "out" / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    names = {(r["method"], r["seed"]) for r in rows}
    assert names == {(m, s) for m in METHODS.split(",") for s in "01"}
    acco, zero1 = (
        next(r for r in rows if r["method"] == m) for m in METHODS.split(",")
    )
    # acco: two half-rounds a step, and the one that primes
    sent = [int(r["bytes_sent_per_worker"]) for r in (acco, zero1)]
    assert sent[0] / 121 == sent[1] / 60 > 0
    # 2 workers, 2 microbatches a step; acco's first half-round is no part of a step
    assert [int(r["microbatches"]) for r in (acco, zero1)] == [242, 240]
    for row in rows:
        assert 0 < float(row["final_loss"]) < 6
        assert float(row["tokens_per_second"]) > 0
        # none where the gradients alone were timed in a slower moment
        assert float(row["exposed_ms_per_step"] or 0) >= 0
    assert (place / "out" / "loss.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_a_run_stopped_and_continued_is_that_of_train(
    finished, place, environment, tmp_path
):
    # in a process as compare's are: another compiler's bits may be others
    command = [sys.executable, "-m", "acco_jax.train", "--config=tiny.py"]
    flags = [*command, f"--workdir={tmp_path}"]
    subprocess.run(flags, env=environment, cwd=place, check=True, timeout=500)
    assert rows_of(tmp_path) == rows_of(place / "out" / "acco" / "seed-0")


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(finished, start, place):
    before = (place / "out" / "results.csv").read_text()
    process = start()
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0 and out == finished[0], err
    assert err.count("finished before") == 4 and "half-round" not in err
    assert (place / "out" / "results.csv").read_text() == before


@pytest.mark.slow
def test_other_configs_are_refused_in_the_same_workdir(finished, start):
    process = start("--config.steps=61")
    out, err = process.communicate(timeout=500)
    assert process.returncode == exits.REFUSED and out == ""
    assert refusal(err, "acco: ", "out/acco/seed-0", "steps=60, not 61", "use another")


@pytest.mark.slow
def test_a_method_that_cannot_run_is_named_before_any_run(start, place):
    process = start("--config.microbatches_per_step=3", methods="zero1,acco", seeds=1,
                    workdir="refused")  # fmt: skip
    out, err = process.communicate(timeout=500)
    assert process.returncode == exits.REFUSED and out == ""
    assert refusal(err, "acco: ", "microbatches_per_step is 3", " 2 ", "a multiple")
    assert not (place / "refused").exists()


@pytest.fixture
def request_of(place, tmp_path):
    """request_of(methods, **fields): a comparison of the tiny config in tmp_path."""

    def make(methods, seeds=2, **fields):
        config, entries = (f"--config={place / 'tiny.py'}",), comparison.parse(methods)
        return comparison.ComparisonRequest(config, entries, tmp_path, seeds, **fields)

    return make


@pytest.fixture
def on_two(monkeypatch):
    """`check` and `prepare` take two devices of this process."""
    build = preparation.build

    def on_two(config, workdir, *_, **__):
        return build(config, workdir, jax.devices()[:2])

    monkeypatch.setattr(preparation, "build", on_two)
    monkeypatch.setattr(comparison.devices, "choose_platform", lambda *_, **__: None)
    monkeypatch.setattr(comparison.program_store, "keep_programs", lambda: None)


def begin(request, entry, *flags):
    """Prepare the run of an entry's first seed with more flags; return its folder."""
    config = parsing.config_of([*request.flags(entry), *flags])
    folder = request.folder(entry, 0)
    preparation.prepare(config, folder)
    return folder


@LOADS
def test_a_check_leaves_nothing_behind(request_of, on_two, tmp_path):
    """So that each run of auto chooses, and a rejected comparison claims no folder."""
    (length,) = comparison.check(request_of("auto"))
    assert length["calls"][60] == 60 and '"policy": "stop"' in length["limits"]
    assert not list(tmp_path.iterdir())


@LOADS
def test_auto_goes_on_with_the_method_that_its_run_chose(request_of, on_two):
    request = request_of("auto")
    begin(request, request.entries[0], "--config.method=acco")
    (length,) = comparison.check(request)
    assert length["calls"][60] == 121
    comparison._check_folders(request)


@LOADS
def test_auto_goes_on_with_microbatches_that_it_has_divided(request_of, on_two):
    shape = "config.microbatch_size={},config.microbatches_per_step=2"
    request = request_of(f"auto({shape.format(2)})")
    (entry,) = request.entries
    config = fields.with_quarters(parsing.config_of(request.flags(entry)))
    config.method = "acco"
    preparation.prepare(config, request.folder(entry, 0))
    old = json.loads((request.folder(entry, 0) / "config.json").read_text())
    assert (old["microbatch_size"], old["microbatches_per_step"]) == (1, 4)
    assert (
        old["eval_batches"] == 2 * parsing.config_of(request.flags(entry)).eval_batches
    )
    (request.folder(entry, 0) / metrics.FILE).touch()
    comparison._check_folders(request)
    other = request_of(f"auto({shape.format(4)})")
    (request.workdir / entry.name).rename(other.workdir / other.entries[0].name)
    with pytest.raises(ValueError, match="microbatch_size=1, not 2"):
        comparison._check_folders(other)


@LOADS
def test_a_budget_counts_the_most_that_is_computed(request_of, on_two):
    changes = "config.most_microbatches=6"
    plain, adaptive = (
        comparison.check(request_of(name))[0]["tokens"]
        for name in ("acco", f"acco(config.microbatches=adaptive,{changes})")
    )
    config = parsing.config_of(list(request_of("acco").config))
    assert adaptive == plain * 6 // (config.microbatches_per_step // 2)


@LOADS
def test_one_microbatch_is_no_matter_of_the_first_half(request_of, on_two):
    request = request_of("acco(config.microbatches_per_step=1)")
    with pytest.raises(ValueError, match=r"microbatches_per_step is 1, which does not"):
        comparison.check(request)


@LOADS
def test_runs_that_choose_their_method_have_no_budget(request_of, on_two):
    sweep = tuning.parse(["optimizer.learning_rate=1,2"])
    with pytest.raises(ValueError, match=r"--budget=9 ends runs .* name methods"):
        comparison.check(request_of("auto", sweep=sweep, budget=9))


@LOADS
def test_a_check_leaves_a_living_runs_checkpoints(request_of, on_two):
    request = request_of("zero1")
    folder = begin(request, request.entries[0])
    saving = folder / "checkpoints" / "20"
    saving.mkdir()
    saving.with_suffix(".saving").touch()
    with claimed(folder):
        comparison.check(request)
    assert saving.exists() and saving.with_suffix(".saving").exists()


@LOADS
@pytest.mark.parametrize("seed", [0, 1])
def test_runs_of_another_config_are_no_tuned_ones(request_of, tmp_path, seed):
    request = request_of("zero1", sweep=tuning.parse(["optimizer.learning_rate=1,2"]))
    (plain,) = request.entries
    tuned = comparison.Entry("zero1", (*plain.flags, f"--{RATE}"))
    request = dataclasses.replace(request, entries=(tuned,))
    for number in request.seed_numbers:
        flags = request.flags(plain if number == seed else tuned)
        config = parsing.config_of([*flags, f"--config.seed={number}"])
        folder = request.folder(tuned, number)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config.to_json_best_effort())
    message = rf"seed-{seed} .*learning_rate=0.001, not 0.002: use another workdir"
    with pytest.raises(ValueError, match=message):
        comparison._check_folders(request)


@LOADS
def test_a_run_that_has_begun_keeps_its_eval_batches(request_of):
    """Losses at a rung of a sweep are all of the same documents."""
    request = request_of("zero1", seeds=1)
    (entry,) = request.entries
    config = parsing.config_of([*request.flags(entry), "--config.seed=0"])
    folder = request.folder(entry, 0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json_best_effort())
    more = (*request.config, "--config.eval_batches=3")
    other = dataclasses.replace(request, config=more)
    comparison._check_folders(other)
    (folder / "metrics.jsonl").touch()
    comparison._check_folders(request)
    message = "seed-0 .*eval_batches=2, not 3: use another workdir"
    with pytest.raises(ValueError, match=message):
        comparison._check_folders(other)


def finish(folder, **config):
    """Leave what a finished run leaves, in as far as it is read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | config))
    (folder / "summary.json").write_text('{"bytes_sent_per_worker": 1}')
    (folder / "metrics.jsonl").touch()


@LOADS
@pytest.mark.fast("1")
@pytest.mark.parametrize("seed", [0, 1])
def test_runs_of_other_workers_are_refused(request_of, on_two, seed):
    request = request_of("zero1")
    (entry,) = request.entries
    folder = begin(request, entry).with_name(f"seed-{seed}")
    flags = [*request.flags(entry), f"--config.seed={seed}"]
    own = json.loads(parsing.config_of(flags).to_json_best_effort())
    finish(folder, **own, workers=2)
    comparison.check(request)
    finish(folder, workers=1)
    message = rf"zero1: .*seed-{seed} .* workers=1, not 2: use another workdir"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            comparison.check(request)
        (folder / "summary.json").unlink(missing_ok=True)  # an interrupted run


@LOADS
def test_runs_of_other_workers_are_no_tuned_ones(request_of, on_two, monkeypatch):
    sweep = tuning.parse(["optimizer.learning_rate=1,2"])
    request = request_of("zero1", sweep=sweep, tune_seeds=2)
    monkeypatch.setattr(tuning, "tune", lambda found, *_: {"zero1": found[1]})
    lengths = comparison.check(request)
    finish(request.folder(request.entries[0], 1), workers=1)
    with pytest.raises(ValueError, match=r"seed-1 .* workers=1, not 2: use another"):
        comparison._tuned(request, lengths, None)
    candidate, seed = request.candidates[0], request.tuning_seeds[-1]
    later = tuning.folder_of(request.workdir, candidate, seed)
    entry = comparison.Entry(candidate.method, candidate.flags)
    own = parsing.config_of([*request.flags(entry), f"--config.seed={seed}"])
    finish(later, **json.loads(own.to_json_best_effort()), workers=1)
    message = rf"zero1 at .*=1: .*seed-{seed} .* workers=1, not 2: use another"
    with pytest.raises(ValueError, match=message):
        comparison.check(request)


@LOADS
def test_no_tuning_seed_is_of_another_config(request_of, on_two):
    sweep = tuning.parse(["optimizer.learning_rate=1,2"])
    request = request_of("zero1", sweep=sweep, tune_seeds=2)
    (entry, _) = request.entries[0], comparison.check(request)
    flags = [*request.flags(entry), "--config.optimizer.learning_rate=1"]
    seed = request.tuning_seeds[-1]
    other = parsing.config_of([*flags, f"--config.seed={seed}", "--config.steps=7"])
    folder = tuning.folder_of(request.workdir, request.candidates[0], seed)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(other.to_json_best_effort())
    with pytest.raises(ValueError, match=rf"seed-{seed} .*steps=7, not"):
        comparison.check(request)


@LOADS
def test_more_seeds_leave_the_tuning_s(request_of):
    few, many, most = (
        request_of("zero1", seeds=seeds, tune_seeds=2) for seeds in (1, 99, 1200)
    )
    assert few.tuning_seeds == many.tuning_seeds == range(1000, 1002)
    assert most.tuning_seeds == range(1200, 1202)


@LOADS
@pytest.mark.parametrize("name", ["zero1/seed-0", "tuning/acco/steps=1/seed-1"])
def test_runs_over_another_link_are_refused(request_of, monkeypatch, tmp_path, name):
    """Whichever methods they are of: a later comparison may have them again."""
    request = request_of("dpu", rate="20mbit", processes=2)
    monkeypatch.setattr(network, "why_not", lambda: None)
    monkeypatch.setattr(pool, "_starting", lambda *_: contextlib.nullcontext(None))
    monkeypatch.setattr(comparison, "_check_elsewhere", lambda *_, **__: [])
    monkeypatch.setattr(pool.Pool, "run", lambda *_: {})
    with pytest.raises(pool.RunFailed):
        comparison.compare(request, [])
    others = [
        (
            dataclasses.replace(request, rate="0.2gbit"),
            r"mbit=20.0 .*not 200.0: use an",
        ),
        (dataclasses.replace(request, rate=None, processes=1), r"mbit=20.0 .*not None"),
        (dataclasses.replace(request, processes=4), "processes=2 .*not 4: use another"),
    ]
    for other, _ in others:
        comparison._check_link(other)  # without a run
    finish(tmp_path / name)
    (tmp_path / name / "summary.json").unlink()  # an interrupted run
    comparison._check_link(dataclasses.replace(request, rate="20000kbit"))
    for other, message in others:
        with pytest.raises(ValueError, match=message):
            comparison.check(other)
    assert json.loads((tmp_path / "link.json").read_text())["mbit"] == 20


@LOADS
def test_the_check_has_the_devices_of_a_run(request_of, monkeypatch, tmp_path):
    """On a machine with several GPUs, of which each run gets one."""
    found = []

    def run(command, env, **_):
        found.append(env)
        return subprocess.CompletedProcess(command, 2, "", "error: seen\n")

    monkeypatch.setattr(pool, "_gpus", lambda: ["3", "5"])
    monkeypatch.setattr(comparison.subprocess, "run", run)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for at_once in (1, 2):
        with pytest.raises(ValueError, match="seen"):
            comparison.compare(request_of("zero1", at_once=at_once), [])
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in found] == [None, "3"]
    assert found[1] == {**found[0], "CUDA_VISIBLE_DEVICES": "3"}
    assert not list(tmp_path.iterdir())  # a rejected comparison leaves nothing


@LOADS
def test_a_first_half_is_that_of_the_methods_own_step(request_of, monkeypatch):
    option = "config.microbatches_per_step"
    sweep = tuning.parse([f"{option[7:]}=8,32"])
    request = request_of(f"acco,acco({option}=16),acco(config.first_half=1)")
    halves = [parsing.config_of(request.flags(e)).first_half for e in request.entries]
    assert halves == [1, 4, 1]
    request = request_of("acco", sweep=sweep)
    monkeypatch.setattr(tuning, "tune", lambda found, *_: {"acco": found[1]})
    length = {"steps": 1, "tokens": 1, "calls": {}, "limits": "", "workers": 2}
    (best,) = (tuned := comparison._tuned(request, [length] * 2, None)).entries
    assert parsing.config_of(tuned.flags(best)).first_half == 8


def test_methods_and_their_options():
    zero1, dpu = comparison.parse(f"zero1, dpu( warmup_steps=40,{RATE} )")
    assert zero1 == comparison.Entry("zero1", ("--config.method=zero1",))
    assert dpu.name == f"dpu(warmup_steps=40,{RATE})"
    assert dpu.flags == (
        "--config.method=dpu",
        "--config.method_options.warmup_steps=40",
        f"--{RATE}",
    )


def test_an_option_may_be_a_pair():
    plain, pair = comparison.parse("acco,acco(gather_bits=(8,4),reduce_bits=8)")
    assert plain.name == "acco"
    assert pair.name == "acco(gather_bits=(8,4),reduce_bits=8)"
    with warnings.catch_warnings():  # how ml_collections 1.1.0 loads a file
        warnings.filterwarnings("ignore", r"the load_module\(\) method")
        config = parsing.config_of([f"--config={QUICKSTART}", *pair.flags])
    assert config.method_options.to_dict() == {"gather_bits": (8, 4), "reduce_bits": 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "''"),
        ("acco(gather_bits=(8,4)", "option=value"),
        ("acco,,zero1", "''"),
        ("acco(", r"'acco\('"),
        ("acco()", r"'acco\(\)'"),
        ("dpu(warmup_steps)", "option=value"),
        ("dpu(config.data.path=/x)", "option=value"),
        ("../acco", "option=value"),
        ("acco,zero1,acco", "acco twice"),
    ],
)
def test_what_is_no_list_of_methods_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as error:
        comparison.parse(text)
    assert "\n" not in str(error.value)


def test_without_the_tools_the_network_is_refused_before_any_run(start, place):
    process = start("--network=20mbit", workdir="unshaped", PATH="/nonexistent")
    out, err = process.communicate(timeout=500)
    assert process.returncode == exits.REFUSED and out == ""
    assert refusal(err, "--network", "no ip and tc", "apt-get install -y iproute2")
    assert not (place / "unshaped").exists()


@LOADS
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (exits.FAILED, "no result of zero1/seed-0, zero1/seed-1: .* to try again"),
        (exits.DIVERGED, "^diverged: zero1/seed-0, zero1/seed-1 .see the errors abo"),
    ],
)
def test_runs_that_fail_or_diverge_do_not_lose_the_others(
    place, tmp_path, monkeypatch, code, message
):
    """With stand-ins for the processes: one method's write a result."""

    def start(task, slot):
        if "--config.method=acco" not in task.flags:
            return [subprocess.Popen(["sh", "-c", f"exit {code}"])]
        folder = task.folder
        folder.mkdir(parents=True, exist_ok=True)
        row = {"kind": "validation", "half_round": 3, "step": 1, "tokens": 9,
               "seconds": 1.0, "loss": 2.5}  # fmt: skip
        (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        summary = {"loss": 2.5, "tokens": 9, "steps": 1, "seconds": 1.0,
                   "bytes_sent_per_worker": 8, "state_bytes_per_device": 7}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "config.json").write_text('{"microbatch_size": 1, "length": 3}')
        return [subprocess.Popen(["true"])]

    monkeypatch.setattr(comparison, "_check_elsewhere", lambda *_, **__: [])
    monkeypatch.setattr(comparison, "_check_folders", lambda *_: None)
    monkeypatch.setattr(pool, "_starting", lambda *_: contextlib.nullcontext(start))
    request = comparison.ComparisonRequest(
        (f"--config={place / 'tiny.py'}",), comparison.parse("zero1,acco"), tmp_path, 2
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(pool.RunFailed, match=message) as error:
        comparison.compare(request, [])
    table, diverged = (tmp_path / "table.md").read_text(), code == exits.DIVERGED
    named = "Diverged, not in the means: zero1/seed-0, zero1/seed-1.\n" in table
    assert "acco" in table and named == diverged
    assert ("try again" in str(error.value)) != diverged
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("code", "said", "error", "message"),
    [
        (exits.REFUSED, "error: no such field\nand a last word", ValueError, "no such"),
        (1, "Traceback\n  here\nerror: KeyError: 'x'", exits.Failed, "Traceback\n  he"),
        (-9, "", exits.Failed, "the check of the methods failed"),
    ],
)
def test_a_check_that_fails_is_told_from_a_refusal(
    monkeypatch, code, said, error, message
):
    done = subprocess.CompletedProcess([], code, "", said)
    monkeypatch.setattr(comparison.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(error, match=message):
        comparison._check_elsewhere([], pool.Slot(), on_cpu=False)


@pytest.mark.long
def test_a_sweep_is_stopped_and_goes_on(start, place):
    """Two values of two methods, two runs at once, killed in the middle."""
    flags = ("--tune=optimizer.learning_rate=1e-3,4e-3", "--at_once=2",
             "--budget=8e3", "--config.steps=40")  # fmt: skip
    process = start(*flags, methods="acco,zero1", seeds=1, workdir="tuned")
    tuning = place / "tuned" / "tuning"
    deadline = time.monotonic() + 500
    while len(list(tuning.glob("*/*/seed-1/metrics.jsonl"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.communicate()
    process = start(*flags, methods="acco,zero1", seeds=1, workdir="tuned")
    out, err = process.communicate(timeout=540)
    assert process.returncode == 0, err
    table = (tuning / "table.md").read_text()
    assert table.count("**optimizer.learning_rate=") == 2
    # half of the steps for all four, the rest for the better one of each method
    assert sorted(re.findall(r"\| \**(\d+)\** ", table)) == ["20", "20", "40", "40"]
    assert (tuning / "loss.png").exists() and "against acco" in out
    for method in ("acco", "zero1"):
        chosen = re.search(rf"\*\*{method}\*\* .*learning_rate=(\S+)\*\*", table)
        assert chosen is not None
        config = json.loads((place / "tuned" / method / "seed-0" / "config.json")
                            .read_text())  # fmt: skip
        assert config["optimizer"]["learning_rate"] == float(chosen[1])
        seeds = {p.name for p in tuning.glob(f"{method}/*/*")}
        assert seeds == {"seed-1"}


@pytest.mark.slow
def test_over_a_shaped_link(finished, start, place):
    """Real processes, or the one line that says what this machine lacks."""
    process = start("--network=20mbit", "--config.devices=1", methods="acco", seeds=1,
                    workdir="link")  # fmt: skip
    out, err = process.communicate(timeout=540)
    if reason := network.why_not():
        assert refusal(err, "--network", reason)
        return
    assert process.returncode == 0, err
    assert out == (place / "link" / "table.md").read_text()
    acco = results.read(place / "link" / "acco" / "seed-0", "acco", 0)
    one = results.read(place / "out" / "acco" / "seed-0", "acco", 0)
    assert acco.bytes_sent_per_worker == one.bytes_sent_per_worker
    assert acco.final_loss == pytest.approx(one.final_loss, rel=1e-5)
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"acco-{process.pid}-" not in spaces  # others may be measuring here
