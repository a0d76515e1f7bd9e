"""Applies fifty faults, one at a time: which of them do the tests notice?

    python benchmarks/mutations.py --coverage=build/coverage [--tier=test|all]
        [--out=build/mutations.jsonl] [--only=NAME] [--jobs=N] [--check]

Each fault of `benchmarks/mutants.py` is put into a copy of the tree, in which the tests
run whose coverage touches its lines, quickest first, until one fails. `make coverage`
says which tests those are. With --tier=test they are those of `make test` alone. Faults
that the file has results of are not tried again. --jobs faults are tried at once, one
a core unless said. --check only looks whether each fault has its place. Exits with 1 if
a fault has none; the last line counts what was noticed.
"""

import argparse
import ast
import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.mutants import MUTANTS, Mutant  # noqa: E402

SECONDS = 1500  # of one fault's tests; one that hangs was noticed
AT_ONCE = 40  # tests in a process
CACHE = {  # of compiled programs; those of a fault are others
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def place(mutant: Mutant) -> tuple[pathlib.Path, str]:
    """Returns the file that a fault is in, and its text.

    Raises:
      ValueError: it occurs in none, or more than once.
    """
    texts = {p: p.read_text() for p in sorted((ROOT / "acco_jax").rglob("*.py"))}
    found = [p for p, text in texts.items() for _ in range(text.count(mutant.before))]
    if len(found) != 1:
        raise ValueError(f"{mutant.name}: its lines occur {len(found)} times.")
    return found[0], texts[found[0]]


def lines(mutant: Mutant, text: str) -> set[int]:
    """Returns the numbers of the lines of the statements that a fault is in."""
    start = text.index(mutant.before)
    first = text.count("\n", 0, start) + 1
    last = first + mutant.before.count("\n")
    best = None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.stmt) and node.lineno <= first <= node.end_lineno:
            size = node.end_lineno - node.lineno
            if best is None or size <= best[0]:
                best = size, node.lineno, node.end_lineno
    return set(range(first, last + 1)) | set(range(best[1], best[2] + 1))


def covering(data: pathlib.Path, path: pathlib.Path, numbers: set[int]) -> set[str]:
    """Returns the tests that run any of a file's lines."""
    import coverage

    found: set[str] = set()
    known = coverage.CoverageData(str(data / ".coverage"))
    known.read()
    relative = str(path.relative_to(ROOT))
    for name in known.measured_files():
        if name.endswith(f"/{relative}") or name == relative:
            by_line = known.contexts_by_lineno(name)
            for number in numbers:
                for context in by_line.get(number, ()):
                    # of this process the test; of one it started "test (call)"
                    found.update(c.partition(" (")[0] for c in context.split("|"))
    return {name for name in found if "::" in name}


def collected(tier: str) -> set[str]:
    """Returns the tests of a tier that there are."""
    marks = [] if tier == "test" else ["-m", ""]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *marks]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def copy(target: pathlib.Path) -> None:
    """Copies what git has of the tree, as it is now."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    for name in filter(None, listed.stdout.splitlines()):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target / name)


def noticed(mutant: Mutant, tests: list[str]) -> str | None:
    """Returns the test that fails of a fault, None if all of them pass.

    Raises:
      RuntimeError: pytest ended otherwise, so that nothing is known.
    """
    path, text = place(mutant)
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder)
        copy(tree)
        changed = text.replace(mutant.before, mutant.after)
        (tree / path.relative_to(ROOT)).write_text(changed)
        env = os.environ | CACHE | {"PYTHONPATH": str(tree)}
        for i in range(0, len(tests), AT_ONCE):
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-m", "",
                       *tests[i : i + AT_ONCE]]  # fmt: skip
            try:
                done = subprocess.run(
                    command, cwd=tree, env=env, capture_output=True, text=True,
                    timeout=SECONDS, stdin=subprocess.DEVNULL,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return "timeout"
            lines = done.stdout.splitlines()
            if failed := [x for x in lines if x.startswith(("FAILED", "ERROR tests"))]:
                return failed[0][:200]
            if done.returncode < 0:
                return f"signal {-done.returncode}"
            if done.returncode:  # nothing was tested
                raise RuntimeError(f"pytest ended with {done.returncode}: {lines[-3:]}")
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coverage", type=pathlib.Path, default="build/coverage")
    parser.add_argument("--durations", type=pathlib.Path)
    parser.add_argument("--tier", choices=("test", "all"), default="test")
    parser.add_argument("--out", type=pathlib.Path, default="build/mutations.jsonl")
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for mutant in MUTANTS:
        ast.parse(place(mutant)[1].replace(mutant.before, mutant.after))
    if args.check:
        print(f"{len(MUTANTS)} faults have their place")
        return
    seconds: dict[str, float] = {}
    durations = args.durations or args.coverage / "durations.jsonl"
    for line in durations.read_text().splitlines():
        row = json.loads(line)
        seconds[row["test"]] = seconds.get(row["test"], 0.0) + row["seconds"]
    there = collected(args.tier)
    rows = []
    if args.out.exists():
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    known = {(row["name"], row["tier"]) for row in rows}

    def attempt(mutant: Mutant) -> None:
        path, text = place(mutant)
        tests = covering(args.coverage, path, lines(mutant, text)) & there
        order = sorted(tests, key=lambda t: (seconds.get(t, 1.0), t))
        row = {"name": mutant.name, "tier": args.tier, "tests": len(order)}
        row["noticed"] = noticed(mutant, order)
        rows.append(row)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{mutant.part}: {mutant.name}: {row['noticed'] or 'NOT NOTICED'}")

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        wanted = (m for m in MUTANTS if args.only in m.name)
        list(pool.map(attempt, (m for m in wanted if (m.name, args.tier) not in known)))
    mine = [r for r in rows if r["tier"] == args.tier]
    print(f"{sum(bool(r['noticed']) for r in mine)} of {len(mine)} faults were noticed")


if __name__ == "__main__":
    main()
