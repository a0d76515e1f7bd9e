"""Parser of optimized HLO text: instructions, computations, device groups, FLOPs.

The grammar is XLA's xla/hlo/parser/hlo_parser.cc. Pure text: JAX is not imported.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4}
_CALLS = (
    "calls|body|called_computations|branch_computations|to_apply"
    "|true_computation|false_computation"
)


@dataclasses.dataclass(eq=False)
class Computation:
    """A named sequence of instructions."""

    name: str
    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    by_name: dict[str, Instruction] = dataclasses.field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        roots = (x for x in self.instructions if x.is_root)
        return next(roots, self.instructions[-1])


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    computation: Computation = dataclasses.field(repr=False)
    position: int  # index in the computation
    name: str
    shape: str  # of the result, as text with layouts
    opcode: str
    operand_names: tuple[str, ...]
    arguments: str  # the text between the parentheses
    attributes: str  # the text after them, without metadata
    is_root: bool
    metadata: str = ""  # its cause: see `op_name` and schedule/sources.py

    @functools.cached_property
    def op_name(self) -> str:
        """Scopes and operation in JAX, "" if the text lacks them."""
        match = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.metadata)
        return match[1] if match else ""

    @functools.cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Data type and dimensions of the result's arrays, tuples flattened."""
        return tuple(
            (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
            for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", self.shape)
        )

    @functools.cached_property
    def in_hbm(self) -> tuple[bool, ...]:
        """Flags of `arrays` that lie in a TPU's HBM: no S(n) in their layout."""
        found = re.findall(r"\b[a-z]\w*\[[\d,<=]*\](\{[^}]*\})?", self.shape)
        return tuple("S(" not in layout for layout in found)

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        return self.arrays[0][1] if self.arrays else ()

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the result."""
        return bytes_of(self.arrays)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that run as this instruction; a loop's condition is left out."""
        attributes = self.attributes.split(", backend_config=")[0]
        calls = re.findall(rf"\b(?:{_CALLS})=(\{{[^}}]*\}}|%?[\w.\-]+)", attributes)
        return tuple(re.findall(r"[\w.\-]+", " ".join(calls)))

    @property
    def operands(self) -> list[Instruction]:
        names = self.computation.by_name
        return [names[name] for name in self.operand_names if name in names]

    def operand(self, i: int) -> Instruction | None:
        names = self.operand_names[i : i + 1]
        return self.computation.by_name.get(names[0]) if names else None

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of a regular expression among the attributes."""
        match = re.search(pattern, self.attributes)
        return match and match[1]


def bytes_of(arrays: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    return sum(bits(dtype) * math.prod(dims) for dtype, dims in arrays) // 8


def bits(dtype: str) -> int:
    """Return the bits of one element; 0 for types without numbers."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)  # bf16, f32, u8, c64, f8e4m3fn
    return int(match[1]) if match else 0


# ---- parsing


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Return all computations by name, and the name of ENTRY."""
    computations: dict[str, Computation] = {}
    current, entry = None, ""
    for line in _lines(text):
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith("HloModule"):
            current = computations[head[2]] = Computation(head[2])
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            _add_instruction(current, line)
    if current is not None:
        raise ValueError(
            f"the module's text ends inside {current.name}: give the whole of "
            "compiled.as_text()"
        )
    if not entry:
        raise ValueError("the module's text has no ENTRY computation")
    if "%" not in text:
        raise ValueError(
            "the module's text has names without %: give that of compiled.as_text()"
        )
    return computations, entry


def _lines(text: str) -> Iterator[str]:
    """Yield lines; join an attribute that is printed over several."""
    started = ""
    for line in text.splitlines():
        if started or line.endswith("={"):
            started += line
            if not line.lstrip().startswith("}}"):
                continue
            line, started = started, ""
        yield line


def _add_instruction(computation: Computation, line: str) -> None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = re.match(r" ([\w\-]+)(?=\()", line[end:])
    if opcode is None:
        return
    opened = end + opcode.end()
    closed = _closing(line, opened)
    arguments = line[opened + 1 : closed - 1]
    names = () if opcode[1] == "constant" else re.findall(r"%([\w.\-]+)", arguments)
    metadata = r', metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*")*)\}'
    found = re.search(metadata, line[closed:])
    x = Instruction(
        computation=computation,
        position=len(computation.instructions),
        name=head[2],
        shape=line[start:end],
        opcode=opcode[1],
        operand_names=tuple(names),
        arguments=arguments,
        attributes=re.sub(metadata, "", line[closed:]),
        is_root=head[1] is not None,
        metadata=found[1] if found else "",
    )
    computation.instructions.append(x)
    computation.by_name[x.name] = x


def _closing(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one at `start`."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return len(text)


# ---- groups of devices


def axis_groups(sizes: Mapping[str, int], *axes: str) -> Groups:
    """Group the devices 0, 1, ... of a row-major mesh that differ only along `axes`.

    Args:
        sizes: the mesh's axes and their sizes, outermost first.
        axes: the axes that a collective is over.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    if missing := set(axes) - set(sizes):
        raise ValueError(f"no axis {min(missing)!r} in the mesh {dict(sizes)}")
    shape = tuple(sizes.values())
    own = [i for i, axis in enumerate(sizes) if axis in axes]
    devices = np.arange(math.prod(shape)).reshape(shape)
    last = np.moveaxis(devices, own, range(-len(own), 0))
    return _rows(last.reshape(-1, math.prod(shape[i] for i in own)))


def device_groups(x: Instruction, devices: int) -> Groups:
    """Read replica_groups in its forms, or a permutation's connected pairs.

    Args:
        x: a collective.
        devices: number of devices that the program runs on.

    Returns:
        The devices that take part together; () if the text lacks them.
    """
    text = x.attributes
    if match := re.search(r"replica_groups=\{\{([\d,{} ]+)\}\}", text):
        groups = re.split(r"\}, ?\{", match[1])
        return tuple(tuple(map(int, group.split(","))) for group in groups)
    if re.search(r"replica_groups=\{(\{\})?\}", text):
        return (tuple(range(devices)),)
    pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if match := re.search(pattern, text):
        shape, dims, axes = map(_integers, match.groups())
        iota = np.arange(math.prod(dims)).reshape(dims)
        return _rows(iota.transpose(axes or None).reshape(-1, shape[-1]))
    if "replica_groups=mesh[" in text:
        return _mesh_groups(text)
    return _connected(permuted(x))


def permuted(x: Instruction) -> Pairs:
    """Read the sources and targets of a permute; () of other collectives."""
    found = re.search(r"source_target_pairs=\{\{([\d,{} ]*)\}\}", x.attributes)
    pairs = re.findall(r"(\d+), ?(\d+)", found[1]) if found else []
    return tuple((int(source), int(target)) for source, target in pairs)


def _mesh_groups(text: str) -> Groups:
    """Read mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(1)2}.

    The devices 0, 1, ... are in the order that device_ids gives, else in their own;
    'b':(1)2 are groups of 2 along b, each of neighbours 4 / (1 x 2) apart. () for a
    form that is unknown.
    """
    form = r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}"
    match = re.search(form, text)
    if match is None:
        return ()
    sizes = {axis: int(n) for axis, n in re.findall(r"'([^']+)'=(\d+)", match[1])}
    order = _device_order(match[2], math.prod(sizes.values()))
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?(:)?", match[3])
    names = [axis for axis, *_ in parts]
    if order is None or len(set(names)) < len(names) or not set(names) <= set(sizes):
        return ()
    shape: list[int] = []
    own: list[int] = []  # the dimensions that a group varies
    chosen = {axis: (before, size) for axis, before, size, _ in parts}
    for axis, n in sizes.items():
        before, size = chosen.get(axis, ("", ""))
        pieces = [int(before), int(size)] if size else [1, n]
        if axis in chosen:
            own.append(len(shape) + 1)
        shape += [*pieces, n // math.prod(pieces)]
    if any(colon for *_, colon in parts) or math.prod(shape) != order.size:
        return ()
    last = np.moveaxis(order.reshape(shape), own, range(-len(own), 0))
    return _rows(last.reshape(-1, math.prod(shape[i] for i in own)))


def _device_order(text: str | None, devices: int) -> np.ndarray | None:
    """Read device_ids: "" (their own order), [4,2]T(1,0) or a list; None: unknown."""
    if not text:
        return np.arange(devices)
    if re.fullmatch(r"[\d, ]+", text):
        order = np.array(_integers(text))
    elif match := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        dims, axes = map(_integers, match.groups())
        iota = np.arange(math.prod(dims)).reshape(dims)
        order = iota.transpose(axes or None).reshape(-1)
    else:
        return None
    return order if sorted(order.tolist()) == list(range(devices)) else None


def _connected(pairs: Pairs) -> Groups:
    """Group the devices that a chain of pairs connects."""
    groups: list[set[int]] = []
    for pair in pairs:
        ends = set(pair)
        touched = [group for group in groups if group & ends]
        groups = [group for group in groups if not group & ends]
        groups.append(ends.union(*touched))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _rows(array: np.ndarray) -> Groups:
    return tuple(map(tuple, array.tolist()))


def _integers(text: str | None) -> list[int]:
    return [int(d) for d in re.findall(r"-?\d+", text or "")]


# ---- matmuls


def product_flops(x: Instruction) -> int:
    """Count the FLOPs of a matmul, attention included, else 0."""
    opcode = x.opcode.removesuffix("-start")
    if opcode in ("dot", "convolution") and len(x.operands) < 2:
        raise ValueError(
            f"the text lacks operands of {x.name}: pass jit(f).lower(...).compile()"
            ".as_text() whole, with its names as they are."
        )
    if opcode == "dot":
        contracted = _integers(x.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
    elif opcode == "convolution":
        return _convolution_flops(x, x.operands[0].dims, x.operands[1].dims, x.dims)
    elif opcode == "custom-call" and "__cublas$" in x.attributes:
        pattern = r'lhs_contracting_dimensions\\?":\[([^\]]*)\]'
        contracted = _integers(x.attribute(pattern))
    elif opcode == "custom-call" and "__cudnn$fmha" in x.attributes:
        return _attention_flops(x)
    elif opcode == "custom-call" and "__cudnn$conv" in x.attributes:
        return _cudnn_flops(x)
    elif opcode == "custom-call" and re.match(r"ragged-dot(?!-metadata)", x.name):
        return _ragged_flops(x)
    elif opcode == "custom-call":
        return _kernel_flops(x)
    else:
        return 0
    depth = math.prod(x.operands[0].dims[i] for i in contracted)
    return 2 * math.prod(x.dims) * depth


# Matmuls of the size of the scores in each kernel of attention, by names in the
# path of its operation: those of models/flash.py, and splash attention's.
_PRODUCTS = {
    r"/attention_forward/|splash_m[hq]a_fwd": 2,
    r"/attention_queries/|splash_m[hq]a_dq": 3,
    r"/attention_keys/|splash_m[hq]a_dkv": 4,
}


def _kernel_flops(x: Instruction) -> int:
    """Count the FLOPs of an attention kernel, for the scores that it computes.

    The numbers of queries and keys are in the scope of models/attention.py's call.
    """
    scope = re.search(r"\battention_(\d+)x(\d+)\b", x.op_name)
    products = (n for name, n in _PRODUCTS.items() if re.search(name, x.op_name))
    if scope is None or (count := next(products, None)) is None:
        return 0
    length, window = int(scope[1]), int(scope[2])
    seen = _seen(length, window)
    arrays = (array for operand in x.operands for array in operand.arrays)
    found = (dims for kind, dims in arrays if "f" in kind and len(dims) > 2)
    if (queries := next(found, None)) is None:
        return 0
    return 2 * count * seen * math.prod(queries) // length


def _ragged_flops(x: Instruction) -> int:
    """Count the FLOPs of a TPU's kernel for `lax.ragged_dot`: each row has one group.

    Its first matrix is (rows, contracted), its result (rows, columns).
    """
    arrays = (array for operand in x.operands for array in operand.arrays)
    found = (dims for kind, dims in arrays if "f" in kind and len(dims) == 2)
    if len(x.dims) != 2 or (rows := next(found, None)) is None:
        return 0
    return 2 * math.prod(x.dims) * rows[1]


def _attention_flops(x: Instruction) -> int:
    """Count the FLOPs of cuDNN's 2 products forward, 5 backward, for computed scores.

    Computed scores are those that a causal mask and a window leave.
    """

    def setting(pattern: str) -> list[int]:  # as JAX writes them, with spaces, or XLA
        return _integers(x.attribute(pattern))

    scores = setting(
        r'intermediate_tensor_shape\\?": ?\{[^}]*?dimensions\\?": ?\[([^\]]*)\]'
    )
    if len(scores) < 2:  # another form of it
        return 0
    rows, length, keys = math.prod(scores[:-2]), *scores[-2:]
    seen = length * keys
    if length == keys and x.attribute(r'"mask_type\\?": ?\\?"((?:PADDING_)?CAUSAL)'):
        window = setting(r'sliding_window_length\\?": ?\\?"?(\d+)')
        seen = _seen(length, window[0] if window and window[0] else length)
    products = 5 if "Backward" in (x.attribute(r'target="([^"]*)"') or "") else 2
    return 2 * products * rows * seen * x.operands[0].dims[-1]


def _seen(length: int, window: int) -> int:
    """Count the pairs of a query and a key that it sees."""
    window = min(window, length)
    return window * (window + 1) // 2 + (length - window) * window


def _cudnn_flops(x: Instruction) -> int:
    """Count the FLOPs of one of cuDNN's convolutions.

    Its labels and window are those of the forward pass, whichever gradient it is.
    """
    first, second = (operand.dims for operand in x.operands[:2])
    target = x.attribute(r'target="([^"]*)"') or ""
    if "BackwardInput" in target:  # (gradient of the output, kernel)
        return _convolution_flops(x, x.dims, second, first)
    if "BackwardFilter" in target:  # (input, gradient of the output)
        return _convolution_flops(x, first, x.dims, second)
    return _convolution_flops(x, first, second, x.dims)


def _convolution_flops(
    x: Instruction, lhs: Sequence[int], rhs: Sequence[int], out: Sequence[int]
) -> int:
    """Count as XLA's HloCostAnalysis does, without products with padding and holes.

    TPU writes every dot as a convolution, batch dimensions as dilated windows.

    Args:
      x: has the labels and the window.
      lhs, rhs, out: sizes of the input, of the kernel and of the output.
    """
    labels = x.attribute(r"dim_labels=(\S+?)(?:,|$)") or ""
    lhs_labels, rhs_labels, out_labels = re.split(r"_|->", labels)
    window = x.attribute(r"window=\{([^}]*)\}") or ""
    spatial = sorted(c for c in out_labels if c.isdigit())

    def each(key: str, default: int) -> list[int]:  # of a pad low_high the low
        match = re.search(rf"\b{key}=(\S+)", window)
        if match is None:
            return [default] * len(spatial)
        return [int(part.split("_")[0]) for part in match[1].split("x")]

    options = {"stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    windows = zip(*(each(*option) for option in options.items()), strict=True)
    taps = 1
    for c, dimension in zip(spatial, windows, strict=True):
        size, kernel = lhs[lhs_labels.index(c)], rhs[rhs_labels.index(c)]
        taps *= _valid_taps(size, kernel, out[out_labels.index(c)], *dimension)
    depth = rhs[rhs_labels.index("i")]
    batch_and_features = out[out_labels.index("b")] * out[out_labels.index("f")]
    return 2 * batch_and_features * depth * taps


@functools.cache
def _valid_taps(
    size: int, kernel: int, out: int, stride: int, low: int, hole: int, kernel_hole: int
) -> int:
    """Count pairs (output, kernel position) of a dimension that meet an input."""
    last = (out - 1) * stride + (kernel - 1) * kernel_hole
    if hole == 1 and low == 0 and last < size:
        return out * kernel
    inputs = range(0, (size - 1) * hole + 1, hole)
    outputs = range(-low, out * stride - low, stride)
    taps = range(0, kernel * kernel_hole, kernel_hole)
    return sum(o + k in inputs for o in outputs for k in taps)
