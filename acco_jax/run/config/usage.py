"""The command line of a command: how its flags are spelled, what `--help` prints."""

import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from absl import flags

from acco_jax import cli
from acco_jax.run.config.schema import FIELDS

WIDTH = 79
INDENT = 20  # of a flag's description
FULL = ("--helpfull", "-helpfull")  # all flags of all modules
ASKING = ("--help", "-help", "-h", "--helpshort", "-helpshort", "-?", "--?", *FULL)
NEEDED = "Needed"  # the group of flags that a command cannot do without


def asked(argv: Sequence[str], words: Sequence[str] = ASKING) -> bool:
    """Return whether a command line asks for help in one of these words."""
    return any(word in words for word in argv[1:])


def spelled(argv: Sequence[str], defined: flags.FlagValues) -> list[str]:
    """Return a command line with each flag's name as it is defined.

    Hyphens and underscores are the same in names. Values do not change.

    Args:
      argv: The program, then its arguments.
      defined: The flags of the command.
    """
    names: dict[str, tuple[str, bool]] = {}  # and whether a value may follow
    for name in defined:
        names[name.replace("-", "_")] = name, not defined[name].boolean
        if defined[name].boolean:
            names["no" + name.replace("-", "_")] = f"no{name}", False
    line, is_value = list(argv[:1]), False
    for place, argument in enumerate(argv[1:], 1):
        if argument == "--" and not is_value:
            return [*line, *argv[place:]]
        given, equals, value = argument.partition("=")
        bare = given.removeprefix("-").removeprefix("-")
        name, takes = names.get(bare.replace("-", "_"), ("", False))
        if is_value or bare == given or not name:
            line.append(argument)
            is_value = False
        else:
            line.append(f"{given.removesuffix(bare)}{name}{equals}{value}")
            is_value = takes and not equals
    return line


def text(
    doc: str,
    groups: Mapping[str, Sequence[str]],
    defined: flags.FlagValues = flags.FLAGS,
) -> str:
    """Return the page.

    Args:
      doc: Docstring of the command.
      groups: Titles, each with names of flags. Other flags follow.
      defined: The flags of the command.
    """
    doc = doc.replace("python -m acco_jax.", cli.prefix)
    doc, _, codes = doc.strip().partition("\nExit codes:")
    listed = [name for names in groups.values() for name in names]
    others = [name for name in _own(defined) if name not in listed]
    title = "Optional" if groups else "Flags"
    lines = [doc.strip(), *_groups({**groups, title: others}, defined)]
    if "config" in defined:
        lines += ["", "Fields of the config are flags, too: --config.method=zero1."]
        lines += [
            "Often changed, with defaults (acco_jax/run/config/schema.py has all):"
        ]
        for name, field in FIELDS.items():
            if field.help:
                lines += _entry(f"--config.{name}", field.summary, indent=35)
    lines += ["", f"Exit codes:{codes.rstrip()}"]
    if "helpfull" in defined:
        lines += ["", "Flags of absl: --helpfull"]
    return "\n".join(lines) + "\n"


def _own(defined: flags.FlagValues) -> list[str]:
    """Return the flags that the command, or a module of this package, defines."""
    return [
        flag.name
        for module, found in defined.flags_by_module_dict().items()
        if module == sys.argv[0] or module.startswith("acco_jax.")
        for flag in found
    ]


def _groups(
    groups: Mapping[str, Sequence[str]], defined: flags.FlagValues
) -> Iterator[str]:
    for title, names in groups.items():
        if names:
            yield from ("", f"{title}:")
        for name in names:
            flag = defined[name]
            unset = flag.default is False or flag.default in (None, "", [])
            default = "" if unset else f" [{flag.default}]"
            shown = f"--[no]{name}" if flag.default is True else f"--{name}"
            says, *_ = flag.help.split(";\n")  # absl adds to that of repeatable ones
            yield from _entry(shown, f"{says}{default}")


def _entry(name: str, says: str, indent: int = INDENT) -> Iterator[str]:
    """Yield the lines of a flag: its name, and beside or below it its description."""
    width = WIDTH - indent
    lines = textwrap.wrap(says, width, break_on_hyphens=False)
    first = f"  {name}".ljust(indent)
    if len(first) > indent - 1 and not first.endswith(" "):
        yield first
        first = " " * indent
    yield first + lines[0]
    yield from (" " * indent + line for line in lines[1:])
