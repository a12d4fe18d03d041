"""Known plans of any training step, as annotated layouts of its arguments; propagation infers the
others.

    data       inputs split along the batch over all devices, parameters replicated
    zero-3     inputs likewise; parameters split along the first dimension that all devices split
               evenly
    2d         inputs split along the batch over the first axis; matrices split by rows over the
               first axis and by columns over the second
    annotated  the annotations of the program; those of the transformers here are Megatron's

ZeRO-3 (Rajbhandari et al., 2020) gathers a parameter where it is used, and reduces and scatters its
gradient: propagation and differentiation derive that from the layouts.
"""

from collections.abc import Callable

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType

from shardir import compile
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.analysis.functions import mesh_of
from shardir.compat.xdsl import set_type
from shardir.cost import report
from shardir.dialects.dist import ClusterOp, MeshOp, with_layout
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import arguments
from shardir.passes.strip_layouts import StripLayouts
from shardir.pipelines import build
from shardir.rewriting.functions import bodies, update_signature
from shardir.search.plans.presets import Product, ProductOfPresets, Structure

Entries = tuple[Axes, ...]
Rule = Callable[[Mesh, tuple[int, ...]], Entries]
"""Returns the axes that split each dimension of an argument of this shape."""


def bare(module: ModuleOp) -> ModuleOp:
    """Return the program with its meshes and without layouts."""
    found = module.clone()
    StripLayouts().apply(Context(), found)
    meshes = [op.clone() for op in module.body.ops if isinstance(op, MeshOp)]
    for mesh in reversed(meshes):
        first = next(op for op in found.body.ops if not isinstance(op, ClusterOp))
        found.body.block.insert_op_before(mesh, first)
    return found


def laid_out(module: ModuleOp, parameter: Rule, input: Rule) -> ModuleOp:
    """Return the bare program with layouts of its parameters and states, and of its inputs, by
    rules."""
    found = bare(module)
    for f, block in bodies(found):
        mesh = mesh_of(f, found)
        assert mesh is not None
        for arg, role in zip(block.args, arguments(f), strict=True):
            if isinstance(arg.type, TensorType):
                dims = (parameter if role.is_retained else input)(mesh, arg.type.get_shape())
                set_type(arg, with_layout(unsharded_type(arg), Layout(mesh.name, dims)))
        update_signature(f)
    return found


def of_presets(module: ModuleOp, presets: Product) -> ModuleOp | None:
    """Return the bare program with the arguments' layouts of a product of presets, one for each
    axis with several devices; None if a function does not have it."""
    found = bare(module)
    for f, block in bodies(found):
        mesh = mesh_of(f, found)
        assert mesh is not None
        plan = ProductOfPresets(presets, Structure(f), mesh)
        if not plan.exists:
            return None
        for arg in block.args:
            if isinstance(arg.type, TensorType):
                set_type(arg, with_layout(unsharded_type(arg), plan.layout(arg)))
        update_signature(f)
    return found


def along_first(axes: Axes, shape: tuple[int, ...]) -> Entries:
    return tuple(axes if d == 0 else () for d in range(len(shape)))


def along_batch(mesh: Mesh, shape: tuple[int, ...]) -> Entries:
    return along_first(mesh.simplify(mesh.names), shape)


def first_even(mesh: Mesh, shape: tuple[int, ...]) -> Entries:
    at = next((d for d, n in enumerate(shape) if n % mesh.size == 0), None)
    return tuple(mesh.simplify(mesh.names) if d == at else () for d in range(len(shape)))


def matrices(mesh: Mesh, shape: tuple[int, ...]) -> Entries:
    one, two = ((a,) for a in mesh.names)
    even = len(shape) > 1 and all(
        n % mesh.extent(a) == 0 for n, a in zip(shape[:2], (one, two), strict=True)
    )
    split = (one, two) if even else ()
    return (*split, *[()] * (len(shape) - len(split)))


PLANS: dict[str, Callable[[ModuleOp], ModuleOp]] = {
    "annotated": lambda m: m,
    "data": lambda m: laid_out(m, lambda _, shape: along_first((), shape), along_batch),
    "zero-3": lambda m: laid_out(m, first_even, along_batch),
    "2d": lambda m: laid_out(m, matrices, lambda mesh, shape: along_first((mesh.names[0],), shape)),
}


def without_overlap(pipeline: str) -> str:
    """Return a pipeline without overlap-communication."""
    return ",".join(str(p) for p in build(pipeline) if p.name != "overlap-communication")


def seconds(module: ModuleOp, pipeline: str = "train") -> float:
    """Return the estimated time of the functions of the lowered program."""
    return sum(f.seconds for f in report(compile(module, pipeline).module))
