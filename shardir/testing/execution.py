"""The values of a program: interpreted, or of the emitted program on ranks."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Mesh
from shardir.api.compiled import Compiled
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.nn.base import Array
from shardir.interpret import random_arguments, run
from shardir.interpret.evaluator import check_arguments, function, global_type, is_local_function
from shardir.interpret.values import assemble, split
from shardir.syntax.files import scratch_folder
from shardir.syntax.parser import parse

AnyProgram = ModuleOp | Compiled | str
"""A module, a compiled program, or the text of one."""


def module_of(program: AnyProgram) -> ModuleOp:
    """Return the module of a program."""
    if isinstance(program, Compiled):
        return program.module
    return parse(program, "<program>", verify=True) if isinstance(program, str) else program


def public_function(module: ModuleOp, name: str | None) -> FuncOp:
    """Return a function: by default the only public one.

    Raises:
        ShardirError: there is no such function, or there are several.
    """
    if name is not None:
        return function(module, name)
    found = [
        op for op in module.body.ops if isinstance(op, FuncOp) and op.body.blocks
        if op.sym_visibility is None or op.sym_visibility.data != "private"
    ]  # fmt: skip
    if len(found) != 1:
        names = ", ".join(f.sym_name.data for f in found) or "none"
        raise ShardirError(f"expected one public function, got {names}; name the function")
    return found[0]


def interpret(
    program: AnyProgram, arguments: Sequence[Any] | None = None, function: str | None = None
) -> list[Array]:
    """Return the results of a function, evaluated in numpy: of the global view on one device, of
    the local view on all ranks of its mesh, in this process.

    Args:
        program: a module, a compiled program, or its text.
        arguments: global arrays; by default random ones, the same in each call.
        function: its name, by default that of the only public function.

    Returns:
        The global results. Short floats are f32.

    Raises:
        ShardirError: the function, an argument or an op cannot be evaluated; or replicas of a
            value differ.
    """
    module = module_of(program)
    f = public_function(module, function)
    values = random_arguments(f, module) if arguments is None else arguments
    return run(module, f.sym_name.data, values)


def on_ranks(
    program: AnyProgram,
    arguments: Sequence[Any] | None = None,
    function: str | None = None,
    backend: str = "simulated",
) -> list[Array]:
    """Return the results of a function of the emitted program, which runs on all ranks.

    Args:
        program: a module, a compiled program, or its text: in the local view, or without layouts,
            for one rank.
        arguments: global arrays; by default those of `interpret`.
        function: its name, by default that of the only public function.
        backend: simulated: ranks are threads of this process, with process groups in memory, which
            takes milliseconds; gloo or shm: ranks are processes.

    Returns:
        The global results, as `interpret` returns them.

    Raises:
        ShardirError: the function is not in the local view, or has stages, whose ranks only
            `Compiled.run` starts; there is no such backend.
        RunError: a rank fails.
    """
    module = module_of(program)
    f = public_function(module, function)
    name = f.sym_name.data
    if backend not in ("simulated", "gloo", "shm"):
        raise ShardirError(f"expected the backend simulated, gloo or shm, got {backend}")
    values = random_arguments(f, module) if arguments is None else arguments
    meshes = dist.meshes_of(module)
    arrays = check_arguments(f, values, meshes)
    if backend != "simulated":
        return _on_processes(module, name, arrays, backend)
    return _on_threads(module, f, arrays, _mesh(f, meshes))


def _mesh(f: FuncOp, meshes: dict[str, Mesh]) -> Mesh | None:
    """Return the mesh of a function in the local view; None of one without layouts."""
    if not is_local_function(f):
        return None
    values = [*f.body.block.args, *(v for op in f.body.block.ops for v in op.results)]
    layouts = (dist.layout_of(v) for v in values)
    return next(meshes[l.mesh] for l in layouts if l is not None)


def _on_threads(module: ModuleOp, f: FuncOp, arrays: list[Array], mesh: Mesh | None) -> list[Array]:
    from shardir.backend.torch.shardir_runtime import runtime as rt
    from shardir.dialects.train import schedule_of
    from shardir.testing import emission, simulated

    if schedule_of(f) is not None:
        raise ShardirError(
            f"expected a function whose ranks run the same program, got stages in "
            f"@{f.sym_name.data}; give a backend"
        )
    call = emission.python_function(module, f.sym_name.data)
    inputs, outputs = f.function_type.inputs.data, f.function_type.outputs.data
    axes, count = (mesh.axes, mesh.size) if mesh else ((), 1)

    def layout(t: Any) -> Layout:
        assert mesh is not None
        return dist.type_layout(t) or replicated(mesh.name, len(t.get_shape()))

    shards = [
        split(a, layout(t), mesh, holder=i) if mesh else [a]
        for i, (a, t) in enumerate(zip(arrays, inputs, strict=True))
    ]

    def on_rank(rank: int) -> list[Array]:
        mine = [emission.tensor(parts[rank], emission.element_of(t))
                for parts, t in zip(shards, inputs, strict=True)]  # fmt: skip
        results = emission.listed(call(rt.Mesh(axes, rank), *mine))
        return [
            emission.array_of(x, emission.element_of(t))
            for x, t in zip(results, outputs, strict=True)
        ]

    by_rank = simulated.run_ranks(count, on_rank)
    if mesh is None:
        return by_rank[0]
    meshes = {mesh.name: mesh}
    return [
        assemble([*parts], layout(t), mesh, global_type(t, meshes).get_shape())
        for parts, t in zip(zip(*by_rank, strict=True), outputs, strict=True)
    ]


def _on_processes(module: ModuleOp, name: str, arrays: list[Array], backend: str) -> list[Array]:
    from shardir.backend.runs import Options
    from shardir.backend.torch.backend import TorchBackend
    from shardir.backend.torch.launch.start import run as start

    with scratch_folder() as folder:
        directory, dump = folder / "program", folder / "results.npz"
        TorchBackend().emit_directory(Context(), module, None, directory)
        plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
        function = plan["functions"][name]
        function["kind"] = "function"
        for i, (argument, array) in enumerate(zip(function["args"], arrays, strict=True)):
            data = array.tolist() if array.ndim else [array.tolist()]
            argument["name"] = f"{i}"
            argument.update(role="input", key=f"{i}", init={"kind": "values", "data": data})
        for result in function["results"]:
            result.pop("updates", None)
            result.pop("weighs", None)
        plan["functions"] = {name: function}
        plan.pop("states", None)
        (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        start(directory, Options(backend=backend, dump=dump, verbose=False))
        results = np.load(dump)
        return [np.asarray(results[f"results/{name}/{i}"]) for i in range(len(function["results"]))]
