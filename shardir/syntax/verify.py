"""Verification of a module: xDSL's checks, symbols and dominance. It finds all errors.

for error in verify_all(module, source):
    print(error)          # net.ir:12:8: error: ..., with the line and a caret
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from xdsl.dialects.builtin import (
    ArrayAttr,
    DictionaryAttr,
    IntegerAttr,
    ModuleOp,
    UnregisteredAttr,
)
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Attribute, Block, Operation, OpTraits
from xdsl.traits import (
    IsolatedFromAbove,
    IsTerminator,
    NoTerminator,
    SymbolOpInterface,
    SymbolTable,
)
from xdsl.utils.exceptions import VerifyException

from shardir.compat.xdsl import next_of, successors_of
from shardir.diagnostics import Diagnostic, Failure, ParseErrors, ShardirError, coded
from shardir.dialects.blocks import ops_in, ops_of
from shardir.dialects.dist import check_transfers, check_type, invalid_type_message
from shardir.dialects.locations import op_name
from shardir.dialects.memory import check_offsets
from shardir.dialects.symbols import find_symbol, fixed_symbols
from shardir.dialects.train import check_counts, check_initial_values, check_order, check_stages
from shardir.syntax.dominance import check_dominance
from shardir.syntax.source import Source

CALL = replace(CallOp.get_irdl_definition(), traits=OpTraits(tuple))
"""The definition of a call without the trait that looks up its callee."""

FUNCTION = replace(
    FuncOp.get_irdl_definition(),
    traits=OpTraits(lambda: tuple(FuncOp.traits.traits - {IsolatedFromAbove()})),
)
"""The definition of a function without the trait that searches its ops for outer values:
`check_dominance` reports them too."""

OTHERS_SHARDING = re.compile(
    r"^(xla\.)?sdy\.|\b(mhlo|stablehlo|xla|jax|tf)\.\w*(shard|partition|replica|spmd)|"
    r"_(XlaSharding|XlaShardingV2)$"
)
"""The names of partitioning attributes of Shardy, StableHLO, XLA and TensorFlow."""

OWN = ("nn.", "dist.", "train.")
"""The prefixes of our ops."""

MISSING = re.compile(r"expected a (?:declared mesh, got|function) @")


@dataclass
class Incomplete:
    """The parts of a module that the parser could not build. Verification skips errors that only
    follow from them."""

    blocks: set[Block] = field(default_factory=set)
    """Blocks that lack ops."""
    ops: set[Operation] = field(default_factory=set)
    """Ops that use missing values."""
    symbols: set[str] = field(default_factory=set)
    """Symbols that the skipped text may have defined."""


OpError = tuple[Operation, str, tuple[str, ...]]
"""An op, a message, and notes."""


def verify_all(
    module: Operation, source: Source | None = None, incomplete: Incomplete | None = None
) -> list[Diagnostic]:
    """Return all errors of a module, each at its op, in text order."""
    source = source or Source("", "<module>")
    lost = incomplete or Incomplete()
    errors: list[OpError] = []

    def report(op: Operation, message: str, *notes: str) -> None:
        if op not in lost.ops and not any(
            re.search(rf"@{re.escape(s)}(?![\w$.])", message) for s in lost.symbols
        ):
            errors.append((op, message, notes))

    around: set[Operation] = set()  # their checks walk over bodies with missing values
    for op in lost.ops:
        while (parent := op.parent_op()) is not None and parent not in around:
            around.add(parent)
            op = parent
    functions = list[FuncOp]()
    with fixed_symbols():
        for op in ops_in(module):
            if op.regions or successors_of(op) or next_of(op) is None:
                if (message := structure_error(op, lost)) is not None:
                    report(op, message)
                check_symbols(op, source, report)
                if isinstance(op, FuncOp):
                    functions.append(op)
            if around and (op in lost.ops or op in around):
                continue
            if (message := foreign_sharding(op)) is not None:
                report(op, message)
                continue
            if (message := foreign_value(op)) is not None:
                if message:
                    report(op, message)
                continue
            try:
                check_op(op)
            except VerifyException as e:
                if not str(e).startswith("Redefinition of symbol"):  # reported by check_symbols
                    report(op, str(e))
            except Failure as e:
                for _, message in e.errors:
                    report(op, message)
            except ShardirError as e:
                report(op, str(e))
            except Exception as e:
                e.add_note(f"while verifying {op.name}")
                raise
        wrong = {op for op, _, _ in errors} | lost.ops
        for f in functions:
            if f.body.blocks and not (wrong and not wrong.isdisjoint(f.walk())):
                ops = ops_of(f.body.block)
                try:
                    check_offsets(ops)
                    check_transfers(ops)
                except VerifyException as e:
                    report(f, str(e))
                except Failure as e:
                    for at, message in e.errors:
                        report(at or f, message)
    check_dominance(module, report)
    shown = [source.at_op(op, message, notes) for op, message, notes in merge_missing(errors)]
    return sorted(shown, key=lambda d: (d.line, d.column))


def merge_missing(errors: Sequence[OpError]) -> Iterator[OpError]:
    """Merge the errors of all ops that name a missing mesh or function."""
    counts = Counter(message for _, message, _ in errors if MISSING.search(message))
    for op, message, notes in errors:
        n = counts.get(message, 1)
        if n > 0:
            yield op, message, (*notes, f"{n - 1} more ops name it") if n > 1 else notes
        if message in counts:
            counts[message] = 0


def foreign_sharding(op: Operation) -> str | None:
    """Return the error message for an op or attribute of Shardy, or a partitioning attribute of
    XLA, which no pass would read; None without one."""
    if op_name(op).startswith("sdy."):
        return coded("L9", f"expected an op of shardir, got {op_name(op)}")
    own = op.name.startswith(OWN)  # our properties are checked when they are read
    if own and not op.attributes:
        return None
    for name, value in named_attributes(op.attributes if own else op.attributes | op.properties):
        if is_sharding(name, value):
            return coded("L9", f"expected a layout, got the attribute {name} = {value}")
    return None


def named_attributes(attributes: Mapping[str, Attribute]) -> Iterator[tuple[str, Attribute]]:
    """Yield attributes with their names, including nested ones in arrays and dictionaries."""
    todo: list[tuple[str, Attribute]] = [*attributes.items()]
    for name, value in todo:
        yield name, value
        if isinstance(value, DictionaryAttr):
            todo += value.data.items()
        elif isinstance(value, ArrayAttr):
            todo += [("", item) for item in value.data]


def is_sharding(name: str, value: Attribute) -> bool:
    """Whether an attribute of another language partitions values or computations."""
    if isinstance(value, IntegerAttr) and value.value.data == 1:
        return False  # one partition, one replica
    if OTHERS_SHARDING.search(name):
        return True
    kind = value.attr_name.data if isinstance(value, UnregisteredAttr) else value.name
    return kind.startswith("sdy.")


def foreign_value(op: Operation) -> str | None:
    """Return the error message for the first value with an invalid type: an argument or result of a
    function, or a result of an op in one. It is empty if only operands have invalid types, which
    their definitions report; None if all types are valid."""
    if isinstance(op, FuncOp):
        ends = (("argument", op.function_type.inputs), ("result", op.function_type.outputs))
        types = [(what, i, t) for what, types in ends for i, t in enumerate(types)]
    elif is_in_function(op):
        types = [("result", i, v.type) for i, v in enumerate(op.results)]
    else:
        return None
    for what, i, t in types:
        if (message := invalid_type_message(t)) is not None:
            return f"{what} {i}: {message}"
    return "" if any(invalid_type_message(v.type) is not None for v in op.operands) else None


def is_in_function(op: Operation) -> bool:
    parent = op.parent_op()
    while parent is not None and not isinstance(parent, FuncOp):
        parent = parent.parent_op()
    return parent is not None


def check_op(op: Operation) -> None:
    """Check an op against its definition. Raises VerifyException, ShardirError."""
    if type(op) is CallOp:
        check_call(op)
    elif type(op) is FuncOp:
        FUNCTION.verify(op)
        check_signature(op)
    else:
        op.verify_()


def check_call(op: CallOp) -> None:
    """Verify a call, with a faster lookup of the callee than xDSL's. Raises VerifyException."""
    CALL.verify(op)
    name, module = op.callee.string_value(), op.parent_op()
    while module is not None and not module.has_trait(SymbolTable, value_if_unregistered=False):
        module = module.parent_op()
    callee = None if module is None else find_symbol(module, FuncOp, name)
    if callee is None:
        raise VerifyException(f"expected a function @{name}, got none")
    ends = (
        ("operand", callee.function_type.inputs, op.arguments),
        ("result", callee.function_type.outputs, op.res),
    )
    for what, types, values in ends:
        if len(types) != len(values):
            message = f"expected {len(types)} {what}s of a call of @{name}, got {len(values)}"
            raise VerifyException(message)
        for i, (t, v) in enumerate(zip(types, values, strict=True)):
            if t != v.type:
                message = f"expected {what} {i} of a call of @{name} to be {t}, got {v.type}"
                raise VerifyException(message)


