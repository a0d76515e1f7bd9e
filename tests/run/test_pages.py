"""The page of acco_jax.report: its text, its data, and what it refuses."""

import dataclasses
import datetime
import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from acco_jax.command import palette
from acco_jax.command.files import sealed
from acco_jax.run.config.fields import default_config
from acco_jax.run.pages import curves, page, run_records
from tests.lines import refusal

ROOT = Path(__file__).resolve().parents[2]
WORKERS = 2


def write(folder, *, calls=40, loss=3.0, done=True, counts=(2, 2), **fields):
    """A run's folder as a run leaves it, of half-rounds that take a second each."""
    folder.mkdir(parents=True)
    config = json.loads(default_config().to_json_best_effort())
    config |= {"steps": calls // 2, "workers": WORKERS, **fields}
    rows = [
        {"kind": "train", "half_round": h, "tokens": 512 * h, "step": h // 2,
         "seconds": float(h), "loss": loss + 4 / h, "tokens_per_second": 512.0,
         "microbatches": list(counts), "dropped": int(h == 7)}
        for h in range(1, calls + 1)
    ]  # fmt: skip
    for h in range(10, calls + 1, 10):
        row = {
            "kind": "validation", "half_round": h, "tokens": 512 * h, "step": h // 2,
            "seconds": float(h), "loss": loss + 3 / h, "bits_per_byte": 1.5,
        }  # fmt: skip
        rows.append(row)
    if done:
        rows.append(rows[-1] | {"kind": "final", "loss": loss})
        summary = {"loss": loss, "tokens": 512 * calls, "steps": calls // 2,
                   "seconds": float(calls), "state_bytes_per_device": 3_500_000,
                   "bytes_sent_per_worker": 8_000_000, "bits_per_byte": 1.25,
                   "gradient_seconds_per_token": 1 / 1024}  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    causes = [
        ("down", 0, 0), ("start_up", 4, 0), ("training", 24, 20), ("down", 34, 20),
        ("start_up", 36, 15), ("training", 61, 40),
    ]  # fmt: skip
    record = [{"time": 1e9 + t, "cause": c, "half_round": h} for c, t, h in causes]
    record[2]["compiling"] = 5.0
    world = {"half_round": 0, "axes": {"data": WORKERS}, "processes": 1,
             "counts": [2, 2], "form": "fused", "first_half": 0}  # fmt: skip
    other = world | {"half_round": 15, "axes": {"data": 1}, "counts": [4]}
    (folder / "config.json").write_text(json.dumps(config))
    for name, lines in (
        ("metrics", rows),
        ("goodput", record),
        ("worlds", [sealed(world), sealed(other)]),
    ):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "failures" / "attempt-1" / "process-0").mkdir(parents=True)
    return folder


class Page(HTMLParser):
    """A page's tags and their attributes, its text by section, and its scripts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.sections = [], [], {}
        self._at, self._in = None, None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._in = tag
        if tag == "section":
            self._at = dict(attributes)["id"]
            self.sections[self._at] = ""
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in = None
        self._at = None if tag == "section" else self._at

    def handle_data(self, data):
        if self._in == "script":
            self.scripts[-1] += data
        elif self._at:
            self.sections[self._at] += f" {' '.join(data.split())}"

    @property
    def figures(self):
        """Title of the x axis -> {name of what is drawn: its columns}."""
        (text,) = re.findall(r"const docs_json = '(.*)';", self.scripts[1])
        text = html.unescape(text.replace("\\\\", "\\"))
        (document,) = json.loads(text).values()
        found, sources = {}, {}
        for entry in walk(document["roots"]):
            if entry.get("name") == "ColumnDataSource":
                entries = entry["attributes"]["data"]["entries"]
                sources[entry["id"]] = dict(entries)
        for root in document["roots"]:
            drawn, axis = {}, root["attributes"]["below"][0]["attributes"]
            for line in root["attributes"]["renderers"]:
                data = sources[line["attributes"]["data_source"]["id"]]
                drawn[line["attributes"].get("name")] = data
            found[axis["axis_label"]] = drawn
        return found


def walk(value):
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from walk(inner)


def made(*folders):
    text = page.written(run_records.read(folders), datetime.datetime(2026, 1, 2, 3, 4))
    return Page(text)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return made(write(tmp_path_factory.mktemp("one") / "acco"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A comparison of two methods, two seeds of one of them, and a run under way."""
    top = tmp_path_factory.mktemp("two")
    write(top / "acco" / "seed-0", loss=2.5)
    write(top / "acco" / "seed-1", loss=2.6, seed=1)
    write(top / "zero1" / "seed-0", method="zero1", done=False, calls=20)
    return made(top)


