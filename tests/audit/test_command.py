"""The audit command on recorded texts; nothing is compiled here."""

import gzip
import json
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from acco_jax.audit import __main__ as command
from acco_jax.audit import auditing
from acco_jax.command import exits
from acco_jax.schedule import topologies

FOREIGN = pathlib.Path(__file__).parents[1] / "recorded" / "foreign"
PLACE, MESH = "--topology=gpu:h100:4x8", "--mesh=data:4,fsdp:8"
FSDP = str(FOREIGN / "fsdp.txt.gz")


def run(*arguments):
    """Runs the command in this process; returns its exit code."""
    command._FLAGS.unparse_flags()
    for name in command._FLAGS:
        command._FLAGS[name].unparse()
    try:
        command.main(command.parse(["audit", *arguments]))
    except SystemExit as stopped:
        return stopped.code
    return 0


def test_a_file_is_audited(tmp_path, capsys):
    text = tmp_path / "step.hlo"
    text.write_bytes(gzip.decompress(pathlib.Path(FSDP).read_bytes()))
    file, picture = tmp_path / "a" / "audit.json", tmp_path / "b" / "audit.png"
    assert run(str(text), PLACE, MESH, f"--json={file}", f"--picture={picture}") == 0
    out = capsys.readouterr().out
    assert "2,429.0 MiB in 73 collectives" in out
    assert json.loads(file.read_text())["axes"]["data"]["bytes"] == 8 * 12 * 2**20
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "mesh", "arguments", "code"),
    [
        ("plain_dp", "--mesh=data:32", ["--axis=data", "--require-hidden=1"], 0),
        ("plain_dp", "--mesh=data:32", ["--require-hidden=0.95"], 0),
        ("fsdp", MESH, ["--axis=fsdp", "--require-hidden=0.95"], exits.EXPOSED),
        ("fsdp", MESH, ["--axis=fsdp", "--require-hidden=0.52"], 0),
        ("fsdp", MESH, ["--axis=fsdp", "--require-hidden=0.53"], exits.EXPOSED),
        # 100 % of the bytes are hidden, 77.7 % of the seconds
        ("fsdp", MESH, ["--axis=data", "--require-hidden"], exits.EXPOSED),
        ("plain_dp", "--mesh=data:32", ["--require-hidden"], 0),
        ("fsdp_fine_remat", MESH, ["--axis=data", "--require-hidden=0.5"], 3),
        ("fsdp_fine_remat", MESH, ["--axis=data"], 0),
        # of a slow network all is exposed, but the schedule is the same
        ("plain_dp", "--mesh=data:32", ["--set=slow_bandwidth=1e8"], 0),
    ],
)
def test_exit_codes(name, mesh, arguments, code, capsys):
    assert run(str(FOREIGN / f"{name}.txt.gz"), PLACE, mesh, *arguments) == code
    err = capsys.readouterr().err
    assert err.startswith("--require-hidden=") if code else not err


def test_a_factory_is_compiled_for_described_devices(monkeypatch, tmp_path, capsys):
    """The factory's step stands for one whose compile takes minutes."""
    asked = []

    class Step:
        def as_text(self):
            return gzip.decompress(pathlib.Path(FSDP).read_bytes()).decode()

    def factory(devices):
        asked.append(devices)
        return Step(), ()

    monkeypatch.setattr(auditing, "devices", lambda topology: [str(topology)])
    monkeypatch.setattr(command, "named", lambda flag, name: factory)
    assert run("--factory=mine:step", PLACE, MESH) == 0
    assert asked == [["gpu:h100:4x8"]]
    assert "axis fsdp" in capsys.readouterr().out


@pytest.fixture
def refused(capsys, monkeypatch):
    """refused(*arguments): the one line in which the command refuses them."""

    def never(*arguments, **options):
        raise AssertionError("compiled")

    monkeypatch.setattr(auditing, "_compile", never)

    def line_of(*arguments):
        assert run(*arguments) == exits.REFUSED
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert out == "" and line.startswith("error: ")
        return line

    return line_of


