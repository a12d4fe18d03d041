"""One rank of a run of several emitted directories, one after the other, in the same processes.

To import torch takes a rank longer than to run a small program, so the programs of one mesh size
are run together. JOBS in the environment: [[directory, steps], ...]; each leaves its dump.npz.
"""
# pyright: reportMissingImports=false

import json
import os
import runpy
from pathlib import Path

import runtime as rt  # that of the directory where this file is started
import runtime_main
import torch
import torch.distributed
from runtime_plan import load_plan


def functions_of(plan):
    """The functions of a directory's program.py, by name."""
    names = runpy.run_path(str(plan.directory / "program.py"))
    described = json.loads((plan.directory / "plan.json").read_text())["functions"]
    return {name: names[f["python"]] for name, f in described.items()}


def main():
    jobs = json.loads(os.environ["JOBS"])
    options = runtime_main._options()
    runtime_main._behave(options)
    events = runtime_main.Events(int(os.environ["RANK"]))
    for i, (directory, steps) in enumerate(jobs):
        plan = load_plan(directory)
        if i == 0:
            mesh = runtime_main.start(plan, options)
        else:
            mesh = rt.Mesh(plan.axes, mesh.rank, mesh.device)
            for axes in plan.groups:
                mesh.group(axes)
        options.steps, options.dump = steps, Path(directory) / "dump.npz"
        with torch.no_grad():
            runtime_main.Runner(plan, mesh, functions_of(plan), 0, events).run(options)
    events.send(event="done")
    if torch.distributed.is_initialized():  # one rank alone has no group
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
