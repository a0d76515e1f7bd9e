"""What processes tell each other, and what a peer that is gone looks like."""

import jax
import numpy as np
import pytest

from acco_jax.run.state import processes


def test_one_process_hears_itself():
    np.testing.assert_array_equal(processes.gathered(np.int32(3)), [3])
    np.testing.assert_array_equal(processes.from_process_0(np.arange(2)), [0, 1])
    processes.meet("here")
    assert processes.bytes_from(0, b"\0one") == b"\0one"
    assert processes.all_bytes(b"") == [b""]


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("gathered", "process_allgather"),
        ("from_process_0", "broadcast_one_to_all"),
        ("meet", "sync_global_devices"),
    ],
)
def test_a_lost_peer_is_no_refused_value(monkeypatch, name, collective):
    """Gloo's failures come as ValueErrors, which commands take for refusals."""

    def fails(x, **options):
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, collective, fails)
    with pytest.raises(processes.Parted, match="Connection reset") as error:
        getattr(processes, name)(np.int32(1))
    assert not isinstance(error.value, ValueError | OSError)
