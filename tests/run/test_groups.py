"""A worker of several devices is a worker: config.mesh changes where, not what."""

import jax
import numpy as np
import pytest

from acco_jax.run import loop, preparation
from acco_jax.run.observe import metrics

pytestmark = pytest.mark.usefixtures("x64", "compiled_here")
GROUP = {"mesh.fsdp": 2, "mesh.tensor": 2}
FLOAT64 = {"model.dtype": "float64", "model.param_dtype": "float64"}


@pytest.fixture(scope="module")
def run(tiny):
    """run(workdir, devices, stop_after=None, **changes): a run on the first devices."""

    def run(workdir, devices, stop_after=None, **changes):
        config = tiny(**{**FLOAT64, "optimizer.options": {"eps": 1e-3}, **changes})
        found = preparation.prepare(config, workdir, jax.devices()[:devices])
        return found, loop.run(found, stop_after=stop_after)

    return run


def losses(workdir):
    rows = metrics.read(workdir)
    return np.array([row["loss"] for row in rows])


@pytest.fixture(scope="module")
def alone(run, tmp_path_factory):
    """(losses, summary) of a run whose workers are two devices."""
    workdir = tmp_path_factory.mktemp("alone")
    _, summary = run(workdir, 2)
    return losses(workdir), summary


@pytest.mark.slow
def test_a_group_is_a_worker(run, alone, tmp_path):
    expected, summary = alone
    group, grouped = run(tmp_path, 8, **GROUP)
    assert group.workers == 2
    np.testing.assert_allclose(losses(tmp_path), expected, rtol=1e-9)
    assert len(expected) > 6 and len(set(expected[:3])) == 3
    assert (grouped["devices"], grouped["workers"]) == (8, 2)
    held = [x["state_bytes_per_device"] for x in (summary, grouped)]
    assert held[1] < 0.5 * held[0]
    sent = [x["bytes_sent_per_worker"] for x in (summary, grouped)]
    assert sent[1] < 0.7 * sent[0]  # by each device of a group, in whole tiles


OTHERS = [(2, {}), pytest.param(4, {"mesh.fsdp": 2}, marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "group"), OTHERS)
def test_a_run_goes_on_in_other_groups(run, alone, devices, group, tmp_path):
    """From groups of 4, in the middle of a step, to single devices and pairs."""
    run(tmp_path, 8, stop_after=6, **GROUP)
    again, summary = run(tmp_path, devices, **group)
    assert summary is not None and again.workers == 2
    np.testing.assert_allclose(losses(tmp_path), alone[0], rtol=1e-9)


def test_groups_that_cannot_be(tiny, tmp_path):
    def refused(devices, **changes):
        with pytest.raises(ValueError) as error:
            preparation.prepare(tiny(**changes), tmp_path, jax.devices()[:devices])
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "microbatch_size is 2, which mesh.fsdp=4" in refused(8, **{"mesh.fsdp": 4})
    assert "is 2, but there are 3 devices" in refused(3, **{"mesh.fsdp": 2})
    assert "does not divide the model's 2 heads" in refused(8, **{"mesh.tensor": 4})
    assert "mesh.fsdp is 0: it must be" in refused(8, **{"mesh.fsdp": 0})
    own = {"model.factory": "tests.run.own_models:linen_model", "mesh.tensor": 2}
    assert "does not say how it is split" in refused(8, **own)
