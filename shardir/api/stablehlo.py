"""Programs of JAX and of StableHLO, compiled in one call.

program = shardir.from_jax(step, params, x, y, in_shardings=(None, P("dp"), P("dp")),
                           mesh="dp = 2, tp = 4")
program.run(steps=10)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from xdsl.context import Context

from shardir.algebra.cluster import Cluster
from shardir.algebra.garbage import no_gc
from shardir.algebra.mesh import Mesh
from shardir.api.compiled import Compiled, compile_module
from shardir.api.devices import SEARCH, devices_of
from shardir.backend.runs import Options
from shardir.build import Module
from shardir.diagnostics import ShardirError, check_arguments, describe, did_you_mean, one_of
from shardir.dialects.nn.base import Array
from shardir.dialects.train import mark_step, updated_keys
from shardir.frontends.stablehlo.complexes import without_complex
from shardir.frontends.stablehlo.form import HloFunction, HloProgram
from shardir.frontends.stablehlo.generic import read_text as read_generic
from shardir.frontends.stablehlo.importer import (
    SHARDING,
    ArgumentForm,
    HloImporter,
    donated_of,
)
from shardir.frontends.stablehlo.meshes import meshes_of
from shardir.frontends.stablehlo.types import is_float
from shardir.interpret.evaluator import function as function_of
from shardir.passes.raise_compositions import RaiseCompositions
from shardir.syntax.files import scratch_folder

if TYPE_CHECKING:
    from shardir.frontends.stablehlo.traced import TracedFunction

STEP = "step"
"""The name of the step of a loss."""

DATA, WEIGHTS = "data.npz", "weights.npz"
"""The files of inputs and of initial states in a saved program."""

INSTALL = "pip install 'shardir[jax]'"
NO_JAX = f"expected the packages jax and jaxlib, got none; {INSTALL}"


@dataclass(frozen=True, eq=False, repr=False)
class CompiledJax(Compiled):
    """A compiled function of JAX, with the values of its example arguments."""

    name: str = "main"
    inputs: Mapping[str, Array] = field(default_factory=dict)
    """The example inputs by name."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """The values of donated arguments before the first step, by name."""
    results: Callable[[Sequence[Array]], Any] = list
    """Makes the tree of results of their arrays."""

    def _write(
        self, directory: str | Path, base_dir: Path | None, states: Mapping[str, Array],
        per_rank: bool, straight_line: bool, aliases: Mapping[str, str] = MappingProxyType({}),
    ) -> Path:  # fmt: skip
        from shardir.frontends.torch.weights import save

        with scratch_folder() as folder:
            save(folder / WEIGHTS, self.states)
            save(folder / DATA, {n: x if x.ndim else x[None] for n, x in self.inputs.items()})
            return super()._write(directory, folder, states, per_rank, straight_line, aliases)

    def __call__(self) -> Any:
        """Run a function without states on local processes, on its example arguments; return its
        results as a tree of arrays.

        Raises:
            ShardirError: the function has states: `run` runs its steps.
        """
        if any(updated_keys(function_of(self.original, self.name))):
            raise ShardirError("expected a function without states, got a step; use run()")
        from shardir.frontends.torch.weights import read_results

        with scratch_folder() as folder:
            dump = folder / "results.npz"
            options = Options.of({"dump": dump, "verbose": False})
            self.backend.run(self.save(folder / "program"), options)
            arrays = read_results(dump, self.name)
        return self.results(arrays)


@check_arguments("from_jax")
def from_jax(
    function: Any,
    *args: Any,
    in_shardings: Any = None,
    mesh: Any = None,
    cluster: str | Cluster | None = None,
    devices: int | None = None,
    parameters: int | Sequence[int] | None = None,
    keywords: Mapping[str, Any] | None = None,
    optimizer: str | None = None,
    accumulate: str | None = None,
    clip: str | None = None,
    loss_scale: str | None = None,
    metrics: str | None = None,
    ema: float | None = None,
    separate_update: bool = False,
    sync: str | None = None,
    stages: str | None = None,
    **options: Any,
) -> CompiledJax:
    """Compile a function of JAX: it is traced, its StableHLO is imported, and compiled.

    A donated argument (`jax.jit(step, donate_argnums=...)`) is a state: the result of its structure
    is its new value. Such a function, whose first result is its loss, is a training step. With
    `optimizer` the function is a loss alone, and the compiler derives its gradients and the update.

    Args:
        function: a function of arrays, as it is or by jax.jit.
        args: example arguments, arrays or jax.ShapeDtypeStruct.
        in_shardings: for each argument the layouts of its arrays: a PartitionSpec, a NamedSharding,
            a text such as `[{dp}, {?}]`, a tree of these, or None.
        mesh: the axes, as for `shardir.compile`, or a mesh of JAX; by default that of the
            function's own shardings.
        cluster, devices: see `shardir.compile`.
        parameters: the indices of the arguments whose arrays are parameters, which a plan names,
            and an optimizer trains; by default the first donated one, or the first of a loss.
        keywords: further example arguments, by keyword.
        optimizer: the optimizer of a loss: `adamw, lr = 1e-3`. The function returns the loss, or a
            tuple or dict of the loss and metrics.
        accumulate, clip, loss_scale, metrics, ema, separate_update, sync, stages: options of its
            step, as those of a module for `shardir.compile`.
        options: those of `shardir.compile`: plan, mode, pipeline, ...

    Raises:
        ShardirError: ops can't be imported; the message lists all, with the lines of the source. Or
            the errors of the compilation.
    """
    try:
        from shardir.frontends.stablehlo import traced
    except ImportError:
        raise ShardirError(NO_JAX) from None
    step_options: dict[str, Any] = {
        "accumulate": accumulate, "clip": clip, "loss_scale": loss_scale, "metrics": metrics,
        "ema": ema, "separate_update": separate_update or None, "sync": sync, "stages": stages,
    }  # fmt: skip
    _check_options("from_jax", from_jax, options)
    requests = {name: value for name, value in step_options.items() if value is not None}
    if requests and optimizer is None:
        raise ShardirError(
            f"expected an optimizer of the loss beside {one_of([*requests])}, got none; a step of "
            'JAX has its own, or give optimizer="adamw, lr = 1e-3"'
        )
    found = traced.trace(function, args, in_shardings, keywords or {}, optimizer is not None)
    start = _start(
        found.program, mesh, cluster, devices, options | {"sync": sync, "stages": stages}
    )
    chosen = _indices(parameters, found, len(args), optimizer is not None)
    roles = []
    arguments = found.program.functions["main"].block.arguments
    for i, (leaf, argument) in enumerate(zip(found.leaves, arguments, strict=True)):
        is_parameter = leaf.argument in chosen
        is_retained = is_parameter or i in found.replaced
        init = _init(leaf.name, leaf.value is not None, is_parameter, is_retained)
        rank = len(argument.type.shape)
        sharding = traced.sharding_of(leaf.sharding, rank, start.mesh, leaf.name)
        roles.append(ArgumentForm(leaf.name, sharding, is_retained, is_parameter, init))
    updates = {result: roles[i].name for i, result in found.replaced.items()}
    name = found.name
    if optimizer is None:
        module = _imported(start, found.program, name, roles, updates)
    else:
        loss, name = ("loss" if name == STEP else name), STEP
        reported = _metrics_of(found)
        _imported(start, found.program, loss, roles, updates, reported, is_loss=True)
        pipeline = requests.pop("stages", None)
        pipeline = None if pipeline == SEARCH else pipeline
        start.module.step(STEP, loss, optimizer, pipeline=pipeline, **requests)
        module = start.module.module
    compiled = compile_module(module, **start.options)
    values = {leaf.name: leaf.value for leaf in found.leaves if leaf.value is not None}
    of_states = {role.name for role in roles if role.is_state}
    return CompiledJax(
        **vars(compiled), name=name, results=found.unflatten,
        inputs={n: x for n, x in values.items() if n not in of_states},
        states={n: x for n, x in values.items() if n in of_states},
    )  # fmt: skip


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check the names of options for the compilation. Raises ShardirError."""
    own, compiled = (
        [p.name for p in signature(f).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
        for f in (function, compile_module)
    )
    known = [*own, "pipeline", *compiled]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known) or f"; it has {', '.join(known)}"
            raise ShardirError(f"expected an argument of {name}, got {option}{hint}")


