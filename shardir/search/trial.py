"""Trials: a copy of one function, lowered by a pipeline to be measured."""

from collections.abc import Callable

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.analysis.functions import name_of
from shardir.dialects.train import PIPELINE, ForwardOp, Request, StepOp
from shardir.rewriting import nested
from shardir.rewriting.copying import copied
from shardir.syntax.source import collect_warnings


def lowered(
    module: ModuleOp, f: FuncOp, write: Callable[[FuncOp], object], pipeline: str
) -> list[FuncOp]:
    """Return the functions that a pipeline makes of a copy of a function, with what is requested of
    it, and without the other functions of its module. `write` changes the copy before.

    Raises:
        Failure: it can't be lowered.
    """
    requests = [op for op in module.body.ops if isinstance(op, Request)]
    names, others = {name_of(f)}, requests
    while found := [r for r in others if r.function.root_reference.data in names]:
        names.update(r.sym_name.data for r in found)
        others = [r for r in others if r not in found]
    left_out = {*others, *(g for g in module.body.ops if isinstance(g, FuncOp) and g is not f)}
    trial = ModuleOp([copied(op) for op in module.body.ops if op not in left_out])
    for op in trial.body.ops:  # it is measured as a step of one stage
        op.attributes.pop(PIPELINE, None)
        if isinstance(op, StepOp | ForwardOp):
            op.properties.pop("pipeline", None)
    copy = next(g for g in trial.body.ops if isinstance(g, FuncOp))
    write(copy)
    with collect_warnings():  # those of the program itself come when it is lowered
        nested.run(pipeline, Context(), trial)
    return [g for g in trial.body.ops if isinstance(g, FuncOp)]
