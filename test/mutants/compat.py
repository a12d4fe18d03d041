"""Mutants of compat: what is private in xDSL and in torch."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "the uses of an op have one index",
        "All uses of a new op are those of its first operand.",
        "shardir/compat/xdsl.py",
        "give_operands",
        "tuple([Use(op, i) for i",
        "tuple([Use(op, 0) for i",
        "test/dialects/test_creation.py",
    ),
    Mutant(
        "a program that writes is functional",
        "A program that writes in place is not traced again without its writes.",
        "shardir/compat/torch.py",
        "_is_functional",
        "not target._schema.is_mutable and",
        "",
        "test/frontends/test_writes.py",
    ),
    Mutant(
        "a program within autocast is functional",
        "The conversions of an autocast around the module are left out.",
        "shardir/compat/torch.py",
        "functionalize",
        "not torch._C._is_any_autocast_enabled()",
        "True",
        "test/frontends/test_regions.py",
    ),
]
