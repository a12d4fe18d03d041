"""A step in two functions: the backward part adds gradients to states, the update part reads them.

    train.step @step of @loss <adam, lr = 0.1> separate_update
 -> func.func @step(%x, %w, %w_gradient, %loss_weight) -> (loss, %w_gradient + %loss_weight * d_w)
    func.func @step_update(%w, %w_gradient, ...) -> (new %w, 0, ...)

The loop of the user calls the first once or several times, and then the second.
"""

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects import train
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.rewriter import Rewriter


def gradient_sum(step: TrainStep, i: int, like: TensorType) -> tuple[SSAValue, str]:
    """Add the state with the sum of the gradients of parameter i; return it and its key.

    Args:
        like: the type of a gradient.
    """
    return step.add_state(i, train.SUM, range(len(like.get_shape())), 0.0, like.element_type)


def summed(step: TrainStep, gradients: dict[int, SSAValue | None]) -> list[tuple[SSAValue, str]]:
    """Return the new sums of gradients, without the loss scale, by the indices of parameters, each
    with its key."""
    results, inverse = [], step.inverse_scale()
    for i, gradient in gradients.items():
        if gradient is not None:
            type = unsharded_type(gradient)
            if inverse is not None:
                gradient = step.b.mul(gradient, step.b.convert(inverse, type.element_type))
            old, key = gradient_sum(step, i, type)
            results.append((step.select_new(old, step.b.add(old, gradient)), key))
    return results


def update_function(
    request: train.StepOp, step: Arguments, gradients: dict[int, SSAValue | None],
    mesh: Mesh | None,
) -> FuncOp:  # fmt: skip
    """Return the function of the update.

    Args:
        step: the arguments of the backward part.
        gradients: the gradients by the indices of parameters; None of one without effect.
        mesh: the mesh of a function with layouts.
    """
    of_step = list(gradients)
    block = Block(arg_types=[step[i].type for i in of_step])
    for arg, i in zip(block.args, of_step, strict=True):
        arg.name_hint = step[i].name_hint
    arguments = Arguments(block, [dict(step.attributes[i]) for i in of_step])
    b = Rewriter(mesh, block)
    b.location = request.location
    b.insert(train.UpdateOp.create(location=request.location))
    b.stays = True
    update = TrainStep(request, b, arguments, is_update=True)
    sums = {
        at: gradient_sum(update, at, unsharded_type(gradient))
        for at, i in enumerate(of_step) if (gradient := gradients[i]) is not None
    }  # fmt: skip
    known: dict[int, SSAValue | None] = {at: None for at in range(len(of_step))}
    known |= {at: value for at, (value, _) in sums.items()}
    results = update.update(known, {})
    results += [(_zeros(b, value), key) for value, key in sums.values()]
    block.add_op(ReturnOp(*(value for value, _ in results)))
    f = arguments.as_function(request, [train.updates_attrs(key) for _, key in results])
    f.sym_name = StringAttr(f"{request.sym_name.data}_{train.UPDATE}")
    f.attributes[train.UPDATE_OF] = request.sym_name
    return f


def _zeros(b: Rewriter, like: SSAValue) -> SSAValue:
    """Return zeros of the type and the layout of a value."""
    zeros, layout = b.zeros(unsharded_type(like), like=like), layout_of(like)
    return zeros if layout is None else b.redistribute(zeros, layout)
