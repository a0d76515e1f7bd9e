"""The share of acco_jax's lines that tests run, by folder; ends `make coverage`.

python benchmarks/covered.py [--data=build/coverage/.coverage] [--json=FILE]
"""

import argparse
import collections
import json
import pathlib

import coverage

ROOT = pathlib.Path(__file__).resolve().parents[1]


def folders(data: str) -> dict[str, tuple[int, int]]:
    """Returns by folder how many lines were run, and how many there are."""
    cover = coverage.Coverage(data_file=data, config_file=False)
    cover.load()
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for name in sorted(cover.get_data().measured_files()):
        if not pathlib.Path(name).is_relative_to(ROOT):  # a copy that a test made
            continue
        _, statements, _, missing, _ = cover.analysis2(name)
        inside = pathlib.PurePath(name[name.rindex("acco_jax/") :])
        folder = "/".join(inside.parts[:2]) if len(inside.parts) > 2 else "acco_jax"
        for key in (folder, "all"):
            found[key][0] += len(statements) - len(missing)
            found[key][1] += len(statements)
    return {name: (run, total) for name, (run, total) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default=str(ROOT / "build/coverage/.coverage"))
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    found = folders(args.data)
    for name, (run, total) in sorted(found.items()):
        print(f"{name:<20} {run:6} of {total:6} lines {100 * run / total:6.2f} %")
    if args.json:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
