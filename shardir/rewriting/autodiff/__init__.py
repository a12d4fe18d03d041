"""Reverse-mode differentiation of functions, laid out or not, in the global view.

function.py        a request -> a function with its forward part, backward part and results
activity.py        which values depend on what is differentiated
transposition.py   the backward part: each op of the forward part transposed, last first
cotangents.py      the cotangents of values, and in which layout their addends are added
microbatches.py    forward and backward part once for each microbatch
step.py            a training step around its gradients: states, optimizers' updates
gradients.py       gradients for the optimizer: without the loss scale, clipped
arguments.py       the arguments that all of these add
"""
