"""The reports of `shard-opt` on stderr: redistributions, layouts, costs, times of passes."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Cluster
from shardir.diagnostics import ShardirError
from shardir.rewriting.options import UsageError
from shardir.syntax.files import write_text
from shardir.tools.internal import Internal


class Reports:
    """The reports that the command line requests.

    Raises:
        UsageError: the cluster of `--cost` does not exist.
    """

    def __init__(self, args: argparse.Namespace, internal: Internal):
        self.redistributions: bool = args.explain_redistributions
        self.costs: bool = args.cost is not None
        self.tables: bool = args.cost_ops is not None
        self.format: str | None = args.format
        self.trace: Path | None = args.trace
        self.cluster = cluster_of(args.cost or args.cost_ops)
        self.internal = internal
        self.explanation = None
        if args.explain is not None:
            from shardir.reports.layouts import Explanation

            self.explanation = Explanation(args.explain.split(","))

    def propagation(self, module: ModuleOp) -> None:
        """Explain the layouts that propagate-strategies is about to set."""
        if self.explanation is not None:
            show(self.explanation.propagate(module))

    def layouts(self, module: ModuleOp) -> None:
        """Explain the redistributions of the module, and the layouts of values that passes have
        added since propagate-strategies."""
        if self.redistributions:
            from shardir.reports.redistributions import explain

            with self.internal("the explanation of redistributions"):
                show(explain(module))
        if self.explanation is not None:
            with self.internal("the explanation of layouts"):
                show(self.explanation.made(module))

    def cost(self, module: ModuleOp) -> str | None:
        """Print the cost of each function: by the relative model in the global view. In JSON or CSV
        return the text with all functions of the local view instead."""
        if not (self.costs or self.tables):
            return None
        from shardir.cost import relative, report
        from shardir.cost.record import csv_text
        from shardir.rewriting.functions import is_public

        with self.internal("the report of costs"):
            costs = report(module, self.cluster)
            if self.format == "csv":
                return csv_text(costs)
            if self.format == "json":
                return json.dumps([cost.record() for cost in costs], indent=1) + "\n"
            show(map(str, relative(module, self.cluster)))
            for cost in costs:
                if self.costs and is_public(module, cost.name):
                    show([str(cost)])
                if self.tables:
                    show([cost.table()])
        return None

    def write_trace(self, module: ModuleOp) -> None:
        """Write the simulated runs of the functions in the local view.

        Raises:
            UsageError: no function is in the local view, or the file cannot be written.
        """
        if self.trace is None:
            return
        from shardir.cost.simulator import simulate
        from shardir.cost.trace import predicted_trace

        with self.internal("the simulator"):
            simulations = simulate(module, self.cluster)
        if not simulations:
            raise UsageError(
                "--trace: expected a function in the local view, got none; run -p train first"
            )
        with self.internal("the trace"):
            text = predicted_trace(simulations)
        try:
            write_text(self.trace, text)
        except ShardirError as e:
            raise UsageError(f"--trace: {e}") from None

    def check_names(self) -> None:
        """Raise UsageError if `--explain` names values without layouts."""
        if self.explanation is not None:
            try:
                self.explanation.check()
            except ShardirError as e:
                raise UsageError(f"--explain: {e}") from None


class PassTimes:
    """The seconds of each part of a compilation."""

    def __init__(self) -> None:
        self.seconds: list[tuple[str, float]] = []

    def measure(self, name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds.append((name, time.perf_counter() - start))

    def show(self) -> None:
        total = sum(s for _, s in self.seconds) or 1.0
        width = max((len(n) for n, _ in self.seconds), default=0)
        lines = [f"{'pass':<{width}}  {'seconds':>9}  share"]
        lines += [f"{n:<{width}}  {s:9.4f}  {s / total:5.1%}" for n, s in self.seconds]
        lines.append(f"{'total':<{width}}  {total:9.4f}")
        show(["\n".join(lines)])


def show(paragraphs: Iterable[str]) -> None:
    """Print paragraphs to stderr."""
    for paragraph in paragraphs:
        print(paragraph, file=sys.stderr)


def cluster_of(name: str | None) -> Cluster | None:
    """Return the cluster of `--cost`, if it names one. Raises UsageError."""
    if not name:
        return None
    from shardir.cost.clusters import load

    try:
        return load(name)
    except ShardirError as e:
        raise UsageError(f"--cost: {e}") from None
