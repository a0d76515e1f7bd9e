"""What copies of the state in memory cost a run without faults.

    python benchmarks/copies.py [--repetitions=4] [--seconds=60] [--width=512]
        [--json=FILE]

Two processes on this machine, as if on two hosts, train under supervision, in turn with
copies in folders in memory, as `memory_copies` makes them by default, and without. A
turn goes on with its run for some seconds. Its first steps are left out: they load
programs, and make the first copies, which are close together. It prints the mean step
of each turn, the ratio of each repetition's two, the bytes sent for copies as a share
of those that steps send, the bytes in memory beside those of a checkpoint, and how many
copies were made.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from acco_jax.command import exits  # noqa: E402
from benchmarks import common  # noqa: E402

PROCESSES, LEFT_OUT = 2, 12
SENT = pathlib.Path("/sys/class/net/lo/statistics/tx_bytes")  # of all processes
LIMITS = {"lost_after": 60.0, "restarts": 1}


class Mode:
    """A run with copies, or one without."""

    def __init__(
        self, place: pathlib.Path, memory: pathlib.Path, name: str, width: int
    ) -> None:
        self.name, self._place = name, place
        self._memory = memory / name
        self._memory.mkdir()
        self._config = place / f"{name}.py"
        common.write_config(
            self._config, place / "texts", devices=1, steps=10**6,
            microbatches_per_step=4, checkpoint_every=10**5, eval_every=10**6,
            eval_batches=1, model={"width": width},
            memory_copies=str(self._memory) if name == "copies" else "",
        )  # fmt: skip
        self.workdir = place / name
        self.most = 0  # bytes of all copies
        self.names = set[str]()  # of the copies

    def turn(self, seconds: float) -> float:
        """Trains for some seconds; returns those of the mean step."""
        before = self._done()
        commands = common.Commands(
            self._place, self.workdir, self._config, PROCESSES, LIMITS
        )
        with commands:
            for process in range(PROCESSES):
                commands.start(process)
            commands.until(lambda: self._done() > before + LEFT_OUT, "half-rounds")
            end = time.monotonic() + seconds
            first, sent = self._done(), int(SENT.read_text())
            while time.monotonic() < end:
                self._look()
                time.sleep(0.2)
            self.sent = int(SENT.read_text()) - sent, self._done() - first
            commands.stop()
            commands.wait(exits.STOPPED)
        rows = [r for r in common.rows(self.workdir) if r["kind"] == "train"]
        rows = [r for r in rows if r["half_round"] > before + LEFT_OUT]
        gaps = [b["seconds"] - a["seconds"] for a, b in itertools.pairwise(rows)]
        return statistics.mean(gaps)

    def _done(self) -> int:
        return max((r["half_round"] for r in common.rows(self.workdir)), default=0)

    def _look(self) -> None:
        sizes = {}
        for path in self._memory.rglob("*.data"):
            try:
                sizes[str(path)] = path.stat().st_size
            except FileNotFoundError:
                continue
        self.names |= sizes.keys()
        self.most = max(self.most, sum(sizes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--width", type=int, default=512, help="of the model")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    with (
        common.workplace(None) as place,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        common.texts(place)
        memory = pathlib.Path(shm)
        modes = [Mode(place, memory, name, args.width) for name in ("none", "copies")]
        for mode in modes:
            mode.turn(1.0)  # compiles
        turns, shares = [], []
        for number in range(args.repetitions):
            order = modes if number % 2 else modes[::-1]
            found = {mode.name: mode.turn(args.seconds) for mode in order}
            turns.append(found)
            each = {m.name: m.sent[0] / max(m.sent[1], 1) for m in modes}
            shares.append(each["copies"] / each["none"] - 1)
            print(
                f"a step takes {found['none']:.3f} s without copies, "
                f"{found['copies']:.3f} s with them",
                flush=True,
            )
        ratios = sorted(t["none"] / t["copies"] for t in turns)
        arrays = modes[1].workdir / "checkpoints"
        newest = arrays / str(common.last_checkpoint(modes[1].workdir))
        state = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
        report = {
            "turns": turns,
            "tokens/s with over without": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]],
            "bytes sent for copies over those for steps": statistics.median(shares),
            "bytes in memory": modes[1].most,
            "bytes of a checkpoint": state,
            "copies": len(modes[1].names) // PROCESSES,
        }
    print(json.dumps({k: v for k, v in report.items() if k != "turns"}, indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
