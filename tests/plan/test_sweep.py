"""Speed-ups against the network's rate, of recorded schedules; nothing is compiled."""

import json
import re

import numpy as np
import pytest

from acco_jax.plan import programs, sweep
from tests.schedule.recordings import SCHEDULES, run


def test_bands_are_where_a_method_is_the_fastest(
    stand_in, tmp_path, capsys, monkeypatch
):
    """dpu's half-round is a step, of as many microbatches as zero1's recording."""
    monkeypatch.setitem(SCHEDULES, "dpu", "gpu_hidden")
    file = tmp_path / "sweep.json"
    run("--sweep-network", "--methods=dpu,zero1", "--topology=gpu:h200:2x8",
        f"--json={file}", f"--out={tmp_path}")  # fmt: skip
    # one compile of each, for all rates, and one that reduces within hosts first
    assert [p.method for p in stand_in].count("dpu") == 2 and len(stand_in) == 3
    text, found = capsys.readouterr().out, json.loads(file.read_text())
    rates, speedups = found["rates"], found["speedups"]
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert rates[0] == pytest.approx(1e8 / 8) and rates[-1] == pytest.approx(1e12 / 8)
    assert set(speedups["zero1"]) == {1.0}
    # equal bytes: at a slow network no gain, at a fast one nothing to overlap
    assert [name for name, *_ in found["bands"]] == ["zero1", "dpu", "zero1"]
    assert max(speedups["dpu"]) > 1.3 and speedups["dpu"][0] == pytest.approx(
        1, abs=0.02
    )
    assert "zero1 up to " in text and "; dpu from " in text and "Gbit/s on." in text
    for name, low, high in found["bands"]:
        for i, rate in enumerate(rates):
            if low <= rate <= high:
                fastest = max(s[i] for s in speedups.values())
                assert speedups[name][i] >= fastest / 1.02


def test_a_method_that_does_not_fit_leaves_the_others(
    stand_in, monkeypatch, tmp_path, capsys
):
    compile_, file = programs.Program.compile, tmp_path / "sweep.json"

    def limited(program, *place):
        if program.method == "acco":
            raise programs.DoesNotFit("it needs 9G of 8G of memory")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    monkeypatch.setitem(SCHEDULES, "dpu", "gpu_hidden")
    for methods, left in (("acco,zero1", {"zero1"}), ("acco,dpu,zero1", {"dpu"})):
        run("--sweep-network", f"--methods={methods}", f"--json={file}")
        text, found = capsys.readouterr().out, json.loads(file.read_text())
        assert "DOES NOT FIT\n  acco with microbatch_size 4 does not fit" in text
        assert left <= set(found["speedups"]) and "acco" not in found["speedups"]


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ("--methods=acco", "compares with zero1, which is not among --methods"),
        ("--recommend", "is of one machine: leave out"),
        ("--tokens=1e9", "is of one machine: leave out"),
        ("--price=h200=2", "is of one machine: leave out"),
        ("--network=10", "varies the network's rate: leave out --network"),
        ("--set=fast_bandwidth=1e10", "leave out --network and --set=fast_bandwidth"),
        ("--config.microbatches=adaptive", "whose counts differ at each rate"),
    ],
)
def test_it_needs_zero1_and_one_machine(stand_in, refusal, extra, said):
    assert said in refusal("--sweep-network", extra)


def test_the_config_s_method_is_compared(stand_in, tmp_path, monkeypatch):
    monkeypatch.setitem(SCHEDULES, "dpu", "gpu_hidden")
    file = tmp_path / "sweep.json"
    for method, own in (("dpu", "dpu"), ("zero1", "acco"), ("auto", "acco")):
        run("--sweep-network", f"--config.method={method}", f"--json={file}")
        found = json.loads(file.read_text())["speedups"]
        assert {name.partition(",")[0] for name in found} == {"zero1", own}


def test_a_row_is_of_the_rate_that_it_names(stand_in, tmp_path, capsys):
    file = tmp_path / "sweep.json"
    run("--sweep-network", "--methods=acco,zero1", f"--json={file}")
    found, text = json.loads(file.read_text()), capsys.readouterr().out
    rates = np.array(found["rates"])
    assert (np.diff(rates) > 0).all()
    rows = re.findall(r"^ +([\d.]+) +1\.00 +([\d.]+) ", text, re.M)
    assert [float(gbps) for gbps, _ in rows] == list(sweep.SHOWN)
    for gbps, speedup in rows:
        (i,) = np.flatnonzero(np.isclose(rates, float(gbps) * 1e9 / 8))
        assert f"{found['speedups']['acco'][i]:.2f}" == speedup


def test_methods_are_asked_for_once_and_no_others(stand_in, tmp_path, capsys):
    file = tmp_path / "sweep.json"
    run("--sweep-network", "--methods=zero1", f"--json={file}", f"--out={tmp_path}")
    assert [p.method for p in stand_in] == ["zero1"]
    assert list(json.loads(file.read_text())["speedups"]) == ["zero1"]
    run("--sweep-network", "--methods=acco,acco,zero1", f"--json={file}")
    found = json.loads(file.read_text())
    assert {len(x) for x in found["speedups"].values()} == {len(found["rates"])}
