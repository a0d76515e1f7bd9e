"""The text of optimized HLO: instructions, computations, device groups, FLOPs.

The grammar is XLA's xla/hlo/parser/hlo_parser.cc. Pure text: JAX is not imported.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

Groups = tuple[tuple[int, ...], ...]

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s2": 2, "u2": 2, "s4": 4, "u4": 4}


def axis_groups(sizes: Mapping[str, int], *axes: str) -> Groups:
    """Groups of devices 0, 1, ... of a row-major mesh that differ only along `axes`.

    Args:
        sizes: the mesh's axes and their sizes, outermost first.
        axes: the axes that a collective is over.

    Raises:
        ValueError: if the mesh has no such axis.
    """
    if missing := set(axes) - set(sizes):
        raise ValueError(f"no axis {min(missing)!r} in the mesh {dict(sizes)}")
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, index in enumerate(itertools.product(*map(range, sizes.values()))):
        kept = tuple(i for i, a in zip(index, sizes, strict=True) if a not in axes)
        groups.setdefault(kept, []).append(device)
    return tuple(map(tuple, groups.values()))


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names
    arguments: str  # the text between the parentheses
    attributes: str  # what follows them
    root: bool
    position: int

    @functools.cached_property
    def arrays(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Data type and dimensions of the result's arrays, tuples flattened."""
        return tuple(
            (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
            for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,<=]*)\]", self.shape)
        )

    @functools.cached_property
    def dims(self) -> tuple[int, ...]:
        return self.arrays[0][1] if self.arrays else ()

    @functools.cached_property
    def size(self) -> int:
        """Bytes of the result."""
        return size_of(self.arrays)

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Computations that run as this instruction; a loop's condition is left out."""
        found: list[str] = []
        keys = "calls|body|called_computations|branch_computations|to_apply"
        keys += "|true_computation|false_computation"
        attributes = self.attributes.split(", backend_config=")[0]
        for names in re.findall(rf"\b(?:{keys})=(\{{[^}}]*\}}|%?[\w.\-]+)", attributes):
            found += re.findall(r"[\w.\-]+", names)
        return tuple(found)

    def attribute(self, pattern: str) -> str | None:
        """The first group of a regular expression found among the attributes."""
        found = re.search(pattern, self.attributes)
        return found and found[1]


@dataclasses.dataclass
class Computation:
    name: str
    instructions: list[Instruction]
    by_name: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        roots = (x for x in self.instructions if x.root)
        return next(roots, self.instructions[-1])

    def operand(self, x: Instruction, i: int) -> Instruction | None:
        return self.by_name.get(x.operands[i]) if i < len(x.operands) else None

    def operands_of(self, x: Instruction) -> list[Instruction]:
        return [self.by_name[name] for name in x.operands if name in self.by_name]


def size_of(arrays: Sequence[tuple[str, tuple[int, ...]]]) -> int:
    return sum(bits(t) * math.prod(d) for t, d in arrays) // 8


def bits(dtype: str) -> int:
    """Of one element; 0 for what holds no numbers."""
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)  # bf16, f32, u8, c64, f8e4m3fn
    return int(found[1]) if found else 0


def _closing(text: str, start: int) -> int:
    """Position after the bracket that closes the one at `start`, strings skipped."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, start):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return found.end()
    return len(text)


def _instruction(line: str, position: int) -> Instruction | None:
    head = re.match(r"\s*(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.find(" ", start)
    opcode = re.match(r" ([\w\-]+)(?=\()", line[end:])
    if opcode is None:
        return None
    opened = end + opcode.end()
    closed = _closing(line, opened)
    arguments = line[opened + 1 : closed - 1]
    operands = () if opcode[1] == "constant" else re.findall(r"%([\w.\-]+)", arguments)
    attributes = re.sub(
        r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}', "", line[closed:]
    )
    return Instruction(
        name=head[2],
        shape=line[start:end],
        opcode=opcode[1],
        operands=tuple(operands),
        arguments=arguments,
        attributes=attributes,
        root=head[1] is not None,
        position=position,
    )


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """All computations by name, and the name of ENTRY."""
    found: dict[str, Computation] = {}
    current, entry = None, ""
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith("HloModule"):
            current = Computation(head[2], [], {})
            found[head[2]] = current
            entry = head[2] if head[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            x = _instruction(line, len(current.instructions))
            if x is not None:
                current.instructions.append(x)
                current.by_name[x.name] = x
    if not entry:
        raise ValueError("the module's text has no ENTRY computation")
    return found, entry


def device_groups(x: Instruction, devices: int) -> Groups:
    """Reads replica_groups in its three forms, or a permutation's connected pairs."""
    text = x.attributes
    if found := re.search(r"replica_groups=\{\{([\d,{} ]*)\}\}", text):
        return tuple(
            tuple(map(int, group.split(",")))
            for group in re.split(r"\}, ?\{", found[1])
        )
    if re.search(r"replica_groups=\{\}", text):
        return (tuple(range(devices)),)
    pattern = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(pattern, text):
        shape, dims = (tuple(map(int, s.split(","))) for s in found.groups()[:2])
        order = _permuted(dims, found[3])
        size = shape[-1]
        return tuple(tuple(order[i : i + size]) for i in range(0, len(order), size))
    pattern = r"replica_groups=mesh\[([^\]]*)\](, device_ids=\(.*?\))? \{([^}]*)\}"
    if found := re.search(pattern, text):
        sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        axes = re.findall(r"'([^']+)'(:)?", found[3])
        if found[2] or any(part for _, part in axes):
            return ()  # another order of the devices, or a part of an axis
        return axis_groups(sizes, *(a for a, _ in axes))
    if found := re.search(r"source_target_pairs=\{\{([\d,{} ]*)\}\}", text):
        parent: dict[int, int] = {}

        def top(i: int) -> int:
            while parent.setdefault(i, i) != i:
                i = parent[i]
            return i

        for pair in re.findall(r"(\d+), ?(\d+)", found[1]):
            parent[top(int(pair[0]))] = top(int(pair[1]))
        chains = {k: [i for i in sorted(parent) if top(i) == k] for k in parent}
        return tuple(tuple(c) for k, c in chains.items() if top(k) == k)
    return ()


