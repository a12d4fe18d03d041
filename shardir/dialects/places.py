"""Where in the source an op comes from."""

from xdsl.dialects.builtin import (
    ArrayAttr,
    CallSiteLoc,
    FileLineColLoc,
    FusedLoc,
    LocationAttr,
    NameLoc,
)
from xdsl.ir import Attribute


def file_place(loc: LocationAttr | Attribute) -> tuple[str, int, int] | None:
    """The file, line and column of a location, or of the first part of it that has one."""
    match loc:
        case FileLineColLoc():
            return loc.filename.data, loc.line.data, loc.column.data
        case NameLoc():
            return file_place(loc.location)
        case CallSiteLoc():
            return file_place(loc.callee) or file_place(loc.caller)
        case FusedLoc() if isinstance(loc.locations, ArrayAttr):
            return next((p for x in loc.locations.data if (p := file_place(x))), None)
        case _:
            return None
