"""Steps in stages: the order of runs and transfers of a rank, and their execution."""
