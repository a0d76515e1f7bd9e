"""The command on recorded schedules: all that it reports, and what it refuses."""

import json
import re

import pytest

from acco_jax.plan import planner, programs
from acco_jax.schedule import topologies
from tests.schedule.recordings import run, text_of

MIB = 2**20


def test_the_whole_report(stand_in, tmp_path, capsys):
    out, file, hlo = tmp_path / "out", tmp_path / "a" / "plan.json", tmp_path / "hlo"
    run("--devices=8,64", f"--out={out}", f"--json={file}", f"--dump-hlo={hlo}")
    text = capsys.readouterr().out
    for words in (
        "gpu:h200:1x8: 8 x NVIDIA H200 141GB HBM3e",
        "READ is from the schedule",
        "989.4 TFLOP/s",
        "450 GB/s",
        "3.4 µs",
        "NVIDIA's data sheet",
        "acco: 2 calls per step, 1 microbatch in each",
        "zero1: 1 call per step, 2 microbatches in each",
        "reduce-scatter  28.5 MiB bf16",
        "EXPOSED",
        "overlapped: 99.9% of the bytes (READ)",
        "overlapped: 0.0% of the bytes (READ)",
        "at equal tokens, NVLink (zero1 as compiled; intervals:",
        "4 programs compiled",
        "the fastest",
        "over zero1",
        "0.5 - 0.9",
        "PREDICTED with method_options.gather_bits and reduce_bits",
        "PREDICTED as devices grow (compiled for 8;",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) < 140
    for picture in ("timeline.png", "scaling.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
        assert str(out / picture) in text
    assert (hlo / "acco.hlo.txt").read_text() == text_of("gpu_hidden")
    assert (hlo / "zero1.hlo.txt").read_text() == text_of("gpu_synchronous")

    data = json.loads(file.read_text())
    hidden = data["methods"]["acco"]["hidden_bytes_fraction"]
    assert 1 - 1e-6 < hidden < 1  # scalars count, too
    assert data["methods"]["zero1"]["hidden_bytes_fraction"] < 1e-6
    listed = data["methods"]["acco"]["collectives"]
    large = [c["kind"] for c in listed if c["bytes"] >= MIB]
    assert large == ["reduce-scatter", "all-gather"]
    assert {c["kind"] for c in listed if c["bytes"] < MIB} == {"all-reduce"}
    rows = {(r["method"], r["devices"]): r for r in data["predicted"]}
    assert set(rows) == {(m, n) for m in ("acco", "zero1") for n in (8, 64)}
    slowing = {m: rows[m, 64]["slowing"] for m in ("acco", "zero1")}
    assert slowing["acco"] > 10 * slowing["zero1"]
    for row in rows.values():
        tokens = 2 * 4 * 128 * row["devices"]  # the quickstart's, of each worker
        assert row["tokens_per_step"] == tokens
        assert row["tokens_per_second"] == pytest.approx(tokens / row["step"])
        spent = row["computation"] + row["exposed"] + row["slowing"]
        assert row["step"] == pytest.approx(spent)
        parts = row["matmul"] + row["memory_access"]
        assert row["computation"] == pytest.approx(parts)
        baseline = rows["zero1", row["devices"]]["step"]
        assert row["baseline"] == "zero1"
        assert row["speedup"] == pytest.approx(baseline / row["step"])
        for name in planner.RANGES:
            low, high = row[f"{name}_range"]
            assert low <= row[name] <= high
        assert row["step_range"][1] > 1.5 * row["step_range"][0]
    for method, before in (("acco", rows["acco", 8]), ("zero1", rows["zero1", 8])):
        bits = [r for r in data["few_bits"] if r["method"] == method]
        choices = [(r["gather_bits"], r["reduce_bits"]) for r in bits]
        assert choices == [(None, None), (8, None), (4, None), (8, 8), (4, 8)]
        shares = [r["share_of_bytes"] for r in bits]
        assert shares == [1, 0.75, 0.625, 0.5, 0.375]
        assert bits[0]["step"] == pytest.approx(before["step"])
    faster = [r["speedup"] for r in data["few_bits"] if r["method"] == "zero1"]
    assert 1 == faster[0] < faster[1] < faster[2]
    # an all-to-all among the recording's 16 devices leaves the host more than a ring
    assert faster[3] < faster[1]
    saved = rows["acco", 8]["memory"] - rows["acco", 64]["memory"]
    assert saved == 40 - 5  # the shard at an eighth


def test_network_and_other_figures_from_the_command_line(stand_in, capsys):
    slow = "--network=100", "--set=compute_efficiency=0.5"
    run("--nofit", *slow)
    lines = capsys.readouterr().out.splitlines()
    assert any(
        re.match(r"\s+slow_bandwidth\s+12.5 GB/s\s+given on the command", x)
        for x in lines
    )
    assert any(re.match(r"\s+compute_efficiency\s+0.5\s+given", x) for x in lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology=gpu:h20o:4x8"], "the gpu chip is 'h20o': did you mean 'h20'?"),
        (
            ["--topology=tpu:v5e:32x32"],
            "1024 chips, but a slice of TPU v5e has at most",
        ),
        (["--topology=tpu:v6e:17x16"], "272 chips, but a slice of TPU v6e has at most"),
        (["--topology=tpu:v5p:21x21x21"], "at most 8960: take several with --slices."),
        (["--set=flops=1:2:3"], "--set=flops=1:2:3: give NAME=NUMBER or NAME=LEAST"),
        (["--set=compute_efficiency=0.7:0.4"], "is 0.7:0.4: give the least first."),
        (["--set=memory_efficiency=0.7:4"], "memory_efficiency is 4: it is a share"),
        (
            ["--set=memory_fraction=75"],
            "the figure memory_fraction is 75: it is a share",
        ),
        (["--tokens=many"], "--tokens: 'many' is not a positive number."),
        (["--tokens=-1"], "--tokens: '-1' is not a positive number."),
        (["--tokens=1e9", "--price=h100=2"], "for a chip of --topology (h200)."),
        (["--tokens=1e9", "--price=h200=-2"], "--price=h200=-2: give CHIP=PRICE"),
        (["--tokens=1e9", "--price=h200"], "--price=h200: give CHIP=PRICE"),
        (["--price=h200=2"], "--tokens is missing: a decision needs the length"),
        (["--network=1,2", "--devices=16"], "--devices is of one plan: leave it out"),
        (["--config.method=auto"], "a run chooses by timing: give --recommend, or --m"),
        (["--network=100,200"], "--tokens is missing: a decision needs the length"),
        (["--tokens=1e9", "--devices=8"], "--devices, --out and --dump-hlo are of one"),
        (["--sweep-network", "--require-hidden"], "leave out --sweep-network"),
        (["--sweep-network", "--dump-hlo=x"], "leave out --sweep-network"),
        (["--calibrate", "--require-hidden"], "leave out --calibrate"),
        (["--calibrate", "--restart-seconds=9"], "is of a plan, --calibrate measures"),
        (["--calibrate"], "--topology is of a plan, --calibrate measures this machine"),
        (
            ["--tokens=1e9", "--failure-hours=0"],
            "--failure-hours: '0' is not a positive",
        ),
        (
            ["--tokens=1e9", "--restart-seconds=x"],
            "--restart-seconds: 'x' is not a pos",
        ),
        (
            ["--tokens=1e9", "--checkpoint-seconds=nan"],
            "'nan' is not a positive number",
        ),
        (["--calibration=nowhere.json"], "is not a report of --calibrate:"),
        (["--topology=h200"], "'h200' is not of the form gpu:CHIP:HOSTSxGPUS"),
        (["--slices=2"], "slices is 2, but must be 1 for GPUs"),
        (["--methods=aco"], "--methods is 'aco': did you mean 'acco'? Known: acco,"),
        (["--devices=12"], "devices is 12: it must be at least 1 and, above 8, a mult"),
        (
            ["--devices=8,2", "--config.mesh.fsdp=4"],
            "devices is 2, but a worker is a group of 4: give a multiple.",
        ),
        (["--devices=8,x"], "--devices: 'x' is not a whole number."),
        (["--devices=0"], "devices is 0: it must be at least 1"),
        (["--set=flops"], "--set=flops: give NAME=NUMBER"),
        (["--set=flop=1"], "the name of a figure is 'flop': did you mean"),
        (["--set=flops=-1"], "the figure flops is -1: it must be positive."),
        (["--set=flops=nan"], "the figure flops is nan: it must be positive."),
        (["--set=flops=1e15,flops="], "--set=flops=: give NAME=NUMBER"),
        (["--set=compute_efficiency=40"], "at most 1 (0.4 for 40 %)."),
        (["--set=flops=1e15,flops=2e15"], "--set=flops is given twice: leave out one"),
        (
            ["--set=slow_bandwidth=1e9", "--network=400"],
            "--network and --set=slow_bandwidth both give the network's rate",
        ),
        (
            ["--checkpoint-seconds=30"],
            "--checkpoint-seconds counts with --failure-hours only",
        ),
        (
            ["--tokens=1e9", "--restart-seconds=30"],
            "--restart-seconds counts with --failure-hours only",
        ),
        (["--network=0"], "--network: '0' is not a positive number."),
        (["--network=-100"], "--network: '-100' is not a positive number."),
        (["--network=inf"], "--network: 'inf' is not a positive number."),
        (["--topology=gpu:h200:0x8"], "with sizes of at least 1"),
        (["--topology=tpu:h200:4x4"], "the tpu chip is 'h200'"),
        (["--topology=cpu:x:1x8"], "the platform is 'cpu'"),
        (["--devices=-8"], "devices is -8: it must be at least 1"),
        (["--devices=8.5"], "--devices: '8.5' is not a whole number."),
        (["--config.method=aco"], "method is 'aco': did you mean 'acco'"),
        (["--config.length=0"], "length is 0"),
        (["--config.microbatches_per_step=3"], "does not divide into the 2 calls"),
        (["--config.microbatch_size=0"], "microbatch_size is 0: it must be at least 1"),
        (["--config.counts=(1,)"], "counts is (1,): give one number from 0 to 1 for"),
        (["--config.form=split"], "form is 'split', which is for CPUs"),
        (["--config.microbatches=replay:x"], "which a run finds or has logged: plan"),
        (
            ["--config.first_half=2"],
            "first_half is 2 of microbatches_per_step=2: give 1 to one less than these",
        ),
        (["--config.data.tokenizer=bpe"], "set model.vocab_size, or data.vocab_size"),
        (["--config.model.heads=3"], "width=128 is not divisible by heads=3"),
    ],
)
def test_errors_are_one_line_before_any_compile(stand_in, refusal, arguments, message):
    assert message in refusal(*arguments)
    assert not stand_in