def _indices(
    parameters: int | Sequence[int] | None, found: "TracedFunction", count: int, is_loss: bool
) -> Collection[int]:  # fmt: skip
    """Return the indices of the arguments with parameters. Raises ShardirError."""
    if parameters is None and is_loss:
        return [0]
    if parameters is None:
        return sorted({found.leaves[i].argument for i in found.replaced})[:1]
    chosen = [parameters] if isinstance(parameters, int) else [*parameters]
    if wrong := [i for i in chosen if not 0 <= i < count]:
        raise ShardirError(f"expected parameters from 0 to {count - 1}, got {wrong[0]}")
    return chosen


def _metrics_of(found: "TracedFunction") -> Mapping[int, str]:
    """Return the names of the results of a loss beside the loss, by their indices: the last word of
    their paths. Raises ShardirError."""
    results = found.program.functions["main"].block.results
    _, *others = [i for i in range(len(results)) if i not in found.replaced.values()]
    names: dict[int, str] = {}
    for i in others:
        if results[i].type.shape:
            raise ShardirError(
                f"expected numbers beside the loss, which are metrics, got {results[i].type} as "
                f"result {found.paths[i]}; reduce it, or do not return it"
            )
        word = found.paths[i].rpartition(".")[2]
        names[i] = word if word.isidentifier() and word not in names.values() else f"metric{i}"
    return names