def test_curves_are_those_of_the_files(one):
    figures = one.figures
    assert list(figures) == [
        "thousand tokens", "time (s)", "sent by each worker (MB)", "thousand tokens"
    ][:3]  # the last picture has the first one's axis  # fmt: skip
    drawn = figures["time (s)"]
    assert drawn["acco, training"]["half_round"] == list(range(1, 41))
    assert drawn["acco, training"]["loss"] == [3 + 4 / h for h in range(1, 41)]
    held_out = drawn["acco, held out"]
    assert held_out["loss"] == [3 + 3 / h for h in (10, 20, 30, 40)]
    assert held_out["tokens"] == [5.12, 10.24, 15.36, 20.48]
    assert held_out["sent"] == [2, 4, 6, 8]
    assert drawn["acco, held out, all documents"]["loss"] == [3]


def test_nothing_is_loaded(one):
    for tag, attributes in one.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert "src" not in attributes and "href" not in attributes
    (policy,) = (
        a["content"] for _, a in one.tags if "content" in a and "http-equiv" in a
    )
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy and "*" not in policy


def test_the_page_says_what_a_run_has_left(one):
    says = one.sections
    assert "finished" in says["overview"] and "2 → 1" in says["overview"]
    assert (
        "3.0000" in says["overview"] and "3.0750" in says["overview"]
    )  # final, lowest
    assert "2 in each half-round, on each of 2 workers" in says["microbatches"]
    assert "--config.profile=START:STOP" in says["communication"]
    assert "8 MB" in says["communication"] and "200 kB" in says["communication"]
    # 1 ms of 1024 tokens' 2 ms a step are gradients: 40 half-rounds, 20 steps
    assert "1,000.0 ms" in says["communication"]
    assert "3.5 MB" in says["memory"]
    for part in ("started 2 times; down in between for 10 s",
                 "half-rounds 16 to 20 were lost and done again",
                 "failures/attempt-1/process-0",
                 "after half-round 15 on other devices: 1 workers",
                 "1 times a worker's numbers were not finite"):  # fmt: skip
        assert part in says["faults"], part


def test_the_wall_time_is_all_there(one):
    says = one.sections["goodput"]
    assert "61 s of wall time" in says
    # 20 s less 5 of compiling, of which 5 of 20 half-rounds were lost, and 25
    for part in ("36 s (59.4%)", "3.8 s (6.1%)", "6.0 s (9.8%)", "5.0 s (8.2%)",
                 "10 s (16.4%)"):  # fmt: skip
        assert part in says, (part, says)
    widths = [float(w) for _, a in one.tags
              for w in re.findall(r"width:([\d.]+)%", a.get("style", ""))]  # fmt: skip
    assert sum(widths) == pytest.approx(100, abs=0.01)


def test_a_single_run_is_compared_with_the_defaults(one):
    says = one.sections["configuration"]
    assert re.search(r"steps 1000 20 ", says), says
    assert "method" not in says  # acco is the default


def test_several_runs_are_told_apart(two):
    assert "acco/seed-0" in two.sections["overview"]
    says = two.sections["configuration"]
    assert re.search(r"method acco acco zero1", says)
    assert re.search(r"seed 0 1 0", says) and "length" not in says
    boxes = [a["value"] for tag, a in two.tags if tag == "input"]
    assert boxes == ["acco", "zero1"]  # seeds of a method have one colour
    assert "failed, step 10 of 10" in two.sections["overview"]


def test_seeds_of_one_method_share_its_colour(tmp_path):
    for seed in range(2):
        write(tmp_path / "acco" / f"seed-{seed}", seed=seed)
    runs = run_records.read([tmp_path / "acco"])
    assert [run.name for run in runs] == ["seed-0", "seed-1"]
    assert curves.colors(runs) == {"acco": palette.METHODS["acco"]}


