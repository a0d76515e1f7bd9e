"""Eight fake CPU devices for every test: set before anything imports jax.

Where the machine is busy a device may come late to a collective: XLA ends the process
after 40 s unless it is told to wait longer. Programs are compiled in a third of the
time, not to run fast. Those for GPUs and TPUs are compiled as users' are, and those
whose bits depend on it are optimized, too (`optimized`). With OPTIMIZED=1, as for the
newest jax, which does not know the flags, all of them are users'.
"""

import fnmatch
import gc
import os
import signal
from collections.abc import Iterable

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_cpu_collective_call_terminate_timeout_seconds=300",
    )
).strip()

if not os.environ.get("OPTIMIZED"):
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # of processes, too
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests import compiling
from tests.examples import TIMES

# What nohup or a shell's background job has ignored, commands that tests start would
# ignore, too.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)

# The compiled programs are the same for every example, so a deadline says nothing; the
# same examples every time, so that a failure is everybody's, unless more are asked for.
hypothesis.settings.register_profile(
    "acco",
    deadline=None,
    derandomize=TIMES == 1,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("acco")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`@pytest.mark.fast("acco-*")`: with other parameters the test is a slow one.

    With `slow=("zero1-*",)` only with these, and a long one with the rest.
    """
    if not (marker := item.get_closest_marker("fast")):
        return

    def matches(patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatch(item.callspec.id, p) for p in patterns)

    if not matches(marker.args):
        item.add_marker("slow")
        if not matches(marker.kwargs.get("slow", ("*",))):
            item.add_marker("long")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs in processes of their own are first: at the end a core would idle."""
    items.sort(key=lambda item: item.path.name != "test_train.py")


def pytest_collection_finish() -> None:
    """Python looks less often for cycles: with jax's modules a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


def options() -> dict[str, object]:
    """What a module may change, if it changes it back."""
    names = (
        "disable_most_optimizations",
        "enable_compilation_cache",
        "enable_x64",
        "numpy_dtype_promotion",
        "numpy_rank_promotion",
    )
    return {name: jax.config.values[f"jax_{name}"] for name in names}


OPTIONS = options()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None):
    """A module's options of JAX end with it: others would be compiled with them."""
    found = yield
    if nextitem is None or nextitem.path != item.path:
        assert options() == OPTIONS, item.path
    return found


@pytest.fixture(scope="module")
def x64():
    """Double precision for a module: `pytestmark = pytest.mark.usefixtures("x64")`.

    Not the context manager of that name, which threads of a test would not see.
    """
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def optimized():
    """Optimizes the programs of a module, and of the processes that it starts."""
    with compiling.optimized():
        yield


@pytest.fixture(scope="module")
def compiled_here():
    """No program of a module comes from the compilation cache.

    XLA:CPU has been seen to run a collective beside a loop that holds others, on one
    device before them and on another after them, in programs loaded from there.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
