"""Functions of JAX as programs of StableHLO: names of arguments, layouts, and states."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core.primitives import stop_gradient_p
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.notation import parse_sharding
from shardir.algebra.sharding import Sharding
from shardir.diagnostics import ShardirError, describe
from shardir.dialects.nn.base import Array
from shardir.frontends.stablehlo.bindings import read_module
from shardir.frontends.stablehlo.complexes import as_complex, as_parts, without_complex
from shardir.frontends.stablehlo.form import HloProgram
from shardir.frontends.stablehlo.names import name_of
from shardir.frontends.stablehlo.ops.control import STOP_GRADIENT
from shardir.frontends.stablehlo.types import DTYPES

NUMPY = {
    "f64": "float64", "f32": "float32", "bf16": "float32", "f16": "float16", "i64": "int64",
    "i32": "int32", "i1": "bool",
}  # fmt: skip
"""The dtype in which the numbers of each of our element types are stored."""


JAX_FOLDER = str(Path(jax.__file__).parent)

NO_PMAP = "expected a function of whole arrays, got jax.pmap; use jax.jit"


@dataclass
class ArgumentLeaf:
    """An array among the arguments.

    Attributes:
        name: by its path, `params.layers.0.w`.
        argument: the index of the argument that it is part of.
        value: its numbers; None for a jax.ShapeDtypeStruct.
        sharding: the entry of in_shardings; None without one.
    """

    name: str
    argument: int
    is_donated: bool
    value: Array | None
    sharding: Any


@dataclass
class TracedFunction:
    """A traced function."""

    name: str
    program: HloProgram
    leaves: Sequence[ArgumentLeaf]
    """Those that the program has: a function that is compiled by jax.jit drops unused ones."""
    unflatten: Callable[[Sequence[Array]], Any]
    """Makes the tree of results of their arrays."""
    replaced: Mapping[int, int]
    """The result that replaces each donated array, by the indices of leaves and of results."""
    paths: Sequence[str]
    """The names of the results, by their paths: `1.accuracy`."""


@dataclass
class _TracedArgument:
    """An argument that is traced: its name, index, value, jax.stages.ArgInfo and in_shardings."""

    name: str
    index: int
    value: Any
    info: Any
    sharding: Any


def trace(
    f: Any, args: Sequence[Any], in_shardings: Any, keywords: Mapping[str, Any], is_loss: bool
) -> TracedFunction:
    """Trace a function on example arguments.

    Args:
        is_loss: whether it is to be differentiated.

    Raises:
        ShardirError: the layouts, or the results for donated arguments, do not fit the arguments.
    """
    if not callable(f):
        raise ShardirError(f"expected a function of JAX, got {describe(f)}")
    jitted: Any = f if hasattr(f, "lower") else jax.jit(f, keep_unused=True)
    if not hasattr(jitted, "trace"):
        raise ShardirError(NO_PMAP)
    traced = jitted.trace(*args, **keywords)
    if is_loss and (names := _own_gradients(traced.jaxpr)):
        raise ShardirError(
            "expected a loss whose gradient is that of its ops, got functions with their own: "
            f"{', '.join(names)}; give the step instead, with jax.value_and_grad and donated "
            "parameters"
        )
    lowered = _lowered_loss(traced) if is_loss else traced.lower()
    program = without_complex(read_module(lowered.compiler_ir("stablehlo")))
    if any("pmap" in mesh for mesh in program.meshes.values()):
        raise ShardirError(NO_PMAP)
    arguments = _traced_arguments(f, args, keywords, in_shardings, lowered.args_info)
    leaves = _leaves(program, arguments)
    structure = jax.tree.structure(lowered.out_info)
    results = jax.tree.unflatten(structure, range(structure.num_leaves))
    dtypes = [info.dtype for info in jax.tree.leaves(lowered.out_info)]

    def unflatten(arrays: Sequence[Array]) -> Any:
        pairs = zip(arrays, dtypes, strict=True)
        return structure.unflatten([_in_dtype(a, d) for a, d in pairs])

    replaced = _replaced(leaves, lowered, results, arguments)
    if not _begins_with_loss(lowered.out_info, results, replaced):
        replaced = {}  # donated memory of a function that is no step
    else:
        _check_no_other_results(lowered.out_info, arguments, leaves)
    flat, _ = jax.tree_util.tree_flatten_with_path(lowered.out_info)
    paths = [name_of(jax.tree_util.keystr(path)) for path, _ in flat]
    return TracedFunction(_name(f), program, leaves, unflatten, replaced, paths)


def _lowered_loss(traced: Any) -> Any:
    """Lower a loss so that its StableHLO tells of jax.lax.stop_gradient, which is nothing to XLA:
    as calls of a function of this name."""
    marked = jax.jit(_identity)
    mlir.register_lowering(stop_gradient_p, mlir.lower_fun(marked, multiple_results=False))
    try:
        lowered = traced.lower()
        if _has(traced.jaxpr, "stop_gradient") and STOP_GRADIENT not in lowered.as_text():
            jax.clear_caches()  # it was lowered before
            lowered = traced.lower()
        return lowered
    finally:
        mlir.register_lowering(stop_gradient_p, lambda _, x: [x])


def _identity(x: Any) -> Any:
    return x


_identity.__name__ = STOP_GRADIENT


def _has(jaxpr: Any, primitive: str) -> bool:
    """Whether a jaxpr, or one within it, has a primitive of this name."""
    return any(eqn.primitive.name == primitive for eqn in _eqns(jaxpr))


def _eqns(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr, and of those within it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for p in eqn.params.values():
            for inner in p if isinstance(p, tuple) else (p,):
                if hasattr(inner, "eqns"):
                    yield from _eqns(inner)


def _rounds_bits(eqn: Any) -> bool:
    """Whether a rounding is imported as that of bits: f32 to bf16 is a conversion."""
    dtype, kept = (
        eqn.invars[0].aval.dtype,
        [eqn.params[f"{n}_bits"] for n in ("exponent", "mantissa")],
    )
    info = jax.numpy.finfo(dtype)
    is_bf16 = dtype == np.float32 and kept == [8, 7]
    return not is_bf16 and (kept[0] < info.nexp or kept[1] < info.nmant)


def _own_gradients(jaxpr: Any) -> list[str]:
    """Name the functions whose gradients are not those of their ops. JAX's own rules of
    `jax.custom_jvp` are left out: they equal those of the ops, but at kinks and of bits."""
    names: dict[str, None] = {}
    for eqn in _eqns(jaxpr):
        kind = eqn.primitive.name
        if kind == "custom_linear_solve":
            names["systems of jax.numpy.linalg (solve, inv)"] = None
        elif kind == "reduce_precision" and _rounds_bits(eqn):
            names["jax.lax.reduce_precision"] = None
        elif kind in ("custom_jvp_call", "custom_vjp_call"):
            function = eqn.params["call_jaxpr"].jaxpr.debug_info.func_src_info or "a function"
            rule = eqn.params.get("jvp_jaxpr_fun")
            places = function, rule.debug_info.func_src_info if rule is not None else None
            is_of_bits = _has(eqn.params["call_jaxpr"], "bitcast_convert_type")
            if is_of_bits or not all(f" at {JAX_FOLDER}" in str(place) for place in places):
                names[f"jax.{kind.removesuffix('_call')} of {function}"] = None
    return [*names]


def _name(f: Any) -> str:
    while isinstance(f, partial):
        f = f.func
    return re.sub(r"\W", "_", getattr(f, "__name__", "main")).strip("_") or "main"


def _is_key(dtype: Any) -> bool:
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def _in_dtype(array: Array, dtype: Any) -> Array:
    """Return a result in the dtype that JAX gives it; keys as their numbers."""
    if _is_key(dtype):
        return array
    if np.issubdtype(dtype, np.complexfloating):
        array = as_complex(array)
    return array.astype(dtype)


def _begins_with_loss(infos: Any, results: Any, replaced: Mapping[int, int]) -> bool:
    """Whether the first result that replaces no argument is a number: the loss of a step."""
    new = {*replaced.values()}
    pairs = zip(jax.tree.leaves(infos), jax.tree.leaves(results), strict=True)
    first = next((info for info, i in pairs if i not in new), None)
    return first is not None and not first.shape and jax.numpy.issubdtype(first.dtype, np.floating)


def _traced_arguments(
    f: Any, args: Sequence[Any], keywords: Mapping[str, Any], in_shardings: Any, infos: Any
) -> list[_TracedArgument]:
    """Return the arguments that are traced, all but static ones, in the order of the program."""
    try:
        names = list(signature(f).parameters)
    except (TypeError, ValueError):
        names = []
    positional, by_keyword = infos
    traced = _not_static(args, positional)
    if _is_entry(in_shardings):
        in_shardings = [in_shardings] * len(args)
    if len(in_shardings) == len(args):
        in_shardings = [in_shardings[i] for i in traced]
    if len(in_shardings) != len(traced):
        raise ShardirError(
            f"expected in_shardings of {len(args)} arguments, got {len(in_shardings)}"
        )
    arguments = [
        _TracedArgument(names[i] if i < len(names) else f"arg{i}", i, args[i], info, sharding)
        for i, info, sharding in zip(traced, positional, in_shardings, strict=True)
    ]
    for name, info in sorted(by_keyword.items()):
        arguments.append(_TracedArgument(name, len(args), keywords[name], info, None))
    return arguments


def _not_static(args: Sequence[Any], infos: Sequence[Any]) -> list[int]:
    """Return the indices of the arguments that are traced, by their forms."""
    traced: list[int] = []
    for info in infos:
        first = traced[-1] + 1 if traced else 0
        spare = len(args) - first - (len(infos) - len(traced))  # that many may be static
        at = next((i for i in range(first, first + spare) if _fits(args[i], info)), first + spare)
        traced.append(at)
    return traced


def _fits(argument: Any, info: Any) -> bool:
    """Whether an argument has the structure, shapes and kinds of numbers of a traced one."""
    leaves, structure = jax.tree.flatten(argument)
    if structure != jax.tree.structure(info):
        return False
    for x, of in zip(leaves, jax.tree.leaves(info), strict=True):
        if not isinstance(x, bool | int | float | complex) and not hasattr(x, "dtype"):
            return False
        dtype = jax.numpy.result_type(x)
        if np.shape(x) != of.shape or not (_is_key(dtype) or dtype == of.dtype):
            return False
    return True


def _leaves(program: HloProgram, arguments: Sequence[_TracedArgument]) -> list[ArgumentLeaf]:
    """Return the arrays of the arguments that the program has: jax.jit drops unused ones."""
    block = program.functions["main"].block
    kept = {name_of(a.name) for a in block.arguments}
    count = sum(len(jax.tree.leaves(a.info)) for a in arguments)
    found: list[tuple[ArgumentLeaf, Any]] = []
    for a in arguments:
        donated = [x.donated for x in jax.tree.leaves(a.info)]
        flat, _ = jax.tree_util.tree_flatten_with_path(a.value)
        for (path, x), is_donated, sharding in zip(flat, donated, _spread(a), strict=True):
            name = name_of(a.name + jax.tree_util.keystr(path)) or f"arg{a.index}"
            if len(block.arguments) == count or name in kept:
                found.append((ArgumentLeaf(name, a.index, is_donated, None, sharding), x))
    if len(found) != len(block.arguments):
        raise ShardirError(
            f"expected the arguments {', '.join(a.name for a in block.arguments)} of the traced "
            f"function, got {', '.join(leaf.name for leaf, _ in found)}; use jax.jit(f, "
            "keep_unused=True)"
        )
    for (leaf, x), argument in zip(found, block.arguments, strict=True):
        leaf.value = _numbers(x, argument.type.element)
    return [leaf for leaf, _ in found]


def _numbers(x: Any, element: str) -> Array | None:
    """Return the numbers of an example argument in the dtype of the program's."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return None
    if isinstance(x, jax.Array) and _is_key(x.dtype):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    if np.iscomplexobj(array):
        return as_parts(array)
    return array.astype(NUMPY[DTYPES[element]]) if element in DTYPES else None


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding | str)


