"""Mutants of build: programs written in Python."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "flags that are False are given",
        "A flag of an op is set whatever its value.",
        "shardir/build/attributes.py",
        "_attribute",
        "return UnitAttr() if value else None",
        "return UnitAttr()",
        "test/build/test_building.py",
    ),
    Mutant(
        "an index keeps its dimension",
        "x[0] has as many dimensions as x.",
        "shardir/build/values.py",
        "Value.__getitem__",
        "start, limit, step = e.start, e.stop, 1",
        "start, limit, step = e.start, e.stop, 1\n                shape.append(1)",
        "test/build/test_building.py",
    ),
    Mutant(
        "numbers are f32 beside any value",
        "A number beside a value does not get its dtype.",
        "shardir/build/values.py",
        "OpScope.value",
        "self.constant(x, dtype=like.dtype)",
        "self.constant(x)",
        "test/build/test_building.py",
    ),
]
