"""The ops in the exported graphs of the zoo: `python test/frontends/kinds.py [NAME...]`.

For each target of a call, undecomposed: how often it occurs in all graphs, and in which
architectures. Last, a few architectures that have all targets together.
"""

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from architectures import ZOO, export_loss
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule


def calls(program: torch.export.ExportedProgram) -> Iterator[tuple[str, str]]:
    """The kind and the name of what each call of the graph, and of graphs within it, calls."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if node.op != "call_function":
                continue
            target = node.target
            if isinstance(target, OpOverload):
                yield ("ATen" if target.namespace == "aten" else "custom"), str(target)
            elif isinstance(target, HigherOrderOperator):
                yield "higher order", target.__name__
            else:
                yield "other", target.__name__


def cover(found: Mapping[str, Counter[tuple[str, str]]]) -> list[str]:
    """Architectures that have all targets together, the most new ones for their calls first."""
    chosen: list[str] = []
    missing = {target for calls in found.values() for target in calls}
    while missing:
        new = {name: len(missing & set(calls)) / calls.total() for name, calls in found.items()}
        chosen.append(max(new, key=new.__getitem__))
        missing -= set(found[chosen[-1]])
    return chosen


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {name: Counter(calls(export_loss(ZOO[name]))) for name in names or ZOO}
    counts = sum(found.values(), Counter())
    for kind in sorted({kind for kind, _ in counts}):
        print(f"{kind}:")
        for call, count in counts.most_common():
            if call[0] == kind:
                users = [f"{name} {calls[call]}" for name, calls in found.items() if call in calls]
                head = f"  {call[1].removeprefix('aten.'):44} {count:6} {len(users):4}"
                print(f"{head}  {'; '.join(users)}")
    chosen = cover(found)
    print(f"{len(chosen)} of {len(found)} architectures have all {len(counts)} targets:")
    print(f"  {'; '.join(chosen)}")


if __name__ == "__main__":
    main(sys.argv[1:])
