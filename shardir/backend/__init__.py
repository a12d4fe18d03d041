"""The torch backend: what a compiled program looks like on disk, and how its ranks are started."""

# Copied beside every emitted program; they need Python and torch, not shardir.
RUNTIME_FILES = (
    "runtime.py", "runtime_main.py", "runtime_mesh.py", "runtime_plan.py", "runtime_random.py",
    "runtime_exchange.py", "ops_runtime.py", "ops_attention.py", "ops_positions.py",
    "ops_random.py", "ops_sliding.py", "ops_windows.py",
)  # fmt: skip
