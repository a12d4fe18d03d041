"""Compile text, files and modules, and run what is compiled."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.plan_notation import PlanForm
from shardir.api.compiled import Compiled, compile_module
from shardir.backend import DEFAULT, backend_of
from shardir.backend.interface import Backend
from shardir.backend.runs import Options, Report, in_python_words
from shardir.build import Module
from shardir.diagnostics import Failure, ShardirError, check_arguments, describe
from shardir.syntax.files import read_text

if TYPE_CHECKING:
    import torch

    from shardir.api.model import CompiledModel
    from shardir.api.steps import CompiledSteps
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
def compile(program: "torch.nn.Module", inputs: Any, **options: Any) -> "CompiledModel": ...


@overload
def compile(
    program: "torch.nn.Module | Mapping[str, torch.nn.Module]", *,
    steps: "Mapping[str, Step | Inference]", **options: Any,
) -> "CompiledSteps": ...  # fmt: skip


def compile(program: Any, *args: Any, **options: Any) -> Any:
    """Compile a program: text, a module of the IR or of `shardir.build`, or a torch.nn.Module.

    `shardir.api.compiled.compile_module` has the arguments for a program of the IR,
    `shardir.api.model.compile_model` for a module of torch, `shardir.api.steps.compile_steps` for
    one with several `steps`. The program itself is not changed.

    Raises:
        ShardirError: the errors of the program or the pipeline, with their locations.
    """
    with in_python_words():  # no decorator: the line of the caller is that of the program
        return _compile(program, *args, **options)


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
def compile_file(path: str | Path, pipeline: str | None = None, **options: Any) -> Compiled:
    """Compile an .ir file. The arguments are those of `compile`.

    Raises:
        ShardirError: the errors of `compile`; or the file cannot be read, or is not UTF-8.
    """
    return compile_module(read_text(Path(path)), pipeline, str(path), **options)


@in_python_words()
@check_arguments("run")
def run(program: str | Path | Compiled, *, mode: str | None = None, **options: Any) -> Report:
    """Run a saved directory, an .ir file (compiled in `mode`), or a compiled program."""
    if not isinstance(program, Compiled) and not Path(program).is_dir():
        return compile_file(program, mode=mode).run(**options)
    if mode is not None:
        raise Failure(
            "expected an .ir file for a mode, got a program that is compiled already; drop the mode"
        )
    if isinstance(program, Compiled):
        return program.run(**options)
    return backend_of(DEFAULT).run(Path(program), Options.of(options))
