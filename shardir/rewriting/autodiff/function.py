"""The request for a step or a gradient -> the body of its function.

   train.step @step of @loss <sgd, lr = 0.1>
-> (%x, %w) {
     forward part of @loss
     train.backward
     %d_w = ...
     train.update
     %w_1 = train.sgd %w, %d_w
     func.return %loss, %w_1
   }
"""

from xdsl.dialects.builtin import AnyFloat, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import name_of
from shardir.analysis.roles import differentiated_arguments
from shardir.diagnostics import Failure, Located
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import RedistributeOp, layout_of, module_of
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    PIPELINE,
    RULE,
    STATE_LAYOUT,
    STATES,
    SYNC,
    BackwardOp,
    Request,
    StepOp,
    UpdateOp,
    arg_attrs,
    gradient_arguments,
    mark_step,
    metric_attrs,
    metric_names,
    remove_annotations,
    result_attrs,
    updated_arguments,
    updates_attrs,
)
from shardir.rewriting.autodiff.arguments import ArgAttributes, Arguments
from shardir.rewriting.autodiff.backward import BackwardPart
from shardir.rewriting.autodiff.manual import ManualGradients
from shardir.rewriting.autodiff.microbatches import add_loop
from shardir.rewriting.autodiff.saved_results import add_saved_results
from shardir.rewriting.autodiff.separate_update import summed, update_function
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.hoisting import hoist_redistributions
from shardir.rewriting.rewriter import Rewriter, erase

MaybeGradients = dict[int, SSAValue | None]
"""Gradients by the index of the argument; None if no result depends on it."""


