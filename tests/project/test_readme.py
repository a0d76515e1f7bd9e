"""README: its Python runs, its commands and links exist, its figures have a source."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
SHELL = [line[4:] for line in README.splitlines() if line.startswith("    ")]
PROSE = re.sub(r"```.*?```|<picture>.*?</picture>", "", README, flags=re.S)
PROSE = "\n".join(x for x in PROSE.splitlines() if not re.match(r"    |\||#|\[!", x))


def test_the_quickstart_runs():
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names = {"__name__": "readme"}
    exec(compile(block, "README.md", "exec"), names)
    assert names["metrics"]["step"] == 3  # seven calls: one fills, two make a step
    assert names["metrics"]["weight"] == 3 * jax.device_count()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(names["theta"]))
    assert jax.tree.map(np.shape, names["theta"]) == {"v": (16, 1), "w": (8, 16)}
    assert len(block.splitlines()) <= 27

    def attend(w):  # outside jax.jit this raises on a mesh with Explicit axes
        heads = w.reshape(1, 8, 2, 8)
        return jax.nn.dot_product_attention(heads, heads, heads, is_causal=True)

    found = [f(names["theta"]["w"]) for f in (attend, jax.jit(attend))]
    expected = attend(jnp.asarray(np.asarray(names["theta"]["w"])))
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-5)


def test_it_is_short():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1200
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", PROSE)
    sentences = re.split(r"[.:?!](?:\s|$)|\n\n|^- ", text, flags=re.M)
    lengths = [n for n in (len(s.split()) for s in sentences) if n > 2]
    assert len(lengths) > 30
    assert np.mean(lengths) <= 18


def test_links_and_pictures_exist():
    links = re.findall(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"', README)
    targets = [a or b for a, b in links]
    assert len(targets) > 25
    for target in targets:
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        text = (ROOT / file).read_text() if file else README
        if anchor:
            titles = re.findall(r"^#+ (.+)$", text, re.M)
            slugs = [
                re.sub(r"[^\w\s-]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert anchor in slugs, target


def test_make_has_its_targets():
    targets = {words.split()[1] for words in SHELL if words.startswith("make ")}
    assert targets == {"train", "test", "test-all", "test-long"}
    ends = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True)
    assert ends.returncode == 0


def commands():
    """The commands that start with python, each whole, with the lines it prints."""
    shell = re.sub(r"\\\n\s*", "", "\n".join(SHELL))
    return {
        words.split()[2]: shlex.split(words)[1:]
        for words in shell.splitlines()
        if words.startswith("python -m ")
    }


@pytest.mark.fast(slow=("acco_jax.audit",))  # the plan's compiler takes minutes
@pytest.mark.parametrize("module", ["acco_jax.plan", "acco_jax.audit"])
def test_commands_print_what_it_says(module):
    """Every word of the output that README quotes, in its order."""
    words = [sys.executable, *commands()[module]]
    ends = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ends.returncode == (3 if module == "acco_jax.audit" else 0), ends.stderr
    block = README.split(f"python -m {module}")[1]
    quoted = re.findall(r"(?:^    .*\n)+", block, re.M)[1]
    printed = " ".join(ends.stdout.split())
    assert " ".join(quoted.split()) in printed


# What README says, and the line of the result that it rests on.
CLAIMS = {
    "426 ms with 101 ms of exposed": ("network", r"\| 6 \| 425\.7 .*\| 101\.1 \|"),
    "0.63 at 0.5 Gbit/s": ("network", r"\| 0\.5 \|.*\| 0\.626 \|"),
    "2.1 to 39 Gbit/s": ("network", r"from 2\.1 to 39 Gbit/s"),
    "1.02 to 1.35": ("network", r"at most 1\.35 times as fast, at 4 Gbit/s"),
    "0.99 to 1.02": ("network", r"\| 200 \|.*\| 0\.988 \|"),
    "1.01 to 1.09": ("one_gpu", r"takes 1\.01 to 1\.09 times the loop's"),
    "1.04 to 1.11": ("one_gpu", r"it took 1\.04 to 1\.11 times"),
    "1.03 to 1.17": ("contention", r"1\.03 to 1\.17 times"),
    "1.88 at 1 with 8 bits": ("sweep", r" 1   1\.00  0\.76          1\.88"),
    "0.92 (0.92-0.93)": ("peers", r"\(recommended\) \| 647 .*\| 0\.92 \(0\.92-0\.93\)"),
    "DDP 685, acco 647": ("peers", r"DDP has 685 tokens/s, acco 647"),
    "1.13 at 0.1": ("peers", r"\| 0\.1 \| `torch/ddp` \| .*\| 1\.13 \(1\.13-1\.14\)"),
    "1.17 to 1.76": ("peers", r"1\.17 \(1\.10-1\.18\)[^#]*1\.76 \(1\.69-1\.78\)"),
    "0.80 (0.78-0.80)": ("peers_16384", r"\| 807 .*\| 0\.80 \(0\.78-0\.80\)"),
    "0.71 (0.67-0.75)": ("overlap", r"zero1 2N.*0\.712 \| 0\.669-0\.746"),
    "1.00 (0.97-1.05)": ("overlap", r"\*\*0\.996\*\* \| 0\.973-1\.045"),
    "| 7.9 |": ("overlap", r"7\.9 times as fast as zero1"),
    "1.01 (0.97-1.03)": ("overhead", r"\| 1\.008 \(0\.965-1\.033\)"),
    "+3.2 ± 0.4 %": ("dynamics", r"\| acco \| 0\.0015 .*\+3\.24 ± 0\.44 %"),
    "+2.8 ± 0.4 %": ("dynamics", r"nadamw.*27M \| f\.75s1\.15 .*\+2\.77 ± 0\.39 %"),
    "+1.4 ± 0.2 %": ("dynamics", r"muon.*27M \| f\.75s1\.15 .*\+1\.39 ± 0\.23 %"),
    "-0.6 ± 0.1 %": ("dynamics", r"adamw.* 30 \| f\.75s1\.15 .*-0\.62 ± 0\.13 %"),
}  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS)
def test_figures_have_a_source(claim):
    file, line = CLAIMS[claim]
    assert claim in README
    text = (ROOT / "experiments" / "results" / f"{file}.md").read_text()
    assert re.search(line, text), (claim, file)