def _init(name: str, has_value: bool, is_parameter: bool, is_retained: bool) -> str | None:
    """Return the text of the values of an argument: those of the example, else random ones, and
    zeros of states that are no parameters."""
    if not has_value:
        return (
            "normal, std = 0.02"
            if is_parameter
            else "constant, value = 0.0"
            if is_retained
            else None
        )
    kind, path = ("file", WEIGHTS) if is_retained else ("batches", DATA)
    return f'{kind}, path = "{path}", array = "{name}"'


@check_arguments("from_stablehlo")
def from_stablehlo(
    program: Any,
    *,
    mesh: Any = None,
    cluster: str | Cluster | None = None,
    devices: int | None = None,
    **options: Any,
) -> Compiled:
    """Compile a module of StableHLO, with shardings of Shardy: text in MLIR's generic form, or with
    `shardir[jax]` also in the forms of the dialects, or a module of jaxlib.

    Args:
        program: its function `main` is compiled.
        mesh: see `from_jax`.
        cluster, devices, options: see `shardir.compile`.

    Raises:
        ShardirError: as in `from_jax`.
    """
    _check_options("from_stablehlo", from_stablehlo, options)
    found = read(program)
    start = _start(found, mesh, cluster, devices, options)
    return compile_module(_imported(start, found, "main", None, {}), **start.options)


def import_text(text: str, name: str) -> Any:
    """Return the module of a text of StableHLO, raised; errors have the name of its
    file. Raises ShardirError."""
    return import_program(read(text, name))


def import_program(program: HloProgram) -> Any:
    """Return the module of a program, raised. Raises ShardirError."""
    start = _start(program, None, None, None, {})
    return _imported(start, program, "main", None, {})


def read(program: Any, name: str = "<stablehlo>") -> HloProgram:
    """Read a text of a file's name, or a module of jaxlib's bindings: by jaxlib where it is
    installed, else by our own reader of MLIR's generic form. Raises ShardirError."""
    try:
        from shardir.frontends.stablehlo import bindings
    except ImportError:
        if isinstance(program, str):
            return without_complex(read_generic(program, name))
        raise ShardirError(f"expected text, got {describe(program)}; {INSTALL}") from None
    if isinstance(program, str):
        return without_complex(bindings.read_text(program, name))
    if isinstance(program, bindings.ir.Module):
        return without_complex(bindings.read_module(program))
    raise ShardirError(f"expected text or a module of jaxlib, got {describe(program)}")