WRONG = [
    ([], "give one file, or --factory=package.module:function."),
    ([PLACE], "give one file, or --factory=package.module:function."),
    ([FSDP, FSDP, PLACE], "give one file, or --factory"),
    ([FSDP, "--factory=a:b", PLACE], "give one file, or --factory"),
    ([FSDP], "--topology is missing: for example --topology=gpu:h100:4x8."),
    ([FSDP, "--topology=h100"], "'h100' is not of the form gpu:CHIP:HOSTSxGPUS"),
    (
        [FSDP, "--topology=gpu:h2000:4x8"],
        "the gpu chip is 'h2000': did you mean 'h200'?",
    ),
    ([FSDP, "--topology=tpu:v5e:4"], "shape '4' is not of the form XxY"),
    ([FSDP, "--topology=gpu:h100:0x8"], "with sizes of at least 1"),
    ([FSDP, PLACE, "--slices=2"], "slices is 2, but must be 1 for GPUs"),
    ([FSDP, PLACE, "--slices=x"], "slices"),
    ([FSDP, "--topology=gpu:h100:8x8"], "is for 32 devices, gpu:h100:8x8 has 64"),
    ([FSDP, PLACE, "--mesh=data"], "the mesh 'data' has 'data': give each axis once"),
    ([FSDP, PLACE, "--mesh=data:0"], "has 'data:0': give each axis once"),
    ([FSDP, PLACE, "--mesh=data:4,data:8"], "has 'data:8': give each axis once"),
    ([FSDP, PLACE, "--mesh=data:4"], "the mesh data 4 has 4 devices, gpu:h100:4x8 has"),
    ([FSDP, PLACE, MESH, "--axis=dat"], "--axis is 'dat', but --mesh has data, fsdp"),
    ([FSDP, PLACE, "--axis=data"], "there is no axis 'data': Known: 4 groups of 8"),
    ([FSDP, PLACE, "--require-hidden=95"], "the fraction 95 must be from 0 to 1."),
    ([FSDP, PLACE, "--require-hidden=-0.1"], "the fraction -0.1 must be from 0 to 1."),
    ([FSDP, PLACE, "--require-hidden=nan"], "the fraction nan must be from 0 to 1."),
    ([FSDP, PLACE, "--require-hidden=all"], "require-hidden"),
    ([FSDP, PLACE, "--trips=-1"], "--trips is -1: it must be at least 0."),
    ([FSDP, PLACE, "--trips=few"], "trips"),
    ([FSDP, PLACE, "--set=flops"], "--set=flops: give NAME=NUMBER"),
    ([FSDP, PLACE, "--set=flop=1"], "the name of a figure is 'flop': did you mean"),
    ([FSDP, PLACE, "--set=flops=0"], "the figure flops is 0: it must be positive."),
    ([FSDP, PLACE, "--set=flops=inf"], "the figure flops is inf: it must be positive."),
    ([FSDP, PLACE, "--jsn=a.json"], "Unknown command line flag 'jsn'"),
    ([FSDP, PLACE, "--json=/dev/null/a/b.json"], "/dev/null/a cannot be written to"),
    ([FSDP, PLACE, "--picture=/dev/null/a.png"], "/dev/null cannot be written to"),
    ([FSDP, PLACE, "--json=/dev"], "--json=/dev is a directory: name a file in it."),
    ([FSDP, PLACE, "--picture=a.txt"], "--picture=a.txt: name a .png file."),
    (
        [FSDP, PLACE, "--require-hidden", "0.9"],
        "a flag takes its value with =: --require-hidden=0.9.",
    ),
    ([FSDP, PLACE, MESH, "--axis=data+dat"], "--axis is 'data+dat', but --mesh has"),
    (["none.hlo", PLACE], "No such file or directory: 'none.hlo'"),
    ([str(FOREIGN), PLACE], "Is a directory"),
    ([__file__, PLACE], "not the text of a compiled, scheduled module"),
    ([sys.executable, PLACE], "Give the text of compiled.as_text()."),
    (["--factory=mine", PLACE], "--factory is 'mine': give 'package.module:function'."),
    (["--factory=no_such:step", PLACE], "No module named 'no_such'"),
    (["--factory=json:no_such", PLACE], "has no attribute 'no_such'"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG)
def test_wrong_flags_are_one_line_before_any_compile(refused, arguments, said):
    assert said in refused(*arguments)


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("json:loads", "raised TypeError: "),
        ("operator:length_hint", "raised TypeError: cannot unpack non-iterable int"),
    ],
)
def test_a_factory_that_makes_no_step(refused, monkeypatch, factory, said):
    monkeypatch.setattr(auditing, "devices", lambda topology: [1, 2])
    line = refused(f"--factory={factory}", PLACE)
    assert said in line and "returns a jitted step and a tuple" in line


def test_a_factory_s_step_that_cannot_be_traced(monkeypatch, capsys):
    class Step:
        def lower(self, x):
            return jax.jit(lambda x: x @ x).lower(x)

    monkeypatch.setattr(auditing, "devices", lambda topology: [1, 2])
    monkeypatch.setattr(auditing, "_check_platform", lambda mesh, place: None)
    given = Step(), (jax.ShapeDtypeStruct((2, 3), "f4"),)
    monkeypatch.setattr(command, "named", lambda flag, name: lambda devices: given)
    assert run("--factory=mine:step", PLACE) == exits.REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert "the step of --factory=mine:step cannot be traced: TypeError: dot_" in line


def test_damaged_and_missing_things_are_said(refused, monkeypatch, tmp_path):
    short = tmp_path / "short.gz"
    short.write_bytes(pathlib.Path(FSDP).read_bytes()[:1000])
    assert "cannot be read" in refused(str(short), PLACE)
    (tmp_path / "plain.gz").write_text("HloModule m, is_scheduled=true")
    assert "cannot be read" in refused(str(tmp_path / "plain.gz"), PLACE)
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    line = refused("--factory=json:loads", "--topology=tpu:v6e:4x4")
    assert "pip install 'acco-jax[plan-tpu]'" in line


def test_help_has_flags_and_exit_codes(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    for words in ("--require-hidden", "Exit codes:", " 3  plan, audit", "--factory="):
        assert words in out


def test_it_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "acco_jax.audit", FSDP, PLACE, MESH],
        cwd=FOREIGN.parents[2], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "axis fsdp" in done.stdout
    assert not re.search(r"half-round", done.stdout)
