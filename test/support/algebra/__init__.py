"""Random redistributions, graphs of values, and moves and ranks that are simulated."""
