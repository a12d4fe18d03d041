"""The zoo: each architecture imported, and by three plans compared with torch on one device.

Seconds of torch.export and of the import are CPU seconds. Bytes are those of all collectives of the
forward and the backward part on one of 2 x 2 slow devices with fast links, on which `auto` splits
such small layers. The difference is that of the loss and of all
gradients, relative to the largest element of each, by the plan with the largest; computed in the
interpreter. Batches have 4 samples and layers 32 columns.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from architectures import ZOO, Architecture, doubles
from support.modules import imported
from support.modules.zoo import (
    CLUSTER,
    DERIVED,
    MESH,
    NOT_IMPORTED,
    PLANS,
    in_torch_alone,
)

import shardir
from bench.bytes import communicated
from shardir.diagnostics import ShardirError
from shardir.dialects import nn

ARCHITECTURES = [*ZOO]
SMOKE = {"ARCHITECTURES": ["MNIST"]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--architecture", action="append", choices=list(ZOO), help="one of the zoo; default all"
    )
    parser.add_argument("--f64", action="store_true", help="in double precision")


def records(
    log: Callable[[str], object], architecture: list[str] | None = None, f64: bool = False
) -> list[dict[str, Any]]:
    """One record per architecture: ops, fallbacks, export_s, import_s, bytes_PLAN, difference, and
    whether that is at most 1e-4, in f64 1e-9."""
    out = []
    for name in architecture or ARCHITECTURES:
        try:
            if f64:
                with doubles():
                    record = measured(ZOO[name], f64)
            else:
                record = measured(ZOO[name], f64)
        except ShardirError as error:
            reason = NOT_IMPORTED.get(name) or str(error).partition(";")[0]
            record = {"architecture": name, "result": f"not imported: {reason}"}
        except RuntimeError as error:  # of torch on one device
            record = {"architecture": name, "result": f"not computed by torch: {error}"}
        out.append(record)
        log(", ".join(f"{k} {x}" for k, x in record.items()))
    return out


def measured(architecture: Architecture, f64: bool) -> dict[str, Any]:
    example = architecture.make()
    example = example.double() if f64 else example
    loss = architecture.loss_function or (lambda o: o if isinstance(o, torch.Tensor) else o["loss"])
    start = time.process_time()
    captured = imported.capture(
        example.module, example.args, example.labels, loss, keywords=example.kwargs,
        derived=DERIVED.get(architecture.name, ()),
    )  # fmt: skip
    exported = time.process_time()
    found = imported.with_gradients(captured, MESH, CLUSTER)
    done = time.process_time()
    ops = list(found.function.block.ops)
    wanted = in_torch_alone(architecture, example)
    record: dict[str, Any] = {
        "architecture": architecture.name,
        "ops": len(ops),
        "fallbacks": sum(isinstance(op, nn.CustomOp) for op in ops),
        "export_s": exported - start,
        "import_s": done - exported,
    }
    worst = 0.0
    for plan, (pipeline, text) in PLANS.items():
        compiled = shardir.compile(found.module, pipeline, plan=text)
        record[f"bytes_{plan}"] = communicated(compiled.module)[1]
        values = imported.values_of(found, compiled.module)
        worst = max(worst, *imported.differences(values, wanted).values())
    result = "equal" if worst <= (1e-9 if f64 else 1e-4) else "differs"
    return record | {"difference": worst, "result": result}
