"""distributed-autodiff: `train.step` and `train.gradient` requests -> functions with a backward
part; `train.forward` requests -> the forward part alone, in a loop over microbatches.

    train.step @step of @loss <sgd, lr = 0.1>
 -> func.func @step(%x, %w) -> (loss, new %w) {
      forward part of @loss
      train.backward
      %d_w = ...                    cotangents, laid out
      %w_1 = train.sgd %w, %d_w
    }

The function may be in the global view, without layouts or with them, before or after
insert-redistributions; or in the local view, whose collectives are not changed. If only some values
have layouts, these stay for search-strategies, and new values have none.
`shardir/rewriting/autodiff` differentiates; this pass finds the functions and their views.

1. A cotangent's layout follows from the factors of the op that produces it: it is partial over
   each axis that splits a factor which the operand does not have.
2. The addends of a cotangent are added while partial. The sum is reduced once, where an op uses it,
   to the layout of the primal value. It passes unreduced through the transpose of an op that is
   linear in its only active operand, if the cotangent does not become larger.
3. The cotangent of a redistribution's result is the cotangent of its operand, in any layout: an
   all-gather pairs with a reduce-scatter or a slice, an all-to-all with its reverse, the reduction
   of a partial value with nothing. A propagation barrier with layouts is transparent too; without
   layouts the cotangent passes through a barrier of the opposite direction.
4. The redistribution of a parameter's gradient has the parameter's `train.fusion` index.
5. Composites are decomposed, and the decomposition is differentiated.
6. With `accumulate` forward and backward part are in a loop over the microbatches, which are in
   dimension 0 of each input. Ops that depend on no input are before the loop, unless they have the
   mark `recompute`; their transposes are after it. The contributions of all microbatches to a
   gradient are added before they are reduced. With `<tokens>` losses are divided by the mean of the
   denominators of all microbatches, which ops before the loop compute.
7. A forward part alone is in such a loop too. Float scalars among its results are the mean (or the
   sum) over the microbatches; other results are stacked in a new dimension 0. States pass from one
   microbatch to the next.
8. In a function that is no step, the ops that read the number of tokens of a mean result have the
   mark `train.weighs`: the number is the result's weight in a mean over several batches.
9. With `separate_update` the backward part adds the gradients to states, `w.gradient`, each loss
   with the weight `step.weight`; the function `step_update` updates the parameters.
10. A parameter with a rule (shardir/dialects/train/rules.py) is updated by the ops of the rule.
11. A private function that nothing else uses is erased; any other stays.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Region

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import is_laid_out, is_local_body, mesh_among, name_of
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure, coded
from shardir.dialects.blocks import ops_in, ops_of
from shardir.dialects.dist import meshes_of
from shardir.dialects.nn.losses import Loss
from shardir.dialects.symbols import fixed_symbols
from shardir.dialects.train import (
    BackwardOp,
    ForwardOp,
    GradientOp,
    Request,
    StepOp,
    arguments,
    is_step,
)
from shardir.rewriting.autodiff.forward import ForwardFunction
from shardir.rewriting.autodiff.function import Differentiation
from shardir.rewriting.autodiff.rules import erase_unused_rules
from shardir.rewriting.autodiff.tokens import mark_weights, means_of
from shardir.rewriting.bases import collect_all, collect_errors
from shardir.rewriting.composites import expand, warn_of_lost_strategies
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies, update_signature
from shardir.rewriting.lowering import lift, lower
from shardir.rewriting.options import PassOptions
from shardir.rewriting.rewriter import erase


@dataclass(frozen=True)
class DistributedAutodiff(PassOptions):
    """Differentiates functions, laid out or not, and adds the optimizer's updates."""

    name = "distributed-autodiff"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        requests: list[Request] = [o for o in op.body.ops if isinstance(o, Request)]
        ordered: dict[Request, None] = {}

        def put_in_order() -> None:
            with fixed_symbols():
                collect_errors(requests, lambda r: ordered.update(chain_of(r)))

        existing = [f for f, _ in bodies(op)]
        collect_all(put_in_order, lambda: differentiate_all(op, list(ordered)))
        erase_unused_rules(op)
        weigh_all(op, [f for f in existing if f.parent is not None])


