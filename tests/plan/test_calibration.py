"""Calibration on CPU devices: measured here, for real."""

import json
import types

import jax
import numpy as np
import pytest

from acco_jax.plan import calibration
from acco_jax.run.config.fields import default_config
from acco_jax.schedule import chips, costs, machines, schedules, topologies
from tests.schedule.recordings import run

long = pytest.mark.long  # what is measured: three programs, and kernels


@pytest.fixture(scope="module")
def report():
    config = default_config()
    config.model.width, config.model.layers, config.model.heads = 128, 2, 4
    config.microbatch_size, config.microbatches_per_step, config.length = 4, 2, 128
    return calibration.calibrate(config)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"microbatches": "adaptive"}, {"counts": (1, 2)}])
def test_a_step_computes_the_microbatches_asked_for(changes):
    config = default_config()
    config.model.width, config.model.layers, config.model.heads = 32, 2, 2
    config.microbatches_per_step, config.length = 2, 16
    config.update(changes)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    program = calibration._Prepared("zero1", 6, config, mesh).program
    assert (program.microbatches, program.counts) == (6, ())


def test_a_card_of_less_memory_has_its_own():
    kinds = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200"
    for kind in (*kinds, "TPU v5 lite"):
        assert calibration._memory(kind, chips.of_kind(kind)) == {}
    half = chips.CHIPS["a100"].memory_bytes / 2
    found = calibration._memory("NVIDIA A100-SXM4-40GB", chips.CHIPS["a100"])
    assert found == {"memory_bytes": half}


def test_auto_is_held_out_as_acco():
    config = default_config()
    config.method = "auto"
    assert calibration._shapes(config)[-1] == ("acco", 2 * config.microbatches_per_step)


@long
def test_kernels_have_rates(report):
    kinds = {k.name for k in report.kernels}
    assert kinds == {"matrix product", "copy", "reduce-scatter", "all-gather"}
    assert all(k.rate > 0 for k in report.kernels)


@long
def test_the_held_out_step_lies_in_a_narrow_interval(report):
    (step,) = (s for s in report.steps if s.held_out)
    assert step.method == "acco"
    low, high = step.interval
    assert 1 < high / low <= 1.5
    # a loaded core may take longer than a quiet one did moments ago
    assert low / 1.5 <= step.measured <= 1.5 * high
    assert step.measured_hidden is None or 0 <= step.measured_hidden <= 1


@long
def test_the_report_is_read_again(report, tmp_path):
    file = tmp_path / "calibration.json"
    calibration.save(report, file)
    chip, figures = calibration.read(file)
    assert chip == "cpu" and figures == report.figures
    low, high = figures["flops"]
    assert 0 < low < high < 1.5 * low
    text = calibration.text(report)
    assert "MEASURED" in text and "held out" in text


def test_figures_of_a_chip_change_its_plan(tmp_path):
    file = tmp_path / "h200.json"
    entry = {"chip": "h200", "figures": {"compute_efficiency": [0.5, 0.6]}}
    file.write_text(json.dumps(entry))
    _, figures = calibration.read(file)
    chip = topologies.parse("gpu:h200:1x8").chip
    found = machines.figures(chip, figures)["compute_efficiency"]
    assert found.value == pytest.approx(0.55) and found.range == (0.5, 0.6)


@pytest.mark.parametrize(
    "figures",
    [{"flops": "9e14"}, {"flops": None}, {"flops": [1e14, 2e14, 3e14]}, {"flops": []},
     {"flops": True}, [], 3],
)  # fmt: skip
def test_a_report_with_odd_figures_is_refused(tmp_path, figures):
    file = tmp_path / "h200.json"
    file.write_text(json.dumps({"chip": "h200", "figures": figures}))
    if figures == []:
        assert calibration.read(file) == ("h200", {})
        return
    with pytest.raises(ValueError, match="is not a report of --calibrate"):
        calibration.read(file)


