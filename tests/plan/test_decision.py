"""Decisions on recorded schedules; nothing is compiled."""

import contextlib
import dataclasses
import json
import re

import pytest

from acco_jax.command import exits
from acco_jax.plan import decision, planner
from acco_jax.plan.decision import Terms
from acco_jax.run.config.fields import default_config
from acco_jax.schedule import topologies
from tests.schedule.recordings import SCHEDULES, run

PLACES = "--topology=gpu:h200:1x8", "--topology=gpu:a100:1x8"
# dpu's half-round is a step: of the recordings both compute the same microbatches
PAIR = "--methods=dpu,zero1"


@pytest.fixture(autouse=True)
def dpu(monkeypatch):
    monkeypatch.setitem(SCHEDULES, "dpu", "gpu_hidden")


def test_one_table_and_one_sentence(stand_in, tmp_path, capsys):
    file = tmp_path / "decision.json"
    run(*PLACES, PAIR, "--tokens=1e9", "--price=h200=4,a100=1", "--nofit",
        f"--json={file}")  # fmt: skip
    text = capsys.readouterr().out
    assert len(stand_in) == 4  # each method for each chip
    lines = [x for x in text.splitlines() if re.match(r"  gpu:", x)]
    assert len(lines) == 4
    found = json.loads(file.read_text())
    for c in found["choices"]:
        low, high = c["interval"]
        assert low < c["tokens_per_second"] < high
        assert c["hours"] == pytest.approx(1e9 / c["tokens_per_second"] / 3600)
        assert c["device_hours"] == pytest.approx(8 * c["hours"])
        price = {"gpu:h200:1x8": 4, "gpu:a100:1x8": 1}[c["topology"]]
        assert c["price"] == pytest.approx(price * c["device_hours"])
        watts = {"gpu:h200:1x8": 700, "gpu:a100:1x8": 400}[c["topology"]]
        assert c["kilowatt_hours"] == pytest.approx(watts * c["device_hours"] / 1000)
    cheapest = min(found["choices"], key=lambda c: c["price"])
    start = f"{cheapest['method']} on {cheapest['topology']} (NVLink) costs least"
    assert found["sentence"].startswith(start)
    said = "dpu is at least 2% faster than zero1 where NVLink gives a device"
    assert said in found["sentence"]
    assert said in " ".join(text.split())


def test_networks_are_rows_and_hiding_pays_on_a_slow_one(stand_in, tmp_path):
    file = tmp_path / "decision.json"
    run("--topology=gpu:h200:2x8", PAIR, "--network=10,4000", "--tokens=1e9", "--nofit",
        f"--json={file}")  # fmt: skip
    speeds = {
        (c["method"], c["network"]): c["tokens_per_second"]
        for c in json.loads(file.read_text())["choices"]
    }
    slow, fast = 10e9 / 8, 4000e9 / 8
    gains = [speeds["dpu", n] / speeds["zero1", n] for n in (slow, fast)]
    assert gains[0] > 1.05 > gains[1]


@pytest.mark.slow
def test_a_crossing_is_where_the_gain_is(stand_in):
    config = default_config()
    place = topologies.parse("gpu:h200:2x8")
    request = planner.PlanRequest(("dpu", "zero1"), fit=False)
    plan = planner.make(config, place, request)
    found = decision.crossing(plan, *plan.outcomes)
    ((low, high),) = found.bands  # far below both only wait: no difference there
    assert found.link == "the network" and low > 1e7
    assert f"{decision._gbps(low)} to {decision._gbps(high)}" in decision._network(plan)
    rates = (low * 0.99, False), (low * 1.01, True), (high * 0.99, True)
    for rate, wins in (*rates, (high * 1.01, False)):
        varied = dataclasses.replace(request, changes={"slow_bandwidth": rate})
        row = planner.make(config, place, varied).row("dpu")
        assert (row["speedup"] >= decision.WINS) == wins


def test_several_bands_each_with_both_ends(stand_in, monkeypatch):
    """A method that is faster at 1 to 2 and above 40 Gbit/s."""
    place = topologies.parse("gpu:h200:2x8")
    plan = planner.make(
        default_config(), place, planner.PlanRequest(("dpu", "zero1"), fit=False)
    )

    def speed(o, machine):
        rate = machine.value("slow_bandwidth") * 8 / 1e9
        return 1.5 if o.method == "dpu" and (1 <= rate <= 2 or rate > 40) else 1.0

    monkeypatch.setattr(decision, "_speed", speed)
    said = decision._network(plan)
    assert re.search(r"a device 1 Gbit/s to 2 Gbit/s and 40 Gbit/s or more, at", said)
    monkeypatch.setattr(decision, "_speed", lambda o, machine: 1.0)
    assert "at no rate of the network" in decision._network(plan)


