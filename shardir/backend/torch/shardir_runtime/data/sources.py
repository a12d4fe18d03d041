"""`--data`: files for the inputs of a program, in place of the files of its plan.

    --data x=train.npy                       rows of the input x of the step
    --data x,labels=train.npz                the arrays x and labels of a file
    --data x=train.safetensors:images        an array of another name
    --data tokens,targets=train.bin:u16      tokens in rows; the second input is shifted by one
    --data accuracy.x=test.npy               an input of a function beside the steps

Only a user can name files outside a program's directory; a plan cannot. This file needs only
Python.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..plan.arrays import ArrayError, FileArray, array_in, sequences
from ..plan.program import PlanArgument, PlanError, PlanFunction, ProgramPlan, fitting
from ..run.options import PIPE, DataFiles, parts_of


def with_data(plan: ProgramPlan, data: DataFiles | None, last: str = "wrap") -> ProgramPlan:
    """Return the plan with files as the data of its inputs.

    Args:
        last: the policy for the incomplete last batch (RunOptions).

    Raises:
        PlanError: there is no such input, a file does not have its rows, or the inputs of a step
            differ in their number of rows.
    """
    given: dict[str, FileArray | int] = {}
    known = {name: (arg, f.kind) for f in plan.functions for name, arg in _inputs(f)}
    for word in data or ():
        for name, source in _sources(word, known):
            if name in given:
                raise PlanError(f"--data {word}: the data of {name} is given twice")
            given[name] = source
    functions = tuple(_with_files(f, given) for f in plan.functions) if given else plan.functions
    if last != "wrap":
        functions = tuple(_with_last(f, last) for f in functions)
    return replace(plan, functions=functions)


def _with_last(f: PlanFunction, last: str) -> PlanFunction:
    """Return a function with a policy for the incomplete last batch. A function beside the steps
    drops it, unless it has the mask of a padded batch."""
    kind, _, mask = last.partition("=")
    if mask:
        return _with_mask(f, mask)
    if f.kind != "step":
        return f
    read = {arg.name: arg.epochs for arg in f.args if arg.epochs is not None}
    if not read:
        raise PlanError(f"--last {last}: expected rows of files, which {f.name} does not read")
    for name, epochs in read.items():
        if epochs.rows < epochs.batch or (kind == "refuse" and epochs.rows % epochs.batch):
            wanted = "a multiple of" if kind == "refuse" else "at least"
            raise PlanError(
                f"--last {last}: expected {wanted} the {epochs.batch} rows of a batch, got "
                f"{epochs.rows} of {name}"
            )
    return replace(f, args=tuple(replace(arg, last=kind) for arg in f.args))


def _with_mask(f: PlanFunction, name: str) -> PlanFunction:
    """Return a function with a padded last batch, if it has an input for the mask."""
    inputs = [arg for arg in f.args if arg.role == "input"]
    if f.kind != "step" and any(arg.microbatches for arg in inputs):
        raise PlanError(
            f"--last pad: expected one microbatch in {f.name}, so that its mean is over rows, got "
            "several; use --last drop"
        )
    mask = next((arg for arg in inputs if arg.name == name), None)
    if mask is None:
        if f.kind != "step":
            return f
        known = ", ".join(arg.name for arg in inputs) or "none"
        raise PlanError(f"--last pad: expected an input of {known} as the mask, got {name!r}")
    if mask.row or not mask.shape:
        raise PlanError(
            f"--last pad: expected a number for each row of a batch as the mask, got {name} of "
            f"{list(mask.shape)}"
        )
    args = [replace(arg, last="pad") for arg in f.args]
    read = {a.name: a.epochs for a in args if a.epochs is not None and a.name != name}
    of_mask = {epochs for epochs in read.values() if epochs.batch == mask.batch}
    several = {epochs for epochs in of_mask if epochs.rows != mask.batch}  # more than one batch
    if len(several or of_mask) != 1:
        got = ", ".join(f"{e.rows} of {n}, {e.batch} at a step" for n, e in read.items()) or "none"
        raise PlanError(
            f"--last pad: expected inputs of {f.name} with equally many rows of files, "
            f"{mask.batch} at a step as {name} has them, got {got}"
        )
    (masked,) = several or of_mask
    return replace(
        f, args=tuple(replace(a, source=None, masked=masked) if a.name == name else a for a in args)
    )


def _inputs(f: PlanFunction) -> Iterator[tuple[str, PlanArgument]]:
    """Yield the inputs of a function with their names in `--data`."""
    for arg in f.args:
        if arg.role == "input":
            yield (arg.name if f.kind == "step" else f"{f.name}.{arg.name}"), arg


def _sources(
    word: str, known: Mapping[str, tuple[PlanArgument, str]]
) -> Iterator[tuple[str, FileArray | int]]:
    """Yield the inputs that a word names, with their files."""
    names, path, entry = parts_of(word)
    for shift, name in enumerate(names):
        if name not in known:
            raise PlanError(
                f"--data {word}: expected an input of {', '.join(known) or 'none'}, got {name!r}"
            )
        arg, kind = known[name]
        if pipe := PIPE.fullmatch(str(path)):
            yield name, int(pipe[1])
            continue
        try:
            tokens = path.suffix == ".bin"
            source = array_in(path, entry if tokens else entry or name.rpartition(".")[2])
            if tokens or (len(source.shape) == 1 and arg.row):
                source = sequences(source, arg.row, shift)
        except ArrayError as error:
            raise PlanError(f"--data {word}: {error}") from None
        if problem := fitting(source, arg, kind):
            raise PlanError(f"--data {word}: {path}: {problem}")
        yield name, source


def _with_files(f: PlanFunction, given: Mapping[str, FileArray | int]) -> PlanFunction:
    """Return a function with files for its inputs. Rows with one index stay together."""
    in_file = {"kind": "file", "shuffle": True}
    args = {id(arg): replace(arg, source=given[name], init={**arg.init, **in_file})
            for name, arg in _inputs(f) if name in given}  # fmt: skip
    fed = replace(f, args=tuple(args.get(id(arg), arg) for arg in f.args))
    files = [a for a in fed.args if a.role == "input" and isinstance(a.source, FileArray)]
    for arg in files if args and f.kind == "step" else ():
        counts = [
            (a.source.shape[0], a.batch) for a in (files[0], arg) if isinstance(a.source, FileArray)
        ]
        if counts[0] != counts[1]:
            raise PlanError(
                f"expected equally many rows, so that they stay together, got {counts[0][0]} of "
                f"{files[0].name}, {counts[0][1]} at a step, and {counts[1][0]} of {arg.name}, "
                f"{counts[1][1]} at a step; give both by --data"
            )
        if counts[1][0] < arg.batch:
            raise PlanError(
                f"expected at least the {arg.batch} rows of a batch, got {counts[1][0]} of "
                f"{arg.name}"
            )
    return fed
