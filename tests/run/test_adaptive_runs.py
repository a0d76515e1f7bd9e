"""Runs whose counts are found on the way, and runs that repeat them."""

import json

import jax
import numpy as np
import pytest

from acco_jax.run.observe import metrics
from acco_jax.run.state.counts import FILE, CountsLog, check_log
from tests.run.test_loop import arrays_of

ADAPTIVE = {"microbatches": "adaptive", "most_microbatches": 3}


@pytest.fixture(scope="module")
def found(train, tmp_path_factory):
    """(experiment, summary, workdir) of an adaptive run."""
    workdir = tmp_path_factory.mktemp("adaptive")
    return *train(workdir, **ADAPTIVE), workdir


def counts_of(workdir):
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


@pytest.mark.slow
def test_counts_are_logged_and_counted(found):
    experiment, summary, workdir = found
    counts = counts_of(workdir)
    assert len(counts) == experiment.total_calls
    assert all(1 <= c <= 3 for row in counts for c in row)
    size = experiment.config.microbatch_size * experiment.config.length
    assert summary["tokens"] == size * np.sum(counts)
    rows = [r for r in metrics.read(workdir) if r["kind"] == "train"]
    steps = slice(2, None, 2)  # rows are of half-rounds that end a step
    assert [r["microbatches"] for r in rows] == counts[steps]
    tokens = size * np.sum(counts, 1).cumsum()
    assert [r["tokens"] for r in rows] == tokens[steps].tolist()


@pytest.mark.slow
def test_a_replay_repeats_it_to_the_bit_also_in_parts(found, train, tmp_path):
    experiment, summary, workdir = found
    replay = ADAPTIVE | {"microbatches": f"replay:{workdir / FILE}"}
    train(tmp_path, stop_after=4, **replay)
    again, repeated = train(tmp_path, **replay)
    assert repeated["loss"] == summary["loss"]
    assert counts_of(tmp_path) == counts_of(workdir)
    assert arrays_of(again) == arrays_of(experiment)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"microbatches": "most"},
            "microbatches is 'most': choose 'fixed', 'adaptive'",
        ),
        (ADAPTIVE | {"counts": (1, 1)}, r"counts is \(1, 1\), but microbatches='adap"),
        (
            ADAPTIVE | {"method": "zero1", "most_microbatches": 8},
            "needs a method that communicates while",
        ),
        (ADAPTIVE | {"form": "fused"}, "and form='split'"),
        (
            ADAPTIVE | {"most_microbatches": 1},
            "most_microbatches is 1, less than the 2",
        ),
        ({"microbatches": "replay:none.jsonl"}, "no log of counts at none.jsonl"),
        ({"microbatches": "replay:~/no.jsonl"}, "no log of counts at /.*/no.jsonl"),
    ],
)
def test_what_cannot_adapt_says_so(train, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        train(tmp_path, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n", "has 1 half-rounds, but the run takes 2: lower steps"),
        ("[1, 2]\n[1]\n", r"line 2 of .* is \[1\]: this run needs one count from 0 to"),
        ("[1, 2]\n[4, 1]\n", r"line 2 of .* is \[4, 1\]: .* 0 to 3, the most"),
    ],
)
def test_a_log_of_another_run_is_refused(tmp_path, text, message):
    log = tmp_path / FILE
    log.write_text(text)
    with pytest.raises(ValueError, match=message):
        check_log(log, total_calls=2, workers=2, most=3)


def test_a_log_goes_on_where_the_checkpoint_is(tmp_path):
    assert jax.process_index() == 0
    log = CountsLog(tmp_path, 0)
    for row in ([1, 2], [3, 1], [2, 2]):
        log.add(row)
    log.close()
    with (tmp_path / FILE).open("a") as file:
        file.write("[1, ")  # cut by a kill
    again = CountsLog(tmp_path, 2)  # the third came after the checkpoint
    assert (again.total, again.last) == (7, [3, 1])
    again.add(np.int32([1, 1]))
    again.close()
    assert counts_of(tmp_path) == [[1, 2], [3, 1], [1, 1]]
    with pytest.raises(ValueError, match="has 3 half-rounds, but the checkpoint is of"):
        CountsLog(tmp_path, 5)