def test_groups_of_devices_are_not_calibrated(monkeypatch):
    config = default_config()
    config.mesh.fsdp = 2
    with pytest.raises(ValueError, match=r"mesh.fsdp=2: .* Leave out --config.mesh"):
        calibration.calibrate(config)
    config = default_config()
    config.domains = 2
    with pytest.raises(ValueError, match=r"domains=2: .* Leave out --config.domains"):
        calibration.calibrate(config)
    config = default_config()  # which has no domains
    monkeypatch.setattr(calibration, "_products", lambda mesh: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        calibration.calibrate(config)


@pytest.mark.parametrize("measured", ["fast", "slow"])
def test_a_network_that_was_not_crossed_keeps_its_share(measured):
    topology = topologies.parse(
        "gpu:h200:1x8" if measured == "fast" else "gpu:h200:8x1"
    )
    before = machines.Machine(topology, machines.figures(topology.chip))
    changes = calibration._network(before, 0.5)
    after = machines.Machine(topology, machines.figures(topology.chip, changes))

    def seconds(machine):
        devices = {"fast": 8, "slow": 16}  # to a neighbour in a host, and beyond it
        return {
            network: machine.seconds("collective-permute", 2**40, n, 8)
            for network, n in devices.items()
        }

    other = {"fast": "slow", "slow": "fast"}[measured]
    corners = [[seconds(x) for x in m.corners()] for m in (before, after)]
    was, now = seconds(before), seconds(after)
    assert now[other] == was[other]
    assert {x[other] for x in corners[0]} == {x[other] for x in corners[1]}
    wide = 0.5 * (calibration.WIDTH + 1 / calibration.WIDTH)  # its value is the middle
    assert now[measured] * wide == pytest.approx(2 * was[measured], rel=1e-3)
    ends = [x[measured] for x in corners[1]]
    assert max(ends) / min(ends) == pytest.approx(calibration.WIDTH**2, rel=1e-3)


def test_a_call_takes_time_of_its_own():
    topology = topologies.parse("gpu:h200:1x8")
    schedule = schedules.Schedule((), (), (), 0, {}, 8)
    for own in (0.0, 0.25):
        found = machines.figures(topology.chip, {"call_seconds": own})
        p = costs.predict(schedule, machines.Machine(topology, found), 8)
        assert (p.call, p.total, costs.synchronous(p, 2)) == (own, own, own)
    with pytest.raises(ValueError, match="call_seconds is -1: it must be positive"):
        machines.figures(topology.chip, {"call_seconds": -1.0})


def test_another_chip_s_figures_are_refused(tmp_path, capsys):
    file = tmp_path / "h100.json"
    file.write_text(json.dumps({"chip": "h100", "figures": {}}))
    with pytest.raises(SystemExit):
        run(f"--calibration={file}")
    assert "is of h100, but --topology of h200" in capsys.readouterr().err


@pytest.mark.slow
def test_an_efficiency_given_by_hand_replaces_the_measured_one(tmp_path, capsys):
    file, out = tmp_path / "measured.json", tmp_path / "plan.json"
    figures = {"fast_bandwidth": 1e9, "fast_efficiency": 1.0}
    file.write_text(json.dumps({"chip": "h200", "figures": figures}))
    seconds = []
    for given in (), ("--set=network_efficiency=0.5",):
        run(
            f"--calibration={file}",
            *given,
            "--nofit",
            "--methods=zero1",
            f"--json={out}",
        )
        figures = json.loads(out.read_text())["methods"]["zero1"]
        seconds.append(sum(c["seconds"] for c in figures["collectives"]))
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.05)


def devices(kind, platform, places):
    return np.array(
        [
            types.SimpleNamespace(
                device_kind=kind, platform=platform, process_index=0, coords=place
            )
            for place in places
        ]
    )


def test_a_host_of_tpus_has_their_shape():
    """Eight chips of a v5e host lie in a square of 2 x 4, not in a line."""
    places = [(x, y, 0) for x in range(4, 6) for y in range(4)]
    found = calibration._topology(devices("TPU v5 lite", "tpu", places))
    assert str(found) == "tpu:v5e:2x4"
    halves = [(x, 0, 0) for x in range(2) for _ in range(2)]
    found = calibration._topology(devices("TPU7x", "tpu", halves))
    assert found.shape == (2, 1, 1)
    with pytest.raises(ValueError, match="these 2 devices lie in one of 2x2 chips"):
        calibration._topology(devices("TPU v5 lite", "tpu", [(0, 0, 0), (1, 1, 0)]))


def test_an_unknown_card_is_rejected():
    cards = devices("NVIDIA L4", "gpu", [None] * 2)
    with pytest.raises(ValueError, match="no data sheet of NVIDIA L4 is known"):
        calibration._topology(cards)
