"""Functions of JAX, imported and raised, against JAX itself."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardir.api.stablehlo import import_program, import_text, read
from shardir.dialects.blocks import ops_of
from shardir.interpret.evaluator import function, run
from support.each import check_each

Case = tuple[str, Callable[..., Any], tuple[Any, ...], set[str]]
"""A name, a function, its arguments, and the names of ops."""


@contextmanager
def in_double_precision() -> Iterator[None]:
    """Arrays are in f64; what XLA compiles runs once."""
    with jax.enable_x64(True):
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def gradients(f: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """The cotangents of the float arguments of `f`, from that of its result, and the result."""
    of = tuple(i for i, a in enumerate(args) if jnp.issubdtype(jnp.result_type(a), jnp.floating))

    def gradient(dy: Any, *args: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            whole = [*args]
            for i, v in zip(of, floats, strict=True):
                whole[i] = v
            return f(*whole)

        out, pull = jax.vjp(of_floats, *(args[i] for i in of))
        return out, pull(dy.astype(out.dtype))

    return gradient


def with_gradient(name: str, f: Callable[..., Any], args: tuple[Any, ...], kinds: set[str]) -> Case:
    shape = jax.eval_shape(f, *args).shape
    return name, gradients(f, *args), (np.asarray(draw(*shape)), *args), kinds


def check_all(
    check: Callable[[str, set[str]], object], cases: Sequence[Case], donated: tuple[int, ...] = ()
) -> None:
    """Compare the results of each imported function with JAX's, and check the names of its ops.
    JAX lowers all functions to one module, but those with donated arguments to one each."""
    every = [args for _, _, args, _ in cases]
    functions = [jax.jit(named(f, i), keep_unused=True) for i, (_, f, *_) in enumerate(cases)]
    run_all = jax.jit(lambda every: [f(*a) for f, a in zip(functions, every, strict=True)])
    lowered = run_all.lower(every)
    results, program = lowered.compile()(every), read(lowered.as_text())

    def check_case(i: int) -> None:
        name, f, args, _ = cases[i]
        if donated:
            own = jax.jit(f, donate_argnums=donated, keep_unused=True).lower(*args)
            module = import_text(own.as_text(), name)
        else:
            main = program.functions[f"case{i}"]
            module = import_program(replace(program, functions=program.functions | {"main": main}))
        got = run(module, "main", [np.asarray(a) for a in args])
        for value, expected in zip(got, jax.tree.leaves(results[i]), strict=True):
            tolerance = 2e-6 if expected.dtype == np.float32 else 1e-9
            np.testing.assert_allclose(
                value, expected, rtol=tolerance, atol=tolerance, err_msg=name
            )
        check(name, {op.name for op in ops_of(function(module, "main").body.block)})

    check_each(check_case, range(len(cases)))


def named(f: Callable[..., Any], i: int) -> Callable[..., Any]:
    """Return a function with the name of a case, which its function in StableHLO has too."""

    def case(*args: Any) -> Any:
        return f(*args)

    case.__name__ = f"case{i}"
    return case
