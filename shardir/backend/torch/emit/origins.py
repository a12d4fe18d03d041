"""The origin of values, for comments: ops with their source lines."""

from functools import lru_cache
from pathlib import PurePath

from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.dialects.locations import file_location


def source_line(op: Operation) -> str:
    """The file and line of an op; empty without a location."""
    location = file_location(op.location)
    return f"{_file_name(location[0])}:{location[1]}" if location else ""


@lru_cache(maxsize=256)
def _file_name(path: str) -> str:
    return PurePath(path).name


def origin(v: SSAValue) -> str:
    """A value and the op that made it: nn.matmul %logits at digits.ir:15."""
    if isinstance(v, BlockArgument):
        return f"the argument %{v.name_hint or f'arg{v.index}'}"
    assert isinstance(v.owner, Operation)
    name = f" %{v.name_hint}" if v.name_hint else ""
    line = source_line(v.owner)
    return f"{v.owner.name}{name}{f' at {line}' if line else ''}"
