"""The locations of ops in the source, and their names there."""

from xdsl.dialects.builtin import (
    ArrayAttr,
    CallSiteLoc,
    FileLineColLoc,
    FusedLoc,
    LocationAttr,
    NameLoc,
    StringAttr,
    UnregisteredOp,
)
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue


def file_name(name: str) -> StringAttr:
    """Return the name of a file in locations: IR is UTF-8, so a byte that is not is U+FFFD."""
    return StringAttr(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def op_name(op: Operation) -> str:
    """The name of an op in the text, also of a dialect that is not registered."""
    return op.op_name.data if isinstance(op, UnregisteredOp) else op.name


def file_location(loc: LocationAttr | Attribute) -> tuple[str, int, int] | None:
    """The file, line and column of a location, or of its first component that has one."""
    match loc:
        case FileLineColLoc():
            return loc.filename.data, loc.line.data, loc.column.data
        case NameLoc():
            return file_location(loc.location)
        case CallSiteLoc():
            return file_location(loc.callee) or file_location(loc.caller)
        case FusedLoc() if isinstance(loc.locations, ArrayAttr):
            return next((p for x in loc.locations.data if (p := file_location(x))), None)
        case _:
            return None


def at(item: Operation | BlockArgument) -> str:
    """` at net.ir:22`; empty without a location."""
    found = file_location(item.location)
    return f" at {found[0]}:{found[1]}" if found else ""


def short_location(item: Operation | BlockArgument) -> str:
    """`net.ir:22`, without folders, on one line in any case; empty without a location."""
    found = file_location(item.location)
    if not found:
        return ""
    name = found[0].rpartition("/")[2]
    return f"{''.join(c if c.isprintable() else '?' for c in name)}:{found[1]}"


def called(op: Operation) -> str:
    """`%y = nn.matmul at net.ir:22`; names are those of the source."""
    names = [f"%{v.name_hint}" for v in op.results if v.name_hint]
    return f"{', '.join(names)}{' = ' if names else ''}{op.name}{at(op)}"


def maker(v: SSAValue) -> str:
    """The op that defines a value, or the argument, with its location."""
    if isinstance(v, BlockArgument):
        return f"the argument %{v.name_hint or v.index}{at(v)}"
    assert isinstance(v.owner, Operation)
    return called(v.owner)
