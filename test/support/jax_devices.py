"""JAX with 8 devices of the CPU: to be imported before jax."""

import os

COUNT = 8

FLAGS = f"--xla_force_host_platform_device_count={COUNT} --xla_cpu_use_fusion_emitters=false"
"""What XLA compiles runs once: without its emitters of fusions it compiles in a third of the
time."""

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", FLAGS)
