"""The run of a program on one rank: options, process groups, states, steps, events, traces."""
