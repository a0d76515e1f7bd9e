"""The files of a corpus, and the split of each of them."""

import dataclasses
import fnmatch
import functools
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

# Words for a split in the names of folders and files, as Hugging Face's `datasets`
# recognises them.
WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
ALL = "all"  # as data.train_split: ignore names, all files are for training
_LETTER = r"[^\W\d_]"
_SHOWN = 4  # names in a line


@dataclasses.dataclass(frozen=True)
class Splits:
    """The files of each split; without validation files, documents are held out.

    Attributes:
      train, validation: files to read.
      unused: files of other splits.
    """

    train: tuple[Path, ...]
    validation: tuple[Path, ...]
    unused: tuple[Path, ...] = ()


def walk(root: Path, excluded: frozenset[str] = frozenset()) -> list[str]:
    """List the files under a folder: relative paths, nothing hidden, links followed.

    Args:
      root: the folder.
      excluded: names of folders that are left out.

    Raises:
      ValueError: a link is broken, a file is not regular, a folder cannot be read.
    """
    paths = []
    for folder, names in folders(root, excluded):
        relative = PurePath(folder).relative_to(root)
        for name in (name for name in names if name[0] != "."):
            check_file(Path(folder, name))
            paths.append((relative / name).as_posix())
    return sorted(paths)


def folders(
    root: Path, excluded: frozenset[str] = frozenset()
) -> Iterator[tuple[str, list[str]]]:
    """Iterate over a folder and those below it, with the names of their files.

    Links are followed. A folder comes again if its path has another split's words, so
    that one folder in two splits is found. It never comes again in a loop of links.
    """

    def fail(error: OSError) -> None:
        raise ValueError(
            f"{error.filename} cannot be read ({error.strerror}): give access to it, "
            "or move it out of the folder"
        ) from error

    seen, above = set(), dict[str, frozenset[str]]()
    for folder, below, names in os.walk(root, followlinks=True, onerror=fail):
        real, parents = os.path.realpath(folder), above.get(os.path.dirname(folder))
        words = _roles(os.path.relpath(folder, root), "train", "validation")
        if real in (parents or ()) or (real, words) in seen:
            below.clear()
            continue
        seen.add((real, words))
        above[folder] = (parents or frozenset()) | {real}
        below[:] = sorted(f for f in below if f not in excluded and f[0] != ".")
        yield folder, names


def check_file(path: Path) -> None:
    """Raise a ValueError for an irregular file, or a line break in a file's name.

    Raises:
      ValueError: the file has such a name, cannot be read or is not regular.
    """
    if len(path.name.splitlines()) > 1:
        raise ValueError(
            f"the name of the file {str(path)!r} has a line break: rename it"
        )
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if path.is_symlink():
            raise ValueError(
                f"{path} is a broken link, to {os.readlink(path)}: restore what it "
                "names, or remove it"
            ) from error
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ValueError(
            f"{path} is a pipe, a socket or a device: write its content to a file"
        )


def matching(root: Path) -> tuple[Path, list[Path]]:
    """Return the files at a path: a file, a folder's or a pattern's.

    Returns:
      The folder that their names are relative to, and the files.

    Raises:
      ValueError: as `walk` raises it.
    """
    if root.is_dir():
        return root, [*map(root.joinpath, walk(root))]
    if os.path.lexists(root):
        check_file(root)
        return root.parent, [root]
    parent, pattern = divided(root)
    if not glob.has_magic(pattern[0]):  # a folder's name is wrong
        return parent, []
    if "**" in pattern:
        found = [parent / p for p in walk(parent) if _matches(p.split("/"), pattern)]
        return parent, sorted(found)
    names = glob.glob(os.path.join(glob.escape(str(parent)), *pattern))
    for path in map(Path, names):
        check_file(path)
    return parent, sorted(map(Path, names))


