"""Benchmarks, each a file that `shard-bench` runs, and what they share."""
