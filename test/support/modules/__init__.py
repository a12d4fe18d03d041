"""Modules of torch: random ones, with their judge and their reducer, the zoo, wrong uses."""
