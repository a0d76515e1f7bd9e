"""The process that runs inputs for fuzz.py: a request a line in, an outcome a line out.

What an input may do here is limited: memory by the system, time by fuzz.py, and what
data make Python import, unpickle, start or connect to by an audit hook.
"""

import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

MEMORY = 2 * 2**30  # bytes beyond the start of an input
EVENTS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen",
          "pickle.find_class", "socket.connect", "socket.getaddrinfo")  # fmt: skip

Outcome = dict[str, Any]


class Ran(BaseException):
    """An input made the program run something that is not its own."""


class Watch:
    """Notices what data make the program run, while it is on."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        tops = {name.partition(".")[0] for name in sys.modules}
        installed = {
            entry.split(".")[0].split("-")[0]
            for folder in sys.path
            if folder and os.path.isdir(folder)
            for entry in os.listdir(folder)
        }
        self._known = tops | installed | sys.stdlib_module_names
        sys.addaudithook(self._hear)
        sys.meta_path.insert(0, self)  # hears importlib too, which no event tells of

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Notices a module that is looked for, and leaves it to the other finders."""
        top = name.partition(".")[0]
        if self.on and top not in self._known and top not in OPTIONAL:
            self.seen.append(f"import of {name!r:.200}")

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in EVENTS:
            self.seen.append(f"{event}{arguments!r:.200}")


# What libraries ask for by themselves and do without.
OPTIONAL = frozenset(
    {
        "apache_beam",
        "cloudpickle",
        "cv2",
        "h5py",
        "pandas",
        "pydub",
        "tensorflow",
        "torch",
    }
)


def _status() -> dict[str, int]:
    """Returns figures of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {k: int(v.split()[0]) * 1024 for k, _, v in
            (line.partition(":") for line in lines) if v.endswith("kB")}  # fmt: skip


def _limit(size: int) -> None:
    """Sets how many bytes of addresses this process may have; 0: all."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size or hard, hard))


def judge(error: BaseException, names: set[str] | None) -> str | None:
    """Returns why an error is none of the product's own refusals; None if it is one."""
    text, kind = str(error), type(error).__name__
    if not isinstance(error, ValueError | OSError):
        return f"{kind} is no ValueError or OSError"
    if isinstance(error, UnicodeError | json.JSONDecodeError):
        return f"{kind} is another library's"
    if len(text.splitlines()) != 1 or not text.strip():
        return f"the {kind} has {len(text.splitlines())} lines"
    if len(text) > 10_000:
        return f"the line has {len(text)} characters"
    if names is not None and not any(name in text for name in names):
        return f"the {kind} names no file"
    return None


def _names(folder: Path, case: dict[str, Any]) -> set[str]:
    """Returns what a line about these files may name: them, their folder, a field."""
    found = {path.name for path in folder.rglob("*")}
    found |= {Path(name).name for name in case["files"]}
    found |= {repr(name)[1:-1] for name in found}
    return found | {"our_records", "data.", "text_feature", "split", "tokenizer",
                    "length", "vocab_size", "microbatch", "rows",
                    "half-round"}  # fmt: skip


def run(
    target: Any, case: dict[str, Any], watch: Watch | None, folder: Path
) -> Outcome:
    """Runs one case; returns what became of it."""
    from fuzzing import targets

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    begin, before, problem, trace = time.process_time(), _status(), None, ""
    result = "accepted"
    with targets.emptied(folder):
        _limit(before["VmSize"] + MEMORY)
        try:
            if watch is not None:
                watch.on = True
            target.run(case)
        except BaseException as error:
            names = _names(folder, case) if "files" in case else None
            result, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
            problem = judge(error, names)
        finally:
            if watch is not None:
                watch.on = False
            _limit(0)
    after = _status()
    if watch is not None and watch.seen:
        problem = f"the input made it {watch.seen[0]}"
        watch.seen.clear()
    return {
        "result": result[:2000],
        "problem": problem,
        "trace": trace[-4000:] if problem else "",
        "memory": max(0, after["VmHWM"] - before["VmRSS"]),
        "seconds": time.process_time() - begin,
    }


def messages_since(path: Path, size: int) -> tuple[str, int]:
    """Returns what was printed, and how many tracebacks of the product's are in it.

    Others are of tensorstore's threads, which print on after one read has failed: the
    last line of theirs may be late.
    """
    for _ in range(20):
        said = path.read_bytes()[size:].decode(errors="replace")
        traces = said.count("Traceback") + said.count("panicked at")
        if (left := traces - said.count("Event loop is closed")) <= 0:
            break
        time.sleep(0.05)
    return said, left


def main() -> None:
    scratch = Path(os.environ["ACCO_FUZZ"])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with open(scratch / "messages.txt", "ab", buffering=0) as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    from fuzzing import targets

    targets.entries.fresh_workdir()
    watch = Watch()
    answers.write("ready\n")
    for line in sys.stdin:
        request = json.loads(line)
        name, case = request["target"], request.get("case")
        if case is None:
            case = targets.make(name, request["seed"], request["number"])
        if request.get("show"):
            answers.write(json.dumps(case) + "\n")
        noticed = watch if name in targets.DATA else None
        size = (scratch / "messages.txt").stat().st_size
        outcome = run(targets.TARGETS[name], case, noticed, scratch / "case")
        said, traces = messages_since(scratch / "messages.txt", size)
        if outcome["problem"] is None and traces > 0:
            outcome |= {"problem": "it printed a traceback", "trace": said[-4000:]}
        answers.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
