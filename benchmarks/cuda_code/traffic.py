"""What a generated kernel reads and writes, in bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import sympy
from benchmarks.cuda_code.own import OWN
from torch._inductor import ir
from torch._inductor.dependencies import index_vars_no_squeeze
from torch._inductor.graph import GraphLowering
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.scheduler import (
    BaseSchedulerNode,
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
)
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import FloorDiv, Identity, ModularIndexing

Condition = tuple[sympy.Expr, bool, int]
"""A number, whether it must be less than the last one or not less, and that."""
_NOT_COUNTED = ("mm", "_attention")
"""Parts of the names of operations whose kernels are no code of inductor's: products and attention."""
_MOST_POINTS = 1 << 24
"""Of an index that is no sum of variables times strides: each is computed."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a block's generated code."""

    name: str
    is_backward: bool
    by_inductor: int
    """Bytes as inductor counts them: a whole buffer where a part of it is read."""
    exact: int
    """Bytes of the values that are read or written, each once."""


def kernels_of(graph: GraphLowering) -> list[Kernel]:
    """Return the kernels of ``graph``, whose code is generated, without products and attention."""
    found = []
    for node in graph.scheduler.nodes:
        if isinstance(node, NopKernelSchedulerNode):
            continue
        if not isinstance(node, ExternKernelSchedulerNode):
            operations = {o.target for part in node.get_nodes() for o in part.node.get_origins()}
            name = " ".join(
                sorted({str(o).removeprefix("aten.").split(".")[0] for o in operations})
            )
            numbers = node.get_read_write_buffers_sizes(), _bytes_of(graph, node)
            found.append(Kernel(name, graph.is_backward, *numbers))
        elif isinstance(node.node, ir.UserDefinedTritonKernel):
            kernel, *_ = node.node.get_kernel_and_metadata()
            name = kernel.fn.__name__
            arguments = {
                a: node.node.get_kwargs_value(a) for a in node.node.ordered_kwargs_for_cpp_kernel
            }
            exact = OWN[name](arguments)
            found.append(Kernel(name, graph.is_backward, exact, exact))
        elif not isinstance(node.node, ir.MultiOutput):
            name = str(node.node.op_overload or node.node.python_kernel_name)
            if not any(part in name for part in _NOT_COUNTED):
                raise NotImplementedError(f"{name} is no product and no attention")
    return found


@dataclass(frozen=True)
class Access:
    """Reads or writes of a buffer by one statement of a kernel."""

    buffer: str
    index: sympy.Expr
    ranges: dict[sympy.Symbol, int]
    """Values of each loop's variable."""
    conditions: list[Condition]

    @property
    def expressions(self) -> list[sympy.Expr]:
        """Return the index, and what is limited by each condition."""
        return [self.index, *(expression for expression, _, _ in self.conditions)]

    def having(self, expressions: list[sympy.Expr], ranges: dict[sympy.Symbol, int]) -> Access:
        """Return this with other ``expressions`` and ``ranges``, without conditions that always hold."""
        limits = zip(expressions[1:], self.conditions, strict=True)
        conditions = [
            (each, is_less, limit)
            for each, (_, is_less, limit) in limits
            if not (is_less and ranges.get(each, limit + 1) <= limit)
        ]
        return Access(self.buffer, expressions[0], ranges, conditions)


@dataclass
class _Accesses(DefaultHandler):
    """Runs the body of a loop, and keeps what it reads and writes, and under which conditions."""

    ranges: dict[sympy.Symbol, int]
    conditions: list[Condition] = field(default_factory=list)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)

    def load(self, name: str, index: sympy.Expr) -> None:
        self.reads.append(
            Access(name, index.replace(Identity, _same), self.ranges, self.conditions)
        )

    def store(self, name: str, index: sympy.Expr, *_: object, **__: object) -> None:
        self.writes.append(
            Access(name, index.replace(Identity, _same), self.ranges, self.conditions)
        )

    def store_reduction(self, name: str, index: sympy.Expr, value: object) -> None:
        self.store(name, index)

    def reduction(self, dtype: Any, source: Any, kind: str, value: Any) -> Any:
        return (None,) * 3 if kind.startswith("welford") else None

    def index_expr(self, expression: sympy.Expr, dtype: Any) -> sympy.Expr:
        return sympy.sympify(expression).replace(Identity, _same)

    value_expr = index_expr

    def constant(self, value: Any, dtype: Any) -> Any:
        return value

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> None:
        around = self.conditions
        self.conditions = [*around, *(mask or ())]
        body()
        self.conditions = around

    def indirect_indexing(self, *_: object, **__: object) -> sympy.Symbol:
        raise NotImplementedError("no block of FLUX.1 reads by an index that it computes")

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("lt", "ge") and isinstance(args[0], sympy.Expr):
            return [(args[0], name == "lt", int(args[1]))]
        if name in ("and_", "logical_and"):
            return [*(args[0] or ()), *(args[1] or ())]
        return None