def _spread(argument: _TracedArgument) -> list[Any]:
    """Return the entry of in_shardings for each array of an argument: an entry for a tree is one
    for all of its arrays."""
    out: list[Any] = []
    try:
        jax.tree.map(
            lambda entry, part: out.extend([entry] * len(jax.tree.leaves(part))),
            argument.sharding, argument.value, is_leaf=_is_entry,
        )  # fmt: skip
    except ValueError as error:
        raise ShardirError(
            f"expected in_shardings of argument {argument.index} with the argument's structure, "
            f"got another one: {str(error).splitlines()[0]}"
        ) from None
    return out


def sharding_of(entry: Any, rank: int, mesh: Mesh | None, name: str) -> Sharding | None:
    """Return an entry of in_shardings as a sharding: a PartitionSpec, a NamedSharding, or a text
    such as `[{dp}, {?}]`. Dimensions that a spec does not name are unsharded.

    Raises:
        ShardirError: the entry does not fit the array or the mesh.
    """
    if entry is None:
        return None
    if mesh is None:
        raise ShardirError(f"expected a mesh for the sharding of {name}, got none; pass mesh=...")
    spec = entry.spec if isinstance(entry, NamedSharding) else entry
    if isinstance(entry, str):
        try:
            sharding = parse_sharding(f"@{mesh.name}, {entry}")
        except ShardirError as error:
            raise ShardirError(f"in_shardings of {name}: {error}") from None
    elif not isinstance(spec, PartitionSpec):
        raise ShardirError(
            f"in_shardings of {name}: expected a PartitionSpec, a NamedSharding, a text such as "
            f"[{{dp}}, {{?}}] or None, got {describe(entry)}"
        )
    elif spec.unreduced or spec.reduced:
        raise ShardirError(
            f"in_shardings of {name}: expected axes of dimensions, got {spec}; an argument is whole"
        )
    else:
        if len(spec) > rank:
            raise ShardirError(f"expected at most {rank} dimensions of {name}, got {spec}")
        entries = [*spec, *[None] * (rank - len(spec))]
        is_open = [e is PartitionSpec.UNCONSTRAINED for e in entries]
        axes = [() if e is None or o else (e,) if isinstance(e, str) else tuple(e)
                for e, o in zip(entries, is_open, strict=True)]  # fmt: skip
        layout = Layout(mesh.name, tuple(tuple(Axis(a) for a in of) for of in axes))
        sharding = Sharding(layout, frozenset(d for d, o in enumerate(is_open) if o))
    try:
        sharding.check(mesh)
    except ShardirError as error:
        raise ShardirError(f"in_shardings of {name}: {error}") from None
    return sharding.simplified(mesh)


