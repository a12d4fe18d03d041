"""Ops that make denominators, for all microbatches at once: as for each alone."""

from functools import cache
from itertools import product

import numpy as np
from op_cases import CASES, Case
from support.harness import Array, differs, elements_of, function, numbers, program
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.diagnostics import Failure
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret import run
from shardir.rewriting.autodiff.tokens import STACKABLE, Denominators, TokenMeans
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter

COUNT = 3


def _stack(f: FuncOp, counted: list[bool]) -> None:
    """Let a function of one op return what this makes of `counted` arguments of all microbatches,
    which are further arguments, too."""
    block = f.body.block
    (op, last) = block.ops
    inputs = [v for v, c in zip(block.args, counted, strict=True) if c]
    means = TokenMeans([], [op], inputs, [], [], [])
    stacked: dict[SSAValue, SSAValue] = {}
    for v in inputs:
        t = unsharded_type(v)
        shape = (COUNT, *t.get_shape())
        stacked[v] = block.insert_arg(tensor(t.element_type, shape), len(block.args))
    made = Denominators(Rewriter().before(last), means, stacked, COUNT)
    last.operands = [*last.operands, *map(made.stacked, op.results)]
    update_signature(f)


def _errors(case: Case, counted: list[bool]) -> list[str]:
    element = case.elements[0]
    args = case.args(element)
    module = program(args, case.body(element))
    f, rng = function(module, "f"), np.random.default_rng(0)
    kinds = [*case.kinds, *["normal"] * (len(args) - len(case.kinds))]

    def draw() -> list[Array]:
        return [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]

    parts, shared = [draw() for _ in range(COUNT)], draw()
    parts = [[x if c else y for x, y, c in zip(part, shared, counted, strict=True)]
             for part in parts]  # fmt: skip
    _stack(f, counted)
    stacks = [np.stack(xs) for xs, c in zip(zip(*parts, strict=True), counted, strict=True) if c]
    found, errors = [run(module, "f", [*part, *stacks]) for part in parts], list[str]()
    count = len(found[0]) // 2
    for (k, outs), i in product(enumerate(found), range(count)):
        wanted, elements = outs[i], elements_of(f.function_type.outputs.data)
        if message := differs(outs[count + i][k], wanted, elements[i]):
            errors.append(f"{case}, {counted}, part {k}, result {i}: {message}")
    return errors


@cache
def _kinds() -> dict[type[TensorOp], list[Case]]:
    found: dict[type[TensorOp], list[Case]] = {}
    for case in CASES:
        found.setdefault(case.op, []).append(case)
    return found


STACKED = [
    op for op in _kinds()
    if issubclass(op, (Elementwise, *STACKABLE)) and op.name.startswith("nn.")
]  # fmt: skip


def test_ops_for_all_microbatches_at_once_are_those_for_each() -> None:
    """Of all operands, or of some; random numbers of each microbatch are its own, and refused."""
    assert {*STACKABLE} <= {*STACKED}
    errors = list[str]()
    for op in STACKED:
        refused = "stream" in {n for case in _kinds()[op] for n in case.props}
        for case in _kinds()[op]:
            n = len(case.operands)
            for counted in {
                (True,) * n,
                (True,) + (False,) * (n - 1),
                (False,) * (n - 1) + (True,),
            }:
                try:
                    errors += _errors(case, [*counted])
                except Failure as e:
                    errors += [] if refused else [f"{case}: {e}"]
    assert not errors, "\n".join(errors[:10])
