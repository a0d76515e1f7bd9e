"""The site's pages: snippets run, flags and files exist, links and tables hold."""

import ast
import importlib
import importlib.util
import os
import re
import tomllib
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
import yaml

import acco_jax
from acco_jax import audit
from acco_jax.command.exits import TABLE
from acco_jax.methods import METHODS, options
from acco_jax.run.config.fields import default_config
from tests import compiling

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
PAGES = sorted(SITE.rglob("*.md"))
TEXTS = {page: page.read_text() for page in PAGES}
COMMANDS = (
    "train",
    "compare",
    "plan",
    "audit",
    "doctor",
    "runs",
    "report",
    "generate",
    "evaluate",
    "export",
)
CONFIGURED = ("train", "compare", "plan")  # which take --config
OF_MODELS = (
    "generate",
    "evaluate",
)  # which take acco_jax.run.config.parsing.ModelFlags
TITLED = re.compile(r"^#{1,6} (.+)$", re.M)


def name(page):
    return str(page.relative_to(SITE))


def source_of(command):
    folder = ROOT / "acco_jax" / command
    return folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")


def defined(*files):
    """The flags, and their help, that files define with absl."""
    found = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr.startswith("DEFINE_"):
                says = next(a for a in node.args[2:] if is_text(a))
                found[node.args[0].value] = says.value
    return found


def defaults(file):
    """The defaults that a file writes out, as `--help` prints them; None: unset."""
    found = {}
    for node in ast.walk(ast.parse(file.read_text())):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if called and node.func.attr.startswith("DEFINE_"):
            try:
                value = ast.literal_eval(node.args[1])
            except ValueError:  # a constant of another module
                continue
            unset = value is False or value in (None, "", [])
            found[node.args[0].value] = None if unset else str(value)
    return found


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def flags_of(command):
    files = [source_of(command)]
    if command in OF_MODELS:
        files.append(ROOT / "acco_jax" / "run" / "config" / "parsing.py")
    found = defined(*files)
    if command in CONFIGURED:
        found["config"] = "A file whose get_config() returns the experiment."
    else:
        found.pop("config", None)
    return found


# ------------------------------------------------------------------------- snippets


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXTS[page], re.S | re.M)


@pytest.mark.slow
def test_the_snippets_run(tmp_path, monkeypatch):
    """Page after page, each in names of its own beside those of the front page."""
    monkeypatch.chdir(tmp_path)  # where they save
    front, ran = {"__name__": "docs"}, 0
    pages = sorted(PAGES, key=lambda page: page != SITE / "index.md")
    for page in pages:
        names = dict(front)
        if "step" in front:  # what a page leaves is not what the next one finds
            fresh = names["acco_jax"].start(names["tx"], names["start"]())
            names["params"], names["state"] = fresh
        for block in blocks(page, "python"):
            exec(compile(block, name(page), "exec"), names)
            ran += 1
        check = CHECKS.get(name(page))
        if check is not None:
            check(names)
        if page == SITE / "index.md":
            front = names
    assert ran > 20


def check_index(names):
    assert names["metrics"]["step"] == 3
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(names["theta"]))


def check_numerics(names):
    assert list(names["metrics"]["dropped"]) == [1] + [0] * (names["n"] - 1)


def check_counts(names):
    assert sum(names["counts"]) == 2 * names["n"] - 1
    balanced = names["step"].counts  # what the page ends with
    assert names["metrics"]["weight"] == sum(balanced) == 2 * names["n"]


def check_devices(names):
    assert names["metrics"]["weight"] == 2 * names["n"]  # the same batch


def check_checkpoints(names):
    assert names["extra"] == {"batches": 3}
    assert names["metrics"]["step"] == 3  # seven half-rounds, the first primes


def check_lora(names):
    assert names["merged"]["w"].shape == (8, 16)
    assert not np.allclose(names["merged"]["w"], names["frozen"]["w"])


def check_models(names):
    """The three libraries' loss functions, of their own parameters."""
    batch = (np.ones((4, 8)), np.ones((4, 1)))
    for kind in ("dense", "nnx", "equinox"):
        loss = names["linen_loss" if kind == "dense" else f"{kind}_loss"]
        assert np.isfinite(loss(names[f"{kind}_weights"], batch, None))
    for kind in ("linen", "nnx"):
        params, state = names[f"{kind}_params"], names[f"{kind}_state"]
        loss, _, _, new = names[f"{kind}_norm_loss"](params, batch, None, state)
        assert np.isfinite(loss)
        mean, var = jax.tree.leaves(new)
        np.testing.assert_allclose(mean, 0.1)  # of rows of ones
        np.testing.assert_allclose(var, 0.9, rtol=1e-6)
        assert names[f"{kind}_predict"](params, new, batch[0]).shape == (4, 1)
    model = names["bigram"](16, 4)
    tokens = {"tokens": np.arange(10).reshape(2, 5)}
    loss, weight, _ = model.loss(model.init(jax.random.key(0)), tokens, None)
    np.testing.assert_allclose(loss, weight * np.log(16), rtol=1e-6)


