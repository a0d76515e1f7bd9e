"""Source lines of the instructions of a compiled program's text.

A compiled module's text ends or begins with four tables (FileNames, FunctionNames,
FileLocations, StackFrames), which `stack_frame_id` in an instruction's metadata points
into; older texts have source_file and source_line there instead. Pure text.
"""

import re

_LIBRARIES = re.compile(r"-packages/(jax|jaxlib|flax|optax|equinox|haiku)/|<frozen")
_ROW = r"(?m)^(\d+) (.*)$"


class Sources:
    """Table of the source lines of a module's text."""

    def __init__(self, text: str) -> None:
        tables = {
            name: dict(re.findall(_ROW, rows))
            for name, rows in re.findall(
                r"(?m)^(FileNames|FunctionNames|FileLocations|StackFrames)\n"
                r"((?:\d+ .*\n)+)",
                text,
            )
        }
        self._files = tables.get("FileNames", {})
        self._functions = tables.get("FunctionNames", {})
        self._locations = tables.get("FileLocations", {})
        self._frames = tables.get("StackFrames", {})
        # a frame without a caller is written as its own or as frame 0's child
        first = _field(self._frames.get("1", ""), "parent_frame_id")
        self._offset = 1 if first == "1" else 0

    def line(self, metadata: str) -> str:
        """Return "file:line (function)" of an instruction's metadata, "" if unknown.

        It is the innermost line outside JAX and the layers right above it.
        """
        frame = _field(metadata, "stack_frame_id")
        found = [self._place(f) for f in self._stack(frame)] if frame else []
        file = re.search(r'source_file="([^"]*)"', metadata)
        if file and (number := _field(metadata, "source_line")):
            found.append(f"{file[1]}:{number}")
        found = [place for place in found if place]
        own = (x for x in found if not _LIBRARIES.search(x))
        return next(own, found[0] if found else "")

    def _stack(self, frame: str) -> list[str]:
        """Return a frame and its callers."""
        stack: list[str] = []
        while frame in self._frames and frame not in stack:
            stack.append(frame)
            parent = _field(self._frames[frame], "parent_frame_id")
            frame = str(int(parent or 0) - self._offset)
        return stack

    def _place(self, frame: str) -> str:
        location = self._locations.get(
            _field(self._frames[frame], "file_location_id"), ""
        )
        file = self._files.get(_field(location, "file_name_id"), "").strip('"')
        name = self._functions.get(_field(location, "function_name_id"), "").strip('"')
        line = f"{file}:{_field(location, 'line')}" if file else ""
        return f"{line} ({name})" if line and name else line


def _field(text: str, name: str) -> str:
    match = re.search(rf"\b{name}=(\d+)", text)
    return match[1] if match else ""
