"""source.ir: the source of a directory, and its compilation for other numbers of ranks.

    // passes: ["inline-calls", "assign-stages", ["apply-plan", {"plan": ["fsdp"]}], ...]
    builtin.module { dist.mesh @m <dp = 4, tp = 2> loc("net.ir":1:1) ... }

1. The outermost axis of the mesh, usually data parallel, shrinks: for half the ranks,
   <dp = 4, tp = 2> becomes <dp = 2, tp = 2>, on a part of the cluster. All passes run again, so
   layouts are propagated or searched for on the new mesh.
2. Functions, arguments and states keep their global shapes, so that checkpoints fit and the batches
   of steps do not change.
3. Arrays are read from the directory; the only other file that is read is one of strategies.
"""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir import pipelines
from shardir.algebra.garbage import no_gc
from shardir.backend.interface import Origin
from shardir.backend.torch.directory import SOURCE
from shardir.diagnostics import Failure, ParseErrors, ShardirError
from shardir.dialects.dist import MeshOp
from shardir.search.meshes.declared_mesh import declare
from shardir.syntax.files import read_text
from shardir.syntax.parser import default_parser, parse
from shardir.syntax.source import Source, collect_warnings
from shardir.syntax.verify import verify

_PASSES = "// passes: "


def text_of(origin: Origin) -> str:
    """Return the text of source.ir."""
    return f"{_PASSES}{origin.passes}\n{origin.text}"


def origin_of(directory: Path) -> tuple[Source, ModuleOp, list[ModulePass]]:
    """Return the source of a directory, its module, and the passes that have compiled it.

    Raises:
        ShardirError: the directory has no source.
    """
    path = directory / SOURCE
    if not path.is_file():
        raise ShardirError(f"expected {path}, from which it is compiled again; compile it anew")
    text = read_text(path)
    first, _, rest = text.partition("\n")
    try:
        if not first.startswith(_PASSES):
            raise ValueError
        passes = pipelines.of_record(first.removeprefix(_PASSES))
    except (ValueError, TypeError):
        raise ShardirError(f"{path}:1: expected `{_PASSES}` and passes; compile it anew") from None
    return Source(rest, str(path)), parse(rest, str(path), verify=True), passes


def resize(directory: Path, ranks: int, of: int) -> tuple[Context, ModuleOp]:
    """Return the program of a directory for `of` ranks, compiled for another number of ranks.

    Raises:
        ShardirError: the directory has no source, or it cannot be compiled for these ranks.
    """
    source, module, passes = origin_of(directory)
    context = default_parser().ctx
    try:
        with no_gc(), collect_warnings():
            _resize_mesh(module, Fraction(ranks, of))
            for p in pipelines.for_devices(passes, ranks):
                p.apply(context, module)
            verify(module, source)
    except Failure as failure:
        raise ParseErrors(failure.diagnostics(source)) from None
    return context, module


def _resize_mesh(module: ModuleOp, share: Fraction) -> None:
    """Scale the outermost axis of the mesh. Raises ShardirError where its size would be none."""
    mesh = next((op.mesh for op in module.ops if isinstance(op, MeshOp)), None)
    if mesh is None:
        return
    at = next((i for i, (_, size) in enumerate(mesh.axes) if size > 1), 0)
    name, size = mesh.axes[at]
    scaled = size * share
    if scaled.denominator > 1:
        raise ShardirError(
            f"expected a size of axis {name} of {mesh} of which {share} is one too, got {size}; "
            "use another mesh, or other numbers of machines"
        )
    axes = (*mesh.axes[:at], (name, int(scaled)), *mesh.axes[at + 1 :])
    cluster = mesh.cluster and mesh.cluster.part(int(mesh.size * share))
    declare(module, replace(mesh, axes=axes, cluster=cluster))
