"""The benchmark beside other people's ways: its figures, its page, a small run."""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

from tests import programs

PROGRAM = pathlib.Path(__file__).parents[2] / "benchmarks" / "peers.py"
run = functools.partial(programs.run, PROGRAM, timeout=3000)
SETTINGS = {
    "kind": "settings", "command": "python benchmarks/peers.py", "machine": "2 cores",
    "left_out": "--environment was not given", "size": "25M", "processes": 2,
    "steps": 1, "microbatches": 4, "rows": 1, "repetitions": 2,
}  # fmt: skip
CALIBRATION = {
    "kind": "calibration", "compute": 2.0, "step": 2.5, "bytes": 100e6,
    "parameters": 25_000_000,
}  # fmt: skip


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    sys.modules["peers"] = module  # for its annotations
    spec.loader.exec_module(module)
    return module


def sample(method: str, repetition: int, seconds: float, **fields: float) -> dict:
    return {
        "kind": "sample", "ratio": 1.0, "method": method, "repetition": repetition,
        "rate_mbit": 400.0, "tokens": 1024, "seconds": seconds, "compute": 2.0,
        "bytes": 100e6, "peak": 900e6, "cpu": 4.096, "first": 1, "others": 0.1,
        "load": 0.5,
    } | fields  # fmt: skip


def rows() -> list[dict]:
    return [
        SETTINGS,
        CALIBRATION,
        sample("jax/jit", 0, 5.0),
        sample("torch/ddp", 0, 2.0, compute=1.0),
        sample("torch/ddp", 1, 3.0, compute=1.5),
        sample("jax/jit", 1, 6.0),
        sample("acco", 0, 3.0, bytes=200e6),
        sample("acco", 1, 2.5, bytes=200e6),
        {"kind": "failure", "method": "torch/fsdp2", "reason": "no gloo"},
    ]


def test_the_first_half_is_the_smallest_that_covers(peers):
    found = [peers.first_half(4, ratio) for ratio in (0.1, 0.25, 0.5, 1, 2, 7)]
    assert found == [1, 1, 2, 1, 1, 1]  # 0.5: covered by a half, not by a quarter


def test_ratios_are_taken_within_a_repetition(peers):
    figures = {x["method"]: x for x in peers.figures_of(rows())}
    assert list(figures) == ["jax/jit", "torch/ddp", "acco"]
    acco, ddp = figures["acco"], figures["torch/ddp"]
    assert acco["best_peer"] == "torch/ddp"  # 2 times its compute, jax/jit 2.75
    assert acco["of_compute"] == {"median": 1.375, "low": 1.3125, "high": 1.4375}
    assert acco["of_best_peer"]["median"] == pytest.approx(1.375 / 2)
    assert acco["communication"]["median"] == 4.0  # 200 MB at 400 Mbit/s
    assert acco["of_limit"]["median"] == pytest.approx(2.75 / 4)
    assert acco["of_sum"] is None
    assert ddp["of_sum"]["median"] == pytest.approx((2 / 3 + 3 / 3.5) / 2)
    assert ddp["should_send"] == 2 / 2 * 4 * 25e6
    assert acco["should_send"] == 2 * ddp["should_send"]


def test_without_a_peer_the_rest_is_measured(peers):
    found = [row for row in rows() if row.get("method") in (None, "acco")]
    (acco,) = peers.figures_of(found)
    assert acco["best_peer"] is acco["of_best_peer"] is None
    assert acco["of_compute"]["median"] == 1.375
    text = peers.page(found, [], "")
    assert "Best peer: none." in text
    assert "| 1.38 (1.31-1.44) | 0.69 (0.66-0.72) |  |  | 200.0 |" in text


def test_the_rate_is_that_of_zero1s_bytes(peers):
    assert peers.rate(CALIBRATION, 0.5) == 800.0  # 800 Mbit in 1 s


def test_page_has_every_method_or_the_reason(peers):
    losses = {"kind": "losses", "parameters": 4_000_000, "losses": [8.0, 7.0]}
    check = [
        SETTINGS,
        losses | {"method": "zero1"},
        losses | {"method": "torch/ddp", "losses": [8.0, 7.7]},
        losses | {"method": "acco(8 bits)"},
    ]
    text = peers.page(rows(), [check], "![]()")
    assert "| torch/ddp | zero1 | 1.0e-01 | 8.00000 | 7.70000 |" in text
    assert "| acco(8 bits) |  |  | 8.00000 | 7.00000 |" in text
    assert "    python benchmarks/peers.py\n" in text
    assert "## r = 1: 400 Mbit/s" in text
    assert (
        "| acco | 375 | 2.75 | 2.00 | 1.38 (1.31-1.44) | 0.69 (0.66-0.72) |  | "
        "0.69 (0.66-0.72) | 200.0 | 200.0 | 4.00 | 900 |" in text
    )
    assert "- `torch/fsdp2` is not measured: no gloo." in text
    assert "- `zero1` is not measured: --environment was not given." in text
    for name in peers.METHODS:
        assert f"`{name}`" in text or f"| {name} |" in text


