"""Tensor ops of a program that torch has no single call for, and its random numbers."""