def check_signature(f: FuncOp) -> None:
    """Check the layouts of a function's arguments (used or not), their initial values, and that a
    step in stages terminates. Raises VerifyException, ShardirError."""
    block = f.body.blocks.first
    if block is not None and f.function_type.inputs.data != block.arg_types:
        raise VerifyException(
            "Expected entry block arguments to have the same types as the function input types"
        )
    for i, t in enumerate(f.function_type.inputs):
        check_type(f, t, f"argument {i}")
    check_initial_values(f)
    check_counts(f)
    check_stages(f)
    check_order(f)


def structure_error(op: Operation, lost: Incomplete) -> str | None:
    """Return an error of terminators, branches or block ends, as in `Operation.verify`."""
    block = op.parent
    region = None if block is None else block.parent
    if op.successors:
        if block is None or block.last_op is not op:
            return f"{op.name} branches, so it must end its block"
        if any(s.parent is not region for s in op.successors):
            return f"{op.name} branches to a block of another region"
    if (
        block is not None
        and region is not None
        and block.last_op is op
        and block not in lost.blocks
    ):
        parent = region.parent
        several = region.first_block is not region.last_block
        wants = several or (parent is not None and not parent.has_trait(NoTerminator))
        if wants and not op.has_trait(IsTerminator):
            return f"a block ends with a terminator such as func.return, not with {op.name}"
    for r in op.regions:
        first = r.first_block
        if (
            first is not None
            and first is r.last_block
            and first.first_op is None
            and first not in lost.blocks
            and not op.has_trait(NoTerminator)
        ):
            return f"the body of {op.name} is empty; it must end with a terminator"
    return None


def check_symbols(op: Operation, source: Source, report: Callable[..., None]) -> None:
    if op.regions and op.has_trait(SymbolTable):
        seen: dict[str, Operation] = {}
        for region in op.regions:
            for block in region.blocks:
                for inner in block.ops:
                    trait = inner.get_trait(SymbolOpInterface)
                    name = None if trait is None else trait.get_sym_attr_name(inner)
                    if name is None:
                        continue
                    if (first := seen.setdefault(name.data, inner)) is not inner:
                        note = source.at_op(first, "")
                        report(
                            inner,
                            f"expected a new name, got @{name.data}",
                            f"first at {note.location}",
                        )


def verify(module: ModuleOp, source: Source | None = None) -> None:
    """Raise ParseErrors with all errors of a module."""
    if errors := verify_all(module, source):
        raise ParseErrors(errors)