def test_page_and_pictures_are_written(peers, tmp_path, monkeypatch):
    from benchmarks import pictures

    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    peers.write_page(rows(), tmp_path / "peers.md", tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"peers.md", "peers.json", "peers.svg", "peers_dark.svg"}
    assert "Not computed." in (tmp_path / "peers.md").read_text()
    saved = json.loads((tmp_path / "peers.json").read_text())
    assert saved["figures"] == peers.figures_of(rows())


def test_a_log_goes_on_and_takes_no_other_settings(peers, tmp_path):
    path = tmp_path / "a" / "log.jsonl"
    settings = {k: v for k, v in SETTINGS.items() if k != "kind"}
    peers.Log(path, settings).add(CALIBRATION)
    log = peers.Log(path, {**settings, "command": "python benchmarks/peers.py --page"})
    assert log.rows == [SETTINGS, CALIBRATION]
    with pytest.raises(SystemExit, match="rows of other settings: give another --out"):
        peers.Log(path, {**settings, "processes": 4})


def test_the_command_names_no_folder(peers, monkeypatch):
    flags = ["--environment=/a/b", "--out", "/c/d.jsonl", "--ratios=1"]
    monkeypatch.setattr(sys, "argv", ["peers.py", *flags])
    found = peers.settings(peers.parse(flags))["command"]
    shown = "--environment=DIR --out FILE --ratios=1"
    assert found == f"python benchmarks/peers.py {shown}"


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--ratios=0.5,x", "is not a list of numbers"),
        ("--ratios=0", "0 is not above 0"),
        ("--methods=zero", "'zero' is none of jax/jit, "),
        ("--microbatches=3", "3 has no equal halves"),
        ("--repetitions=1", "quartiles need at least 2"),
    ],
)
def test_flags_that_do_not_fit(peers, capsys, flag, message):
    with pytest.raises(SystemExit) as error:
        peers.parse([flag])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def without_a_link(peers, done: subprocess.CompletedProcess) -> bool:
    """Returns whether this machine has no links; then one line must have said so."""
    if reason := peers.network.why_not():
        assert done.returncode == 1
        assert done.stderr == f"peers.py cannot shape a link: {reason}\n"
    return bool(reason)


@pytest.mark.long
def test_jax_methods_have_the_losses_of_zero1(peers, tmp_path):
    names = ["jax/shard_map", "jax/jit", "jax/fsdp"]
    methods = f"--methods=torch/ddp,{','.join(names)}"
    done = run("--check", "--quick", methods, f"--out={tmp_path / 'losses.jsonl'}")
    if without_a_link(peers, done):
        return
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("without --environment, not measured: torch/ddp")
    assert [x.split()[1] for x in lines if " | zero1 | " in x] == names


@pytest.mark.slow
def test_quick(peers, tmp_path):
    """A real run of a part of the methods, and nothing left to do afterwards."""
    out = tmp_path / "rows.jsonl"
    methods = "--methods=jax/shard_map,acco(recommended)"
    done = run("--quick", methods, "--ratios=1", f"--out={out}")
    if without_a_link(peers, done):
        return
    assert done.returncode == 0, done.stdout + done.stderr
    found = list(map(json.loads, out.read_text().splitlines()))
    assert [x["kind"] for x in found] == ["settings", "calibration", *4 * ["sample"]]
    text = peers.page(found, [], "")
    assert text.partition("## r = 1")[2].count("\n| ") == 1 + 2
    for x in peers.figures_of(found):
        assert x["bytes"] == pytest.approx(x["should_send"], rel=0.1)
    done = run("--quick", methods, "--ratios=1", f"--out={out}")
    assert done.returncode == 0
    assert len(out.read_text().splitlines()) == len(found)
    spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
    assert f"acco-{done.pid}-" not in spaces


@pytest.mark.long
def test_pytorch_has_the_losses_of_both(peers, tmp_path):
    flags = "--quick", f"--environment={tmp_path / 'environment'}"
    done = run("--check", *flags, f"--out={tmp_path / 'losses.jsonl'}")
    if without_a_link(peers, done):
        return
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [x for x in done.stdout.splitlines() if x.startswith("| torch/")]
    compared = {line.split()[1]: line.split()[3] for line in lines}
    assert list(compared) == [x for x in peers.METHODS if "torch" in x]
    assert list(compared.values()) == ["zero1", "zero1", "zero1", "|", "acco"]
    names = ",".join(compared)
    out = tmp_path / "rows.jsonl"
    done = run(*flags, f"--methods={names}", f"--out={out}")
    assert done.returncode == 0, done.stdout + done.stderr
