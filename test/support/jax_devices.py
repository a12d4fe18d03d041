"""JAX with 8 devices of the CPU: to be imported before jax."""

import os

COUNT = 8

QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
FLAGS = f"--xla_force_host_platform_device_count={COUNT} {QUICK}"
"""What XLA compiles runs once: without its emitters of fusions, and as one module of LLVM, it
compiles in a quarter of the time."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", FLAGS)
