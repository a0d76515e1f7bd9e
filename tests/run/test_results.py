"""The table, the file and the pictures of a comparison, from made-up runs."""

import csv
import json
import re

import numpy as np
import pytest
from matplotlib import image

from acco_jax.command import palette
from acco_jax.run.compare import results

ACCO, ZERO1 = (
    tuple(bytes.fromhex(palette.METHODS[name][1:])) for name in ("acco", "zero1")
)
EVERY = 100  # half-rounds between evaluations


def make_run(folder, *, loss, rate=1000.0, sent=4_000_000, alone=8e-4, rows=10, fill=0):
    """A run's folder: 10 evaluations, falling to `loss`; the last but one is best."""
    folder.mkdir(parents=True)
    lines = []
    for k in range(1, rows + 1):
        tokens = 256 * EVERY * k
        at = {"half_round": EVERY * k + fill, "step": EVERY * k, "tokens": tokens,
              "seconds": tokens / rate}  # fmt: skip
        known = None if k == 1 else rate  # the first interval compiles
        lines.append(
            {"kind": "train", "loss": 9.0, "tokens_per_second": known, **at}
        )  # fmt: skip
        held_out = loss + 2 / k if k != rows - 1 else loss - 0.5
        held_out = loss if k == rows else held_out
        lines.append({"kind": "validation", "loss": held_out, **at})
    text = "".join(json.dumps(row) + "\n" for row in lines)
    (folder / "metrics.jsonl").write_text(text)
    summary = {
        "loss": loss, "tokens": tokens, "steps": EVERY * rows, "seconds": tokens / rate,
        "bytes_sent_per_worker": sent, "state_bytes_per_device": 1_234_567,
        "gradient_seconds_per_token": alone,
        "seconds_by_cause": {"training": 200.0, "compiling": 30.0, "down": 900.0},
        "wall_seconds": 1200.0, "microbatches": 4002,
    }  # fmt: skip
    if alone is None:
        del summary["gradient_seconds_per_token"], summary["seconds_by_cause"]
    (folder / "summary.json").write_text(json.dumps(summary))
    config = {"microbatch_size": 2, "length": 32}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def found(tmp_path):
    """acco with seeds 0, 1 and zero1 with seed 0, some of it not measured."""
    acco = [make_run(tmp_path / f"a{s}", loss=2.0 + s / 4) for s in range(2)]
    zero1 = make_run(tmp_path / "z", loss=3.0, rate=500.0, sent=None, alone=None)
    return [
        *(results.read(folder, "acco", seed) for seed, folder in enumerate(acco)),
        results.read(zero1, "zero1", 0),
    ]


def cells(text):
    """Method -> column -> cell, of all tables in a text."""
    found = {}
    for part in text.split("\n\n")[::2]:
        lines = [re.split(r" *\| *", line.strip("| ")) for line in part.splitlines()]
        assert set("".join(lines[1])) == {"-"}
        assert len({len(line) for line in part.splitlines()}) == 1
        for line in lines[2:]:
            row = dict(zip(lines[0], line, strict=True))
            found.setdefault(line[0], {}).update(row)
    return found


def test_a_result_is_what_the_run_recorded(found):
    first = found[0]
    assert first.final_loss == 2.0 and first.best_loss == 1.5
    assert first.tokens == 256_000 and first.microbatches == 4002
    assert first.tokens_per_second == 1000  # without the interval that compiled
    # 1 / 1000 s a token, of which 0.8 ms gradients; 256 tokens a step
    assert first.exposed_ms_per_step == pytest.approx(256 * 0.2)
    assert found[2].exposed_ms_per_step is None