def check_audit(names):
    """The test on the page passes with acco and fails with zero1."""
    given = audit.assert_hidden  # the plugin's own test is in tests/audit
    with compiling.optimized():
        names["test_communication_stays_overlapped"](given)
        synchronous = mock.patch.object(acco_jax, "acco", acco_jax.zero1)
        with synchronous, pytest.raises(AssertionError, match=r"^data: .*overlapped"):
            names["test_communication_stays_overlapped"](given)


CHECKS = {
    "audit.md": check_audit,
    "index.md": check_index,
    "numerics.md": check_numerics,
    "microbatches.md": check_counts,
    "howto/checkpoints.md": check_checkpoints,
    "howto/devices.md": check_devices,
    "howto/lora.md": check_lora,
    "howto/model.md": check_models,
}


def test_what_does_not_run_is_at_least_python():
    other = [(p, b) for p in PAGES for b in blocks(p, "py")]
    assert {name(p) for p, _ in other} == {"migrate/pytorch.md", "migrate/tunix.md"}
    for _, block in other:
        ast.parse(block)
    languages = {x for t in TEXTS.values() for x in re.findall(r"^```(\w+)$", t, re.M)}
    assert languages == {"python", "py"}


# ------------------------------------------------------------------- shell commands


def command_lines():
    """(page, command, its words) of every python -m acco_jax.COMMAND."""
    for page, text in TEXTS.items():
        text = re.sub(r"\\\n\s*", " ", text)
        # in code spans a command may go over lines
        spans = re.findall(r"(?<!`)`([^`]+)`(?!`)", text)
        lines = [line for line in text.splitlines() if line.startswith("    ")]
        for line in [*lines, *(" ".join(span.split()) for span in spans)]:
            found = re.search(r"python -m acco_jax\.(\w+)(.*)", line)
            if found:
                yield page, found[1], found[2]


def fields(config, before=""):
    for key, value in config.items():
        yield f"{before}{key}"
        if hasattr(value, "items"):
            yield from fields(value, f"{before}{key}.")


FIELDS = set(fields(default_config()))
FREE = ("method_options.", "optimizer.options.", "optimizer.schedule_options.",
        "model.options.")  # fmt: skip


def is_field(field):
    return field in FIELDS or field.startswith(FREE)


def test_commands_have_these_flags():
    seen = 0
    for page, command, words in command_lines():
        assert command in COMMANDS, (name(page), command)
        known = {f: {f, f"no{f}"} for f in flags_of(command)}
        known = set().union(*known.values())
        for flag in re.findall(r"--([\w.-]+)", words):
            seen += 1
            if flag.startswith("config."):
                ok = command in CONFIGURED and is_field(flag.removeprefix("config."))
            else:
                ok = flag in known | {"help"}
            assert ok, (name(page), command, flag)
    assert seen > 80


def test_fields_and_options_in_the_text_exist():
    known = set().union(*(flags_of(c) for c in COMMANDS))
    of_others = {"zone", "worker", "command", "logdir", "kill-on-bad-exit", "wait",
                 "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal",
                 "requeue", "help"}  # fmt: skip
    of_benchmarks = {"microbatches", "shares", "methods", "texts", "out", "machines",
                     "sizes", "rows", "repetitions", "table"}  # fmt: skip
    for page, text in TEXTS.items():
        for field in re.findall(r"--config\.([a-z_]+(?:\.[a-z_0-9]+)*)", text):
            assert is_field(field), (name(page), field)
        for flag in re.findall(r"(?<![\w-])--([a-z][a-z_-]*)(?![\w.-])", text):
            ok = flag in known | of_others | of_benchmarks
            assert ok or flag.removeprefix("no") in known, (name(page), flag)


def test_method_options_in_the_text_exist():
    for page, text in TEXTS.items():
        for method, given in re.findall(r"`(\w+)\((\w+=[^`]*)\)`", text):
            if method in METHODS:
                for option in re.findall(r"(\w+)=", given):
                    assert option in options(method), (name(page), method, option)


def test_the_commands_page_has_all_flags():
    text = TEXTS[SITE / "commands.md"]
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.S | re.M))
    assert set(parts) == set(COMMANDS)
    for command in COMMANDS:
        row = r"^\| `--([\w-]+)` \| (.*) \|$"
        listed = dict(re.findall(row, parts[command], re.M))
        assert set(listed) == set(flags_of(command)), command
        for flag, default in defaults(source_of(command)).items():
            shown = re.search(r"\[([^\]]*)\]$", listed[flag])
            assert (shown and shown[1]) == default, (command, flag)


