"""What Python people and embedders use: parse, compile, save, run.

    import shardir

    compiled = shardir.compile_file("mlp.ir")     # or compile(text), or compile(module)
    print(compiled.text)                          # the IR after all passes
    print(compiled.program)                       # the Python that every rank runs
    compiled.save("out")                          # torchrun --nproc-per-node 4 out/program.py
    report = compiled.run(steps=100)              # or here and now, on local processes

What is wrong with a program is a ShardirError that says where.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir import pipelines
from shardir.backend import DEFAULT, backend_of
from shardir.backend.interface import Backend, Options, Report
from shardir.diagnostics import Failure, ParseErrors
from shardir.syntax.files import read_text
from shardir.syntax.parser import default_parser, no_gc
from shardir.syntax.parser import parse as _parse
from shardir.syntax.printer import print_module
from shardir.syntax.source import Source
from shardir.syntax.verify import verify


def parse(text: str, name: str = "<input>") -> ModuleOp:
    """Text -> a verified module. Raises ParseErrors with everything that is wrong."""
    return _parse(text, name, verify=True)


def compile(
    text_or_module: str | ModuleOp,
    pipeline: str | None = None,
    name: str = "<input>",
    *,
    mode: str | None = None,
    save_strategies: str | Path | None = None,
    load_strategies: str | Path | None = None,
    base_dir: str | Path | None = None,
    target: str | Backend = DEFAULT,
) -> "Compiled":
    """Run a pipeline (the names of passes, with options in braces) over a program, or that of a
    mode: stand_alone, data, hybrid, semi_auto (the default), auto or manual. A mode takes the
    options of its passes: `auto{memory=16GB}`.

    What is decided on where values lie is written to the file `save_strategies`, or taken from
    `load_strategies` instead. A module that is given stays as it is. `name` is what errors and
    comments call the source; `base_dir` is where the paths of data files count from, if not from
    the folder of `name`; `target` is the backend, or its name.

    Raises:
        ShardirError: what is wrong with the program or the pipeline, with its place.
    """
    text = pipelines.pipeline_of(pipeline, mode, pipelines.DEFAULT)
    passes = pipelines.with_strategies(pipelines.build(text), load_strategies, save_strategies)
    with no_gc():
        if isinstance(text_or_module, str):
            source = Source(text_or_module, name)
            original = parse(text_or_module, name)
        else:
            source, original = Source("", name), text_or_module.clone()
            verify(original, source)
        module, context = original.clone(), default_parser().ctx

        def work() -> None:
            nonlocal original
            for p in passes:
                p.apply(context, module)
                if pipelines.runs_on_one_device(p):
                    original = module.clone()
            verify(module, source)

        located(source, work)
    base = Path(base_dir) if base_dir is not None else None
    return Compiled(module, original, source, base, context, backend_of(target))


def compile_file(path: str | Path, pipeline: str | None = None, **options: Any) -> "Compiled":
    """Compiles an .ir file, as `compile` does.

    Raises:
        ShardirError: as there, or the file cannot be read, or is not UTF-8.
    """
    return compile(read_text(Path(path)), pipeline, str(path), **options)


def located(source: Source, work: Callable[[], Any]) -> Any:
    """What a pass or the emitter finds wrong, with its place in the source."""
    try:
        with no_gc():
            return work()
    except Failure as failure:
        raise ParseErrors(failure.diagnostics(source)) from None


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program after its passes, ready to be read, saved and run."""

    module: ModuleOp
    original: ModuleOp
    source: Source
    base_dir: Path | None
    context: Context
    backend: Backend

    @property
    def text(self) -> str:
        """The IR after all passes."""
        return print_module(self.module)

    @property
    def program(self) -> str:
        """The Python that every rank runs."""
        return located(self.source, lambda: self.backend.text(self.module))

    def save(self, directory: str | Path, *, per_rank: bool = False) -> Path:
        """Writes a directory that needs only Python and torch; `per_rank`: also one file for
        each rank, to read."""
        backend = replace(self.backend, per_rank=per_rank)
        located(
            self.source,
            lambda: backend.emit_directory(
                self.context, self.module, self.original, directory, self.base_dir
            ),
        )
        return Path(directory)

    def run(self, **options: Any) -> Report:
        """Runs it on processes of this machine, one for each rank: steps=, seed=, backend=,
        timeout=, ... as in shardir.backend.interface.Options."""
        with tempfile.TemporaryDirectory(prefix="shardir-") as folder:
            return self.backend.run(self.save(Path(folder) / "program"), Options(**options))


def run(program: "str | Path | Compiled", *, mode: str | None = None, **options: Any) -> Report:
    """Runs a directory that was saved, an .ir file (in a mode), or what compile gave."""
    if not isinstance(program, Compiled) and not Path(program).is_dir():
        return compile_file(program, mode=mode).run(**options)
    if mode is not None:
        raise Failure("what is to run is compiled already; a mode is for an .ir file")
    if isinstance(program, Compiled):
        return program.run(**options)
    return backend_of(DEFAULT).run(Path(program), Options(**options))
