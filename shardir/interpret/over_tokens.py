"""Means over tokens in microbatches: the denominators of a function become arguments.

    %n = nn.reduce <sum> %mask                    %n = nn.reduce <sum> %mask
    %loss = nn.div %total, %n                     %mean_n = nn.mul %all_n, %half
    func.return %loss                      ->     %loss = nn.div %total, %mean_n
                                                  func.return %loss, %n

A first evaluation of each microbatch returns its %n. A second one takes their sum %all_n, and
returns the results whose means are the results of the step.
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
        """The sums and means in denominators, with their kinds. The function returns them too."""
        self.totals: list[Array] = []
        """The totals of `sums` over all microbatches."""
        accumulate = request.accumulate
        f = function(module, self.name)
        self.results = len(f.function_type.outputs)
        if accumulate is None or accumulate.kind != "tokens" or is_local_function(f):
            return
        self.module = copied(module)
        f = function(self.module, self.name)
        expand(f.body.block, None)
        self.sums = _Totals.add_to(f, request.microbatches).sums
        self.totals = [np.ones(()) for _ in self.sums]

    def count(self, microbatches: Iterable[Sequence[Array]]) -> None:
        """Compute the totals over all microbatches from their arguments."""
        if not self.sums:
            return
        parts = [run(self.module, self.name, [*m, *self.totals]) for m in microbatches]
        for i, (_, kind) in enumerate(self.sums):
            terms = [float(outs[self.results + i].item()) for outs in parts]
            self.totals[i] = np.asarray(sum(terms) / (len(terms) if kind == "mean" else 1))

    def run(self, arguments: Sequence[Array]) -> list[Array]:
        """Return the results of a microbatch."""
        return run(self.module, self.name, [*arguments, *self.totals])[: self.results]


class _Totals(Denominators):
    """Denominators computed from totals that are arguments."""

    def __init__(self, block: Block, means: TokenMeans, count: int):
        super().__init__(Rewriter(None), means, {v: v for v in means.inputs}, count)
        self.block, self.sums = block, list[tuple[SSAValue, str]]()

    @staticmethod
    def add_to(f: FuncOp, count: int) -> "_Totals":
        """Add the totals to the arguments of a function, and the sums to its results."""
        block = f.body.block
        last, means = block.last_op, means_of(f)
        assert last is not None
        totals = _Totals(block, means, count)
        divide_by_tokens(means, totals)
        last.operands = [*last.operands, *(v for v, _ in totals.sums)]
        update_signature(f)
        return totals

    def mean(self, token_mean: TokenMean) -> SSAValue:
        self.b.before(token_mean.op)
        return super().mean(token_mean)

    def total(self, v: SSAValue, kind: str) -> SSAValue:
        t = unsharded_type(v)
        self.sums.append((v, kind))
        arg = self.block.insert_arg(tensor(t.element_type, ()), len(self.block.args))
        return self.b.widen(arg)
