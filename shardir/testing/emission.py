"""The text that the backend torch emits: run in this process, and compared with the interpreter."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement, product
from types import CodeType
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region

from shardir.algebra.factors import Factors, OpSharding, try_op_sharding
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.backend.torch.emit.program import TABLE, function_names, program_text, public_functions
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.run.program_module import with_this_runtime
from shardir.dialects import dist
from shardir.dialects.installed import installed
from shardir.dialects.nn.base import Array, TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.interpret import run
from shardir.interpret.values import assemble
from shardir.testing.programs import elements_of, function

TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
         "i32": torch.int32, "i64": torch.int64, "i1": torch.bool}  # fmt: skip
TOLERANCE = {"f32": 2e-5, "f64": 1e-10, "bf16": 4e-2, "f16": 4e-3}
"""The tolerance of a result, relative to itself and to the largest element, or to 1."""
MESH = Mesh("m", (("dp", 2), ("tp", 2)))

DIAGONALS = (0, 3), (1, 2)
"""Ranks of the 2x2 mesh with both coordinates of both axes, whose own programs are tried with the
placements in turn."""


# ---- programs in this process ----


@cache
def code_of(text: str) -> CodeType:
    """Return the compiled program. Programs of ranks are often equal."""
    return compile(with_this_runtime(text.encode()), "<program>", "exec")


def functions_of(text: str) -> dict[str, Any]:
    """Return the functions of a program, without running its main."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(code_of(text), space)
    return space


def python_function(module: ModuleOp, name: str) -> Any:
    """Return a function of the program of a module."""
    names = function_names(public_functions(module))
    python = next(n for f, n in names.items() if f.sym_name.data == name)
    return functions_of(program_text(module))[python]


def tensor(array: Any, element: str) -> torch.Tensor:
    """Return an array as a tensor of an element type."""
    return torch.tensor(np.array(array)).to(TYPES[element])


def array_of(x: torch.Tensor, element: str) -> Array:
    """Return a tensor as an array, as the interpreter has it: short floats as f32."""
    return x.float().numpy() if element in ("bf16", "f16") else x.numpy()


def element_of(t: Attribute) -> str:
    """Return the element type of a type."""
    return elements_of([t])[0]


def mesh_op(mesh: Mesh) -> dist.MeshOp:
    """Return the declaration of a mesh."""
    return dist.MeshOp.create(
        properties={"sym_name": StringAttr(mesh.name), "axes": dist.MeshAttr(mesh.axes)}
    )


# ---- an op alone ----


def texts() -> Mapping[type[Operation], object]:
    """Return the ops that have a text in torch."""
    return {**TABLE, **installed().torch()}


def placements(op: TensorOp, names_matter: bool = False) -> Iterator[OpSharding]:
    """Yield every split of the op's factors over two axes of the mesh. The axes are equivalent, so
    of two splits that differ by their names one is enough, unless the `names_matter`."""
    factors: Factors = op.factors()
    names = [f for f, _ in factors.sizes if f not in factors.replicate | factors.sliding]
    seen = set()
    pairs = list(product([None, *names], repeat=2))
    half = list(combinations_with_replacement([None, *names], 2))
    for dp, tp in pairs if names_matter else half:
        for order in ((0, 1), (1, 0)) if dp == tp and dp else ((0, 1),):
            chosen: dict[str, Axes] = {}
            for k in order:
                if (factor := (dp, tp)[k]) is not None:
                    chosen[factor] = (*chosen.get(factor, ()), Axis(("dp", "tp")[k]))
            found = try_op_sharding(factors, chosen, MESH)
            if found is not None and (found.operands, found.results) not in seen:
                seen.add((found.operands, found.results))
                yield found