@dataclass
class _ImportStart:
    """What an import begins with."""

    module: Module
    mesh: Mesh | None
    options: Mapping[str, Any]


def _start(
    program: HloProgram, mesh: Any, cluster: str | Cluster | None, count: int | None,
    options: Mapping[str, Any],
) -> _ImportStart:  # fmt: skip
    """Begin a module on the given mesh, or on that of the program."""
    of_program = next(iter(meshes_of(program).values()), None)
    if hasattr(mesh, "axis_names") and hasattr(mesh, "shape"):  # a mesh of JAX
        mesh = dict(mesh.shape)
    if mesh is None and cluster is None and count is None:
        mesh = of_program
    found = devices_of(mesh, cluster, count, options)
    in_parts = {"sync", "stages"} & {name for name, value in options.items() if value is not None}
    one_device = {"d": 1} if in_parts and options.get("stages") != SEARCH else None
    module = Module(
        mesh=found.mesh if found.mesh is not None else one_device, cluster=found.cluster
    )
    made = _mesh_of(module)
    if of_program is not None and made is not None:
        if dict(made.axes) != dict(of_program.axes):
            raise ShardirError(
                f"expected the mesh of the program's shardings, {of_program}, got {made}; drop mesh"
            )
        module, made = Module(mesh=of_program, cluster=found.cluster), of_program
    return _ImportStart(module, made, found.options)


def _mesh_of(module: Module) -> Mesh | None:
    if module.mesh is None:
        return None
    return Mesh(module.mesh_name, module.mesh.axes.data)


def _roles_of(main: HloFunction) -> tuple[Sequence[ArgumentForm], Mapping[int, str]]:
    """Return the arguments of a text, and the state that each result replaces. Donated arguments of
    a step, which begins with its loss, are states; those of the first path are parameters.

    Raises:
        ShardirError: a donated argument has the type of the loss.
    """
    from shardir.frontends.stablehlo.names import unique_names

    roles = [ArgumentForm(n) for n in unique_names([a.name for a in main.block.arguments])]
    replaced = donated_of(main)
    results = main.block.results
    first = next((v.type for i, v in enumerate(results) if i not in replaced.values()), None)
    if not replaced or first is None or first.shape or not is_float(first.element):
        return roles, {}
    if any(results[i].type == first for i in replaced.values()):
        raise ShardirError(
            f"expected one result of type {first} for the loss, got several, of which one may be "
            "the new value of a donated argument; donate no argument of this type"
        )
    tree = roles[min(replaced)].name.partition(".")[0]
    for i in replaced:
        role = roles[i]
        role.is_state, role.is_parameter = True, role.name.partition(".")[0] == tree
        role.init = _init(role.name, False, role.is_parameter, True)
    return roles, {result: roles[i].name for i, result in replaced.items()}


def _imported(
    start: _ImportStart, program: HloProgram, name: str, roles: Sequence[ArgumentForm] | None,
    updates: Mapping[int, str], metrics: Mapping[int, str] = MappingProxyType({}),
    is_loss: bool = False,
) -> Any:  # fmt: skip
    """Import the function `main` as `name`: as a step if it updates states and is no loss."""
    if "main" not in program.functions:
        names = ", ".join(program.functions) or "none"
        raise ShardirError(f"expected a function main, got {names}; name it so")
    main = program.functions["main"]
    importer = HloImporter(program, start.module, start.mesh)
    if roles is None:
        roles, updates = _roles_of(main)
    for role, attributes in zip(roles, main.arguments, strict=True):
        if SHARDING in attributes:
            own = importer.sharding(attributes[SHARDING])
            if role.sharding is not None and role.sharding != own:
                raise ShardirError(
                    f"expected one sharding of {role.name}, got [{role.sharding}] in in_shardings "
                    f"and [{own}] of jax.jit; drop one"
                )
            role.sharding = own
    with no_gc():
        function = importer.run(name, roles, updates, metrics=metrics, private=is_loss)
        if updates and not is_loss:
            mark_step(function.func)
        RaiseCompositions().apply(Context(), start.module.module)
    return start.module.module
