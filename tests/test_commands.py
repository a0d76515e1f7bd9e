"""The program `acco`: its list, its errors, each command's help, flags' spellings."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absl import flags

from acco_jax import cli
from acco_jax.command import exits
from acco_jax.run.config import usage
from tests.lines import refusal

ROOT = Path(__file__).parents[1]


def ended(capsys, monkeypatch, *arguments, program="/bin/acco"):
    """The exit code, stdout and stderr of a command line."""
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code
    return code, *capsys.readouterr()


def python(*arguments, **options):
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


def test_the_script_is_the_function_that_is_tested():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    (name, target), (module, function) = *scripts.items(), ("acco_jax.cli", "main")
    assert name == "acco" and target == f"{module}:{function}"
    assert getattr(importlib.import_module(module), function) is cli.main


def test_the_table_has_every_command():
    found = {
        file.parent.name if file.stem == "__main__" else file.stem
        for file in (ROOT / "acco_jax").glob("**/*.py")
        if re.search(r"^@exits\.lines\(.*\)\ndef main\(", file.read_text(), re.M)
    }
    assert set(cli.COMMANDS) == found


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_it_lists_the_commands(capsys, monkeypatch, arguments):
    code, out, err = ended(capsys, monkeypatch, *arguments)
    assert code == 0 and err == "" and out.startswith("Usage: acco COMMAND [FLAGS]\n")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)


def test_the_list_needs_no_jax_and_no_extra():
    program = """
import sys
sys.modules |= dict.fromkeys(("jax", "numpy", "optax", "absl", "ml_collections"))
import acco_jax.cli
acco_jax.cli.main()
"""
    done = python("-c", program)
    assert done.returncode == 0 and "  train " in done.stdout, done


@pytest.mark.parametrize(("name", "meant"), [("trian", "'train'"), ("xyz", None)])
def test_an_unknown_command_is_one_line(capsys, monkeypatch, name, meant):
    code, out, err = ended(capsys, monkeypatch, name, "--help")
    assert code == exits.REFUSED == cli.USAGE_ERROR and out == ""
    suggested = f" Did you mean {meant}?" if meant else ""
    said = f"{name!r} is not a command.{suggested} `acco help` lists them."
    assert err == f"error: {said}\n"


def test_without_the_extra_it_names_the_remedy(capsys, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    code, _, err = ended(capsys, monkeypatch, "train")
    assert code == exits.REFUSED and "pip install 'acco-jax[train]'" in err


def test_python_m_does_the_same():
    done = python("-m", "acco_jax")
    assert done.returncode == 0, done
    assert done.stdout.startswith("Usage: python -m acco_jax COMMAND [FLAGS]\n")
    done = python("-m", "acco_jax", "export", "--half-round=-1", "--out=a")
    assert done.returncode == exits.REFUSED, done
    assert done.stderr.startswith("error: flag --half_round=-1"), done


# Forks this process, which has imported all, for each command line.
MANY = r"""
import json, os, sys
import acco_jax.plan.planner, acco_jax.run.compare.comparison
from acco_jax import cli
for i, words in enumerate(json.loads(sys.argv[1])):
    sys.stdout.flush()
    if not os.fork():
        for fd in 1, 2:
            os.dup2(os.open(f"{i}.{fd}", os.O_CREAT | os.O_WRONLY), fd)
        sys.argv = ["/bin/acco", *words]
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        sys.stdout.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
CONFIG = f"--config={ROOT / 'experiments' / 'quickstart.py'}"
SPELLINGS = {  # command lines, and what each is refused for once its flags are read
    ("compare", CONFIG, "--methods=acco", "--workdir=w", "--network=1mbit",
     "--at-once=2"): "--at_once is for runs",
    ("compare", CONFIG, "--methods=acco", "--workdir="): "--workdir is empty",
    ("train", CONFIG, "--workdir", "w", "--min-processes", "2"): "--min_processes=2",
    ("plan", CONFIG, "--failure_hours=-1", "--nofit", "--topology=gpu:h100:1x8"):
        "--failure-hours",
    ("audit", "--require_hidden=2"): "--require-hidden",
    ("generate", "--prompt", "--top-k", "--no-such"): "'no-such'",
}  # fmt: skip
REFUSED = {  # the same of what is missing, or too much
    ("export", "--workdir=w", "--half_round=3"): "--out",
    ("evaluate", "--file=a", "--lambada=b", "--model=m"):
        "--file=a and --lambada=b: give one",
    ("evaluate", "--file=a"): "neither: give --workdir of a run, or --model",
    ("evaluate", "--model=m"): "a folder has no data of its own",
    ("evaluate", "--workdir=w", "--window=8"): "--window=8 is for --file: give both",
    ("generate", "--model=m", "--top_k=5"): "--top_k=5 needs sampling, but",
    ("generate", "--model=m", "--top-p=0.5"): "--top_p=0.5 needs sampling, but",
    ("generate", "--model=m", "--samples=2"): "--samples=2 needs sampling, but",
    ("generate", "--model=m", "--seed=2"): "--seed=2 needs sampling, but",
    ("generate", "--model=m", "--seed=9223372036854775808"): "--seed",
}  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """By command line: the exit code, stdout and stderr."""
    folder = tmp_path_factory.mktemp("pages")
    helped = [(command, "--help") for command in cli.COMMANDS]
    lines = [*helped, *SPELLINGS, *REFUSED]
    done = python("-c", MANY, json.dumps(lines), cwd=folder)
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(lines), done
    return {
        line: (code, *((folder / f"{i}.{fd}").read_text() for fd in (1, 2)))
        for i, (line, code) in enumerate(zip(lines, codes, strict=True))
    }


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_names_the_command_and_all_its_flags(pages, command):
    code, out, err = pages[command, "--help"]
    assert code == 0 and err == ""
    assert f"acco {command} " in out and "python -m" not in out
    text = (ROOT / "docs" / "site" / "commands.md").read_text()
    part = text.split(f"\n## {command}\n")[1].split("\n## ")[0]
    for line in part.splitlines():
        if line.startswith("| `--"):
            flag = line.split("`")[1].removeprefix("--")
            assert re.search(rf"^  --(\[no\])?{flag}\s", out, re.M), flag
            says = line.split(" | ", 1)[1].removesuffix(" |").replace("`", "")
            assert flag == "config" or says in " ".join(out.split()), says


