"""What a terminal of 80 columns shows: the line of progress, and train --help."""

import json
import re
import subprocess
import sys

import pytest

from acco_jax.runner import commands, progress, usage
from acco_jax.runner.config import default_config

ROW = {"half_round": 40, "seconds": 12.0, "loss": 2.34567}
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


def test_the_line_says_loss_rate_utilization_and_time_left(monkeypatch):
    terminal = Terminal()
    # here and in no fixture: before the test itself, pytest sets stderr anew
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    line = progress.Progress(total=80_001, done=20)
    row = ROW | {"model_flops_utilization": 0.4123}
    line.show(row)
    line.show(row | {"half_round": 60, "seconds": 42.0})
    line.close()
    first, *_, last = [x for x in terminal.text.split("\r") if "loss" in x]
    assert "? left" in first  # it holds the compilation
    # 79941 half-rounds, 20 of which took 30 s
    assert "loss 2.346, 1,234,568 tokens/s, MFU 41.2%, 33:18:31 left" in last
    assert last.startswith("60/80001 |")
    assert max(len(x.strip()) for x in (first, last)) <= 80


def test_where_there_is_no_terminal_there_is_no_line(capsys):
    line = progress.Progress(total=9, done=0)
    line.show(ROW | {"half_round": 4})
    line.close()
    assert capsys.readouterr() == ("", "")


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
from acco_jax.runner import usage
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
    for name in usage.FIELDS:
        value = config
        for part in name.split("."):
            value = value[part]
        assert f"--config.{name} " in text
        assert value is None or f"[{value}]" in text


def test_help_is_printed_and_no_error(capsys, monkeypatch):
    monkeypatch.setattr(usage, "text", lambda doc, groups: "the page")
    with pytest.raises(SystemExit) as end:
        commands.parser()(["train", "--help"])
    assert end.value.code == 0 and capsys.readouterr().out == "the page"