def test_exit_codes_are_those_of_the_commands():
    codes = set(re.findall(r"^\s+(\d+)  ", TABLE, re.M))
    listed = re.findall(r"^\| (\d+) \|", TEXTS[SITE / "faults.md"], re.M)
    assert set(listed) == codes


# --------------------------------------------------------------------- what is named


def test_files_that_are_named_exist():
    for page, text in TEXTS.items():
        tops = "acco_jax|benchmarks|experiments|tests"
        for file in re.findall(rf"(?<![\w/.])((?:{tops})/[\w./]+\.\w+)", text):
            assert (ROOT / file).exists(), (name(page), file)


def test_every_figure_of_time_has_a_record():
    """Each result that is quoted names the file that has it."""
    for file in ("dynamics", "overlap", "memory", "audit", "hub", "loading", "chaos",
                 "soak", "fuzz", "overhead"):  # fmt: skip
        assert any(f"results/{file}.md" in text for text in TEXTS.values()), file


# What a page says, and the line of the result that it rests on.
FIGURES = {
    ("rent.md", "0.63 at 0.5 Gbit/s"): ("network", r"\| 0\.5 \|.*\| 0\.626 \|"),
    ("rent.md", "2.1 to 39 Gbit/s"): ("network", r"from 2\.1 to 39 Gbit/s"),
    ("rent.md", "the most near 4 Gbit/s"): ("network", r"at most 1\.35 times as fast"),
    ("rent.md", "6.0 ms of a step of 259 ms"): ("audit", r"zero1.* 6\.0 .* 259\.2 "),
    ("rent.md", "3 h 19 with zero1"): ("plans", r"4x8.*zero1 \| 48\.7 .*3 h 19"),
    ("rent.md", "3 h 00 with acco"): ("plans", r"4x8.*acco \| 0\.0 .*3 h 00"),
    ("tutorials/plan.md", "48.7 of 373 ms"): ("plans", r"4x8.*zero1 \| 48\.7 .*373 ms"),
    ("tutorials/plan.md", "1.04 to 1.20"): ("plans", r"1\.10 \(1\.04 - 1\.20\)"),
    ("rent.md", "1.34 times as fast"): ("published", r"acco is 1\.34 times as fast"),
    ("methods.md", "+3.2 ± 0.4 % (n = 5)"): ("dynamics", r"acco .*\+3\.24 ± 0\.44 %"),
    ("methods.md", "-0.6 ± 0.1 % (n = 34)"): ("dynamics", r"-0\.62 ± 0\.13 %"),
    ("methods.md", "+0.643 nats"): ("dynamics", r"1,000 .*\+0\.6433"),
    ("methods.md", "+0.068 nats"): ("dynamics", r"1,000 .*\+0\.0679"),
    ("methods.md", "+1.7 to +7.1 %"): ("dynamics", r"H = 50[\s\S]*\(\+7\.1 %\)"),
    ("howto/optimizers.md", "2.98 ± 0.70"): ("optimizers", r"large .*2\.98 ± 0\.70"),
    ("howto/optimizers.md", "1.22 ± 0.04"): ("optimizers", r"polyak.*1\.22 ± 0\.04"),
    ("howto/optimizers.md", "1.16 ± 0.07"): ("optimizers", r"dowg.*1\.16 ± 0\.07"),
    ("howto/optimizers.md", "1.10 ± 0.05"): ("optimizers", r"dadapt.*1\.10 ± 0\.05"),
    ("howto/optimizers.md", "1.04 ± 0.05"): ("optimizers", r"0\.3 .*1\.04 ± 0\.05"),
    ("overlap.md", "| 88 % | 63 %"): ("audit", r"plain_dp .*h100.* 87\.7%"),
}  # fmt: skip


@pytest.mark.parametrize(("page", "words"), FIGURES)
def test_figures_are_those_of_the_results(page, words):
    file, line = FIGURES[page, words]
    assert words in " ".join(TEXTS[SITE / page].split())
    result = ROOT / "experiments" / "results" / f"{file}.md"
    assert re.search(line, result.read_text())


