"""Trials: a copy of one function, lowered by a pipeline to be measured."""

from collections.abc import Callable

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.analysis.functions import name_of
from shardir.analysis.in_flight import named_or_smallest
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.train import (
    PIPELINE,
    SEARCH,
    ForwardOp,
    MicrobatchesOp,
    PipelineAttr,
    Request,
    StepOp,
    is_rule,
    pipeline_of,
)
from shardir.rewriting.copying import copied
from shardir.rewriting.registry import run_pipeline
from shardir.syntax.source import collect_warnings


def lowered(
    module: ModuleOp,
    f: FuncOp,
    write: Callable[[FuncOp], object],
    pipeline: str,
    in_stages: bool = False,
) -> list[FuncOp]:
    """Return the functions that a pipeline makes of a copy of a function, with what is requested of
    it and the rules of optimizers, and without the other functions of its module. `write` changes
    the copy before.

    Args:
        in_stages: whether a step in stages stays one. In place of a schedule that is to be found it
            has the named one with the fewest microbatches in flight.

    Raises:
        Failure: it can't be lowered.
    """
    requests = [op for op in module.body.ops if isinstance(op, Request)]
    names, others = {name_of(f)}, requests
    while found := [r for r in others if r.function.root_reference.data in names]:
        names.update(r.sym_name.data for r in found)
        others = [r for r in others if r not in found]
    functions = [g for g in module.body.ops if isinstance(g, FuncOp) and not is_rule(g)]
    called = {op.function for op in of_kind(ops_of(f.body.block), ManualOp)}
    left_out = {*others, *(g for g in functions if g is not f and g not in called)}
    trial = ModuleOp([copied(op) for op in module.body.ops if op not in left_out])
    for op in trial.body.ops:
        if in_stages and isinstance(op, FuncOp):
            _name_schedule(op)
        elif not in_stages:
            op.attributes.pop(PIPELINE, None)
            if isinstance(op, StepOp | ForwardOp):
                op.properties.pop("pipeline", None)
    copy = next(g for g in trial.body.ops if isinstance(g, FuncOp) and name_of(g) == name_of(f))
    write(copy)
    with collect_warnings():  # those of the program itself come when it is lowered
        run_pipeline(pipeline, Context(), trial)
    return [g for g in trial.body.ops if isinstance(g, FuncOp)]


def _name_schedule(f: FuncOp) -> None:
    """Request a named schedule of a step, in place of one that is to be found."""
    requested = pipeline_of(f)
    loop = next((op for op in f.walk() if isinstance(op, MicrobatchesOp)), None)
    if requested is not None and requested.kind == SEARCH and loop is not None:
        name, _ = named_or_smallest(requested, loop.runs)
        numbers = ", ".join(f"{key} = {n}" for key, n in requested.values.items())
        f.attributes[PIPELINE] = PipelineAttr.read(f"{name}, {numbers}")