def divided(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Return the part of a path that exists, and the parts after it: a pattern."""
    root = path
    while not os.path.lexists(root):
        root = root.parent
    return root, path.relative_to(root).parts


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether a path's parts match a pattern's; "**" matches any number."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        if len(pattern) == 1:
            return True
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts)))
    first = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return first and _matches(parts[1:], pattern[1:])


def choose(
    files: Sequence[Path],
    root: Path,
    train_split: str,
    validation_split: str,
    documents: bool = False,
) -> Splits:
    """Choose the split of each file, by the words in its path below a folder.

    Files without a word of a split are for training, if no file has a word of it. If
    there is no file for validation, the files for testing are taken.

    Args:
      files: all under `root`.
      root: whose own path does not count.
      train_split: a key of `WORDS`, another name, or `ALL`.
      validation_split: a key of `WORDS`, or another name.
      documents: whether each file is a document, whose name may hold any word. Then
        splits are only recognised if each file has one, and folders' names win.

    Raises:
      ValueError: a file would be in two splits, or may be of any.
    """
    check_names(train_split, validation_split)
    if train_split == ALL:
        return distinct(files, ())
    names = {path: path.relative_to(root).as_posix() for path in files}
    roles = {}
    for path, name in names.items():
        folder = _roles(os.path.dirname(name), train_split, validation_split)
        whole = _roles(name, train_split, validation_split)
        roles[path] = folder if documents and folder else whole
    if documents and (train_split, validation_split) == ("train", "validation"):
        found = set().union(*roles.values())
        if not all(roles.values()) or found in ({"train"}, {"validation"}, {"test"}):
            _check_documents([*names.values()], root)
            return distinct(files, ())
    if several := [names[path] for path in files if len(roles[path]) > 1]:
        raise ValueError(
            f"files of {root} have words of several splits in their names: "
            f"{some(several)}: rename them, or name the splits in full with "
            "data.train_split and data.validation_split"
        )
    of = {
        role: tuple(path for path in files if role in (roles[path] or {""}))
        for role in ("train", "validation", "test", "other", "")
    }
    if not of["train"] and train_split == "train":
        of["train"], of[""] = of[""], ()
        if not of["train"]:
            raise ValueError(
                f"{root} has only files of held-out splits: "
                f"{some(names.values())}: add files for training, or set "
                f"data.train_split={ALL!r} to train on these"
            )
    elif of["train"] and of[""] and train_split == "train":
        raise ValueError(
            f"{root} has files for training by their names, and others of no split: "
            f"{some([names[path] for path in of['']])}: put a split into their names, "
            "or choose files with a pattern in data.path"
        )
    if not of["validation"] and validation_split == "validation":
        of["validation"], of["test"] = of["test"], ()
    for role, split in ("train", train_split), ("validation", validation_split):
        if not of[role] and split != role:
            raise ValueError(
                f"no file of {root} has {split!r} in its name: set "
                f"data.{role}_split to a word of those that are, among "
                f"{some(names.values())}"
            )
    unused = (*of["test"], *of["other"], *of[""])
    return distinct(of["train"], of["validation"], unused)


def check_names(train_split: str, validation_split: str) -> None:
    """Raise a ValueError for names with which a split would be trained on and held out.

    Raises:
      ValueError: a name is empty, or the two do not fit each other.
    """
    for name, split in ("train", train_split), ("validation", validation_split):
        if not split:
            raise ValueError(f"data.{name}_split is '': set it to {name!r}")
    if train_split == validation_split:
        raise ValueError(
            f"data.train_split and data.validation_split are both {train_split!r}: "
            "held-out documents would be trained on; name two splits"
        )
    if train_split == ALL and validation_split != "validation":
        raise ValueError(
            f"data.train_split={ALL!r} leaves no split {validation_split!r}: set "
            "data.validation_split to 'validation', which holds out documents"
        )


def held_out(splits: Sequence[str], train: str, asked: str) -> str | None:
    """Return the held-out split among those that a data set declares; None: none.

    Args:
      splits: their names.
      train: data.train_split, which is not held out.
      asked: data.validation_split; for 'validation' its other words are tried, and
        then the words of 'test'.

    Raises:
      ValueError: several may be.
    """
    if asked != "validation" or asked in splits:
        return asked
    # of a named data set train may be a sum, and of parts: 'train+test[:50%]'
    used = {part.partition("[")[0].strip() for part in train.split("+")}
    others = [split for split in splits if split not in {train, *used}]
    for role in ("validation", "test"):
        found = [split for split in others if split.lower() in WORDS[role]]
        if len(found) > 1 and role not in found:
            raise ValueError(
                f"the splits {found} may each be the held-out one: set "
                "data.validation_split to one of them"
            )
        if found:
            return role if role in found else found[0]
    return None


def some(names: Iterable[str]) -> str:
    """List names, or only the first of many."""
    names = [repr(name)[1:-1] for name in names]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def said(
    train: Sequence[str], validation: Sequence[str], unused: Sequence[str], share: float
) -> str:
    """Return a line that names the files, or declared splits, of each split.

    Args:
      train, validation, unused: their names.
      share: of the documents of `train` is held out where `validation` has none.
    """
    held = f"{len(validation)} ({some(validation)})" if validation else f"{share:g} of "
    line = f"training: {len(train)} ({some(train)}); held out: {held}"
    line += "" if validation else "the training documents"
    return line + (f"; not used: {len(unused)} ({some(unused)})" if unused else "")


def _check_documents(names: Sequence[str], root: Path) -> None:
    """Raise a ValueError for a folder of documents with a part named like a split."""
    tops = sorted({PurePath(name).parts[0] for name in names})
    words = {word for group in WORDS.values() for word in group}
    if found := [top for top in tops if top.split(".")[0].lower() in words]:
        if {top.split(".")[0].lower() for top in found} <= {*WORDS["train"]} and (
            len(found) == len(tops)
        ):
            return
        raise ValueError(
            f"{root} has parts that are named as splits are, {some(found)}, and others "
            f"that are not: put all into folders train, validation and test, or set "
            f"data.train_split={ALL!r} to take each file for a document to train on or "
            "hold out"
        )


def distinct(
    train: Iterable[Path], validation: Iterable[Path], unused: Iterable[Path] = ()
) -> Splits:
    """Leave out files that links repeat; raise a ValueError for one in two splits.

    Raises:
      ValueError: a file would be in two splits.
    """
    seen: dict[str, tuple[int, Path]] = {}
    real = functools.cache(os.path.realpath)  # of folders
    kept: list[list[Path]] = [[], [], []]
    for number, group in enumerate((train, validation, unused)):
        for path in group:
            place = os.path.join(real(path.parent), path.name)
            if path.is_symlink():
                place = os.path.realpath(path)
            before = seen.setdefault(place, (number, path))
            if before[0] != number:
                one = f"{before[1]} and {path} are one file, by a link,"
                one = f"{path} is" if before[1] == path else one
                raise ValueError(f"{one} in two splits: remove one of them")
            if before[1] is path:
                kept[number].append(path)
    return Splits(*map(tuple, kept))


@functools.lru_cache(4096)  # folders' names come often
def _roles(name: str, train_split: str, validation_split: str) -> frozenset[str]:
    """Return the roles of a path's words; words within a longer name do not count."""
    pattern, roles = _words(train_split, validation_split)
    found = pattern.finditer(_spaced(name))
    return frozenset(roles[match.lastindex - 1] for match in found if match.lastindex)


@functools.lru_cache
def _words(train_split: str, validation_split: str) -> tuple[re.Pattern[str], list]:
    """Return a pattern of all words, a group each, and the role of each."""
    asked = {"train": train_split, "validation": validation_split}
    role_of = {w: role for role, s in asked.items() for w in WORDS.get(s, ())}
    role_of |= {split: role for role, split in asked.items()}
    for kind, group in WORDS.items():
        for word in group:
            role_of.setdefault(word, kind if kind == "test" else "other")
    words = sorted(role_of, key=len, reverse=True)
    pattern = re.compile("|".join(map(_delimited, words)), re.IGNORECASE)
    return pattern, [role_of[word] for word in words]


def _delimited(word: str) -> str:
    """Return a pattern for a word that no letters (nor, of a number, digits) extend."""
    word = _spaced(word)
    before, after = (r"\d" if c.isdigit() else _LETTER for c in (word[0], word[-1]))
    return f"((?<!{before}){re.escape(word)}(?!{after}))"


def _spaced(name: str) -> str:
    """Put a space between words that only a capital separates: 'trainSet'."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)