def test_the_table_of_methods_is_what_the_program_prints():
    path = ROOT / "benchmarks" / "methods_table.py"
    spec = importlib.util.spec_from_file_location("methods_table", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    text = TEXTS[SITE / "methods.md"]
    assert program.HEAD in text
    few = [m for m in program.METHODS if m[0] in ("zero1", "acco") and not m[1]]
    for method in few:
        assert program.row(*method, workers=8) in text
    assert set(METHODS) == {method for method, _ in program.METHODS}
    assert all(f"| `{method}" in text for method in METHODS)


def test_causes_are_those_of_the_program():
    rows = re.findall(
        r"^\| ([a-z][^|]+) \|", TEXTS[SITE / "howto" / "exposed.md"], re.M
    )
    program = (ROOT / "acco_jax" / "schedule" / "causes.py").read_text()
    assert len(rows) > 10
    assert [x for x in rows if x != "message" and x not in program] == []


# --------------------------------------------------------------------------- links


def slug(title):
    """A heading's anchor, as Python-Markdown makes it."""
    text = re.sub(r"[^\w\s-]", "", re.sub(r"`", "", title)).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def prose(page):
    text = TEXTS.get(page) or page.read_text()  # a result is not a page
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists(), target
        if there.suffix == ".svg":
            assert anchor == f"gh-{'dark' if '_dark' in file else 'light'}-mode-only"
        elif anchor:
            assert anchor in map(slug, TITLED.findall(prose(there))), target


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "docs" / "mkdocs.yml").read_text())

    def pages(nav):
        for entry in nav:
            for value in entry.values():
                yield from [value] if isinstance(value, str) else pages(value)

    listed = list(pages(config["nav"]))
    results = (ROOT / "experiments" / "results").glob("*.md")
    added = [
        "architecture.md",
        *(f"results/{x.name}" for x in results),
        *(f"notebooks/{x.stem}.md" for x in (ROOT / "colab").glob("*.ipynb")),
    ]  # docs/hooks.py
    assert sorted(listed) == sorted([*map(name, PAGES), *added])
    assert len(listed) == len(set(listed))


READERS = {  # five questions of each, and where the answer is
    "has an optax loop": {
        "How do I put acco into my loop?": "howto/loop.md",
        "Does my optimizer work with it, Muon for example?": "howto/optimizers.md",
        "How do I save and resume?": "howto/checkpoints.md",
        "How much memory does it take?": "memory.md",
        "How close is the final loss?": "experiments/results/dynamics.md",
    },
    "studies DiLoCo": {
        "Which local methods are there?": "methods.md",
        "How many bytes does each send?": "methods.md#bytes-sent-and-held",
        "How do I compare at the same tokens?": "tutorials/compare.md",
        "Which one at which rate of the network?": "experiments/results/sweep.md",
        "What if workers are unequal?": "microbatches.md",
    },
    "has 512 chips": {
        "Is communication overlapped on my hardware?": "plan.md",
        "What does a run take and cost?": "rent.md",
        "The model does not fit one chip?": "howto/fsdp.md",
        "How do I start it on SLURM, Kubernetes or TPU slices?": "howto/clusters.md",
        "What happens when a host dies?": "faults.md",
    },
}


@pytest.mark.parametrize("reader", READERS)
def test_answers_are_one_click_away(reader):
    """README or the site's home links the answer's page, or its section, directly."""
    targets = set()
    for page in (ROOT / "README.md", SITE / "index.md"):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            path = os.path.normpath(page.parent.relative_to(ROOT) / link)
            targets.add(path.removeprefix("docs/site/"))
    for question, answer in READERS[reader].items():
        assert answer in targets, question
        assert (SITE / answer.partition("#")[0]).exists() or (ROOT / answer).exists()


def test_the_reference_has_every_export_once():
    pages = [p.read_text() for p in sorted((SITE / "api").glob("*.md"))]
    assert len(pages) == 4
    found = re.findall(r"^::: (\S+)$", "\n".join(pages), re.M)
    names = [path.rpartition(".")[2] for path in found]
    assert len(set(found)) == len(found)
    for path in found:
        module, _, last = path.rpartition(".")
        assert hasattr(importlib.import_module(module), last), path
    exported = set(acco_jax.__dir__()) & set(acco_jax._LAZY)
    assert exported and sorted(exported - set(names)) == []


def test_linked_names_of_other_libraries_exist():
    """The addresses are theirs: signatures show these names."""
    config = yaml.load((ROOT / "docs" / "mkdocs.yml").read_text(), yaml.BaseLoader)
    addresses = config["extra"]["addresses"]
    assert len(addresses) > 5
    for path, address in addresses.items():
        module, _, last = path.rpartition(".")
        assert hasattr(importlib.import_module(module), last), path
        assert address.startswith("https://")


def test_the_extra_has_what_the_site_is_built_with():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        re.split(r"[\[>=]", x)[0] for x in project["optional-dependencies"]["docs"]
    }
    pinned = (ROOT / "requirements.txt").read_text()
    assert wanted == {"codespell", "mkdocs-material", "mkdocstrings", "ruff"}
    assert all(f"\n{package}==" in pinned for package in wanted)


def test_a_warning_fails_the_build():
    """mkdocs counts warnings with --strict, and with --quiet it never sees one."""
    recipe = re.search(
        r"^docs:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M
    )
    (build,) = (line for line in recipe[1].splitlines() if "mkdocs build" in line)
    assert "--strict" in build and not re.search(r"--quiet|\s-q\b", build)