def test_a_run_on_answers_counts_its_microbatches(train_quickly, tmp_path):
    """Of 2 workers, 4 microbatches each; few tokens are targets."""
    rows = [{"instruction": f"{i}?", "input": "", "output": "a"} for i in range(60)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_quickly(tmp_path / "run", **{
        "data.name": "jsonl", "data.path": str(tmp_path / "all.jsonl"),
        "data.task": "instruct", "length": 200, "method": "zero1", "steps": 2,
    })  # fmt: skip
    result = results.read(tmp_path / "run", "zero1", 0)
    assert result.tokens < 16 * 2 * 200 / 10 and result.microbatches == 16
    assert result.seconds >= result.training_seconds + result.compiling_seconds


def test_the_table_says_means_spreads_and_what_is_not_known(found, tmp_path):
    text = results.write(found, tmp_path)
    assert (tmp_path / "table.md").read_text() == text + "\n"
    rows = cells(text)
    assert list(rows) == ["acco", "zero1"]
    assert max(map(len, text.splitlines())) <= 80
    expected = {
        "method": "acco", "seeds": "2", "final": "2.1250 (0.2500)",
        "against acco": "", "lowest": "1.6250 (0.2500)", "tokens/s": "1,000",
        "training": "200.0 s", "compiling": "30.0 s", "in all": "300.0 s",
        "exposed": "51.2 ms/step", "microbatches": "4,002", "sent": "4 MB",
        "state": "1.235 MB",
    }  # fmt: skip
    assert rows["acco"] == expected
    assert rows["zero1"]["final"] == "3.0000 (0.0000)"
    assert rows["zero1"]["against acco"] == "+50.00 %"  # 3 and 2, of seed 0
    assert rows["zero1"]["sent"] == "n/a"
    assert rows["zero1"]["exposed"] == rows["zero1"]["compiling"] == "n/a"
    for column in [*expected, "against"]:  # each is said what it is
        known = ("method", "seeds", "against acco")
        assert column in known or f'"{column}"' in text, column


def test_methods_are_compared_with_the_first_seed_by_seed(found, tmp_path):
    acco = found[:2]  # 2 and 2.25
    wp = [
        results.read(make_run(tmp_path / f"w{s}", loss=loss), "wp", s)
        for s, loss in ((0, 2.02), (1, 2.25 * 1.03), (2, 9.0))
    ]
    rows = cells(results.table([*acco, *wp]))
    # 1 and 3 %: standard deviation 2 ** .5, of two; the third seed has no partner
    assert rows["wp"]["against acco"] == "+2.00 ± 1.00 %"
    assert rows["wp"]["seeds"] == "3"
    assert cells(results.table([*wp, *acco]))["acco"]["against wp"] == "-1.95 ± 0.96 %"
    assert cells(results.table([*acco, wp[2]]))["wp"]["against acco"] == "n/a"
    assert not any(c.startswith("against") for c in cells(results.table(acco))["acco"])


def test_the_file_has_a_row_per_run(found, tmp_path):
    results.write(found, tmp_path)
    with (tmp_path / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(r["method"], r["seed"]) for r in rows] == [
        ("acco", "0"), ("acco", "1"), ("zero1", "0"),
    ]  # fmt: skip
    for row, result in zip(rows, found, strict=True):
        assert float(row["final_loss"]) == result.final_loss
        assert row["bytes_sent_per_worker"] == str(result.bytes_sent_per_worker or "")


def test_a_curve_is_the_mean_within_the_seeds_range(found):
    c = results.curve(found[:2])
    assert c.tokens == [256 * EVERY * k for k in range(1, 11)]
    assert c.mean[-1] == 2.125 and (c.low[-1], c.high[-1]) == (2.0, 2.25)
    assert c.bytes_sent == [400_000.0 * k for k in range(1, 11)]
    assert results.curve(found[2:]).bytes_sent is None


def test_seeds_with_other_evaluations_meet_where_both_have_one(found, tmp_path):
    short = results.read(make_run(tmp_path / "s", loss=2.0, rows=4), "acco", 2)
    assert len(results.curve([*found[:2], short]).mean) == 4


def test_seeds_whose_methods_differ_meet_at_their_steps(found, tmp_path):
    """As runs of auto may: acco's half-rounds have other numbers than zero1's."""
    other = results.read(make_run(tmp_path / "o", loss=2.0, fill=1), "acco", 2)
    assert len(results.curve([*found[:2], other]).mean) == 10


def pixels(path, colour):
    """Pixels of a colour in each third of a picture, and its shape."""
    picture = image.imread(path)[..., :3] * 255
    near = np.abs(picture - np.array(colour)).max(-1) < 64
    return [int(t.sum()) for t in np.array_split(near, 3, axis=1)], picture.shape


def test_draws_every_method_against_tokens_time_and_bytes(found, tmp_path):
    results.draw(found, tmp_path / "loss.png")
    acco, (height, width, _) = pixels(tmp_path / "loss.png", ACCO)
    assert width > 1200 and height > 400
    assert min(acco) > 300
    zero1, _ = pixels(tmp_path / "loss.png", ZERO1)
    assert min(zero1[:2]) > 300 > zero1[2]  # its bytes are not known
    # the band: half of acco's colour, where the seeds differ
    band, _ = pixels(tmp_path / "loss.png", [255 - 0.2 * (255 - c) for c in ACCO])
    assert min(band) > 1000


def test_draws_a_single_evaluation(tmp_path):
    folder = make_run(tmp_path / "a", loss=2.0, rows=1)
    (folder / "metrics.jsonl").write_text(
        (folder / "metrics.jsonl").read_text().splitlines()[1] + "\n"
    )
    result = results.read(folder, "acco", 0)
    assert result.tokens_per_second is None and result.exposed_ms_per_step is None
    results.draw([result], tmp_path / "loss.png")
    assert sum(pixels(tmp_path / "loss.png", ACCO)[0]) > 30


@pytest.mark.parametrize(
    ("alone", "exposed"), [(8e-4, 51.2), (1e-3, 0.0), (1.1e-3, None), (None, None)]
)
def test_no_time_is_exposed_that_is_less_than_nothing(tmp_path, alone, exposed):
    """Of 256 tokens a step, at 1 ms each in training."""
    result = results.read(make_run(tmp_path / "a", loss=2.0, alone=alone), "acco", 0)
    assert result.exposed_ms_per_step == pytest.approx(exposed)
    shown = cells(results.table([result]))["acco"]["exposed"]
    assert shown == ("n/a" if exposed is None else f"{exposed:.1f} ms/step")


def test_tokens_that_a_rollback_lost_are_of_no_step(tmp_path):
    path = make_run(tmp_path / "a", loss=2.0) / "summary.json"
    summary = json.loads(path.read_text())
    lost = {"tokens": summary["tokens"] + 64_000, "lost_tokens": 64_000}
    path.write_text(json.dumps(summary | lost))
    result = results.read(path.parent, "acco", 0)
    assert result.exposed_ms_per_step == pytest.approx(51.2)


def test_runs_that_diverged_are_named(found):
    names = [f"zero1/seed-{seed}" for seed in range(1, 9)]
    text = results.table(found, names)
    named = f"Diverged, not in the means: {', '.join(names)}."
    assert named in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_unfinished_runs_are_not_results(tmp_path):
    assert not results.finished(tmp_path)
    assert results.finished(make_run(tmp_path / "a", loss=1.0))
    (tmp_path / "summary.json").write_text('{"loss": 1.0}')  # of an older version
    assert not results.finished(tmp_path)