def test_a_lead_is_judged_at_the_same_figures(stand_in, monkeypatch):
    """Fast products and a slow network: there the other method is ahead."""
    place = topologies.parse("gpu:h200:2x8")
    request = planner.PlanRequest(("dpu", "zero1"), fit=False)

    def speed(o, machine):
        figures = machine.figures
        names = ("compute_efficiency", "network_efficiency")
        mixed = [figures[n].value for n in names] == [most, least]
        return (0.6 if mixed else 1.3) if o.method == "zero1" else 1.0

    def sentence():
        return decision.make(default_config(), [place], request, Terms(1e9)).sentence

    figures = planner.machine_of(place, request).figures
    most = figures["compute_efficiency"].range[1]
    least = figures["network_efficiency"].range[0]
    assert "at every end" not in sentence()  # its own speeds
    monkeypatch.setattr(decision, "_speed", speed)
    assert "though not at every end of the figures' ranges" in sentence()


def test_a_gate_judges_the_microbatch_that_is_asked_for(stand_in, capsys):
    with contextlib.suppress(SystemExit):
        run(PLACES[0], PAIR, "--tokens=1e9", "--require-hidden=0.01")
    assert [p.rows for p in stand_in] == [4, 4]  # no other is looked for


def test_adaptive_counts_have_no_band(stand_in):
    config = default_config()
    config.microbatches = "adaptive"
    request = planner.PlanRequest(("dpu", "zero1"), fit=False)
    plan = planner.make(config, topologies.parse("gpu:h200:2x8"), request)
    assert "adaptive counts differ at each rate" in decision._network(plan)


def test_the_sentence_names_its_network_whatever_the_order(stand_in):
    """Without a network in use both tie: the slower one suffices."""
    place = topologies.parse("gpu:h200:1x8")
    request = planner.PlanRequest(("dpu", "zero1"), fit=False)
    said = set()
    for rates in ((25e9 / 8, 400e9 / 8), (400e9 / 8, 25e9 / 8)):
        found = decision.make(
            default_config(), [place], request, Terms(1e9, networks=rates)
        )
        said.add(found.sentence)
    (sentence,) = said
    assert re.match(r"\w+ on gpu:h200:1x8 \(NVLink\) takes least time", sentence)
    assert len(found.choices) == 4


@pytest.fixture
def small_a100(monkeypatch):
    finish = planner.finish

    def limited(prepared):
        if prepared.machine.topology.chip.name == "a100":
            raise planner.NothingFits({"acco": "acco does not fit: it needs too much"})
        return finish(prepared)

    monkeypatch.setattr(planner, "finish", limited)


def test_a_machine_that_nothing_fits_is_a_row(stand_in, small_a100, capsys):
    run("--topology=gpu:mi300x:1x8", PLACES[1], "--methods=acco", "--tokens=1e9",
        "--nofit")  # fmt: skip
    text = capsys.readouterr().out
    assert re.search(r"gpu:a100:1x8 +NVLink +acco +does not fit", text)
    assert "acco does not fit: it needs too much" in text
    assert "acco on gpu:mi300x:1x8 (Infinity Fabric) takes least time" in text
    assert "there is no compiler for AMD Instinct MI300X" in text


@pytest.mark.parametrize("places", [PLACES[1:], PLACES])
def test_a_gate_judges_what_fits_nowhere(stand_in, small_a100, capsys, places):
    with pytest.raises(SystemExit) as end:
        run(*places, "--methods=acco", "--tokens=1e9", "--nofit",
            "--require-hidden=0.01")  # fmt: skip
    assert end.value.code == exits.EXPOSED
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.count("acco on ") == 1
    assert said.endswith("acco on gpu:a100:1x8: acco does not fit: it needs too much")


def test_failures_that_leave_no_time_are_rejected(refusal, stand_in):
    said = refusal(PLACES[0], PAIR, "--tokens=1e9", "--failure-hours=0.01")
    assert "--failure-hours=0.01 leaves gpu:h200:1x8 no time" in said
    assert not stand_in  # nothing was compiled


def test_goodput_is_young_s():
    assert decision.goodput(Terms(1e9), 1000) == 1
    terms = Terms(1e9, failure_hours=10_000, checkpoint_seconds=30, restart_seconds=120)
    assert decision.goodput(terms, 1) > 0.998
    between = 10_000 * 3600 / 1024  # seconds
    apart = (2 * 30 * between) ** 0.5
    lost = 30 / apart + apart / 2 / between + 120 / between
    assert decision.goodput(terms, 1024) == pytest.approx(1 - lost)
    # any other distance of checkpoints loses more
    assert all(
        30 / x + x / 2 / between > 30 / apart + apart / 2 / between
        for x in (apart / 2, 2 * apart)
    )
    assert decision.goodput(terms, 10**7) == 0


def test_recordings_exist():
    assert {"acco", "zero1"} <= SCHEDULES.keys()
