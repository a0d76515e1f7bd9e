"""Wrong flags, each alone: an exit code, a line with field and remedy, nothing left."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acco_jax.command import exits
from tests import programs

ROOT = Path(__file__).parents[2]
CONFIG = """
from acco_jax.run.config.fields import default_config

def get_config():
    c = default_config()
    c.devices, c.steps, c.length, c.microbatch_size = 2, 6, 32, 2
    c.microbatches_per_step, c.first_half, c.log_every = 4, 2, 1
    c.model.width, c.model.layers, c.model.heads, c.model.window = 16, 2, 2, 16
    c.model.dtype = c.model.param_dtype = "float32"
    c.data.name, c.data.path, c.data.held_out = "text_folder", {texts!r}, 0.2
    return c
"""
# Forks this process, which has imported all, for each case: 0.2 s instead of 4.
MANY = r"""
import contextlib, json, os, runpy, sys, tempfile
import jax
from acco_jax import data
from acco_jax.run import loop
from acco_jax.run.observe import hooks
cases, folder = json.load(sys.stdin)
with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as workdir:
    config = runpy.run_path("tiny.py")["get_config"]()
    data.load_corpus(config.data, workdir=workdir)
for i, (case, variables) in enumerate(cases):
    if not os.fork():
        for fd in 1, 2:
            os.dup2(os.open(f"{folder}/{i}.{fd}", os.O_CREAT | os.O_WRONLY), fd)
        os.environ |= variables
        compiled = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: "backend_compile" in name and compiled.append(name))
        sys.argv = ["train", *case]
        try:
            runpy.run_module("acco_jax.train", run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        if compiled:
            print("compiled", compiled, file=sys.stderr)
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code or 0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
HOOKS = """
class Row:
    pass

def none():
    pass

def two(row, other):
    pass

constant = 3
"""

END = "--config.optimizer.final_fraction"
WRONG = {
    "field of the command line": (
        ["--config.optimzer.x=1"],
        r"no such field: 'optimzer'.*Did you mean \"optimizer\"",
    ),
    "nested field": (["--config.model.widht=3"], r"model\.widht.*model\.width"),
    "option": (["--config.optimizer.options.b3=0.1"], "options of adamw is 'b3'"),
    "value": (["--config.steps=abc"], r"--config.steps=abc: invalid literal for int"),
    "no config": (["--config=/nowhere.py"], "No such file or directory"),
    "syntax": (["--config=syntax.py"], r"invalid syntax \(syntax.py, line 1\)"),
    "no get_config": (["--config=nothing.py"], "no attribute 'get_config'"),
    "no ConfigDict": (["--config=three.py"], r"get_config\(\) returned 3"),
    "typo in a config": (["--config=typo.py"], r"'modle' Did you mean \"model\""),
    "type in a config": (["--config=kind.py"], r"Could not override field 'seed'"),
    "no workdir": (["--workdir="], "--workdir must have a value other than None"),
    "steps": (["--config.steps=100000000000000000000"], "at most 1073741824"),
    "devices": (["--config.devices=-3"], "devices is -3: it must be at least 1"),
    "many devices": (["--config.devices=100000"], "devices is 100000: it must be at m"),
    "rate": (["--config.optimizer.learning_rate=nan"], "learning_rate is nan: it must"),
    "b2": (["--config.optimizer.options.b2=2"], r"options\.b2 is 2: it must be at l"),
    "warm-up": (["--config.optimizer.warmup_steps=7"], "more than the 6 steps"),
    "float64": (["--config.model.param_dtype=float64"], "set JAX_ENABLE_X64=1"),
    "dpu": (
        ["--config.method=dpu", "--config.method_options.warmup_steps=-1"],
        "warmup_steps is -1: give a whole number, 0 for none",
    ),
    "bpe": (
        ["--config.data.tokenizer=bpe", "--config.data.vocab_size=100000000000"],
        "vocab_size is 100000000000: it must be at most",
    ),
    "layers of a size": (
        ["--config.model.size=gpt2", "--config.model.layers=4"],
        "model.layers is 4, but model.size 'gpt2' has its own",
    ),
    "family of a size": (
        ["--config.model.size=gpt2", "--config.model.family=llama"],
        "model.family is llama, but model.size 'gpt2' has its own",
    ),
    "window of a size": (
        ["--config.model.size=gemma-3-270m", "--config.model.window=64"],
        "model.window is 64, but model.size 'gemma-3-270m' has its own",
    ),
    "window of a family": (
        ["--config.model.family=llama", "--config.model.window=64"],
        "model.window is 64, but the model has no local layers",
    ),
    "window of global layers": (
        ["--config.model.size=llama-3-8b", "--config.model.window=64"],
        "model.window is 64, but the model has no local layers",
    ),
    "window of a folder": (
        ["--config.init_from=base", "--config.model.window=64"],
        "model.window is 64, but the model of init_from 'base' has its own",
    ),
    "width of a folder": (
        ["--config.init_from=base", "--config.model.width=64"],
        "model.width is 64, but the model of init_from 'base' has its own",
    ),
    "scale": (
        ["--config.lora.scale=nan", "--config.lora.rank=2"],
        "lora.scale is nan: it must be finite",
    ),
    "adapters": (
        ["--config.lora.pattern=mlp/.*kernel"],
        "lora.pattern is 'mlp/.*kernel', but rank of lora is not given: give lora.rank",
    ),
    "pattern of a folder": (
        ["--config.lora.pattern=mlp/.*kernel", "--config.lora.init_from=adapters"],
        "lora.pattern is 'mlp/.*kernel', but rank of lora is not given: give lora.rank",
    ),
    "a first half of counts": (
        ["--config.first_half=1", "--config.counts=(1,2)"],
        r"first_half is 1, but counts=\(1, 2\) determines what a half-round computes",
    ),
    "a first half that adapts": (
        ["--config.first_half=1", "--config.microbatches=adaptive"],
        "first_half is 1, but microbatches=adaptive determines what a half-round",
    ),
    "balance of fixed counts": (
        ["--config.balance.grows=True"],
        "balance.grows is of microbatches='balanced', which is not set: drop it",
    ),
    "room of fixed counts": (
        ["--config.most_microbatches=32"],
        "most_microbatches is of microbatches that vary, which is not set: drop it",
    ),
    "options of no factory": (
        ["--config.model.options.dropout=0.1"],
        "model.options.dropout is of model.factory, which is not set: drop it",
    ),
    "spikes that nobody watches for": (
        ["--config.spike.calls=4", "--config.spike.policy=off"],
        "spike.calls is of a spike.policy other than 'off', which is not set: drop it",
    ),
    "drops that are not made": (
        ["--config.most_dropped_in_a_row=4", "--config.drop_nonfinite=False"],
        "most_dropped_in_a_row is of drop_nonfinite, which is not set: drop it",
    ),
    "weights of no folder": (
        ["--config.ignore_weights=head"],
        "ignore_weights is of init_from, which is not set: drop it",
    ),
    "path of the standard library": (
        ["--config.data.path=/nowhere", "--config.data.name=stdlib"],
        "data.path is '/nowhere', but data.name='stdlib' does not read it: set ",
    ),
    "column of instructions": (
        ["--config.data.text_feature=reply", "--config.data.task=instruct"],
        "data.text_feature is 'reply', but data.task='instruct' has columns of its own",
    ),
    "balance of padding": (
        ["--config.model.family=qwen3-moe", "--config.model.router_loss=.001",
         "--config.data.task=chat"],
        "model.router_loss is 0.001, which would count the padding of data.task 'chat'",
    ),
    "end of a constant rate": (
        ["--config.optimizer.schedule=constant", f"{END}=.1"],
        "optimizer.final_fraction is 0.1, but optimizer.schedule 'constant' has none",
    ),
    "decay of a cosine": (
        ["--config.optimizer.schedule=cosine", "--config.optimizer.decay_fraction=.5"],
        "optimizer.decay_fraction is 0.5, but optimizer.schedule 'cosine' has none",
    ),
    "steps and epochs": (
        ["--config.steps=5", "--config.epochs=2"],
        "steps is 5, but epochs=2.0 determines them: give --config.epochs instead, or",
    ),
    "width of a factory": (
        ["--config.model.factory=my:model", "--config.model.width=64"],
        "model.width is 64, but the model of model.factory 'my:model' has its own",
    ),
    "decay without a mask": (
        ["--config.optimizer.name=novograd", "--config.optimizer.no_decay=bias",
         "--config.optimizer.options.weight_decay=0.1"],
        "no_decay is 'bias', but novograd has no mask, so its weight_decay acts on all",
    ),
    "port": (
        ["--processes=2", "--process=0", "--coordinator=localhost:99999"],
        "a port from 1 to 65535",
    ),
    "workdir in a file": (["--workdir=/dev/null/x"], "Not a directory"),
    "argument": (["more"], "unexpected argument 'more'"),
    "batch": (["--config.microbatches_per_step=3"], "does not divide into the 2"),
    "data set": (["--config.data.name=stdlb"], "did you mean 'stdlib'"),
    "folder": (["--config.data.path=/nowhere"], "no folder /nowhere"),
    "counts": (["--config.counts=(0,0)"], "counts is 0 for every worker"),
    "length of counts": (["--config.counts=(1,)"], "one number from 0 to 2"),
    "method": (["--config.method=aco"], "did you mean 'acco'"),
    "optimizer": (["--config.optimizer.name=adamv"], "did you mean 'adam"),
    "dtype": (["--config.model.dtype=float61"], "give a floating dtype"),
    "form": (["--config.form=fuse"], "did you mean 'fused'"),
    "size": (["--config.model.size=x"], "'x' is unknown: use one of gpt-neo"),
    "heads": (["--config.model.heads=3"], "not divisible by heads=3"),
    "vocabulary": (["--config.model.vocab_size=9"], "is 9, but the tokenizer has 257"),
    "corpus": (["--config.length=99999"], "less than a batch"),
    "some of three": (["--processes=2"], "go together"),
    "which process": (
        ["--processes=2", "--process=2", "--coordinator=localhost:1"],
        "it is 0 to 1",
    ),
    # numbers of no size that anything has
    "lost_after": (["--lost_after=nan"], "--lost_after is nan: it must be finite"),
    "start_within": (["--start_within=inf"], r"start_within=inf: .*1.0, 86400.0"),
    "long lost_after": (["--lost_after=1e10"], r"lost_after=1e10: .*5.0, 86400.0"),
    "regroup_after": (["--regroup_after=nan"], "--regroup_after is nan: it must be"),
    "regroup_after of no one": (["--regroup_after=5"], "regroup_after=5 is for --min"),
    "sample_prompt": (["--config.sample_prompt=a"], "sample_prompt is of samples, wh"),
    "tokens": ([f"--config.tokens={10**24}"], r"tokens is 10+, which takes .*lower"),
    "epochs": (["--config.epochs=1e300"], r"epochs is 1e\+300, which takes .*lower"),
    "no epochs": (["--config.epochs=nan"], "epochs is nan: it must be finite"),
    "seed": (["--config.seed=99999999999999999999"], "seed is 9+: it must be at most"),
    "negative seed": (["--config.seed=-1"], "seed is -1: it must be at least 0"),
    "width": ([f"--config.model.width={10**12}"], "width is 10+: it must be at most"),
    "layers": ([f"--config.model.layers={10**9}"], "layers is 10+: it must be at mo"),
    "many tokens": (
        [f"--config.model.vocab_size={10**12}"], "vocab_size is 10+: it must be at m"
    ),
    "samples": (["--config.samples=100000000"], "samples is 10+: it must be at most"),
    "microbatch": ([f"--config.microbatch_size={10**30}"], "size is 10+: it must b"),
    "clip": (["--config.optimizer.clip=inf"], "optimizer.clip is inf: it must be fin"),
    "held_out": (["--config.data.held_out=nan"], "data.held_out is nan: it must be f"),
    "threshold": (["--config.spike.threshold=nan"], "spike.threshold is nan: it must"),
    # options of optimizers and schedules
    "eps": (["--config.optimizer.options.eps=-1"], "eps is -1: it must be at least 0"),
    "decay": (
        ["--config.optimizer.options.weight_decay=-0.1"],
        "weight_decay is -0.1: it must be at least 0",
    ),
    "b1": (["--config.optimizer.options.b1=x"], "options.b1 is 'x': give a number"),
    "eps of a group": (
        ["--config.optimizer.groups=(('wte',{'eps':-1}),)"], "'wte' .*eps is -1: it m"
    ),
    "rate of a group": (
        ["--config.optimizer.groups=(('wte',{'learning_rate':-1}),)"],
        "learning_rate is -1: it must be at least 0",
    ),
    "word as the rate of a group": (
        ["--config.optimizer.groups=(('wte',{'learning_rate':'1e-3'}),)"],
        "'wte' of optimizer.groups.learning_rate is '1e-3': give a number",
    ),
    "options of our schedule": (
        ["--config.optimizer.schedule_options.decay_steps=3"],
        "schedule_options is {'decay_steps': 3}, but cosine has fields of its own",
    ),
    "warm-up beyond epochs": (
        ["--config.epochs=0.01", "--config.optimizer.warmup_steps=99999"],
        r"warmup_steps is 99999, more than the \d+ steps",
    ),
    "many epochs": (["--config.epochs=1e308"], r"epochs is 1e\+308, which takes .*lo"),
    "more tokens": ([f"--config.tokens={10**400}"], "tokens is 10+, which takes .*lo"),
    "schedule": (
        ["--config.optimizer.schedule=join_schedules"],
        r"schedule is 'join_schedules': (?!did you mean 'join_)",
    ),
    "schedule of many": (
        ["--config.optimizer.schedule=inject_hyperparams"], "Known: cosine, linear"
    ),
    "option of a schedule": (
        ["--config.optimizer.schedule=exponential_decay",
         "--config.optimizer.schedule_options.rate=1"],
        "schedule_options of exponential_decay is 'rate': Known: .*decay_rate",
    ),
    # options of methods
    "extrapolation": (
        ["--config.method_options.extrapolation=inf"],
        "method_options.extrapolation is 'inf': give a finite value of type float",
    ),
    "extrapolation 0": (["--config.method_options.extrapolation=0"], "give a positive"),
    "bits": (["--config.method_options.gather_bits=x"], "gather_bits is 'x': .* int"),
    "half a bit": (["--config.method_options.reduce_bits=7.5"], "bits is 7.5: give"),
    "resync": (["--config.method_options.resync_every=None"], "every is None: .* int"),
    "local_steps": (
        ["--config.method=diloco", "--config.method_options.local_steps=2.5"],
        "local_steps is 2.5: give a finite value of type int",
    ),
    "many local_steps": (
        ["--config.method=diloco", f"--config.method_options.local_steps={10**20}"],
        "local_steps is 10+: give a finite value of type int",
    ),
    "momentum": (
        ["--config.method=diloco", "--config.method_options.outer_momentum='x'"],
        "outer_momentum is 'x': give a finite value of type float",
    ),
    "outer": (
        ["--config.method=diloco", "--config.method_options.outer=3"],
        "method_options.outer is 3: give",
    ),
    "topology": (
        ["--config.method=gossip", "--config.method_options.topology=3"],
        "topology is 3: give a finite value of type str",
    ),
    "weighted": (
        ["--config.method=diloco", "--config.method_options.weighted=2"],
        "weighted is 2: give a finite value of type bool",
    ),
    "axis": (["--config.method_options.axis_name=x"], "of acco is 'axis_name': .*Kn"),
    "specs": (["--config.method_options.param_specs=1"], "acco is 'param_specs'"),
    # names
    "no section": (
        ["--config.learning_rate=1e-4"], "did you mean 'optimizer.learning_rate'"
    ),
    "no section of two": (["--config.width=64"], "did you mean 'model.width'"),
    "another section": (
        ["--config.model.weight=3"], r"no field model.weight: did you mean 'model.wid"
    ),
    "home": (["--workdir=~tilde/x"], "~tilde/x begins with a home .* or ./~tilde/x "),
    "home of data": (["--config.data.path=~tilde"], "data.path is ~tilde, but .*home"),
    "replay": (["--replay=/nowhere"], "/nowhere"),
    "replay of auto": (["--replay=/nowhere", "--config.method=auto"], "/nowhere/"),
    "home of replay": (["--replay=~tilde"], "or ./~tilde for"),
    "base": (["--config.base=/nowhere"], "/nowhere"),
    "init_from": (["--config.init_from=/nowhere"], "/nowhere"),
    # programs of the user's
    "wandb": (["--config.wandb_project=x"], "not installed: pip install wandb"),
    "hook": (["--config.metrics_hook=beside:none"], "', which cannot be called"),
    "hook of two": (["--config.metrics_hook=beside:two"], "name a function of one"),
    "no function": (["--config.metrics_hook=beside:constant"], "name a function"),
    "no hook": (["--config.metrics_hook=beside:nothing"], "which cannot be imported"),
    "broken hook": (["--config.metrics_hook=broken:f"], "which cannot be imported: "),
    "no module": (["--config.model.factory=nowhere:f"], "Its folder must be .*PYTHONP"),
    "factory": (["--config.model.factory=beside:none"], "does not take vocab_size=257"),
    "model": (["--config.model.factory=beside:model"], "returned a Row: it must"),
    # what launchers say
    "SLURM": ([{"SLURM_NTASKS": "4"}], "SLURM_NTASKS is 4, but .* with srun, or unset"),
    "SLURM_NTASKS": ([{"SLURM_NTASKS": ""}], "SLURM_NTASKS is '', which .* unset it"),
    "Open MPI": (
        [{"OMPI_COMM_WORLD_SIZE": "2"}],
        "OMPI_COMM_WORLD_SIZE is 2, but OMPI_MCA_orte_hnp_uri .* give --coordinator",
    ),
    "Indexed Job": (
        [{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}],
        r"JOB_COMPLETION_INDEX is 0, .*'jax\[k8s\]'.* unset JOB_COMPLETION_INDEX",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def refusals(texts, tmp_path_factory):
    """{case: (exit code, stdout, stderr, files left)}: an import, a fork for each."""
    place, folder = (tmp_path_factory.mktemp(name) for name in ("place", "refusals"))
    broken = {
        "tiny": CONFIG.format(texts=str(texts)),
        "syntax": "def get_config(:",
        "nothing": "x = 1",
        "three": "def get_config():\n    return 3",
        "typo": CONFIG.format(texts="").replace("c.model.", "c.modle."),
        "kind": CONFIG.format(texts="").replace("c.devices", "c.seed = 'x'; c.devices"),
        "beside": HOOKS + "\ndef model(vocab_size, length):\n    return Row()\n",
        "broken": "raise RuntimeError('broken')",
    }
    for name, text in broken.items():
        (place / f"{name}.py").write_text(text)
    cases = []
    for i, (given, _) in enumerate(WRONG.values()):
        variables = given[0] if isinstance(given[0], dict) else {}
        given = [g for g in given if isinstance(g, str)]
        flags = [] if given == ["--workdir="] else [f"--workdir={folder}/w{i}/a/b"]
        named = any(g.startswith("--config=") for g in given)
        config = [] if named else ["--config=tiny.py"]
        # absl takes the last of a flag that is given twice
        last = [g for g in given if g != "--workdir="]
        cases.append(([*config, *flags, *last], variables))
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        input=json.dumps([cases, str(folder)]),
        env=programs.environment(ACCO_DATA_DIR=str(place / "data")),
        cwd=place,
        text=True,
        capture_output=True,
        timeout=500,
    )
    codes = [int(line) for line in done.stdout.split()]
    assert len(codes) == len(WRONG), done
    return {
        name: (
            code,
            *((folder / f"{i}.{fd}").read_text() for fd in (1, 2)),
            (folder / f"w{i}").exists(),
        )
        for i, (name, code) in enumerate(zip(WRONG, codes, strict=True))
    }


@pytest.mark.parametrize("case", WRONG)
def test_refuses_in_one_line_and_leaves_no_folder(refusals, case):
    code, out, err, left = refusals[case]
    assert code == exits.REFUSED and out == "", (code, out, err)
    assert err.count("\n") == 1 and err.startswith("error: "), err
    assert re.search(WRONG[case][1], err), err
    assert not left


HELP = r"""
import os, runpy, sys
import acco_jax.plan.planner, acco_jax.run.compare.comparison
for command in sys.argv[1:]:
    for word in "--help", "-h", "--helpshort", "--helpfull":
        sys.stdout.flush()
        if not os.fork():
            os.dup2(os.open(f"{command}{word}", os.O_CREAT | os.O_WRONLY), 1)
            sys.argv = [command, "--no_such_flag", word]
            try:
                runpy.run_module(f"acco_jax.{command}", None, "__main__", True)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code or 0)
            os._exit(99)
        print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
COMMANDS = ("train", "compare", "plan", "audit", "doctor", "runs", "report",
            "generate", "evaluate", "export")  # fmt: skip


def test_help_of_every_command_ends_with_0(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HELP, *COMMANDS],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == ["0"] * 4 * len(COMMANDS), done
    pages = {path.name: path.read_text() for path in tmp_path.iterdir()}
    flag = dict.fromkeys(COMMANDS, "workdir") | {
        "plan": "topology", "audit": "topology", "report": "out",
        "runs": "json",
    }  # fmt: skip
    for name, page in pages.items():
        assert f"--{flag[name.partition('-')[0]]}" in page and "Exit codes:" in page


def test_a_command_without_the_extra_says_so_in_one_line():
    program = """
import runpy, sys
sys.modules["ml_collections"] = None
sys.argv = ["train", "--help"]
runpy.run_module("acco_jax.train", None, "__main__", True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    line = r"error: .*ml_collections.*: pip install 'acco-jax\[train\]' .*\n"
    assert done.returncode == exits.REFUSED and re.fullmatch(line, done.stderr), done
