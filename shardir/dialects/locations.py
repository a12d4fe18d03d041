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
    """Return the name of a file for locations. IR is UTF-8: other bytes become U+FFFD."""
    return StringAttr(name.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))


def op_name(op: Operation) -> str:
    """The name of an op in the text, even if its dialect is not registered."""
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


def location_suffix(item: Operation | BlockArgument, short: bool = False) -> str:
    """` at net.ir:22`, if `short` without folders; empty without a location."""
    if short:
        return f" at {place}" if (place := short_location(item)) else ""
    location = file_location(item.location)
    return f" at {location[0]}:{location[1]}" if location else ""


def short_location(item: Operation | BlockArgument) -> str:
    """`net.ir:22`, without folders, always on one line; empty without a location."""
    location = file_location(item.location)
    if not location:
        return ""
    name = location[0].rpartition("/")[2]
    return f"{''.join(c if c.isprintable() else '?' for c in name)}:{location[1]}"


def describe_op(op: Operation, short: bool = False) -> str:
    """`%y = nn.matmul at net.ir:22`, with the names of the source; if `short` without folders."""
    names = [f"%{v.name_hint}" for v in op.results if v.name_hint]
    return f"{', '.join(names)}{' = ' if names else ''}{op.name}{location_suffix(op, short)}"


def describe_maker(v: SSAValue, short: bool = False) -> str:
    """The op that defines a value, or the argument, with its location."""
    if isinstance(v, BlockArgument):
        return f"the argument %{v.name_hint or v.index}{location_suffix(v, short)}"
    assert isinstance(v.owner, Operation)
    return describe_op(v.owner, short)
