"""Report on runs: python -m acco_jax.report DIR [DIR ...]

Writes one HTML page that needs no network: interactive curves of the training and
held-out loss against tokens, time and bytes, differences of configurations, throughput,
microbatches per worker, communication, memory, wall time, faults and restarts. DIR is
the workdir of a run, finished or not, or of a comparison, or a folder of workdirs.

  python -m acco_jax.report runs/quickstart        # writes runs/quickstart/report.html
  python -m acco_jax.report runs/acco runs/zero1 --out=both.html

It needs Bokeh: pip install 'acco-jax[report]'.
"""

import datetime
import importlib.util
import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # quiet C++ start-up messages

from absl import app, flags

from acco_jax.command import exits
from acco_jax.command.files import write_whole
from acco_jax.command.paths import expanded
from acco_jax.run.config import parsing

__doc__ = f"{(__doc__ or '').rstrip()}\n{exits.TABLE}"

FILE = "report.html"
_OUT = flags.DEFINE_string(
    "out",
    None,
    "File to write; default: report.html in DIR, or in the current folder for "
    "several runs.",
)


@exits.lines()
def main(argv: list[str]) -> None:
    folders = [expanded(name) for name in argv[1:]]
    if not folders:
        raise ValueError("no folder: name the workdir of a run, or several.")
    if importlib.util.find_spec("bokeh") is None:
        raise ValueError(
            "the page's curves need Bokeh, which is not installed: pip install "
            "'acco-jax[report]'."
        )
    from acco_jax.run.pages import page, run_records  # slow, and bokeh is optional

    runs = run_records.read(folders)
    single = folders[0] if len(folders) == 1 else Path()
    path = expanded(_OUT.value) if _OUT.value else single / FILE
    text = page.written(runs, datetime.datetime.now())
    write_whole(path, text)
    number = f"{len(runs)} runs" if len(runs) > 1 else "a run"
    print(f"{path}: {number}, {len(text.encode()) / 1e6:.1f} MB")


if __name__ == "__main__":
    app.run(main, flags_parser=parsing.parser(names=True))
