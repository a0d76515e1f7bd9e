"""The runner trains adapters of several ranks with cellm on workers' own documents."""

import jax
import pytest

import acco_jax
from acco_jax.run.observe import metrics

CHANGES = {
    "method": "cellm",
    "method_options": {"local_steps": 2},
    "lora.ranks": (("attn/q_proj/kernel", 3), ("attn/v_proj/kernel", 1)),
    "lora.scale": 2.0,
    "data.skew": 1.0,
    "counts": (4, 1),
}
CLOCKS = ("seconds", "tokens_per_second", "goodput")


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("cellm")
    return *train(workdir, **CHANGES), workdir


@pytest.mark.long
def test_a_stopped_run_continues_bit_for_bit(whole, train, tmp_path):
    train(tmp_path, stop_after=1, **CHANGES)
    _, summary = train(tmp_path, **CHANGES)
    rows = [
        [{k: v for k, v in row.items() if k not in CLOCKS} for row in metrics.read(d)]
        for d in (tmp_path, whole[2])
    ]
    assert rows[0] == rows[1]
    assert summary["loss"] == whole[1]["loss"]


@pytest.mark.slow
def test_adapters_have_the_ranks_of_their_patterns(whole):
    experiment, summary, _ = whole
    checkpoints = experiment.checkpoints
    (params, state), _ = checkpoints.restore(checkpoints.latest(), experiment.abstract)
    adapters = acco_jax.committed_params(state, params)
    ranks = {name: ab["a"].shape[-1] for name, ab in adapters.items()}
    assert {3 if "q_proj" in name else 1 for name in ranks} == set(ranks.values())
    assert all(r == (3 if "q_proj" in name else 1) for name, r in ranks.items())
    size = sum(x.size for x in jax.tree.leaves(adapters))
    assert any(x.any() for x in jax.tree.leaves(state.error))
    parcel = -(-size // 256) * 4 * (4 + 1)  # bytes of each of two workers, 3 rounds
    assert summary["bytes_sent_per_worker"] == 3 * parcel
