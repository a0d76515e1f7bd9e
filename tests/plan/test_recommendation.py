"""What plan recommends, on recorded schedules; nothing is compiled."""

import itertools
import json
import pathlib
import re
import shlex

import numpy as np
import pytest

from acco_jax.methods import gaps
from acco_jax.plan import planner
from acco_jax.run.config import parsing
from acco_jax.run.config.fields import default_config
from acco_jax.schedule import topologies
from tests.schedule.recordings import run

ROOT = pathlib.Path(__file__).parents[2]
FILE = "--recommend", "--nofit"
AS_PLANNED = {"microbatch_size": 4, "microbatches_per_step": 2}  # unless asked


def recommended(tmp_path, *arguments):
    file = tmp_path / "recommended.json"
    run(*FILE, f"--json={file}", *arguments)
    return json.loads(file.read_text())


def test_the_network_decides(stand_in, tmp_path, capsys):
    """Acco in few bits on a slow one; zero1 where nothing is exposed."""
    names = [
        recommended(tmp_path, f"--set=fast_bandwidth={rate}")["recommended"]
        for rate in (1e15, 5e9)
    ]
    assert names == ["zero1", "acco with 8 bits both ways"]
    text = " ".join(capsys.readouterr().out.split())
    assert "RECOMMENDED: acco with 8 bits both ways, " in text
    assert "times as fast as zero1" in text
    assert "% of its step is exposed communication: twice the " in text
    assert re.search(r"early losses of zero1's in [\d.]+ to [\d.]+ of its time", text)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_command_trains_so(stand_in, tmp_path):
    found = recommended(
        tmp_path, "--set=fast_bandwidth=5e9", "--config.seed=7", "--config.method=wp"
    )
    program, flag, module, *arguments, workdir = shlex.split(found["command"])
    assert [program, flag, module] == ["python", "-m", "acco_jax.train"]
    assert workdir == "--workdir=runs/recommended"
    config = parsing.config_of(arguments)
    assert (config.seed, config.method) == (7, "acco")
    assert config.method_options.to_dict() == {"gather_bits": 8, "reduce_bits": 8}
    # a step of as many rows, in four microbatches at least
    assert (config.microbatch_size, config.microbatches_per_step) == (2, 4)
    rows = {c["name"]: c for c in found["candidates"]}
    assert rows["acco"]["gap"].startswith("-0.62") and rows["zero1"]["gap"] == "exact"
    assert all(c["tokens_per_second"] > 0 for c in rows.values())


def test_what_helps_on_slow_links_is_what_the_map_measured():
    """Seconds to each loss of zero1's, means over seeds, over zero1's own."""
    report = json.loads((ROOT / "experiments" / "results" / "map.json").read_text())
    names = {
        "acco(gather_bits=8,reduce_bits=8)": "acco in 8 bits",
        "streaming_diloco(local_steps=24,bits=8)": (
            "streaming_diloco (bits=8, local_steps=24)"
        ),
    }
    found: dict = {}
    for link, goal in itertools.product(report["links"], report["goals"]):
        seconds = {
            method: np.mean(goal["steps"][method]) * np.median(link["seconds"][method])
            for method in ("zero1", *names)
        }
        for method, name in names.items():
            share = round(seconds[method] / seconds["zero1"], 2)
            found.setdefault(link["ratio"], {}).setdefault(name, []).append(share)
    for ratio, shares in gaps.EARLY_LOSSES.items():
        assert shares == {n: (min(x), max(x)) for n, x in found[ratio].items()}
    for ratio, near in ((0.0, 1), (2.0, 1), (3.0, 5), (12.0, 5), (13.0, 30), (1e9, 30)):
        assert f"Where zero1's takes {near} times" in gaps.where_exposed(ratio)


def test_without_a_measured_loss_there_is_zero1(stand_in, tmp_path):
    slow = "--set=fast_bandwidth=5e9"
    found = recommended(tmp_path, slow, "--config.optimizer.name=adan")
    assert found["recommended"] == "zero1"
    assert "acco: not measured" in found["left_out"]
    found = recommended(tmp_path, slow, "--config.tolerance=-1")
    assert found["recommended"] == "zero1"


@pytest.mark.parametrize(
    "extra",
    ["--methods=acco", "--devices=16", "--tokens=1e9", "--network=10,20",
     "--price=h200=2", "--failure-hours=9"],
)  # fmt: skip
def test_it_is_for_one_machine(refusal, extra):
    assert "--recommend is for one machine" in refusal(*FILE, extra)


def test_a_worker_of_several_hosts_has_no_domains():
    place = topologies.parse("gpu:h200:4x8")
    for fsdp, domains in ((1, 4), (8, 4), (16, None)):
        config = default_config()
        config.mesh.fsdp = fsdp
        assert planner.with_domains(config, place).domains == domains


