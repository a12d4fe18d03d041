"""JAX with 8 devices of the CPU: to be imported before jax."""

import os

COUNT = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={COUNT}")
