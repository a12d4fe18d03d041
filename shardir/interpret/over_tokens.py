"""The function of a step, or of a forward part, over tokens: with the totals of denominators given.

    %n = nn.reduce <sum> %mask                    %n = nn.reduce <sum> %mask
    %loss = nn.div %total, %n                     %mean_n = nn.mul %all_n, %half
    func.return %loss                      ->     %loss = nn.div %total, %mean_n
                                                  func.return %loss, %n

A first evaluation of each microbatch has its %n; a second one, to which the sum of these is given,
the results whose means are those of the step.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.dialects import train
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret.evaluator import function, is_local_function, run
from shardir.rewriting.autodiff.tokens import (
    Denominators,
    TokenMean,
    TokenMeans,
    divide_by_tokens,
    means_of,
)
from shardir.rewriting.composites import expand
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import Rewriter


class MicrobatchFunction:
    """The function of a request, on microbatches."""

    def __init__(self, request: train.StepOp | train.ForwardOp, module: ModuleOp):
        self.module, self.name = module, request.function.root_reference.data
        self.sums: list[tuple[SSAValue, str]] = []
        """The sums and means that make denominators, which the function returns too."""
        self.given: list[Array] = []
        """Their totals."""
        several = request.accumulate
        f = function(module, self.name)
        self.results = len(f.function_type.outputs)
        if several is None or several.kind != "tokens" or is_local_function(f):
            return
        self.module = copied(module)
        f = function(self.module, self.name)
        expand(f.body.block, None)
        self.sums = _Totals.given_to(f, request.microbatches).sums
        self.given = [np.ones(()) for _ in self.sums]

    def count(self, microbatches: Iterable[Sequence[Array]]) -> None:
        """Find the totals of all microbatches, from the arguments of each."""
        if not self.sums:
            return
        parts = [run(self.module, self.name, [*m, *self.given]) for m in microbatches]
        for i, (_, kind) in enumerate(self.sums):
            each = [float(outs[self.results + i].item()) for outs in parts]
            self.given[i] = np.asarray(sum(each) / (len(each) if kind == "mean" else 1))

    def run(self, arguments: Sequence[Array]) -> list[Array]:
        """Return the results of a microbatch."""
        return run(self.module, self.name, [*arguments, *self.given])[: self.results]


class _Totals(Denominators):
    """Denominators made of totals that are arguments."""

    def __init__(self, block: Block, means: TokenMeans, count: int):
        super().__init__(Rewriter(None), means, {v: v for v in means.inputs}, count)
        self.block, self.sums = block, list[tuple[SSAValue, str]]()

    @staticmethod
    def given_to(f: FuncOp, count: int) -> "_Totals":
        """Let a function have totals as arguments, and return the sums that make them."""
        block = f.body.block
        last, means = block.last_op, means_of(f)
        assert last is not None
        found = _Totals(block, means, count)
        divide_by_tokens(means, found)
        last.operands = [*last.operands, *(v for v, _ in found.sums)]
        update_signature(f)
        return found

    def mean(self, token_mean: TokenMean) -> SSAValue:
        self.b.before(token_mean.op)
        return super().mean(token_mean)

    def total(self, v: SSAValue, kind: str) -> SSAValue:
        t = unsharded_type(v)
        self.sums.append((v, kind))
        arg = self.block.insert_arg(tensor(t.element_type, ()), len(self.block.args))
        return self.b.widen(arg)
