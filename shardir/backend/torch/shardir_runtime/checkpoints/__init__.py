"""Checkpoints of a run, and the weights that it begins with."""