def _same(value: sympy.Expr) -> sympy.Expr:
    return value


def _bytes_of(graph: GraphLowering, node: BaseSchedulerNode) -> int:
    """Return the bytes that the kernel of ``node`` moves; what only it reads stays in registers."""
    parts = list(node.get_nodes())
    accesses = [_run(part) for part in parts]
    written = {access.buffer for each in accesses for access in each.writes}
    names = {part.get_name() for part in parts}
    kept = {
        buffer
        for buffer in written
        if {user.node.get_name() for user in graph.scheduler.name_to_buf[buffer].users} <= names
    }
    by_buffer = defaultdict[tuple[str, bool], list[Access]](list)
    for each in accesses:
        for access in each.reads:
            if access.buffer not in written:
                by_buffer[access.buffer, False].append(access)
        for access in each.writes:
            if access.buffer not in kept:
                by_buffer[access.buffer, True].append(access)
    total = 0
    for (name, _), of_it in by_buffer.items():
        buffer = _buffer(graph, name)
        size = buffer.get_layout().storage_size()
        total += _values(of_it, int(size)) * buffer.get_dtype().itemsize
    return total


def _run(part: Any) -> _Accesses:
    variables, ranges = index_vars_no_squeeze(*part._sizes, prefix="x_")
    accesses = _Accesses({variable: int(size) for variable, size in ranges.items()})
    with V.set_ops_handler(accesses):
        part._body(*variables)
    return accesses


def _buffer(graph: GraphLowering, name: str) -> Any:
    buffer = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
    while isinstance(buffer, ir.MutationOutput):  # what a kernel of our own wrote
        name = buffer.mutation_names[0]
        buffer = graph.name_to_buffer.get(name) or graph.graph_inputs[name]
    return buffer