def _permuted(dims: Sequence[int], permutation: str | None) -> list[int]:
    """range(prod(dims)) reshaped to dims, transposed, flattened."""
    axes = list(range(len(dims)))
    if permutation:
        axes = list(map(int, permutation.split(",")))
    strides = [math.prod(dims[i + 1 :]) for i in range(len(dims))]
    index = itertools.product(*(range(dims[a]) for a in axes))
    return [sum(i * strides[a] for i, a in zip(at, axes, strict=True)) for at in index]


# ---------------------------------------------------------------- matrix products


def _integers(text: str | None) -> list[int]:
    return [int(d) for d in re.findall(r"-?\d+", text or "")]


def product_flops(x: Instruction, operands: list[Instruction]) -> int:
    """FLOPs of one dot, convolution, cuBLAS or cuDNN attention call, else 0."""
    if x.opcode == "dot":
        contracted = _integers(x.attribute(r"lhs_contracting_dims=\{([\d,]*)\}"))
    elif x.opcode == "convolution":
        return _convolution_flops(x, operands)
    elif x.opcode == "custom-call" and "__cublas$" in x.attributes:
        pattern = r'lhs_contracting_dimensions\\?":\[([^\]]*)\]'
        contracted = _integers(x.attribute(pattern))
    elif x.opcode == "custom-call" and "__cudnn$fmha" in x.attributes:
        return _attention_flops(x, operands)
    else:
        return 0
    depth = math.prod(operands[0].dims[i] for i in contracted)
    return 2 * math.prod(x.dims) * depth


def _attention_flops(x: Instruction, operands: list[Instruction]) -> int:
    """2 products forward, 5 backward, each batch x heads x T x S x head size.

    The causal half is not taken off, as it is not for attention made of dots.
    """
    pattern = r'intermediate_tensor_shape\\?":\{[^}]*?dimensions\\?":\[([^\]]*)\]'
    products = 5 if "Backward" in (x.attribute(r'target="([^"]*)"') or "") else 2
    scores = math.prod(_integers(x.attribute(pattern)))
    return 2 * products * scores * operands[0].dims[-1]


def _convolution_flops(x: Instruction, operands: list[Instruction]) -> int:
    """As XLA's HloCostAnalysis: products with padding and holes are not counted.

    TPU writes every dot as a convolution, batch dimensions as dilated windows.
    """
    lhs, rhs = operands[:2]
    labels = x.attribute(r"dim_labels=(\S+?)(?:,|$)") or ""
    lhs_labels, rhs_labels, out_labels = re.split(r"_|->", labels)
    window = x.attribute(r"window=\{([^}]*)\}") or ""
    spatial = [c for c in out_labels if c.isdigit()]

    def each(key: str, default: int) -> list[int]:  # of a pad low_high the low
        found = re.search(rf"\b{key}=(\S+)", window)
        if found is None:
            return [default] * len(spatial)
        return [int(part.split("_")[0]) for part in found[1].split("x")]

    taps = 1
    for i, c in enumerate(sorted(spatial)):
        taps *= _valid_taps(
            lhs.dims[lhs_labels.index(c)],
            rhs.dims[rhs_labels.index(c)],
            x.dims[out_labels.index(c)],
            each("stride", 1)[i],
            each("pad", 0)[i],
            each("lhs_dilate", 1)[i],
            each("rhs_dilate", 1)[i],
        )
    depth = rhs.dims[rhs_labels.index("i")]
    batch_and_features = x.dims[out_labels.index("b")] * x.dims[out_labels.index("f")]
    return 2 * batch_and_features * depth * taps


@functools.cache
def _valid_taps(
    size: int, kernel: int, out: int, stride: int, low: int, hole: int, kernel_hole: int
) -> int:
    """Pairs (output, kernel position) of one dimension that meet an input element."""
    last = (out - 1) * stride + (kernel - 1) * kernel_hole
    if hole == 1 and low == 0 and last < size:
        return out * kernel
    inputs = range(0, (size - 1) * hole + 1, hole)
    outputs = range(-low, out * stride - low, stride)
    taps = range(0, kernel * kernel_hole, kernel_hole)
    return sum(o + k in inputs for o in outputs for k in taps)