def test_methods_are_compared_seed_by_seed(tmp_path, two):
    losses = {"acco": (2.0, 2.2, 2.4), "zero1": (2.02, 2.2, 2.376), "lion": (2.1,)}
    for name, found in losses.items():
        method, options = ("zero1", {"name": "lion"}) if name == "lion" else (name, {})
        for seed, loss in enumerate(found, start=0 if name == "acco" else 1):
            more = {"optimizer": default_config().optimizer.to_dict() | options}
            folder = tmp_path / f"{name}-{seed}"
            write(folder, loss=loss, method=method, seed=seed, **more)
    says = made(tmp_path).sections["overview"]
    # seeds 1 and 2: 2.02 / 2.2 and 2.2 / 2.4, -8.18 % and -8.33 %
    assert "against acco, optimizer.name=adamw pairs" in " ".join(says.split())
    for row in (r"acco, optimizer.name=adamw 3 2\.2000",
                r"zero1, optimizer.name=adamw 3 2\.1987 -8\.26 ± 0\.08 % 2",
                r"zero1, optimizer.name=lion 1 2\.1000 -4\.55 % 1"):  # fmt: skip
        assert re.search(row, " ".join(says.split())), says
    assert "seed by seed" not in two.sections["overview"]  # one of them is unfinished


def test_runs_of_other_workers_or_of_the_same_seed_have_rows_of_their_own(tmp_path):
    """Each worker has its microbatches: four read twice the tokens of two in a step."""
    runs = {"a": (2, 2.0), "b": (4, 2.02), "c": (2, 2.04)}
    for name, (workers, loss) in runs.items():
        write(tmp_path / name, loss=loss, workers=workers)
    says = " ".join(made(tmp_path).sections["overview"].split())
    for row in ("acco, workers=2 1 2.0000 ", "acco, workers=4 1 2.0200 +1.00 % 1",
                "acco, workers=2, c 1 2.0400 +2.00 % 1"):  # fmt: skip
        assert row in says, says


def test_bytes_of_an_unfinished_run_are_not_made_up(two):
    assert "zero1/seed-0, held out" in two.figures["time (s)"]
    assert "zero1/seed-0, held out" not in two.figures["sent by each worker (MB)"]


def test_a_run_that_has_just_begun(tmp_path):
    folder = write(tmp_path / "new", done=False)
    for name in ("metrics", "goodput", "worlds"):
        (folder / f"{name}.jsonl").unlink()
    (folder / "lock.json").write_text("{}")
    says = made(folder).sections
    assert "running, step 0 of 20" in says["overview"]
    assert "Nothing is recorded" in says["goodput"]
    assert "not recorded yet" in says["microbatches"]


def test_counts_that_adapt_are_drawn(tmp_path):
    folder = write(tmp_path / "adaptive", microbatches="adaptive")
    lines = "".join(f"[{1 + h % 2}, 3]\n" for h in range(40)) + "[1,"  # cut by a kill
    (folder / "counts.jsonl").write_text(lines)
    shown = made(folder)
    assert (
        "mean of 40 half-rounds, worker by worker: 1.50, 3.00"
        in (shown.sections["microbatches"])
    )
    assert shown.figures["half-round"]["adaptive"]["mean"] == [2, 2.5] * 20


def test_counts_of_an_inner_step_are_drawn_as_a_call_s(tmp_path):
    """diloco of ten inner steps, balanced; its first row counted for nobody."""
    folder = write(tmp_path / "local", method="diloco", counts=(20, 30))
    lines = "[0, 0]\n" + 39 * "[2, 3]\n"
    (folder / "counts.jsonl").write_text(lines)
    (run,) = run_records.read([folder])
    assert run.microbatches()[:2] == [(1, [0, 0]), (2, [20, 30])]


def test_a_trace_is_shown(tmp_path):
    folder = write(tmp_path / "run")
    row = {
        "half_round": 7, "seconds": 0.1, "computation": 0.06, "communication": 0.04,
        "hidden": 0.03, "waited_for": {"all-gather": 0.01, "neither": 0.03},
    }  # fmt: skip
    summary = {"devices": ["a", "b"], "unknown": "", "calls": [row]}
    unknown = summary | {"unknown": "no <events>", "calls": []}
    (folder / "profile").mkdir()
    for number, text in enumerate((summary, unknown)):
        path = folder / "profile" / f"process-{number}.json"
        path.write_text(json.dumps(text))
    says = made(folder).sections["communication"]
    assert "run, process 0: means over 2 devices" in says
    assert re.search(
        r"7\s+100.0 ms\s+60.0 ms\s+40.0 ms\s+75%\s+all-gather 10.0 ms", says
    )
    assert "What was overlapped is unknown: no <events>." in says