def test_it_writes_no_file_unless_asked(stand_in, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    run("--nofit", "--methods=acco")
    assert not list(tmp_path.iterdir())
    assert "picture" not in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--out={}/x", "--json={}/x/y.json", "--dump-hlo={}"])
def test_where_nothing_can_be_written_is_said_first(stand_in, tmp_path, refusal, flag):
    file = tmp_path / "file"
    file.touch()
    line = refusal(flag.format(file))
    assert "cannot be written to" in line and str(file) in line
    assert not stand_in


def test_a_missing_compiler_is_one_line_with_the_remedy(monkeypatch, refusal):
    monkeypatch.setattr(topologies, "_installed", lambda module: False)
    line = refusal(topology="tpu:v6e:4x4")
    assert "pip install 'acco-jax[plan-tpu]'" in line


def test_a_program_too_large_is_said_with_what_would_fit(
    stand_in, monkeypatch, refusal
):
    compile_ = programs.Program.compile

    def limited(program, *place):
        if program.rows > 2:
            raise programs.DoesNotFit("it needs 200G of 141G hbm")
        return compile_(program, *place)

    monkeypatch.setattr(programs.Program, "compile", limited)
    assert re.fullmatch(
        r"error: acco with microbatch_size 4 does not fit into the memory of a NVIDIA "
        r"H200 141GB HBM3e: it needs 200G of 141G hbm; 2 would fit\.",
        refusal("--methods=acco"),
    )


def test_adaptive_counts_that_do_not_fit_are_said(stand_in, monkeypatch, refusal):
    def limited(program, *place):
        raise programs.DoesNotFit("it needs 200G of 141G hbm")

    monkeypatch.setattr(programs.Program, "compile", limited)
    line = refusal("--config.microbatches=adaptive", "--config.most_microbatches=16")
    assert "acco with microbatch_size 4 does not fit" in line
    assert line.endswith("it needs 200G of 141G hbm; lower it.")


@pytest.mark.parametrize("arguments", [[], ["--nofit"]])
def test_a_gpu_program_larger_than_its_memory_is_refused(stand_in, refusal, arguments):
    # the stand-in's 1 GB and 8 MB per row
    line = refusal("--set=memory_bytes=1.01e9,memory_fraction=1", *arguments)
    assert "does not fit into the memory" in line
    assert "it needs 1.0G of 0.9G of memory" in line
    assert ("; lower it." if arguments else "; 1 would fit.") in line


def test_what_jax_leaves_of_a_gpu_s_memory_is_not_used(stand_in, refusal):
    room = "--set=memory_bytes=1.2e9"  # of which JAX takes three quarters
    line = refusal("--nofit", "--methods=acco", room)
    assert "it needs 1.0G of 0.8G of memory, JAX's share of the GPU" in line
    run("--nofit", "--methods=acco", f"{room},memory_fraction=0.9")


def test_what_cannot_fit_is_said_before_any_compile(stand_in, refusal):
    line = refusal("--set=memory_bytes=2e6")
    assert "holding parameters, state and batch needs" in line
    assert "take more devices" in line
    assert not stand_in
