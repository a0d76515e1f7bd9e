"""The picture and the summary of a finished run."""

import json

import numpy as np
import pytest
from matplotlib import image

from acco_jax.run.observe import run_summary


def rows(length=50):
    train = [
        {"kind": "train", "half_round": h, "tokens": 1000 * h, "seconds": h / 3,
         "loss": 5.5 / h**0.3}
        for h in range(1, length)
    ]  # fmt: skip
    held_out = [
        {"kind": "validation", "half_round": h, "tokens": 1000 * h, "seconds": h / 3,
         "loss": 5.5 / h**0.3, "bits_per_byte": 8.0 / h**0.3}
        for h in range(10, length + 1, 10)
    ]  # fmt: skip
    return sorted([*train, *held_out], key=lambda r: r["half_round"])


def pixels(path, red, green, blue):
    """How many pixels of a PNG are of a colour, but for smoothing; the shape too."""
    picture = image.imread(path)[..., :3] * 255
    near = np.abs(picture - np.array([red, green, blue])).max(-1) < 64
    return int(near.sum()), picture.shape[:2]


@pytest.mark.parametrize("bigram", [3.4, 0.9], ids=["reached", "far below"])
def test_draws_all_three_curves(tmp_path, bigram):
    run_summary.draw(rows(), bigram, tmp_path / "loss.png", "acco, text, 2 devices")
    blue, (height, width) = pixels(tmp_path / "loss.png", 31, 119, 180)
    assert width >= 1000 and height >= 400
    assert blue > 1500  # held out, in both halves: the legend alone is some 200
    assert pixels(tmp_path / "loss.png", 191, 191, 191)[0] > 300  # training
    assert pixels(tmp_path / "loss.png", 214, 39, 40)[0] > 300  # bigram


def test_draws_a_run_of_one_evaluation(tmp_path):
    run_summary.draw(rows(10), 3.4, tmp_path / "loss.png", "acco, text, 2 devices")
    assert pixels(tmp_path / "loss.png", 31, 119, 180)[0] > 50


def test_summarizes_in_a_file_and_for_people(tmp_path):
    summary = {
        "method": "acco", "devices": 2, "parameters": 11120, "steps": 6,
        "tokens": 3328, "seconds": 4.0, "loss": 5.4, "bits_per_byte": 3.0,
        "bigram_bits_per_byte": 4.0, "bytes_sent_per_worker": 12345,
        "state_bytes_per_device": 67890, "goodput": 0.875, "wall_seconds": 8.0,
        "seconds_by_cause": {"training": 7.0, "start_up": 1.0, "down": 0.0},
    }  # fmt: skip
    text = run_summary.summarize(summary, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    parts = ["acco on 2 devices", "11,120 parameters", "3.0000 bits per byte"]
    for part in [
        *parts,
        "4.0000 bits per byte",
        "0.75",
        "832 tokens/s",
        "loss.png",
        "12,345 bytes",
        "67,890 of parameters",
        "87.5% of 8 s on half-rounds; start-up 1 s\n",
    ]:
        assert part in text
    summary["seconds_by_cause"] = {"training": 8.0, "start_up": 0.2}
    text = run_summary.summarize(summary, tmp_path)
    assert "of 8 s on half-rounds\n" in text
