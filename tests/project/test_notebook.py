"""The notebook runs from a clean kernel, and the committed file is what it gave."""

import base64
import difflib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from acco_jax.run.trained import language, perplexity
from benchmarks import pictures

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "colab" / "acco_quickstart.ipynb"
OWN_MODELS = ROOT / "colab" / "bring_your_own_model.ipynb"
HOW = ROOT / "colab" / "how_acco_works.ipynb"
WRITER = ROOT / "colab" / "small_python"  # a model, of experiments/small_python.py
KERNEL = "this-interpreter"
SMOKE = (
    "10"  # steps that every cell is run with here; `make notebook` has no such limit
)
# Held out, nats per byte, and the last losses, nats: a little above what is committed.
# Another Python has another text.
LOSS_BAR, LAST_LOSS_BAR = 2.8, 0.7
# Of acco's held-out loss from zero1's.
SPREAD = 0.03

each = pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(QUICKSTART, marks=pytest.mark.long),  # more than a minute
        OWN_MODELS,
        pytest.param(HOW, marks=pytest.mark.long),
    ],
    ids=lambda path: path.stem,
)


def read(notebook):
    return nbformat.read(notebook, as_version=4)


def code_cells(content):
    return [cell for cell in content.cells if cell.cell_type == "code"]


def printed(content):
    outputs = [output for cell in code_cells(content) for output in cell.outputs]
    return "".join(o.text for o in outputs if o.output_type == "stream")


def check_run(content):
    """Every cell was run, in order, without a word on stderr."""
    cells = code_cells(content)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.get("name") == "stderr"]
    assert "Installing" not in printed(content)
    pictures = [
        o.data["image/png"] for o in outputs if "image/png" in o.get("data", ())
    ]
    for picture in pictures:
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    return len(pictures)


def check_quickstart(content):
    """What does not depend on how long it trained."""
    assert check_run(content) == 4
    assert "bitwise identical: True" in printed(content)
    overlapped = re.findall(
        r"^ +(reduce-scatter|all-gather) .* overlapped", printed(content), re.M
    )
    assert sorted(overlapped) == ["all-gather", "reduce-scatter"]
    assert re.search(r"overlapped: (99\.9|100\.0)% of the bytes", printed(content))
    lines = re.findall(r"^(\w+) +([\d.a-z]+) nats per byte$", printed(content), re.M)
    return {name: float(loss) for name, loss in lines}


def test_committed_quickstart():
    held_out = check_quickstart(read(QUICKSTART))
    assert set(held_out) == {"zero1", "acco", "dpu"}
    assert held_out["acco"] < LOSS_BAR < held_out.pop("dpu") < 3.2  # what delay costs
    assert all(math.isfinite(loss) and loss < LOSS_BAR for loss in held_out.values())
    assert held_out["acco"] == pytest.approx(held_out["zero1"], rel=SPREAD)


def test_committed_own_models():
    content = read(OWN_MODELS)
    assert check_run(content) == 0
    losses = re.findall(r"^(.+): loss ([\d.]+) -> ([\d.]+)$", printed(content), re.M)
    names = ["plain arrays", "linen", "nnx", "equinox", "Hugging Face"]
    assert [name for name, *_ in losses] == names
    assert all(float(last) < LAST_LOSS_BAR < float(first) for _, first, last in losses)
    assert "written back: True" in printed(content)


def check_how(content):
    """Timelines, paths, a sweep with its picture, and text like Python."""
    assert check_run(content) == 5
    assert "call 8: commit " in printed(content)
    (cell,) = (x for x in code_cells(content) if "ipywidgets" in x.source)
    assert "ipywidgets is missing" in cell.outputs[0].text
    assert re.search(r"^ +10 +1\.00 ", printed(content), re.M)
    assert "--- 3 of 3\ndef " in printed(content)


def test_committed_how_acco_works():
    content = read(HOW)
    check_how(content)
    text = "".join(x.source for x in content.cells if x.cell_type == "markdown")
    assert text.count("<summary>Answer</summary>") == text.count("</details>") == 3


def test_the_first_answer():
    of_zero1, of_acco, at_6 = pictures.predicted()
    assert round(at_6 * 6 / (of_acco / 2), 1) == 3.5
    assert round(at_6 * 6 / of_zero1, 1) == 1.9


@pytest.mark.slow
def test_the_second_answer(monkeypatch):
    def ends(rate):
        monkeypatch.setattr(pictures, "RATE", rate)
        paths = map(pictures.path, ("zero1", "acco", "dpu"))
        return [round(float(abs(path[-1]).max()), 1) for path in paths]

    assert ends(1.4) == [1.2, 1.7, 20.8]
    assert ends(1.9)[:2] == [1.5, 8.9]
    assert min(ends(2.1)) > 10


def test_the_model_that_writes_is_small():
    assert sum(file.stat().st_size for file in WRITER.iterdir()) <= 2**20
    model = language.from_folder(WRITER)
    text = "    def close(self):\n        self.file.close()\n"
    other = "Das ist kein Programm, sondern deutsche Prosa ohne Sinn.\n"
    found = [perplexity.of_text(model, x)["bits_per_byte"] for x in (text, other)]
    assert found[0] < 2.3 < found[1]  # bits per byte of a bigram of Python


def test_three_lines_differ_and_the_text_shows_them():
    content = read(QUICKSTART)
    plain, acco = (
        cell.source.splitlines() for cell in code_cells(content) if "# 3" in cell.source
    )

    def loop(lines):
        """The loop with its tx: not what prepares it, nor the call at the end."""
        body = lines[next(i for i, x in enumerate(lines) if "def train(" in x) : -1]
        return [x for x in lines if x.startswith("tx =")] + body

    changes = difflib.ndiff(loop(plain), loop(acco))
    changes = [x[0] + x[2:] for x in changes if x[0] in "+-"]
    changes = [x for x in changes if x[1:].strip()]
    (shown,) = (
        re.search(r"```diff\n(.*?)\n```", cell.source, re.S)
        for cell in content.cells
        if "```diff" in cell.source
    )
    assert len(changes) == 6
    assert changes == shown[1].splitlines()
    assert [x[-3:] for x in changes] == ["# 1", "# 1", "# 2", "# 2", "# 3", "# 3"]


@each
@pytest.mark.slow
def test_runs_from_a_clean_kernel(notebook, tmp_path):
    spec = tmp_path / "jupyter" / "kernels" / KERNEL / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(
        json.dumps({"argv": argv, "display_name": KERNEL, "language": "python"})
    )
    copy = tmp_path / "colab" / notebook.name
    copy.parent.mkdir()
    content = read(notebook)
    for cell in code_cells(content):
        cell.outputs, cell.execution_count = [], None
    nbformat.write(content, copy)

    program = "from nbclient.cli import NbClientApp; NbClientApp.launch_instance()"
    environment = os.environ | {
        "ACCO_DATA_DIR": str(tmp_path / "data"),
        "ACCO_STEPS": SMOKE,
        "JUPYTER_PATH": str(spec.parent.parent.parent),
        "PYTHONPATH": str(ROOT),
    }
    # as users run it: compiled with optimizations (it is quicker by more than that
    # takes), and without an accelerator, which the notebook itself must find out
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "JAX_PLATFORMS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-c", program, "--inplace", f"--kernel_name={KERNEL}", copy],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if notebook == QUICKSTART:
        assert len(check_quickstart(read(copy))) == 3
    elif notebook == HOW:
        check_how(read(copy))
    else:
        check_run(read(copy))