@pytest.mark.parametrize("line", SPELLINGS, ids=lambda line: line[0])
def test_commands_take_hyphens_and_underscores(pages, line):
    code, out, err = pages[line]
    assert code == exits.REFUSED and out == "" and SPELLINGS[line] in err, pages[line]


@pytest.mark.parametrize("line", REFUSED, ids=" ".join)
def test_a_command_line_is_refused_in_one_line(pages, line):
    code, out, err = pages[line]
    assert code == exits.REFUSED and out == "", pages[line]
    assert refusal(err, REFUSED[line]), err


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--at-once=2", "--at_once=2"),
        ("--at_once -2 -at-once=-2", "--at_once -2 -at_once=-2"),
        ("--dump_hlo=a_b-c=d-e", "--dump-hlo=a_b-c=d-e"),
        ("--text -foo --at-once 1", "--text -foo --at_once 1"),
        ("--text --at-once --dump_hlo d", "--text --at-once --dump-hlo d"),
        ("--dry_run at-once --nodry_run", "--dry-run at-once --nodry-run"),
        ("--nodry_run --dry_run=false", "--nodry-run --dry-run=false"),
        ("--config.batch-size=1 --no-such -5", "--config.batch-size=1 --no-such -5"),
        ("a-b --at-once 1 -- --at-once", "a-b --at_once 1 -- --at-once"),
        ("--text -- --at-once=1 - --", "--text -- --at_once=1 - --"),
    ],
)
def test_only_names_of_flags_change(given, meant):
    defined = flags.FlagValues()
    for name in "text", "at_once", "dump-hlo":
        flags.DEFINE_string(name, None, "", flag_values=defined)
    flags.DEFINE_bool("dry-run", False, "", flag_values=defined)
    line = usage.spelled(["--at-once", *given.split()], defined)
    assert line == ["--at-once", *meant.split()]
