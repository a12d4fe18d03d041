"""The frontend of StableHLO: programs of JAX and of other compilers, with Shardy's shardings."""
