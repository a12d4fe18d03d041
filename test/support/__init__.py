"""What tests share: programs and their reference results, generators, ranks, tools in a process.

The folder test/ is on the path of pytest (pyproject.toml), of ranks (support/forked.py) and of the
commands in it, such as `python test/layers.py`.
"""
