"""Domains: which devices they are, and a run whose mesh has an axis for them."""

from unittest import mock

import jax
import numpy as np
import pytest

from acco_jax.run import loop, preparation, prepared
from acco_jax.run.build import meshes
from tests.run.test_loop import arrays_of, rows_of


@pytest.mark.slow
def test_domains_make_two_data_axes(tiny, tmp_path):
    """The run of one axis, to the arithmetic; few bits cross between domains alone."""

    def run(name, stop_after=None, **changes):
        config = tiny(steps=3, **changes)
        e = preparation.prepare(config, tmp_path / name, jax.devices()[:4])
        return e, loop.run(e, stop_after=stop_after)

    (_, flat), (apart, two) = run("flat"), run("two", domains=2)
    assert apart.mesh.axis_names == apart.tx.axis == ("domain", "data")
    assert two["loss"] == pytest.approx(flat["loss"], rel=1e-6)
    # by a ring of all four 3/4 of a buffer; in two stages 1/2 and then 1/4
    assert two["bytes_sent_per_worker"] == flat["bytes_sent_per_worker"]

    bits = {"domains": 2, "method_options": {"gather_bits": 8, "reduce_bits": 8}}
    whole, summary = run("bits", **bits)
    run("stopped", stop_after=4, **bits)
    again, _ = run("stopped", **bits)
    assert rows_of(tmp_path / "stopped") == rows_of(tmp_path / "bits")
    assert arrays_of(again) == arrays_of(whole)
    assert summary["loss"] == pytest.approx(flat["loss"], rel=1e-2)
    # the stage within a domain is two thirds of plain bytes, a quarter of it gathers'
    share = summary["bytes_sent_per_worker"] / two["bytes_sent_per_worker"]
    assert share == pytest.approx((2 / 3 + 1 / 3 / 4 + 1 / 4) / 2, rel=0.02)


@pytest.mark.parametrize(
    ("processes", "group", "own"),
    [
        ([0, 0, 1, 1], 1, {0: (0, 1), 1: (2, 3)}),
        ([0, 1, 1, 0], 1, {0: (0, 3), 1: (1, 2)}),  # as the wires of a TPU slice go
        ([0, 1, 2, 3], 2, {0: (0,), 1: (0,), 2: (1,), 3: (1,)}),
        ([0, 1, 1, 0], 2, {0: (0, 1), 1: (0, 1)}),
        ([0, 0, 1, 1, 1, 1], 2, "there are 3 workers for 2 processes: use sizes"),
        ([0, 0, 0, 1, 1, 1], 2, "there are 3 workers for 2 processes: use sizes"),
    ],
)
def test_which_workers_are_of_a_process(processes, group, own):
    devices = np.array([mock.Mock(process_index=p) for p in processes])
    mesh = mock.Mock(
        devices=devices.reshape(-1, group),
        shape={"data": len(processes) // group, "fsdp": group},
        axis_names=("data", "fsdp"),
    )
    if isinstance(own, dict):
        assert prepared.own_workers(mesh) == own
        return
    with pytest.raises(ValueError, match=own):
        prepared.own_workers(mesh)


def test_a_process_reads_the_rows_of_its_workers(tiny, tmp_path, monkeypatch):
    """Also where they are not neighbours: else rows are skipped and repeated."""
    e = preparation.prepare(tiny(counts=(2, 1, 2, 1)), tmp_path, jax.devices()[:4])
    rows = next(prepared.batches(e))["tokens"].reshape(4, -1, 33)
    held_out = [x["tokens"] for x in prepared.held_out_batches(e, 1)]
    assert prepared.counts_of(e).tolist() == [2, 1, 2, 1]
    monkeypatch.setattr(prepared, "own_workers", lambda _: {0: (0, 3)})
    own = next(prepared.batches(e))["tokens"].reshape(2, -1, 33)
    np.testing.assert_array_equal(own, rows[[0, 3]])
    (part,) = [x["tokens"] for x in prepared.held_out_batches(e, 1)]
    np.testing.assert_array_equal(
        part.reshape(2, -1), held_out[0].reshape(4, -1)[[0, 3]]
    )
    monkeypatch.setattr(prepared, "to_devices", lambda counts, mesh: counts)
    assert prepared.counts_of(e).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("slices", "domains", "shape"),
    [
        ([0] * 4, None, (4,)),
        ([0] * 4, 2, (2, 2)),
        ([0, 0, 1, 1], None, (2, 2)),
        ([0, 0, 1, 1], 1, (4,)),
        ([0, 0, 1, 1], 4, (4,)),  # no network within them
        ([0] * 4, 3, "domains is 3, but there are 4 devices: give a number that"),
        ([0] * 4, 0, "domains is 0, but there are 4 devices"),
        ([0, 1, 0, 1], 2, "domains is 2, but the devices are in 2 slices"),
    ],
)
def test_which_devices_are_a_domain(slices, domains, shape, monkeypatch):
    def make_mesh(shape, names, types, devices):
        assert len(shape) == len(names) == len(types) == 1
        return mock.Mock(devices=np.array(devices).reshape(shape))

    monkeypatch.setattr(meshes.jax, "make_mesh", make_mesh)
    monkeypatch.setattr(meshes, "Mesh", lambda devices, names, types: devices)
    devices = [mock.Mock(slice_index=i) for i in slices]
    if isinstance(shape, str):
        with pytest.raises(ValueError, match=shape) as error:
            meshes.data_mesh(devices, domains)
        assert "\n" not in str(error.value)
        return
    found = meshes.data_mesh(devices, domains)
    assert found.shape == shape and found.ravel().tolist() == devices