def local_module(op: TensorOp, placement: OpSharding) -> tuple[ModuleOp, TensorOp]:
    """Return the op alone, in the local view."""
    t_in = [unsharded_type(v) for v in op.operands]
    t_out = [unsharded_type(v) for v in op.results]
    ins = [dist.local(t.element_type, t.get_shape(), l, MESH)
           for t, l in zip(t_in, placement.operands, strict=True)]  # fmt: skip
    outs = [dist.local(t.element_type, t.get_shape(), l, MESH)
            for t, l in zip(t_out, placement.results, strict=True)]  # fmt: skip
    block = Block(arg_types=ins)
    new = type(op).create(
        operands=block.args, result_types=outs, properties=dict(op.properties),
        regions=[region.clone() for region in op.regions],
    )  # fmt: skip
    block.add_ops([new, ReturnOp(*new.results)])
    f = FuncOp("f", (ins, outs), Region(block))
    module = ModuleOp([mesh_op(MESH), f])
    module.verify()
    return module, new


def op_errors(module: ModuleOp, given: Sequence[Array]) -> str:
    """Return how the text of the op of @f on one device differs from the interpreter, or ""."""
    op = function(module, "f").body.block.first_op
    assert isinstance(op, TensorOp)
    tensors = [tensor(x, element_of(v.type)) for x, v in zip(given, op.operands, strict=True)]
    before = [t.clone() for t in tensors]
    got = listed(python_function(module, "f")(rt.Mesh(()), *tensors))
    for i, (t, b) in enumerate(zip(tensors, before, strict=True)):
        if not torch.equal(t.nan_to_num(), b.nan_to_num()):
            return f"expected the operand {i} to stay as it is, got another value in it"
    for i, (g, w, r) in enumerate(zip(got, run(module, "f", given), op.results, strict=True)):
        e = element_of(r.type)
        if g.dtype != TYPES[e] or tuple(g.shape) != w.shape:
            return (
                f"result {i}: expected {TYPES[e]} of shape {[*w.shape]}, got {g.dtype} of shape "
                f"{[*g.shape]}"
            )
        if message := far(array_of(g, e), w, e):
            return f"result {i} {message}"
    return ""


def placement_errors(
    op: TensorOp, placement: OpSharding, given: Sequence[Array], want: Sequence[Array],
    alone: Sequence[int],
) -> str:  # fmt: skip
    """Return how the text of an op in a split of its factors differs from its results, or "".

    Args:
        alone: the ranks whose own programs, with folded constants, are compared too.
    """
    local, _ = local_module(op, placement)
    shared = functions_of(program_text(local))["f"]
    parts: list[list[Array]] = [[] for _ in op.results]
    for rank in range(MESH.size):
        mine = [
            tensor(x[l.slices(MESH, x.shape, rank)], element_of(v.type))
            for x, l, v in zip(given, placement.operands, op.operands, strict=True)
        ]
        mesh = rt.Mesh(MESH.axes, rank)
        got = listed(shared(mesh, *[t.clone() for t in mine]))
        for part, g, r in zip(parts, got, op.results, strict=True):
            part.append(array_of(g, element_of(r.type)))
        if rank in alone:
            folded = listed(functions_of(program_text(local, rank=rank))["f"](mesh, *mine))
            for g, same in zip(got, folded, strict=True):
                if not torch.equal(g.nan_to_num(), same.nan_to_num()):
                    return f"expected the same result by the program of rank {rank} alone"
    for i, (p, w, r, layout) in enumerate(
        zip(parts, want, op.results, placement.results, strict=True)
    ):
        if message := far(assemble(p, layout, MESH, w.shape), w, element_of(r.type)):
            return f"result {i} {message}"
    return ""


def listed(got: Any) -> list[torch.Tensor]:
    """Return the results of a call as a list."""
    return [got] if isinstance(got, torch.Tensor) else [*got]


def far(got: Array, want: Array, element: str) -> str:
    """Return the difference of the text from the interpreter beyond TOLERANCE, or ""."""
    try:
        if element in TOLERANCE:
            scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
            np.testing.assert_allclose(
                got, want, rtol=TOLERANCE[element], atol=TOLERANCE[element] * scale
            )
        else:
            np.testing.assert_array_equal(got, want)
    except AssertionError as e:
        return str(e).strip()
    return ""
