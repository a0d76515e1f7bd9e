"""What `import acco_jax` costs, what the package asks for, what the files hold."""

import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMPORT_SHARE = 0.06  # of what jax and optax take, on a machine of any speed
IMPORT_ATTEMPTS = 5  # the fastest counts: noise adds time, never takes any

IMPORT_PROGRAM = """
import gc, json, sys, time
start = time.process_time()
import jax, optax
others = time.process_time() - start

before = set(sys.modules)
gc.collect()  # or the garbage of importing jax is collected, and counted, below
start = time.process_time()  # what a busy machine does meanwhile does not count
import acco_jax
acco_jax.acco, acco_jax.make_train_step  # imported when they are asked for
seconds = time.process_time() - start
try:  # jax refuses this once a backend is initialized
    jax.config.update("jax_num_cpu_devices", 3)
    backend_initialized = False
except RuntimeError:
    backend_initialized = True
print(json.dumps({
    "seconds": seconds,
    "share": seconds / others,
    "backend_initialized": backend_initialized,
    "before": sorted({name.partition(".")[0] for name in before}),
    "added": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
}))
"""


def import_in_new_process():
    """What the import did, in a process that has imported jax and optax only."""
    # Compiled modules are written, as they are for users, so that attempts after
    # the first do not measure Python's compiler.
    unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTHONPROFILEIMPORTTIME", "COV_CORE_SOURCE")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROGRAM],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k not in unwanted},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_needs_jax_and_optax_alone_and_touches_no_device():
    seen = import_in_new_process()
    known = {"acco_jax", *seen["before"], *sys.stdlib_module_names}
    assert set(seen["added"]) <= known
    assert not seen["backend_initialized"]


def test_import_is_fast():
    fastest = float("inf")
    for _ in range(IMPORT_ATTEMPTS):
        seen = import_in_new_process()
        fastest = min(fastest, seen["share"])
        if fastest <= IMPORT_SHARE:
            return
    ms = 1e3 * seen["seconds"]
    pytest.fail(f"import acco_jax took {ms:.0f} ms, {fastest:.0%} of jax and optax")


def test_no_file_names_a_place_on_one_machine():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # A path that starts in somebody's home or work directory; not part of an URL.
    private = re.compile(rb"(?<![\w.}$-])/(?:home|root|Users|work)/[\w.]+")
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        content = path.read_bytes() if path.is_file() else b""
        if b"\0" not in content:  # text
            found += [
                f"{name}: {m.group().decode()}" for m in private.finditer(content)
            ]
    assert not found


@functools.cache
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(python_version):
    """Name to the version that requirements.txt gives it on a version of Python."""
    environment = {
        **default_environment(),
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
    }
    versions = {}
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pin = Requirement(line)  # no option, no address: a name, a version, a marker
        assert re.fullmatch(r"==[\w.]+", str(pin.specifier)), line
        assert pin.url is None, line
        assert not pin.extras, line
        if pin.marker is None or pin.marker.evaluate(environment):
            name = canonicalize_name(pin.name)
            assert name not in versions, f"{name} has two versions on {python_version}"
            versions[name] = next(iter(pin.specifier)).version
    return versions


def test_the_library_asks_for_jax_and_optax_alone():
    asked = [Requirement(line).name for line in project()["dependencies"]]
    assert sorted(asked) == ["jax", "optax"]


@pytest.mark.parametrize("python_version", ["3.11", "3.12", "3.13"])
def test_pinned_versions_are_those_that_the_project_allows(python_version):
    versions = pins(python_version)
    assert "torch" not in versions
    extras = project()["optional-dependencies"].values()
    for line in [*project()["dependencies"], *(r for extra in extras for r in extra)]:
        asked = Requirement(line)
        name = canonicalize_name(asked.name)
        if name == canonicalize_name(project()["name"]):  # an extra made of extras
            continue
        if asked.marker is None or asked.marker.evaluate():
            assert name in versions, f"{line} is not pinned"
            assert asked.specifier.contains(versions[name]), (line, versions[name])
