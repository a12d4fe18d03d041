"""Functions of JAX as programs of StableHLO: names of arguments, layouts, and states."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import jax
import numpy as np
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

WIDER = {
    "bfloat16": "float32", "uint32": "int64", "uint64": "int64",
    **dict.fromkeys(("int8", "int16", "uint8", "uint16"), "int32"),
}  # fmt: skip
"""The dtype in which the numbers of others are stored: that of our element type."""


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


def trace(f: Any, args: Sequence[Any], in_shardings: Any) -> TracedFunction:
    """Trace a function on example arguments.

    Raises:
        ShardirError: the layouts, or the results for donated arguments, do not fit the arguments.
    """
    if not callable(f):
        raise ShardirError(f"expected a function of JAX, got {describe(f)}")
    jitted: Any = f if hasattr(f, "lower") else jax.jit(f, keep_unused=True)
    lowered = jitted.lower(*args)
    program = without_complex(read_module(lowered.compiler_ir("stablehlo")))
    all_leaves = _leaves(f, args, lowered.args_info[0], in_shardings)
    names = [a.name for a in program.functions["main"].block.arguments]
    leaves = all_leaves
    if len(names) != len(all_leaves):  # jax.jit drops arguments without a use
        kept = {name_of(n) for n in names}
        leaves = [leaf for leaf in all_leaves if leaf.name in kept]
    if len(leaves) != len(names):
        raise ShardirError(
            f"expected the arguments {', '.join(names)} of the traced function, got "
            f"{', '.join(leaf.name for leaf in all_leaves)}; use jax.jit(f, keep_unused=True)"
        )
    structure = jax.tree.structure(lowered.out_info)
    results = jax.tree.unflatten(structure, range(structure.num_leaves))
    name = re.sub(r"\W", "_", getattr(f, "__name__", "main")).strip("_") or "main"
    replaced = _replaced(leaves, lowered, results, args)
    kinds = [np.issubdtype(x.dtype, np.complexfloating) for x in jax.tree.leaves(lowered.out_info)]

    def unflatten(arrays: Sequence[Array]) -> Any:
        both = zip(arrays, kinds, strict=True)
        return structure.unflatten([as_complex(x) if is_complex else x for x, is_complex in both])

    return TracedFunction(name, program, leaves, unflatten, replaced)


def _leaves(f: Any, args: Sequence[Any], infos: Any, in_shardings: Any) -> list[ArgumentLeaf]:
    try:
        names = list(signature(f).parameters)
    except (TypeError, ValueError):
        names = []
    shardings = _spread(in_shardings, args)
    leaves = []
    for i, (argument, info, tree) in enumerate(zip(args, infos, shardings, strict=True)):
        own = names[i] if i < len(names) else f"arg{i}"
        donated = [x.donated for x in jax.tree.leaves(info)]
        flat, _ = jax.tree_util.tree_flatten_with_path(argument)
        for (path, x), is_donated, sharding in zip(flat, donated, tree, strict=True):
            name = name_of(own + jax.tree_util.keystr(path)) or f"arg{i}"
            leaves.append(ArgumentLeaf(name, i, is_donated, _numbers(x), sharding))
    return leaves


def _numbers(x: Any) -> Array | None:
    if isinstance(x, jax.ShapeDtypeStruct):
        return None
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.asarray(x)
    if np.iscomplexobj(array):
        return as_parts(array)
    kind = WIDER.get(str(array.dtype))
    return array if kind is None else array.astype(kind)


def _is_entry(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | NamedSharding | str | Layout | Sharding)


def _spread(in_shardings: Any, args: Sequence[Any]) -> list[list[Any]]:
    """Return the entry of in_shardings for each array of each argument: an entry for a tree is one
    for all of its arrays."""
    if _is_entry(in_shardings):
        in_shardings = [in_shardings] * len(args)
    if len(in_shardings) != len(args):
        raise ShardirError(
            f"expected in_shardings of {len(args)} arguments, got {len(in_shardings)}"
        )
    spread = []
    for i, (prefix, argument) in enumerate(zip(in_shardings, args, strict=True)):
        out: list[Any] = []
        try:
            jax.tree.map(
                lambda entry, part, out=out: out.extend([entry] * len(jax.tree.leaves(part))),
                prefix, argument, is_leaf=_is_entry,
            )  # fmt: skip
        except ValueError as error:
            raise ShardirError(
                f"expected in_shardings of argument {i} with the argument's structure, got "
                f"another one: {str(error).splitlines()[0]}"
            ) from None
        spread.append(out)
    return spread


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
    if isinstance(entry, str):
        sharding = parse_sharding(f"@{mesh.name}, {entry}")
    else:
        spec = entry.spec if isinstance(entry, NamedSharding) else entry
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
    leaves: Sequence[ArgumentLeaf], lowered: Any, results: Any, args: Sequence[Any]
) -> dict[int, int]:
    """Return which result replaces each donated array: the k-th donated argument of a form is
    replaced by the k-th result of that form."""
    donated = sorted({leaf.argument for leaf in leaves if leaf.is_donated})
    if not donated:
        return {}
    parts = results if isinstance(results, tuple | list) else (results,)
    infos = lowered.out_info if isinstance(lowered.out_info, tuple | list) else (lowered.out_info,)
    free = [(_form(info), part) for info, part in zip(infos, parts, strict=True)]
    replaced: dict[int, int] = {}
    for argument in donated:
        form = _form(args[argument])
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


def _form(tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(tuple(x.shape), str(x.dtype)) for x in leaves]
