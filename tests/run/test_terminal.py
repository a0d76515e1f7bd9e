"""What a terminal and a log show: the progress of a run, and train --help."""

import concurrent.futures
import json
import re
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from acco_jax.run.config import parsing, usage
from acco_jax.run.config.fields import default_config
from acco_jax.run.config.schema import FIELDS
from acco_jax.run.observe import metrics, progress

ROW = {"step": 40, "seconds": 12.0, "loss": 2.34567, "grad_norm": 1.2345}
ROW |= {"tokens_per_second": 1_234_567.8}


class Terminal:
    def __init__(self):
        self.text = ""

    def isatty(self):
        return True

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.fixture
def terminal(monkeypatch):
    """Make stderr a terminal: in the test, before which pytest sets it again."""

    def install():
        screen = Terminal()
        monkeypatch.setattr(progress.sys, "stderr", screen)
        return screen

    return install


@pytest.fixture
def clock(monkeypatch):
    """[seconds] that the progress takes for the time."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def logged(caplog):
    """The lines of the log so far."""
    caplog.set_level("INFO", logger="absl")
    return lambda: caplog.messages


def test_the_bar_shows_step_loss_rate_utilization_and_time_left(terminal):
    screen = terminal()
    bar = progress.Progress(80_001, step=20)
    row = ROW | {"model_flops_utilization": 0.4123}
    bar.show(row)
    bar.show(row | {"step": 60, "seconds": 42.0})
    bar.close()
    first, *_, last = [x for x in screen.text.split("\r") if "loss" in x]
    assert "? left" in first  # it holds the compilation
    # 79941 steps, 20 of which took 30 s
    assert "loss 2.346, 1,234,568 tokens/s, MFU 41.2%, 33:18:31 left" in last
    assert last.startswith("step 60/80001 |")
    # in 80 columns nothing but the bar itself gets shorter
    assert max(len(re.sub(r"\|.*\|", "|#|", x.strip())) for x in (first, last)) < 80


def test_the_bar_shows_what_the_run_does_instead_of_training(terminal):
    screen = terminal()
    bar = progress.Progress(40, log_every=10)
    assert "step 0/40" in screen.text and "compiling" in screen.text
    assert bar.due()  # the first call that is computed ends the compilation
    bar.show(ROW | {"step": 1}, between=True)
    assert "step 1/40" in screen.text and not bar.due()
    for step in (20, 39):
        bar.show(ROW | {"step": step, "seconds": 10.0 + step})
    assert "00:01 left" in screen.text.split("\r")[-1]
    with bar.doing("final evaluation", 40):
        shown = screen.text.split("\r")[-1]
        assert re.match(r"step 40/40 \|.*\| final evaluation", shown)
    shown = screen.text.split("\r")[-1]
    assert "step 40/40" in shown and "loss" in shown and "left" not in shown
    bar.close()
    assert "00:00 left" not in screen.text and "\x1b" not in screen.text


def test_the_log_has_the_first_and_the_last_row_and_one_a_minute(capsys, clock, logged):
    lines = progress.Progress(400, log_every=10, goodput=lambda: 0.871)
    for step in range(10, 401, 10):
        clock[0] += 25
        lines.show(ROW | {"step": step, "seconds": clock[0]})
    lines.close()
    steps = [int(line.split()[1]) for line in logged()]
    assert steps == [*range(10, 400, 30), 400]
    assert logged()[1] == (
        "step 40 of 400: loss 2.346, gradient norm 1.23, 1,234,568 tokens/s, "
        "15:00 left, goodput 87.1%"
    )
    assert logged()[-1].endswith("tokens/s, goodput 87.1%")  # and no 00:00 left
    shown = capsys.readouterr()
    assert shown.out == "" and not set("|\r\x1b") & set(shown.err)  # no bar


@pytest.fixture
def slow_rows(tmp_path, clock):
    """A recorder of rows that come every 1,000 steps."""
    lines = progress.Progress(4000, log_every=1000)
    recorder = metrics.Recorder(tmp_path, done=0, tokens=0, seconds=0.0, progress=lines)
    yield recorder
    recorder.close()


def test_the_log_has_a_line_a_minute_where_rows_are_rarer(
    slow_rows, clock, logged, tmp_path
):
    for step in range(1, 31):
        clock[0] += 5
        host = {"kind": "train", "half_round": step, "tokens": 10 * step}
        device = {"loss": 2.0, "grad_norm": 1.0, "step": step}
        slow_rows.between(host, {k: jnp.asarray(x) for k, x in device.items()})
    assert [int(line.split()[1]) for line in logged()] == [12, 24]
    assert metrics.read(tmp_path) == []  # rows stay those of log_every


def test_a_row_older_than_the_line_before_it_is_not_shown(clock, logged):
    lines = progress.Progress(40, log_every=10)
    clock[0] = 60.0
    lines.show(ROW | {"step": 12}, between=True)
    lines.show(ROW | {"step": 10})  # rows come an interval late
    lines.show(ROW | {"step": 40, "seconds": 90.0})
    assert [line.split()[1] for line in logged()] == ["12", "40"]


def test_a_line_between_rows_waits_for_no_device(slow_rows, clock, logged):
    ended = concurrent.futures.Future()
    slow_rows._ends.of = lambda device: ended
    clock[0] = 60.0
    host = {"kind": "train", "half_round": 7, "tokens": 70}
    device = {"loss": 2.0, "grad_norm": 1.0, "step": 7}
    device = {k: jnp.asarray(x) for k, x in device.items()}
    slow_rows.between(host, device)
    assert logged() == []
    ended.set_result(time.perf_counter())
    slow_rows.between(host | {"half_round": 8}, device | {"step": jnp.asarray(8)})
    assert [line.split()[1] for line in logged()] == ["7"]


def test_what_is_not_known_is_not_in_the_line():
    row = ROW | {"tokens_per_second": None, "model_flops_utilization": None}
    assert progress.text(row, None) == "loss 2.346, ? left"


def test_dropped_workers_are_in_the_line():
    assert "3 dropped, 00:05 left" in progress.text(ROW | {"dropped": 3}, 5.4)


# In a process of its own: other commands' flags have the same names.
HELP = """
import json
from absl import flags
from acco_jax import train
from acco_jax.run.config import usage
defined = [f.name for f in flags.FLAGS.get_flags_for_module("acco_jax.train")]
listed = [name for names in train.GROUPS.values() for name in names]
print(json.dumps([usage.text(train.__doc__, train.GROUPS), defined, listed]))
"""


@pytest.fixture(scope="module")
def shown_help():
    """The page, the flags that are defined, and those that it groups."""
    done = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_help_has_every_flag_once_in_79_columns(shown_help):
    text, defined, listed = shown_help
    assert max(map(len, text.splitlines())) <= 85
    assert sorted(listed) == sorted({*defined, "config"})
    shown = re.findall(r"^  --(\w+) ", text, re.M)
    assert shown == listed and shown[:2] == ["config", "workdir"]
    assert text.index("Needed:") < text.index("--restarts") < text.index("Exit codes:")


def test_help_shows_fields_that_there_are_with_their_defaults(shown_help):
    text = " ".join(shown_help[0].split())
    config = default_config()
    assert text.count("--config.") == 1 + sum(f.help for f in FIELDS.values())
    for name in (name for name, field in FIELDS.items() if field.help):
        value = config
        for part in name.split("."):
            value = value[part]
        assert f"--config.{name} " in text
        assert value is None or f"[{value}" in text


def test_help_is_printed_and_no_error(capsys, monkeypatch):
    monkeypatch.setattr(usage, "text", lambda doc, groups: "the page")
    with pytest.raises(SystemExit) as end:
        parsing.parser()(["train", "--help"])
    assert end.value.code == 0 and capsys.readouterr().out == "the page"
