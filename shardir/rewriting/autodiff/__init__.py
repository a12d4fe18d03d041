"""Reverse-mode differentiation of functions of the global view, with layouts or without.

- function.py: a request -> a function with its forward part, backward part and results
- saved_results.py: results that gradients read, made in the forward part
- manual.py: the gradients of manual computations, in functions of their own
- activity.py: the values that depend on differentiated arguments
- transposition.py: the backward part: each op of the forward part transposed, last first
- varying.py: transposed collectives of values that vary over devices
- cotangents.py: the cotangents of values, and the layout in which their addends are added
- microbatches.py: the loop over microbatches around forward and backward part
- step.py: a training step around its gradients: states, optimizers' updates
- gradients.py: gradients for the optimizer: unscaled and clipped
- arguments.py: the arguments of the function under construction
"""
