"""The table of acco_jax.runs: states, figures, damaged folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from acco_jax.command.files import append_row
from acco_jax.run.pages import run_table
from acco_jax.run.state.workdir import claimed
from tests.lines import refusal
from tests.run.test_pages import write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs in all states, at several depths, beside a Hugging Face folder."""
    top = tmp_path_factory.mktemp("runs")
    write(top / "b" / "deep" / "er" / "finished", parameters=1_234_567, loss=2.5)
    write(top / "a-failed", method="zero1", done=False)
    stopped = write(top / "c-stopped", done=False, tokens=10**6, total_steps=100)
    last = {"time": 1e9 + 62, "cause": "checkpoints", "half_round": 40, "stopped": True}
    append_row(stopped / "goodput.jsonl", last)
    new = write(top / "d-unknown", done=False)
    for name in ("metrics", "goodput", "worlds"):
        (new / f"{name}.jsonl").unlink()
    (write(top / "e-damaged") / "metrics.jsonl").write_text('{"kind": 1}\n{}\n')
    (write(top / "f-damaged") / "config.json").write_text("{")
    (top / "a-failed" / "checkpoints" / "config.json").mkdir(parents=True)
    (top / "model").mkdir()
    (top / "model" / "config.json").write_text('{"model_type": "llama"}')
    return top


def test_each_run_has_a_row(folder):
    rows = {row["name"]: row for row in run_table.rows_of(folder)}
    assert list(rows) == ["a-failed", "b/deep/er/finished", "c-stopped", "d-unknown",
                          "e-damaged", "f-damaged"]  # fmt: skip
    states = [row["state"] for row in rows.values()]
    assert states == ["failed", "finished", "stopped", "unknown", "damaged", "damaged"]
    finished = rows["b/deep/er/finished"]
    expected = {
        "folder": str(folder / "b" / "deep" / "er" / "finished"),
        "method": "acco", "model": "gpt-neo", "parameters": 1_234_567, "step": 20,
        "steps": 20, "loss": 2.5, "tokens_per_second": 512.0,
    }  # fmt: skip
    assert expected.items() <= finished.items()
    assert finished["goodput"] == pytest.approx(0.594, abs=1e-3)
    assert rows["a-failed"]["loss"] == 3 + 3 / 40
    assert rows["c-stopped"]["steps"] == 100 and rows["d-unknown"]["loss"] is None
    assert rows["e-damaged"]["problem"].startswith("metrics.jsonl is damaged in line 1")


def test_runs_behind_links_have_rows(tmp_path):
    write(tmp_path / "scratch" / "big")
    top = tmp_path / "runs"
    top.mkdir()
    (top / "linked").symlink_to(tmp_path / "scratch", target_is_directory=True)
    (top / "back").symlink_to(top, target_is_directory=True)
    assert [row["name"] for row in run_table.rows_of(top)] == ["linked/big"]


def test_a_run_with_a_living_process_is_running(tmp_path):
    folder = write(tmp_path / "run", done=False)
    with claimed(folder):
        before = sorted(p.name for p in folder.iterdir())
        (row,) = run_table.rows_of(folder)
        assert row["state"] == "running" and row["name"] == "run"
        assert sorted(p.name for p in folder.iterdir()) == before
        (folder / "lock.json").write_text('{"host": "elsewhere"}')
        os.utime(folder / "lock.json", (0, 0))
        assert run_table.rows_of(folder)[0]["state"] == "failed"


def test_lines_are_aligned_and_coloured_only_where_asked(folder):
    rows = run_table.rows_of(folder)
    head, *lines = run_table.text(rows).splitlines()
    assert "\033" not in "".join(lines) and len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert line[head.index("state") :].startswith(row["state"])
    assert "20 of 20  2.5000       512    59.4%  finished" in lines[1]
    coloured = run_table.text(rows, colour=True)
    assert "\033[32mfinished\033[0m" in coloured
    assert run_table.text([rows[0] | {"name": "\033[2J"}]).count("\033") == 0


@pytest.mark.slow
def test_the_command_needs_no_device(folder, tmp_path):
    program = """
import sys
from jax._src import xla_bridge
from acco_jax import cli
cli.main()
assert not xla_bridge._backends
"""

    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def runs(*words):
        return subprocess.run(
            [sys.executable, "-c", program, "runs", *words], text=True, cwd=tmp_path,
            capture_output=True, timeout=120, env=environment,
        )  # fmt: skip

    done = runs(str(folder), "--json")
    assert done.returncode == 0 and len(json.loads(done.stdout)) == 6, done
    done = runs("nowhere")
    assert done.returncode == 2, done
    assert refusal(done.stderr, f"{tmp_path}/nowhere does not exist", "name a folder")
    for words in ((), ("a", "b")):
        done = runs(*words)
        assert done.returncode == 2 and refusal(done.stderr, "one folder"), done


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        run_table.rows_of(tmp_path)