def test_names_are_text(tmp_path):
    """Neither a folder nor a field of its config can end a script, or begin one."""
    evil = "<img onerror=alert(1)>'\"&{{7*7}}"
    cut = "</script><script>alert(2)</script>"  # which no name of a folder can hold
    top = tmp_path / evil
    write(top / "a" / "b", wandb_project=cut)
    write(top / evil, metrics_hook=f"{cut}\\'")
    runs = run_records.read([top])
    named = {"name": cut, "group": cut}
    runs = [dataclasses.replace(r, **named) if r.name == "a/b" else r for r in runs]
    assert [r.name for r in runs] == [evil, cut]
    text = page.written(runs, datetime.datetime(2026, 1, 2))
    shown = Page(text)
    assert (
        len(shown.scripts) == 3 and "alert" not in shown.scripts[0] + shown.scripts[2]
    )
    assert not [t for t, _ in shown.tags if t == "img"]
    assert cut in " ".join(shown.sections["configuration"].split())
    assert f"{cut}, held out" in shown.figures["time (s)"]
    assert f"{evil}, held out" in shown.figures["time (s)"]


def test_long_runs_are_averaged_not_cut():
    rows = [{"half_round": h, "loss": float(h)} for h in range(1, 3001)]
    thin = curves.thinned(rows, ("half_round", "loss"))
    assert len(thin) <= curves.POINTS
    assert thin[0] == {"half_round": 4.5, "loss": 4.5}
    assert thin[-1]["half_round"] > 2990


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "metrics.jsonl").write_text('{"kind": 1}\n{}\n'), "line 1"),
        (lambda f: spoil(f / "metrics.jsonl", '"loss": ', '"loss": "x'), "line 1"),
        (lambda f: spoil(f / "goodput.jsonl", "start_up", "nap"), "line 2: remove it"),
        (lambda f: (f / "summary.json").write_text('{"loss": -1}'), "loss is -1"),
        (lambda f: (f / "config.json").write_text("{"), "config.json is damaged"),
        (lambda f: (f / "config.json").write_text("{}"), "is of no run"),
        (
            lambda f: spoil(f / "worlds.jsonl", '"data"', '"dato"'),
            "worlds.jsonl is dam",
        ),
        (lambda f: (f / "counts.jsonl").write_text("[1]\nx\n"), "line 2 of"),
    ],
)
def test_what_is_damaged_is_named_in_one_line(tmp_path, change, message):
    folder = write(tmp_path / "run")
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        run_records.read([folder])
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def spoil(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, f'{new}"' if new.endswith("x") else new))


@pytest.mark.slow
def test_the_command(tmp_path):
    known = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = dict(os.environ, PYTHONPATH=known)

    def report(*words, **more):
        return subprocess.run(
            [sys.executable, "-m", "acco_jax.report", *words], cwd=tmp_path, text=True,
            capture_output=True, timeout=120, env=environment | more,
        )  # fmt: skip

    write(tmp_path / "run")
    done = report("run")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"run/report.html: a run, \d\.\d MB\n", done.stdout)
    text = (tmp_path / "run" / "report.html").read_text()
    assert len(text) < 2e6 and Page(text).figures
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text(
        "import sys; sys.modules['bokeh'] = None\n"
    )
    path = os.pathsep.join((str(tmp_path / "hidden"), known))
    refused = [
        (report(), ("no folder", "name the workdir of a run")),
        (report("nowhere"), (f"{tmp_path}/nowhere does not exist", "name the workdir")),
        (report("hidden"), (f"{tmp_path}/hidden holds no run", "name the --workdir")),
        (report("run", PYTHONPATH=path), ("Bokeh", "pip install 'acco-jax[report]'")),
    ]
    for done, words in refused:
        assert done.returncode == 2 and refusal(done.stderr, *words), done
