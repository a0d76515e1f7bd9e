"""Where the minutes of the tests go: a pytest plugin, and the table of what it wrote.

    python -m pytest -p benchmarks.durations -m ""      # writes build/durations.jsonl
    python benchmarks/durations.py [FILE] [--out=build/durations.md]

`make durations` does both. Each test's seconds are split by what they pay for: tracing
and compiling of this process, waiting for other processes, sleeping, and the rest,
which is steps and Python. `cpu` is the processor time of this process and its children,
which depends less on what else the machine does. Under coverage each test is also a
context, so that a line is known with the tests that run it.
"""

import argparse
import collections
import functools
import json
import os
import pathlib
import resource
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

FILE = pathlib.Path("build/durations.jsonl")
PAID = ("trace", "compile", "processes", "sleep")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "trace",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_spent: collections.Counter[str] = collections.Counter()
_inside: list[str] = []


def _cpu() -> float:
    """Processor seconds of this process and of its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


_begun = [_cpu()]


def _measured(kind: str, fn: Callable) -> Callable:
    """fn; what its outermost call takes is added to a kind's seconds."""

    @functools.wraps(fn)
    def run(*args, **kwargs):
        if _inside:
            return fn(*args, **kwargs)
        _inside.append(kind)
        begin = time.perf_counter()
        try:
            return fn(*args, **kwargs)
        finally:
            _spent[kind] += time.perf_counter() - begin
            _inside.clear()

    return run


def pytest_configure(config: pytest.Config) -> None:
    import jax

    subprocess.Popen.wait = _measured("processes", subprocess.Popen.wait)
    subprocess.Popen.communicate = _measured("processes", subprocess.Popen.communicate)
    time.sleep = _measured("sleep", time.sleep)

    def notice(event: str, seconds: float, **_: object) -> None:
        if event in EVENTS:
            _spent[EVENTS[event]] += seconds

    jax.monitoring.register_event_duration_secs_listener(notice)
    if not hasattr(config, "workerinput"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: object) -> Iterator[object]:
    _spent.clear()
    try:
        import coverage
    except ImportError:
        return (yield)
    if current := coverage.Coverage.current():
        current.switch_context(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[object]:
    report = yield
    before, _begun[0] = _begun[0], _cpu()
    paid = {k: _spent[k] for k in PAID} | {"cpu": _begun[0] - before}
    report.user_properties.append(("paid", paid))
    _spent.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    paid = [value for name, value in report.user_properties if name == "paid"]
    row = {"test": report.nodeid, "when": report.when, "seconds": report.duration}
    with FILE.open("a") as file:
        file.write(json.dumps(row | (paid[-1] if paid else {})) + "\n")


def table(rows: list[dict], slowest: int = 50) -> str:
    """Returns the seconds by file and of the slowest tests, as Markdown."""
    tests: dict[str, collections.Counter[str]] = {}
    for row in rows:
        paid = {k: row.get(k, 0.0) for k in ("seconds", "cpu", *PAID)}
        tests.setdefault(row["test"], collections.Counter()).update(paid)
    files: dict[str, collections.Counter[str]] = {}
    for name, paid in tests.items():
        of = files.setdefault(name.partition("::")[0], collections.Counter())
        of.update(paid | collections.Counter(tests=1))

    def line(name: str, paid: collections.Counter[str]) -> str:
        rest = paid["seconds"] - sum(paid[k] for k in PAID)
        seconds = (*(paid[k] for k in ("seconds", "cpu", *PAID)), max(rest, 0.0))
        return " | ".join([f"| {name}", *(f"{x:.1f}" for x in seconds)]) + " |"

    head = "| | seconds | cpu | " + " | ".join(PAID) + " | rest |\n|---|" + "---:|" * 7
    total = functools.reduce(lambda a, b: a + b, files.values(), collections.Counter())
    ordered = [
        sorted(found.items(), key=lambda item: -item[1]["seconds"])
        for found in (files, tests)
    ]
    return "\n".join([
        f"# Where the minutes of {len(tests)} tests go",
        "", "## By file", "", head,
        line(f"all {len(files)} files", total),
        *(line(f"{name} ({int(paid['tests'])})", paid) for name, paid in ordered[0]),
        "", f"## The {slowest} slowest", "", head,
        *(line(name, paid) for name, paid in ordered[1][:slowest]),
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="The table of durations.")
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=FILE)
    parser.add_argument("--out", type=pathlib.Path, default=FILE.with_suffix(".md"))
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.file.read_text().splitlines()]
    args.out.write_text(table(rows))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
