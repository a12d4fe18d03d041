"""`shardir.compare`: which plan, on which mesh?

print(shardir.compare(model, x, labels=y, loss=cross_entropy, optimizer="adamw, lr = 1e-3",
                      plans=["ddp", "fsdp(dp)", "megatron(tp) * fsdp(dp)", "auto"],
                      devices=16, cluster="h200"))
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.api.compilation import compile, compile_file
from shardir.api.compiled import Compiled, parse
from shardir.build import Module
from shardir.build.module import cluster_of
from shardir.diagnostics import ShardirError, check_arguments
from shardir.reports.comparison import PlanComparison, compare_plans, entry, mesh_of, meshes_of
from shardir.reports.page import write_page

_HINTS = {
    "mesh": "give meshes=[...]",
    "plan": "give plans=[...]",
    "mode": "give plans=[...]",
    "precision": "write it behind a plan: 'ddp precision=bf16'",
    "recompute": "write it behind a plan: 'ddp recompute=full'",
    **dict.fromkeys(("pipeline", "offload", "save_strategies", "target", "arena"), "drop it"),
}
"""The options of `shardir.compile` that are no part of a program, with what to do."""


@check_arguments("compare")
def compare(
    program: Any,
    *args: Any,
    plans: Sequence[str],
    meshes: Sequence[str | Mesh] | None = None,
    devices: int | None = None,
    cluster: str | Cluster | None = None,
    report: str | Path | None = None,
    **options: Any,
) -> PlanComparison:
    """Compile a program by several plans on several meshes, and compare the estimates of a step:
    time, share of the peak rate, communication, memory. Nothing runs. Of a program with several
    steps it is the first one, as the table says.

    Args:
        program: a torch.nn.Module, with the arguments of `shardir.compile` behind it; text, an .ir
            file (a Path), a module, or a compiled program.
        plans: presets or texts of plans, `megatron(tp) * fsdp(dp)`, or modes, `auto`; with
            `recompute=full`, `recompute=0.6`, `precision=bf16` or `stages=4 microbatches=16
            schedule=zb-h1` behind them. A plan is tried on the meshes that have
            the axes which it names.
        meshes: `dp = 2, tp = 8`; by default all of `devices` with the axes dp and tp.
        devices: the number of devices, by default all of the cluster.
        cluster: the name or the text of a cluster, or a Cluster. Without one, estimates are those
            of the default cluster, and no memory is too large.
        report: a file for a page with the programs side by side, `plans.html`.

    Returns:
        The comparison: its `str` is a table, `best` the fastest plan that fits, and `json()` and
        `csv()` are for other programs.

    Raises:
        ShardirError: the program is wrong, there is no such mesh or cluster, or no plan can be
            compiled. An error of one plan on one mesh is in its row.
    """
    found = None if cluster is None else cluster_of(cluster)
    if meshes is None and devices is None and found is None:
        raise ShardirError(
            'expected meshes=["dp = 2, tp = 8"], devices=16 or a cluster to compare plans on, got '
            "none of them"
        )
    if meshes is None:
        of_cluster = 1 if found is None else found.units[-1]
        placed = meshes_of(of_cluster if devices is None else devices, found)
    elif devices is not None:
        raise ShardirError(
            f"expected meshes or devices, got meshes and {devices} devices; drop one"
        )
    else:
        placed = [mesh if isinstance(mesh, Mesh) else mesh_of(mesh) for mesh in meshes]
    module, entries = _module(program, args, options), list(map(entry, plans))
    comparison = compare_plans(module, entries, placed, found, recorded=report is not None)
    if report is not None:
        write_page(Path(report), comparison.report(_title(program)))
    return comparison


def _title(program: Any) -> str:
    """Return the name of a program in a report."""
    if isinstance(program, Path):
        return program.name
    if isinstance(program, Compiled):
        return Path(program.title).name
    return "program" if isinstance(program, str | ModuleOp) else type(program).__name__


def _module(program: Any, args: Sequence[Any], options: dict[str, Any]) -> ModuleOp:
    """Return the program before its passes."""
    if isinstance(program, Module):
        program = program.module
    if isinstance(program, ModuleOp | str | Path | Compiled):
        if args or options:
            wrong = next(iter(options), "an argument")
            raise ShardirError(f"expected no {wrong} beside a program of the IR; drop it")
        if isinstance(program, Path):
            return compile_file(program, "").input_module
        if isinstance(program, Compiled):
            return program.input_module
        return parse(program) if isinstance(program, str) else program
    if wrong := [name for name in options if name in _HINTS]:
        raise ShardirError(
            f"expected no {wrong[0]} beside the plans to compare, got one; {_HINTS[wrong[0]]}"
        )
    return compile(program, *args, mesh="d = 1", mode="stand_alone", **options).input_module
