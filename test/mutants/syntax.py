"""Mutants of syntax: the parser, the printer and the verifier."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "columns count from 0",
        "The column of a location is one too low.",
        "shardir/syntax/source.py",
        "self._int(pos - starts[line] + 1))",
        "self._int(pos - starts[line]))",
        "test/syntax/test_parser.py::test_locations",
    ),
    Mutant(
        "names of values are lost",
        "The printer numbers all values.",
        "shardir/syntax/printer.py",
        "self.new_name(value.name_hint)",
        "self.new_name(None)",
        "test/syntax/test_parser.py::test_names_are_kept",
    ),
    Mutant(
        "a missing mesh is reported at each use",
        "An undeclared mesh is an error at each op that names it.",
        "shardir/syntax/verify.py",
        "counts[message] = 0",
        "counts[message] = n",
        "test/syntax/test_syntax_errors.py -k missing_mesh",
    ),
    Mutant(
        "dominance within a block is not checked",
        "A value may be used before its op.",
        "shardir/syntax/dominance.py",
        "if id(operand) not in seen:",
        "if False:",
        "test/syntax/test_syntax_errors.py::test_dominance",
    ),
    Mutant(
        "errors are in the order of ops",
        "Diagnostics are not sorted by their location.",
        "shardir/syntax/verify.py",
        "return sorted(found, key=lambda d: (d.line, d.column))",
        "return found[::-1]",
        "test/syntax/test_syntax_errors.py -k order_of_the_text",
    ),
    Mutant(
        "each encoding is an alias",
        "A layout that one value has is printed as an alias.",
        "shardir/syntax/printer.py",
        "        if n > 1:\n            word",
        "        if n > 0:\n            word",
        "test/syntax/test_syntax_printer.py::test_aliases",
    ),
    Mutant(
        "hexadecimal elements of floats are integers",
        "dense<0xff800000>, as -inf is printed, is 4.28e9 where it is read again.",
        "shardir/syntax/leaf_reductions.py",
        "not in content or content.startswith",
        "not in content or content or content.startswith",
        "test/syntax/test_syntax_printer.py::test_special_floats",
    ),
    Mutant(
        "the rules of ops are those of others",
        "The file of the rules of ops is not named by the definitions of the ops.",
        "shardir/syntax/op_rules.py",
        "[_definition(op) for op in ops]",
        "[op.name for op in ops]",
        "test/syntax/test_tables.py",
    ),
]