def test_without_acco_in_memory_there_is_zero1(stand_in, tmp_path, monkeypatch):
    """Also where a host has several devices, of which acco is planned once more."""
    make = planner.make

    def make_only_zero1(config, topology, request):
        if request.methods == ("acco",):
            raise planner.NothingFits({"acco": "needs 200 GB of 141"})
        return make(config, topology, request)

    monkeypatch.setattr(planner, "make", make_only_zero1)
    place = "--topology=gpu:h200:4x8"
    found = recommended(tmp_path, place, "--set=slow_bandwidth=5e9")
    assert found["recommended"] in ("zero1", "acco")
    names = [c["name"] for c in found["candidates"]]
    assert "acco with 8 bits both ways" not in names


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_options_of_another_method_are_left_out(stand_in, tmp_path):
    found = recommended(
        tmp_path,
        "--set=fast_bandwidth=1e15",
        "--config.method_options.extrapolation=1.2",
    )
    assert found["recommended"] == "zero1"
    assert "method_options" not in found["command"]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_the_command_has_the_halves_that_were_planned(stand_in, tmp_path):
    """Not those that the config asked for."""
    found = recommended(
        tmp_path, "--set=fast_bandwidth=5e9", "--config.first_half=2",
        "--config.microbatches_per_step=4",
    )  # fmt: skip
    assert "acco" in found["recommended"]
    config = parsing.config_of(shlex.split(found["command"])[3:-1])
    assert (config.microbatches_per_step, config.first_half) == (4, 1)


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize(
    "given",
    [
        ("microbatch_size=1", "microbatches_per_step=2"),
        ("microbatches_per_step=4", "counts=(2,2,2,2,2,2,2,1)"),
        # microbatches of half the rows would make it half the batch
        ("microbatches_per_step=2", "method=zero1", "counts=(2,2,2,2,2,2,2,1)"),
    ],
)
def test_halves_whose_loss_is_not_measured_are_not_recommended(
    stand_in, tmp_path, given
):
    """Acco's losses are of a smaller first half, of which these have none."""
    flags = [f"--config.{field}" for field in given]
    found = recommended(tmp_path, "--set=fast_bandwidth=5e9", *flags)
    assert found["recommended"] == "zero1"
    (why,) = found["left_out"]
    assert "four microbatches" in why
    config = parsing.config_of(shlex.split(found["command"])[3:-1])
    rows = config.microbatch_size * config.microbatches_per_step
    asked = dict(field.split("=") for field in given)
    size, many = (int(asked.get(n, d)) for n, d in AS_PLANNED.items())
    assert rows == size * many


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("mesh.fsdp=0", "mesh.fsdp is 0"),
        ("microbatches_per_step=0", "microbatches_per_step is 0"),
        ("method=aco", "aco"),
    ],
)
def test_the_config_is_checked_first(refusal, flag, said):
    assert said in refusal(*FILE, f"--config.{flag}")


def test_varying_microbatches_are_rejected(refusal):
    said = refusal(*FILE, "--config.microbatches=adaptive")
    assert "microbatches is 'adaptive', but --recommend is for fixed ones" in said


def test_a_gate_judges_what_is_recommended(stand_in, tmp_path, capsys):
    """Zero1 is compiled, too, and overlaps nothing."""
    with pytest.raises(SystemExit) as end:
        run(*FILE, "--require-hidden", "--set=fast_bandwidth=5e9")
    assert end.value.code == 3
    assert "zero1" not in capsys.readouterr().err


def test_a_gate_judges_the_bits_that_are_recommended(stand_in, tmp_path, capsys):
    file = tmp_path / "recommended.json"
    with pytest.raises(SystemExit) as end:
        run(*FILE, "--require-hidden", "--set=fast_bandwidth=5e9", f"--json={file}")
    assert end.value.code == 3
    (said,) = re.findall(r"([\d.]+) ms exposed, most by", capsys.readouterr().err)
    found = json.loads(file.read_text())
    exposed = {c["name"]: 1e3 * c["exposed"] for c in found["candidates"]}
    assert found["recommended"] == "acco with 8 bits both ways"
    assert float(said) == pytest.approx(exposed[found["recommended"]], rel=0.05)
    assert exposed["acco"] > 2 * exposed[found["recommended"]]


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
def test_only_measured_options_are_planned(stand_in, tmp_path):
    """A gap is known of plain acco, not of acco in 4 bits."""
    given = ["--config.method_options.gather_bits=4", "--config.method=acco"]
    found = recommended(tmp_path, "--set=fast_bandwidth=5e9", *given)
    names = [c["name"] for c in found["candidates"]]
    assert "acco with 8 bits both ways" in names
    assert not any(p.config.method_options for p in stand_in if hasattr(p, "config"))
    config = parsing.config_of(shlex.split(found["command"])[3:-1])
    assert config.method_options.gather_bits == 8


@pytest.mark.parametrize("extra", ["--out=x", "--dump-hlo=x"])
def test_files_of_a_plan_are_rejected(refusal, extra):
    assert "leave out --tokens and --recommend" in refusal(*FILE, extra)
