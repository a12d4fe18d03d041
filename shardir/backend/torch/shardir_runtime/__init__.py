"""The runtime of emitted programs: a package that needs only Python and torch.

`shard-opt` copies it beside every program.py, which imports it as `shardir_runtime`. Within shardir
it is `shardir.backend.torch.shardir_runtime`. It imports itself by relative imports, so either name
is complete in itself.

A process runs programs with one of the two:

1. `python program.py`, and with it torchrun and shard-run, with the copy beside the program.
2. A process that loads program.py as a module (`run/program_module.py`: `shardir.load`, tests)
   with the runtime that loads it, whatever is beside the program.

So no object meets a class of the other name. Processes exchange JSON, memory and safetensors, no
pickles.
"""
