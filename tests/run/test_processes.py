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


class Coordinator:
    """JAX's client as process 1 of two sees it, of a service that answers so."""

    def __init__(self, other=b"", error=None):
        self.other, self.error, self.values = other, error, {}

    def key_value_set_bytes(self, key, value):
        self.values[key] = value

    def wait_at_barrier(self, name, timeout):
        if self.error:
            raise self.error

    def key_value_dir_get_bytes(self, folder):
        own = [(k, v) for k, v in self.values.items() if k.startswith(folder)]
        return [*own, (f"{folder}000000", self.other)]

    def key_value_delete(self, key):
        self.values.pop(key, None)


@pytest.fixture
def coordinated(monkeypatch):
    def as_process_1(**answers):
        client = Coordinator(**answers)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        monkeypatch.setattr(
            processes.multihost, "get_jax_distributed_client", lambda: client
        )
        return client

    return as_process_1


def test_numbers_go_by_the_coordinator(coordinated):
    client = coordinated(other=np.arange(3.0).tobytes())
    rows = processes.gathered(np.ones(3))
    np.testing.assert_array_equal(rows, [[0, 1, 2], [1, 1, 1]])
    taken = processes.from_process_0(np.ones(3))
    np.testing.assert_array_equal(taken, [0, 1, 2])
    taken += 1  # it may be written to
    assert len(client.values) == 1  # what all have read is removed


def test_large_arrays_go_by_the_devices(coordinated, monkeypatch):
    coordinated(error=AssertionError())
    for name in ("process_allgather", "broadcast_one_to_all"):
        monkeypatch.setattr(
            processes.multihost_utils, name, lambda x, **_: np.asarray(x)
        )
    large = np.zeros(processes.LARGE + 1, np.uint8)
    assert processes.gathered(large).shape == processes.from_process_0(large).shape


def test_who_meets_elsewhere(coordinated):
    coordinated(other=b"there")
    with pytest.raises(processes.Parted, match="different places"):
        processes.meet("here")


@pytest.mark.parametrize("name", ["gathered", "from_process_0", "meet"])
def test_a_lost_peer_is_no_refused_value(coordinated, name):
    """Some failures come as ValueErrors, which commands take for refusals."""
    coordinated(error=ValueError("UNAVAILABLE: Connection reset by peer"))
    with pytest.raises(processes.Parted, match="Connection reset") as error:
        getattr(processes, name)("here" if name == "meet" else np.int32(1))
    assert not isinstance(error.value, ValueError | OSError)
