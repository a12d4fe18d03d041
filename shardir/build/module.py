"""The builder of a module in Python.

    m = Module(mesh="dp = 2, tp = 2")
    f = m.function("loss", private=True)
    x = f.input("x", (128, 64), layout="[{dp}, {}]")
    w = f.parameter("w", (64, 10), init="normal, std = 0.1")
    f.returns(nn.square(x @ w).mean())
    m.step("step", "loss", "adamw, lr = 1e-3")
    print(m)                                  # the text of an .ir file
    shardir.compile(m.module).run(steps=10)
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, TypeVar

from xdsl.dialects.builtin import ModuleOp, StringAttr, SymbolRefAttr, UnitAttr
from xdsl.ir import Attribute, Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import parse_cluster
from shardir.build.function import FunctionBuilder, caller
from shardir.cost.clusters import load, names
from shardir.diagnostics import NotationError, ShardirError, check_arguments, did_you_mean
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.train import (
    AccumulateAttr,
    AverageAttr,
    ClipAttr,
    ForwardOp,
    GradientOp,
    LossScaleAttr,
    MetricsAttr,
    OptimizerAttr,
    PipelineAttr,
    StepOp,
    SyncAttr,
)
from shardir.syntax.printer import print_module

KindOfBuilder = TypeVar("KindOfBuilder", bound=FunctionBuilder)


class Module:
    """A program: a mesh, functions, and requests of training steps and gradients."""

    MESH = "m"

    @check_arguments("Module")
    def __init__(
        self,
        mesh: str | Mapping[str, int] | Mesh | None = None,
        cluster: str | Cluster | None = None,
    ) -> None:
        """Begin a program.

        Args:
            mesh: the axes as a text, `dp = 2, tp = 4`, or a dict; or a Mesh.
            cluster: the name or the text of a cluster, or a Cluster.

        Raises:
            NotationError: the text is no mesh, or no cluster.
            ShardirError: there is a cluster without a mesh.
        """
        self._module = ModuleOp([])
        self._functions: list[FunctionBuilder] = []
        self.mesh: MeshOp | None = None
        self.mesh_name = self.MESH
        if isinstance(mesh, Mesh):
            self.mesh_name, cluster = mesh.name, cluster or mesh.cluster
            mesh = dict(mesh.axes)
        if mesh is None:
            if cluster is not None:
                raise ShardirError("expected a mesh on the cluster, got none; use mesh=...")
            return
        sizes = _read(MeshAttr, mesh if isinstance(mesh, str) else _axes(mesh))
        properties: dict[str, Attribute] = {"sym_name": StringAttr(self.mesh_name), "axes": sizes}
        if cluster is not None:
            name = str(cluster) if cluster in names() else "cluster"
            devices = cluster_of(cluster).part(prod(n for _, n in sizes.data))
            self._add(
                ClusterOp.create(
                    properties={"sym_name": StringAttr(name), "devices": ClusterAttr(devices)}
                )
            )
            properties["cluster"] = SymbolRefAttr(name)
        self.mesh = MeshOp.create(properties=properties)
        self._add(self.mesh)

    def _add(self, op: Operation) -> None:
        self._module.body.block.add_op(op)

    def function(
        self, name: str, *, private: bool = False, rule: str | None = None,
        kind: type[KindOfBuilder] = FunctionBuilder,
    ) -> KindOfBuilder:  # fmt: skip
        """Begin a function. A private one is dropped once no other function uses it.

        Args:
            rule: `elementwise` or `whole`, for a function that updates a parameter.
            kind: the class of the builder.
        """
        mesh = None if self.mesh is None else self.mesh_name
        f = kind(name, private, mesh, rule)
        self._functions.append(f)
        self._add(f.func)
        return f

    @check_arguments("step")
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
        ema: float | None = None,
        states: str | None = None,
        separate_update: bool = False,
        sync: str | None = None,
        pipeline: str | None = None,
    ) -> None:
        """Request a training step of a function that returns its loss; docs/reference/language.md has the
        options.

        Args:
            optimizer: `adamw, lr = 1e-3`.
            accumulate: `mean, microbatches = 4`, or `tokens, microbatches = 4`.
            clip: `norm, max = 1.0`.
            loss_scale: `static, factor = 1024.0`.
            metrics: `gradient_norm, learning_rate`.
            ema: the decay of moving averages of the parameters: 0.999.
            states: the name of the optimizer's states, where steps train a parameter in common.
            separate_update: whether the update of the parameters is a function of its own.
            sync: `nesterov, replicas = 4, every = 8, lr = 0.7, momentum = 0.9`.
            pipeline: `1f1b, ranks = 4`.

        Raises:
            NotationError: an option's text is invalid.
        """
        properties: dict[str, Attribute] = {
            "sym_name": StringAttr(name), "function": SymbolRefAttr(function),
            "optimizer": _read(OptimizerAttr, optimizer),
        }  # fmt: skip
        for key, kind, text in (
            ("accumulate", AccumulateAttr, accumulate), ("clip", ClipAttr, clip),
            ("loss_scale", LossScaleAttr, loss_scale), ("metrics", MetricsAttr, metrics),
            ("ema", AverageAttr, None if ema is None else str(ema)), ("sync", SyncAttr, sync), ("pipeline", PipelineAttr, pipeline),
        ):  # fmt: skip
            if text is not None:
                properties[key] = _read(kind, text)
        if states is not None:
            properties["states"] = StringAttr(states)
        if separate_update:
            properties["separate_update"] = UnitAttr()
        self._add(StepOp.create(properties=properties, location=caller()))

    @check_arguments("forward")
    def forward(
        self, name: str, function: str, *, accumulate: str | None = None,
        pipeline: str | None = None,
    ) -> None:  # fmt: skip
        """Request a function that runs another one on several microbatches or in stages, without a
        backward part.

        Args:
            accumulate: `mean, microbatches = 4`: how to combine scalar results.
            pipeline: `gpipe, ranks = 4`.

        Raises:
            NotationError: an option's text is invalid.
        """
        properties: dict[str, Attribute] = {
            "sym_name": StringAttr(name), "function": SymbolRefAttr(function),
        }  # fmt: skip
        for key, kind, text in (
            ("accumulate", AccumulateAttr, accumulate), ("pipeline", PipelineAttr, pipeline),
        ):  # fmt: skip
            if text is not None:
                properties[key] = _read(kind, text)
        self._add(ForwardOp.create(properties=properties, location=caller()))

    def gradient(self, name: str, function: str, wrt: Sequence[int]) -> None:
        """Request a function that returns the results, and the cotangents of the arguments with the
        indices `wrt`."""
        properties: dict[str, Attribute] = {
            "sym_name": StringAttr(name), "function": SymbolRefAttr(function),
            "wrt": dims_attr(*wrt),
        }  # fmt: skip
        self._add(GradientOp.create(properties=properties, location=caller()))

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


def cluster_of(cluster: str | Cluster) -> Cluster:
    """Return a cluster by its name or its text.

    Raises:
        NotationError: the text is no cluster. ShardirError: there is no cluster of this name.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster.isidentifier() and cluster not in names():
        hint = did_you_mean(cluster, names()) or f"; use one of {', '.join(names())}"
        raise ShardirError(f"expected a ready-made cluster, got {cluster}{hint}")
    return load(cluster) if cluster in names() else parse_cluster(cluster)


def _read(kind: Any, text: str) -> Any:
    """Parse an attribute. Raises NotationError, whose message quotes the text."""
    try:
        return kind.read(text)
    except NotationError as e:
        raise NotationError(f'"{text}": {e}', e.offset) from None


def _axes(sizes: Mapping[str, int]) -> str:
    """Return the text of a mesh. Raises ShardirError if a name is no str, or a size no int."""
    for name, size in sizes.items():
        if not isinstance(name, str) or not isinstance(size, int) or isinstance(size, bool):
            raise ShardirError(
                f'expected the sizes of axes by their names, {{"dp": 2}}, got {size!r:.20} of '
                f"{name!r:.20}"
            )
    return ", ".join(f"{name} = {size}" for name, size in sizes.items())