class Differentiation:
    """The differentiation of a function with the body `block`, in place."""

    def __init__(self, request: Request, source: FuncOp, block: Block, mesh: Mesh | None):
        """`mesh`: the mesh of a body with layouts, otherwise None."""
        self.request, self.source, self.block = request, source, block
        self.arguments = Arguments(block, arg_attrs(source))
        self.result_attributes: list[ArgAttributes] = result_attrs(source)
        is_step = isinstance(request, StepOp)
        updated, metrics = updated_arguments(source), metric_names(source)
        self.given = gradient_arguments(source) if is_step else [None] * len(updated)
        """For each result the index of the argument whose gradient it is, or None; a step does not
        return gradients."""
        if is_step:
            kept = [at for at, i in enumerate(self.given) if i is None]
            self.result_attributes = [self.result_attributes[at] for at in kept]
            updated, metrics = [updated[at] for at in kept], [metrics[at] for at in kept]
        self.updated = updated if is_step else [None] * len(updated)
        """For each result the index of the state or parameter that it updates, or None; updates
        have no cotangents."""
        self.metrics = metrics
        """For each result its name as a metric, or None; metrics have no cotangents."""
        self.update: FuncOp | None = None
        """The function of a separate update."""
        self.differentiated = self.differentiated_arguments()
        self.builder = Rewriter(mesh, block)
        self.builder.location = request.location
        module = module_of(request)
        assert isinstance(module, ModuleOp)
        self.manual = ManualGradients(module)
        self.backward = BackwardPart(
            request, self.arguments, self.builder, self.differentiated, self.updated, metrics
        )
        self.backward.transposition.manual = self.manual.of_op

    def differentiated_arguments(self) -> list[int]:
        """Return the indices of the arguments with respect to which the function is differentiated.

        Raises:
            Failure: an argument is not a float tensor.
        """
        annotations = map(self.arguments.annotation, range(len(self.arguments.attributes)))
        indices = differentiated_arguments(self.request, list(annotations))
        errors: list[Located] = []
        for i in indices:
            t = self.arguments[i].type
            if not (isinstance(t, TensorType) and isinstance(t.element_type, AnyFloat)):
                message = (
                    f"expected argument {i} of @{name_of(self.source)} of a float type, got {t}"
                )
                errors.append((self.request, f"{message}; differentiate with respect to others"))
        if errors:
            raise Failure(errors)
        return indices

    def run(self) -> None:
        """Add the backward part, and return the requested results."""
        self.backward.activity.match(self.block.ops)
        add_saved_results(self.block, self.backward.activity)
        self.manual.save(self.block, self.backward.activity)
        last = self.block.last_op
        assert isinstance(last, ReturnOp)
        pairs = list(zip(last.operands, self.given, strict=True))
        returned = [v for v, i in pairs if i is None]
        self.block.erase_op(last)
        self.backward.given = {i: _undo_redistribution(v) for v, i in pairs if i is not None}
        forward = ops_of(self.block)
        step = self.backward.step
        if step is not None and step.is_loop:
            returned = add_loop(self.backward, step, forward, returned)
        else:
            self.backward.add(forward, returned)
        gradients = {i: self.gradient(i) for i in self.differentiated}
        self.builder.location = self.request.location
        if step is not None:
            results = self.step_results(step, returned, gradients)
        else:
            results = [*returned, *(self.or_zeros(i, g) for i, g in gradients.items())]
            self.result_attributes = [{} for _ in results]
        self.block.add_op(ReturnOp(*results))
        self.erase_unused()
        self.manual.erase_replaced(self.block)
        hoist_redistributions(self.block)

    def gradient(self, i: int) -> SSAValue | None:
        """Return the gradient of argument i, communicated with the gradients of its fusion index.
        In a step it has the layout of the parameter's states."""
        is_step = isinstance(self.request, StepOp)
        target = self.arguments.state_layout(i, self.builder.mesh) if is_step else None
        gradient = self.backward.cotangents.sum(self.arguments[i], target=target)
        moved = gradient.owner if gradient is not None else None
        index = self.arguments.annotation(i).fusion
        if isinstance(moved, RedistributeOp) and index is not None:
            moved.properties["fusion"] = index
        step = self.backward.step
        if gradient is None or i not in self.backward.given or step is None or not step.scales:
            return gradient
        return self.builder.mul(gradient, step.seed(unsharded_type(gradient).element_type))

    def or_zeros(self, i: int, gradient: SSAValue | None) -> SSAValue:
        """Return the gradient of argument i; zeros if no result depends on it."""
        if gradient is not None:
            return gradient
        arg = self.arguments[i]
        zeros = self.builder.zeros(unsharded_type(arg), like=arg)
        layout = layout_of(arg)
        return zeros if layout is None else self.builder.redistribute(zeros, layout)

    def step_results(
        self, step: TrainStep, returned: list[SSAValue], gradients: MaybeGradients
    ) -> list[SSAValue]:
        """Return the results of a step. `returned`: the values that the function returns; the loss
        is the sum over all microbatches."""
        returned = [
            v if state is not None else step.loss(v) if metric is None else step.mean(v)
            for v, state, metric in zip(returned, self.updated, self.metrics, strict=True)
        ]
        self.block.add_op(UpdateOp.create(location=self.request.location))
        self.builder.stays = True
        if step.request.separate_update is not None:
            return self.separate_results(step, returned, gradients)
        written = {i: v for v, i in zip(returned, self.updated, strict=True) if i in gradients}
        updates = step.update(gradients, written)
        remaining = [at for at, i in enumerate(self.updated) if i not in written]
        results = [
            returned[at] if (i := self.updated[at]) is None
            else step.select_new(self.arguments[i], returned[at])
            for at in remaining
        ]  # fmt: skip
        self.result_attributes = [self.result_attributes[at] for at in remaining]
        self.result_attributes += [updates_attrs(key) for _, key in updates]
        self.result_attributes += [metric_attrs(name) for _, name in step.metrics]
        return [*results, *(v for v, _ in (*updates, *step.metrics))]

    def separate_results(
        self, step: TrainStep, returned: list[SSAValue], gradients: MaybeGradients
    ) -> list[SSAValue]:
        """Return the results of the backward part of a step, and make the function of its
        update."""
        results = [
            v if i is None else step.select_new(self.arguments[i], v)
            for v, i in zip(returned, self.updated, strict=True)
        ]
        sums = summed(step, gradients)
        self.result_attributes += [updates_attrs(key) for _, key in sums]
        mesh = self.builder.mesh
        self.update = update_function(step.request, self.arguments, gradients, mesh)
        return [*results, *(value for value, _ in sums)]

    def erase_unused(self) -> None:
        """Erase the ops of the backward part without uses, such as the cotangents of inputs."""
        op = self.block.last_op
        first = next(op for op in self.block.ops if isinstance(op, BackwardOp))
        while op is not None and op is not first:
            before = op.prev_op
            if op.results and all(v.first_use is None for v in op.results):
                self.block.erase_op(op)
            op = before

    def functions(self) -> list[FuncOp]:
        """Return the function with the block as its body, and that of a separate update."""
        f = self.arguments.as_function(self.request, self.result_attributes)
        functions = [f] if self.update is None else [f, self.update]
        for g in functions:
            remove_annotations(g, STATE_LAYOUT, RULE)  # the types and ops of the states have them
        if isinstance(self.request, StepOp):
            mark_step(f)
            for name, requested in (
                (SYNC, self.request.sync), (PIPELINE, self.request.pipeline),
                (STATES, self.request.states),
            ):  # fmt: skip
                if requested is not None:
                    f.attributes[name] = requested
        return functions


def _undo_redistribution(v: SSAValue) -> SSAValue:
    """Return a value in the layout in which it is made, if it is only redistributed for the return:
    partial gradients of several microbatches are added before they are reduced."""
    op = v.owner
    if not isinstance(op, RedistributeOp) or v.first_use is not None:
        return v
    made = op.value
    erase(op)
    return made
