"""A module that is being built in Python.

    m = Module(mesh="dp = 2, tp = 2")
    f = m.function("loss", private=True)
    x = f.input("x", (128, 64), layout="[{dp}, {}]")
    w = f.parameter("w", (64, 10), init="normal, std = 0.1")
    f.returns(nn.square(x @ w).mean())
    m.step("step", "loss", "adamw, lr = 1e-3")
    print(m)                                  # the text, as of an .ir file
    shardir.compile(m.module).run(steps=10)
"""

from collections.abc import Mapping, Sequence
from math import prod

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr
from xdsl.ir import Attribute, Operation

from shardir.algebra.notation import parse_cluster
from shardir.build.function import FunctionBuilder, caller
from shardir.cost.clusters import load, names
from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.train import (
    AccumulateAttr,
    ClipAttr,
    GradientOp,
    LossScaleAttr,
    MetricsAttr,
    OptimizerAttr,
    PipelineAttr,
    StepOp,
    SyncAttr,
)
from shardir.syntax.printer import print_module

WRITTEN = {
    "accumulate": 'write accumulate="mean, microbatches = 4"',
    "clip": 'write clip="norm, max = 1.0"',
    "metrics": 'write metrics="gradient_norm, learning_rate"',
    "pipeline": 'write pipeline="1f1b, ranks = 4"',
    "sync": 'write sync="nesterov, replicas = 4, every = 8, lr = 0.7, momentum = 0.9"',
    "loss_scale": 'write loss_scale="static, factor = 1024.0"',
}
"""A text of each further option of a step."""


class Module:
    """A program: a mesh, functions, and requests of training steps and gradients."""

    MESH = "m"

    def __init__(
        self, mesh: str | Mapping[str, int] | None = None, cluster: str | None = None
    ) -> None:
        """`mesh` has the axes: `dp = 2, tp = 4`, or a dict; `cluster` the name of a ready-made
        cluster, or the text of one.

        Raises:
            NotationError: the text is no mesh, or no cluster.
            ShardirError: a cluster without a mesh.
        """
        self._module = ModuleOp([])
        self._functions: list[FunctionBuilder] = []
        self.mesh: MeshOp | None = None
        if mesh is None:
            if cluster is not None:
                raise ShardirError("expected a mesh on the cluster, got none; use mesh=...")
            return
        if not isinstance(mesh, str | Mapping):
            raise ShardirError(f'expected a mesh: "dp = 2, tp = 4" or a dict, got {mesh!r:.60}')
        axes = mesh if isinstance(mesh, str) else ", ".join(f"{k} = {n}" for k, n in mesh.items())
        sizes = MeshAttr.read(axes)
        given: dict[str, Attribute] = {"sym_name": StringAttr(self.MESH), "axes": sizes}
        if cluster is not None:
            if cluster.isidentifier() and cluster not in names():
                hint = did_you_mean(cluster, names()) or f"; use one of {', '.join(names())}"
                raise ShardirError(f"expected a ready-made cluster, got {cluster}{hint}")
            name = cluster if cluster in names() else "cluster"
            devices = load(cluster) if cluster in names() else parse_cluster(cluster)
            devices = devices.part(prod(n for _, n in sizes.data))
            self._add(
                ClusterOp.create(
                    properties={"sym_name": StringAttr(name), "devices": ClusterAttr(devices)}
                )
            )
            given["cluster"] = SymbolRefAttr(name)
        self.mesh = MeshOp.create(properties=given)
        self._add(self.mesh)

    def _add(self, op: Operation) -> None:
        self._module.body.block.add_op(op)

    def function(self, name: str, *, private: bool = False) -> FunctionBuilder:
        """Begin a function. A private one is kept only while others of the module use it."""
        f = FunctionBuilder(name, private, None if self.mesh is None else self.MESH)
        self._functions.append(f)
        self._add(f.func)
        return f

    def step(
        self,
        name: str,
        function: str,
        optimizer: str,
        *,
        accumulate: str | None = None,
        clip: str | None = None,
        loss_scale: str | None = None,
        metrics: str | None = None,
        sync: str | None = None,
        pipeline: str | None = None,
    ) -> None:
        """Request a training step of a function that returns its loss: `adamw, lr = 1e-3`.
        `accumulate`, `clip`, `loss_scale`, `metrics`, `sync` and `pipeline` are as in
        docs/language.md.

        Raises:
            NotationError: a text is not of its form.
        """
        given: dict[str, Attribute] = {
            "sym_name": StringAttr(name), "function": SymbolRefAttr(function),
            "optimizer": OptimizerAttr.read(optimizer),
        }  # fmt: skip
        for key, kind, text in (
            ("accumulate", AccumulateAttr, accumulate), ("clip", ClipAttr, clip),
            ("loss_scale", LossScaleAttr, loss_scale), ("metrics", MetricsAttr, metrics),
            ("sync", SyncAttr, sync), ("pipeline", PipelineAttr, pipeline),
        ):  # fmt: skip
            if text is not None and not isinstance(text, str):
                raise ShardirError(f"expected a text as {key}, got {text!r:.60}; {WRITTEN[key]}")
            if text is not None:
                given[key] = kind.read(text)
        self._add(StepOp.create(properties=given, location=caller()))

    def gradient(self, name: str, function: str, wrt: Sequence[int]) -> None:
        """Request a function that returns the results and the cotangents of the arguments of these
        indices."""
        given: dict[str, Attribute] = {
            "sym_name": StringAttr(name), "function": SymbolRefAttr(function),
            "wrt": dims_attr(*wrt),
        }  # fmt: skip
        self._add(GradientOp.create(properties=given, location=caller()))

    @property
    def module(self) -> ModuleOp:
        """The module, for `shardir.compile` and passes.

        Raises:
            ShardirError: a function does not return yet.
        """
        for f in self._functions:
            if not f.returned:
                raise ShardirError(f"expected @{f.name} to return, got no end; use returns(...)")
        return self._module

    def __str__(self) -> str:
        return print_module(self.module)
