"""Where in the source an op comes from, and what it is called there."""

from xdsl.dialects.builtin import (
    ArrayAttr,
    CallSiteLoc,
    FileLineColLoc,
    FusedLoc,
    LocationAttr,
    NameLoc,
)
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue


def file_location(loc: LocationAttr | Attribute) -> tuple[str, int, int] | None:
    """The file, line and column of a location, or of the first part of it that has one."""
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


def at(what: Operation | BlockArgument) -> str:
    """` at net.ir:22`; empty where nothing is known."""
    place = file_location(what.location)
    return f" at {place[0]}:{place[1]}" if place else ""


def short_location(what: Operation | BlockArgument) -> str:
    """`net.ir:22`, without folders, on one line whatever the file is called; empty where nothing is
    known."""
    place = file_location(what.location)
    if not place:
        return ""
    name = place[0].rpartition("/")[2]
    return f"{''.join(c if c.isprintable() else '?' for c in name)}:{place[1]}"


def called(op: Operation) -> str:
    """`%y = nn.matmul at net.ir:22`; names are those of the source."""
    names = [f"%{v.name_hint}" for v in op.results if v.name_hint]
    return f"{', '.join(names)}{' = ' if names else ''}{op.name}{at(op)}"


def maker(v: SSAValue) -> str:
    """The op that makes a value, or the argument that it is."""
    if isinstance(v, BlockArgument):
        return f"the argument %{v.name_hint or v.index}{at(v)}"
    assert isinstance(v.owner, Operation)
    return called(v.owner)
