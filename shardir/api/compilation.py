"""Compile text, files and modules, and run what is compiled."""

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.plan_notation import PlanForm
from shardir.api.compiled import Compiled, compile_module
from shardir.backend import DEFAULT, backend_of
from shardir.backend.interface import Backend
from shardir.backend.runs import Options, Report, in_python_words, with_options
from shardir.build import Module
from shardir.diagnostics import (
    Failure,
    ShardirError,
    check_arguments,
    describe,
    progress_shown,
    show_overloads,
)
from shardir.syntax.files import read_text

if TYPE_CHECKING:
    import torch

    from shardir.algebra.cluster import Cluster
    from shardir.api.devices import MeshForm
    from shardir.api.model import CompiledModel
    from shardir.api.steps import CompiledSteps
    from shardir.frontends.torch.capture import LossFunction
    from shardir.frontends.torch.steps import Inference, Step


@overload
def compile(
    program: str | ModuleOp | Module,
    pipeline: str | None = None,
    name: str = "<input>",
    *,
    mode: str | None = None,
    plan: PlanForm | None = None,
    precision: str | None = None,
    recompute: str | float | None = None,
    offload: bool = False,
    save_strategies: str | Path | None = None,
    base_dir: str | Path | None = None,
    target: str | Backend = DEFAULT,
    arena: bool = False,
) -> Compiled: ...


@overload
def compile(
    program: "torch.nn.Module",
    inputs: Any = None,
    *,
    keywords: Mapping[str, Any] | None = None,
    labels: Any = None,
    loss: "LossFunction | None" = None,
    optimizer: Any = None,
    scheduler: Any = None,
    scheduler_steps: int | None = None,
    train: bool = True,
    mesh: "MeshForm | None" = None,
    cluster: "str | Cluster | None" = None,
    devices: int | None = None,
    accumulate: str | None = None,
    clip: str | None = None,
    loss_scale: str | None = None,
    metrics: str | None = None,
    ema: float | None = None,
    separate_update: bool = False,
    sync: str | None = None,
    stages: str | None = None,
    derived: Collection[str] = (),
    trace: bool = False,
    evaluate: bool = False,
    check: bool = False,
    pipeline: str | None = None,
    name: str = "<input>",
    mode: str | None = None,
    plan: PlanForm | None = None,
    precision: str | None = None,
    recompute: str | float | None = None,
    offload: bool = False,
    save_strategies: str | Path | None = None,
    base_dir: str | Path | None = None,
    target: str | Backend = DEFAULT,
    arena: bool = False,
) -> "CompiledModel": ...


@overload
def compile(
    program: "torch.nn.Module | Mapping[str, torch.nn.Module]",
    *,
    steps: "Mapping[str, Step | Inference]",
    mesh: "MeshForm | None" = None,
    cluster: "str | Cluster | None" = None,
    devices: int | None = None,
    pipeline: str | None = None,
    mode: str | None = None,
    plan: PlanForm | None = None,
    precision: str | None = None,
    recompute: str | float | None = None,
    offload: bool = False,
    save_strategies: str | Path | None = None,
    target: str | Backend = DEFAULT,
    arena: bool = False,
) -> "CompiledSteps": ...


def compile(program: Any, *args: Any, **options: Any) -> Any:
    """Compile a program: text, a module of the IR or of `shardir.build`, or a torch.nn.Module.

    `shardir.api.compiled.compile_module` has the arguments for a program of the IR,
    `shardir.api.model.compile_model` for a module of torch, `shardir.api.steps.compile_steps` for
    one with several `steps`. The program itself is not changed.

    Raises:
        ShardirError: the errors of the program or the pipeline, with their locations.
    """
    # No decorators: the line of the caller is that of the program.
    with in_python_words(), progress_shown("compiling", lines=False):
        return _compile(program, *args, **options)


show_overloads(compile)


def _compile(program: Any, *args: Any, **options: Any) -> Any:
    if "steps" in options:
        from shardir.api.steps import compile_steps

        return compile_steps(program, *args, **options)
    if isinstance(program, Module):
        program = program.module
    if isinstance(program, str | ModuleOp):
        return compile_module(program, *args, **options)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(program, torch.nn.Module):
        use = "make one" if isinstance(program, type) else "use compile_file for a file"
        raise ShardirError(f"expected text or a module, got {describe(program)}; {use}")
    from shardir.api.model import compile_model

    return compile_model(program, *args, **options)


@check_arguments("compile_file")
def compile_file(
    path: str | Path,
    pipeline: str | None = None,
    *,
    mode: str | None = None,
    plan: PlanForm | None = None,
    precision: str | None = None,
    recompute: str | float | None = None,
    offload: bool = False,
    save_strategies: str | Path | None = None,
    base_dir: str | Path | None = None,
    target: str | Backend = DEFAULT,
    arena: bool = False,
) -> Compiled:
    """Compile an .ir file. The arguments are those of `compile`.

    Raises:
        ShardirError: the errors of `compile`; or the file cannot be read, or is not UTF-8.
    """
    return compile_module(
        read_text(Path(path)), pipeline, str(path), mode=mode, plan=plan, precision=precision,
        recompute=recompute, offload=offload, save_strategies=save_strategies, base_dir=base_dir,
        target=target, arena=arena,
    )  # fmt: skip


@with_options
@check_arguments("run")
def run(program: str | Path | Compiled, *, mode: str | None = None, **options: Any) -> Report:
    """Run a saved directory, an .ir file (compiled in `mode`), or a compiled program.

    Args:
        options: those of a run.

    Raises:
        ShardirError: the program is invalid, or a rank fails.
    """
    if not isinstance(program, Compiled) and not Path(program).is_dir():
        return compile_file(program, mode=mode).run(**options)
    if mode is not None:
        raise Failure(
            "expected an .ir file for a mode, got a program that is compiled already; drop the mode"
        )
    if isinstance(program, Compiled):
        return program.run(**options)
    return backend_of(DEFAULT).run(Path(program), Options.of(options))
