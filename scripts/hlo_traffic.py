"""Bytes that an optimized HLO module moves to and from main memory, from its text.

XLA's own "bytes accessed" counts what is read from a TPU's on-chip memory like what is read from HBM, so a
weight that is prefetched counts three times, and for GPUs compiled ahead of time there is none. This counts,
for each instruction that runs, operands and results that lie in main memory: slices of an operand as slices,
updates in place as updates, the dearer branch of a conditional, a loop as often as it runs. Loops that run as
often as data say are summed apart, one turn each.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\](\{[^}]*\})?")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "copy-done",
    "slice-done",
    "async-update",
    "async-done",
    "opt-barrier",
    "iota",
}
_SLICES = {"slice", "dynamic-slice", "gather"}
_THROUGH = {"bitcast", "copy", "convert", "reshape", "transpose"}
_CALLED = re.compile(r"(?:calls|body|to_apply|async_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+)")


class Instruction(NamedTuple):
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    text: str
    is_root: bool


@dataclass
class Computation:
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def users(self, name: str) -> list[Instruction]:
        return [i for i in self.instructions.values() if name in i.operands]


def array_bytes(shape: str) -> list[tuple[int, bool]]:
    """(bytes, lies in main memory) of each array of a shape, layouts of TPUs ("S(1)" is on chip) included."""
    found = []
    for kind, dims, layout in _ARRAY.findall(shape):
        digits = re.match(r"[a-z]+(\d+)", kind)
        bits = int(digits.group(1)) if digits else 8 * (kind == "pred")
        n = 1
        for d in dims.split(","):
            n *= int(d) if d else 1
        found.append((-(-n * bits // 8), not re.search(r"S\([1-9]\d*\)", layout or "")))
    return found


def in_main_memory(shape: str) -> int:
    return sum(n for n, outside in array_bytes(shape) if outside)


def total(shape: str) -> int:
    return sum(n for n, _ in array_bytes(shape))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Computations of a module by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line)
            current = None
            if header and not line.startswith("HloModule"):
                current = computations[header.group(2)] = Computation()
                entry = header.group(2) if header.group(1) else entry
            continue
        found = _LINE.match(line) if current is not None else None
        if found is None or current is None:
            continue
        root, name, rest = found.groups()
        shape, rest = _split_shape(rest)
        called = re.match(r"([\w\-]+)\((.*)$", rest)
        if called is None:
            continue
        opcode, rest = called.groups()
        inside, after = _split_parenthesis(rest)
        operands = tuple(re.findall(r"%([\w.\-]+)", inside))
        current.instructions[name] = Instruction(name, opcode, shape, operands, inside + after, bool(root))
    return computations, entry


def _split_shape(rest: str) -> tuple[str, str]:
    if rest.startswith("("):
        inside, after = _split_parenthesis(rest[1:])
        return inside, after.lstrip(") ")
    shape, _, after = rest.partition(" ")
    return shape, after


def _split_parenthesis(text: str) -> tuple[str, str]:
    depth = 1
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return text[:i], text[i:]
    return text, ""


class Traffic:
    """Where a module's bytes go.

    bytes: of one run, without loops whose count depends on data; open_loops: bytes of one turn of each of
    those. by_instruction: bytes of each instruction of the entry and what it calls. n_kernels: instructions
    of the entry that do something.
    """

    def __init__(self, text: str) -> None:
        self.computations, entry = parse(text)
        self.by_instruction: Counter[tuple[str, str, str]] = Counter()
        self.n_kernels = self.open_loops = 0
        self.bytes = self._of_computation(entry, record=True)

    def moves(self, sizes: set[int], opcodes: tuple[str, ...]) -> int:
        """Instructions, in any computation that runs, that only move an array of one of `sizes` bytes within
        main memory: copies, transposes, gathers, and fusions of nothing else."""
        n = 0
        for computation in self._run():
            for i in computation.instructions.values():
                if i.opcode not in opcodes or not any(o and b in sizes for b, o in array_bytes(i.shape)):
                    continue
                if i.opcode == "copy-start":
                    n += all(outside for _, outside in array_bytes(i.shape)[:2])
                elif i.opcode == "fusion":
                    called = _CALLED.search(i.text)
                    assert called is not None
                    inner = self.computations[called.group(1)].instructions.values()
                    n += all(j.opcode in {"parameter", "gather", "constant"} | _THROUGH for j in inner)
                else:
                    n += 1
        return n

    def fetched_and_written_back(self, sizes: set[int]) -> int:
        """Arrays of one of `sizes` bytes that are copied from on-chip memory to main memory."""
        n = 0
        for computation in self._run():
            for i in computation.instructions.values():
                if i.opcode == "copy-start":
                    (size, to_main), (_, from_main) = array_bytes(i.shape)[:2]
                    n += size in sizes and to_main and not from_main
        return n

    def _run(self) -> list[Computation]:
        """The computations whose instructions are run one by one: all but the insides of fusions."""
        fused = {
            called.group(1)
            for computation in self.computations.values()
            for i in computation.instructions.values()
            if i.opcode == "fusion" and (called := _CALLED.search(i.text))
        }
        return [c for name, c in self.computations.items() if name not in fused]

    def _of_computation(self, name: str, record: bool = False) -> int:
        computation = self.computations[name]
        n = 0
        for i in computation.instructions.values():
            cost = self._of(i, computation)
            n += cost
            if record:
                self.n_kernels += i.opcode not in _FREE
                if cost:
                    operator = re.search(r'op_name="([^"]*)"', i.text)
                    self.by_instruction[i.opcode, i.shape, operator.group(1) if operator else ""] += cost
        return n

    def _of(self, i: Instruction, where: Computation) -> int:
        if i.opcode in _FREE:
            return 0
        match i.opcode:
            case "conditional":
                branches = [b for pair in _BRANCHES.findall(i.text) for part in pair for b in part.split(",")]
                names = [b.strip().lstrip("%") for b in branches if b.strip()]
                return max(self._of_computation(b) for b in names)
            case "while":
                trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.text)
                body = re.search(r"body=%?([\w.\-]+)", i.text)
                assert body is not None
                once = self._of_computation(body.group(1))
                if trips is None:
                    self.open_loops += once
                    return 0
                return once * int(trips.group(1))
            case "call" | "async-start":
                called = _CALLED.search(i.text)
                assert called is not None
                inner = self.computations[called.group(1)]
                if i.opcode == "call" or inner.root.opcode in ("fusion", "custom-call", "call"):
                    return self._of_computation(called.group(1))
                return self._of(inner.root, inner)
            case "copy-start" | "slice-start":
                return self._of_async_copy(i)
            case "fusion":
                return self._of_fusion(i, where)
            case "custom-call":
                if "ConcatBitcast" in i.text or "AllocateBuffer" in i.text:
                    return 0
        if i.opcode in _SLICES:
            return 2 * in_main_memory(i.shape) or self._read(i, where, 0, total(i.shape))
        if i.opcode == "dynamic-update-slice":
            update = where.instructions[i.operands[1]].shape
            return 2 * total(update) if in_main_memory(i.shape) else 0
        return in_main_memory(i.shape) + sum(self._operand(where, o) for o in i.operands)

    def _operand(self, where: Computation, name: str) -> int:
        return in_main_memory(where.instructions[name].shape) if name in where.instructions else 0

    def _read(self, i: Instruction, where: Computation, k: int, n: int) -> int:
        return n if self._operand(where, i.operands[k]) else 0

    def _of_async_copy(self, i: Instruction) -> int:
        """A copy between memories: its second part is the source, the first what arrives (or the reverse)."""
        arrays = array_bytes(i.shape)
        moved = min(n for n, _ in arrays[:2])
        return sum(moved for _, outside in arrays[:2] if outside)

    def _of_fusion(self, i: Instruction, where: Computation) -> int:
        called = _CALLED.search(i.text)
        assert called is not None
        inner = self.computations[called.group(1)]
        parameters: dict[int, Instruction] = {}
        for p in inner.instructions.values():
            if p.opcode == "parameter":
                parameters[int(re.match(r"\s*(\d+)", p.text).group(1))] = p  # type: ignore[union-attr]
        n = 0
        for k, operand in enumerate(i.operands):
            if self._operand(where, operand):
                whole = total(parameters[k].shape)
                n += min(whole, self._used(inner, parameters[k].name, whole))
        return n + self._written(inner, i)

    def _used(self, inner: Computation, name: str, whole: int) -> int:
        """Bytes of a parameter that its users read."""
        n = 0
        for user in inner.users(name):
            if user.opcode in _SLICES and user.operands[0] == name:
                n += total(user.shape)
            elif user.opcode in ("dynamic-update-slice", "scatter") and user.operands[0] == name:
                n += total(inner.instructions[user.operands[1 if user.opcode[0] == "d" else 2]].shape)
            elif user.opcode in _THROUGH:
                n += self._used(inner, user.name, whole)
            else:
                return whole
        return n

    def _written(self, inner: Computation, fusion: Instruction) -> int:
        """Bytes that a fusion's results write: updates where they are made in place."""
        roots = [inner.root]
        if inner.root.opcode == "tuple":
            roots = [inner.instructions[o] for o in inner.root.operands]
        n = 0
        for root, (size, outside) in zip(roots, array_bytes(fusion.shape), strict=False):
            if not outside:
                continue
            while root.opcode in _THROUGH:
                root = inner.instructions[root.operands[0]]
            if root.opcode == "dynamic-update-slice":
                size = total(inner.instructions[root.operands[1]].shape)
            elif root.opcode == "scatter":
                size = total(inner.instructions[root.operands[2]].shape)
            n += size
        return n