def _values(accesses: list[Access], size: int) -> int:
    """Return how many of a buffer's ``size`` values ``accesses`` reach, each once."""
    linear = {_loops(access) for access in accesses}
    if None in linear:
        reached = np.zeros(size, bool)
        for access in accesses:
            reached[_points(access)] = True
        return int(reached.sum())
    # in units of as many values as all of them reach as a whole
    unit = math.gcd(size, *(number for places in linear for number in _multiples(*places)))
    reached = np.zeros(size // unit, bool)
    for start, loops in linear:
        last = start + sum(stride * (count - 1) for stride, count in loops)
        if not 0 <= start <= last < size:
            raise NotImplementedError(f"a mask that is not understood: {accesses}")
        strides = [max(stride // unit, 1) for stride, _ in loops]
        shape = [count // unit if stride == 1 else count for stride, count in loops]
        np.lib.stride_tricks.as_strided(reached[start // unit :], shape, strides)[...] = True
    return int(reached.sum()) * unit


def _multiples(start: int, loops: tuple[tuple[int, int], ...]) -> list[int]:
    wholes = [count if stride == 1 else stride for stride, count in loops]
    return [start, *wholes, *([] if loops and loops[0][0] == 1 else [1])]


def _loops(access: Access) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return the first place that ``access`` reaches, and its loops: (stride, number of values).

    None if its index or a condition is no sum of that kind.
    """
    split = _simple(access)
    if split is None:
        return None
    bounds = {variable: [0, count] for variable, count in split.ranges.items()}
    for expression, is_less, limit in split.conditions:
        if expression not in bounds:
            return None
        low, end = bounds[expression]
        bounds[expression] = [low, min(end, limit)] if is_less else [max(low, limit), end]
    start, pairs, index = 0, [], sympy.expand(split.index)
    for variable, (low, end) in bounds.items():
        stride = index.coeff(variable)
        index = sympy.expand(index - stride * variable)
        start += int(stride) * low
        if stride and end - low > 1:
            pairs.append((int(stride), end - low))
    if index.free_symbols:
        return None
    loops: list[tuple[int, int]] = []
    for stride, count in sorted(pairs):
        if loops and math.prod(loops[-1]) == stride:
            loops[-1] = loops[-1][0], loops[-1][1] * count
        else:
            loops.append((stride, count))
    return start + int(index), tuple(loops)


def _simple(access: Access) -> Access | None:
    """Return ``access`` as sums of variables times strides; None if it cannot be one."""
    while _quotients(access) or not access.ranges.keys() >= {
        each for each, *_ in access.conditions
    }:
        before = access
        access = _digits(_flat(_reduced(access)))
        if access == before:
            return None
    return access


def _quotients(access: Access) -> set[sympy.Expr]:
    """Return the quotients and remainders in ``access``."""
    return {part for each in access.expressions for part in each.atoms(FloorDiv, ModularIndexing)}


def _reduced(access: Access) -> Access:
    """Return ``access`` with the terms outside of a quotient or remainder that its divisor divides."""
    values = {}
    for part in _quotients(access):
        whole, divisor, *modulus = part.args
        span = math.prod(map(int, part.args[1:]))
        terms = sympy.Add.make_args(whole)
        taken = sum(term for term in terms if int(term.as_coeff_Mul()[0]) % span == 0)
        if taken != 0:
            rest = type(part)(whole - taken, divisor, *modulus)
            values[part] = rest if modulus else rest + taken / divisor
    return access.having([each.xreplace(values) for each in access.expressions], access.ranges)


def _flat(access: Access) -> Access:
    """Return ``access`` with one variable for several that count through a range together."""
    sums = {part.args[0] for part in _quotients(access)} | set(access.expressions[1:])
    for whole in sorted((each for each in sums if isinstance(each, sympy.Add)), key=str):
        strides = sorted((int(whole.coeff(v)), str(v), v) for v in whole.free_symbols)
        inner = strides[0][2]
        sizes = [access.ranges.get(v, 0) for *_, v in strides]
        nested = sum(math.prod(sizes[:i]) * v for i, (*_, v) in enumerate(strides))
        if sympy.expand(whole - nested) != 0 or 0 in sizes:
            continue
        flat = sympy.Symbol("_".join(name for _, name, _ in strides), integer=True)
        expressions = []
        for each in access.expressions:
            each = sympy.expand(each.xreplace({whole: flat}))
            expressions.append(sympy.expand(each + each.coeff(inner) * (flat - whole)))
        if not any(whole.free_symbols & each.free_symbols for each in expressions):
            access = access.having(expressions, access.ranges | {flat: math.prod(sizes)})
    return access


def _digits(access: Access) -> Access:
    """Return ``access`` with digits in place of a variable with quotients and remainders."""
    values, ranges = dict[sympy.Expr, sympy.Expr](), dict(access.ranges)
    for expression, is_less, limit in access.conditions:
        if is_less and expression in ranges:
            ranges[expression] = min(ranges[expression], limit)
    access = access.having(access.expressions, ranges)
    parts = [part for part in _quotients(access) if part.args[0] in ranges]
    for variable in {part.args[0] for part in parts}:
        own = {part: _weights(part) for part in parts if part.args[0] == variable}
        count = ranges[variable]
        weights = sorted({1, *(each for pair in own.values() for each in pair if each < count)})
        if any(b % a for a, b in pairwise([*weights, count])):
            continue
        digits = {weight: sympy.Symbol(f"{variable}_{weight}", integer=True) for weight in weights}
        ranges = ranges | {digits[a]: b // a for a, b in pairwise([*weights, count])}
        for part, (low, end) in own.items():
            values[part] = sum(d * (w // low) for w, d in digits.items() if low <= w < end)
        values[variable] = sum(d * w for w, d in digits.items())
    return access.having([each.xreplace(values) for each in access.expressions], ranges)


def _weights(part: sympy.Expr) -> tuple[int, float]:
    """Return which digits of a variable ``part`` has: those from the first weight on, below the second."""
    low = int(part.args[1])
    return low, low * int(part.args[2]) if isinstance(part, ModularIndexing) else math.inf


def _points(access: Access) -> np.ndarray[Any, Any]:
    """Return all places that ``access`` reaches."""
    counts = list(access.ranges.values())
    if math.prod(counts) > _MOST_POINTS:
        raise NotImplementedError(f"{access}: too many places")
    grid = np.meshgrid(*map(np.arange, counts), indexing="ij", sparse=True)

    def values(expression: sympy.Expr) -> np.ndarray[Any, Any]:
        names = {"FloorDiv": np.floor_divide, "ModularIndexing": lambda x, by, of: x // by % of}
        function = sympy.lambdify(list(access.ranges), expression, [names, "numpy"])
        return np.broadcast_to(function(*grid), counts)

    kept = np.ones(counts, bool)
    for expression, is_less, limit in access.conditions:
        kept &= values(expression) < limit if is_less else values(expression) >= limit
    return values(access.index)[kept]