def _replaced(
    leaves: Sequence[ArgumentLeaf], lowered: Any, results: Any, arguments: Sequence[_TracedArgument]
) -> dict[int, int]:
    """Return which result replaces each donated array: the k-th donated argument of a form is
    replaced by the k-th result of that form."""
    donated = _donated(leaves)
    if not donated:
        return {}
    parts = _parts(results)
    free = [(_form(info), part) for info, part in zip(_parts(lowered.out_info), parts, strict=True)]
    replaced: dict[int, int] = {}
    for argument in donated:
        form = _form(next(a.value for a in arguments if a.index == argument))
        at = next((i for i, (other, _) in enumerate(free) if other == form), None)
        if at is None:
            raise ShardirError(
                f"expected a result with the structure of the donated argument {argument}, which "
                "it replaces, got none; return its new value, or do not donate it"
            )
        _, part = free.pop(at)
        of_argument = [i for i, leaf in enumerate(leaves) if leaf.argument == argument]
        new = jax.tree.leaves(part)
        if len(of_argument) != len(new):
            raise ShardirError(
                f"expected a use of all arrays of the donated argument {argument}, got unused "
                "ones; use jax.jit(f, keep_unused=True, ...)"
            )
        replaced.update(zip(of_argument, new, strict=True))
    return replaced


def _check_no_other_results(
    infos: Any, arguments: Sequence[_TracedArgument], leaves: Sequence[ArgumentLeaf]
) -> None:
    """Raises ShardirError if a step has more results of a donated argument's form than donated
    arguments: a loss, say, and a number of steps, of which either may be the new state."""
    values = {a.index: a.value for a in arguments}
    forms = [_form(values[argument]) for argument in _donated(leaves)]
    results = [*map(_form, _parts(infos))]
    for argument, form in zip(_donated(leaves), forms, strict=True):
        n, others = forms.count(form), results.count(form)
        if n != others:
            raise ShardirError(
                f"expected one result for each donated argument of the form of argument {argument} "
                f"({n} in all), got {others}; return the others in a dict, or do not donate it"
            )


def _donated(leaves: Sequence[ArgumentLeaf]) -> list[int]:
    return sorted({leaf.argument for leaf in leaves if leaf.is_donated})


def _parts(infos: Any) -> Sequence[Any]:
    return infos if isinstance(infos, tuple | list) else (infos,)


def _form(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(x.shape), str(x.dtype)) for x in leaves]