def differentiate_all(module: ModuleOp, requests: Sequence[Request]) -> None:
    """Replace the requests by their functions, in order.

    Raises:
        Failure: the errors of all functions that can't be differentiated.
    """
    uses = Counter(r.function.root_reference.data for r in requests)
    called, meshes = called_functions(module), meshes_of(module)
    functions = {name_of(f): f for f in module.body.ops if isinstance(f, FuncOp) and f.body.blocks}
    missing, owners = {r.sym_name.data for r in requests}, dict[str, StepOp]()

    def differentiate(request: Request) -> None:
        name = request.function.root_reference.data
        uses[name] -= 1
        if isinstance(request, GradientOp) and name in missing:
            return  # its function could not be differentiated
        source = functions.get(name) or request.find()
        private = source.sym_visibility is not None and source.sym_visibility.data == "private"
        consumed = private and not uses[name] and name not in called
        mesh = mesh_among(source, ops_of(source.body.block), meshes)
        function, *others = make_functions(request, source, mesh, consumed)
        module.body.block.insert_ops_before([function, *others], request)
        functions[name_of(function)] = function
        missing.remove(name_of(function))
        if isinstance(request, StepOp):
            for f in (function, *others):
                check_states(request, source, f, owners)
        erase(request)
        if consumed:
            erase(source)

    collect_errors(requests, differentiate)


def check_states(request: StepOp, source: FuncOp, step: FuncOp, owners: dict[str, StepOp]) -> None:
    """Raise Failure if a step has states of an optimizer that another step has too.

    Args:
        source: the function of the loss.
        step: the function of the step.
        owners: the first step that has each state of an optimizer, by key.
    """
    own = {a.key for a in arguments(source)}
    for key in (a.key for a in arguments(step) if a.key is not None and a.key not in own):
        first = owners.setdefault(key, request)
        steps = f"of @{request.sym_name.data} and @{first.sym_name.data}"
        if first is not request and request.states is None:
            message = f"expected states of their own, or shared ones, {steps}, got {key} of both"
            raise Failure([(request, coded("G19", message))])
        if first.optimizer.kind != request.optimizer.kind:
            kinds = f"{first.optimizer.kind} and {request.optimizer.kind}"
            message = f"expected one optimizer {steps}, which share {key}, got {kinds}"
            raise Failure([(request, coded("G19", message))])


def weigh_all(module: ModuleOp, functions: Sequence[FuncOp]) -> None:
    """Mark the numbers of tokens of the results of public functions, except steps."""
    meshes = meshes_of(module)
    for f in functions:
        private = f.sym_visibility is not None and f.sym_visibility.data == "private"
        block = f.body.block
        if private or is_step(f):
            continue
        mesh = mesh_among(f, ops_of(block), meshes) if is_laid_out(block) else None
        local_types = {} if mesh is None else lift(block, mesh)
        if any(isinstance(op, Loss) and "ignore" in op.properties for op in block.ops):
            expand(block, mesh, Loss)
        mark_weights(f, means_of(f), block.last_op.operands if block.last_op is not None else [])
        for v, t in local_types.items():
            set_type(v, t)


def chain_of(request: Request) -> dict[Request, None]:
    """Return the requests that make a request's function, in order, and the request.

    Raises:
        Failure: the function is made from the request itself.
    """
    chain = [request]
    while isinstance(last := chain[-1], GradientOp) and (maker := last.maker()) is not None:
        if maker in chain:
            name = request.sym_name.data
            message = f"expected a gradient of another function, got @{name} of itself"
            raise Failure([(request, coded("G1", message))])
        chain.append(maker)
    return dict.fromkeys(reversed(chain))


def called_functions(module: ModuleOp) -> set[str]:
    """Return the names of the functions that are called."""
    return {op.callee.root_reference.data for op in ops_in(module) if isinstance(op, CallOp)}


def make_functions(
    request: Request, source: FuncOp, mesh: Mesh | None, consumed: bool
) -> list[FuncOp]:
    """Return the function that a request names, and that of a separate update. They are in the
    local view if the source is.

    Raises:
        Failure: the function can't be differentiated.
    """
    block = take_body(source, consumed)
    is_local = mesh is not None and is_local_body(block)
    local_types = lift(block, mesh) if mesh is not None and is_local else {}
    laid_out_on = mesh if is_laid_out(block) else None
    if isinstance(request, ForwardOp):
        expand(block, laid_out_on, Loss)  # shows the denominators of means
        builder = ForwardFunction(request, source, block, laid_out_on)
    else:
        if laid_out_on is None:
            warn_of_lost_strategies(block)
        expand(block, laid_out_on)
        builder = Differentiation(request, source, block, laid_out_on)
    builder.run()
    if laid_out_on is not None and is_local:
        lower(block, laid_out_on)
        for v, t in local_types.items():
            set_type(v, t)
    functions = builder.functions()
    for update in functions[1:]:
        if laid_out_on is not None and is_local:
            lower(update.body.block, laid_out_on)
            update_signature(update)
    return functions


def take_body(source: FuncOp, consumed: bool) -> Block:
    """Return the body of a function, or a copy if the function stays; a backward part joins the
    forward part."""
    if consumed:
        block = source.detach_region(source.body).block
        source.add_region(Region(Block(arg_types=source.function_type.inputs)))
    else:
        copy = copied(source)
        block = copy.detach_region(copy.body).block
    for op in [op for op in block.ops if isinstance(op, BackwardOp)]:
        erase(op)
    return block
