"""Private names of other libraries, which may be gone in their next version.

One file for each library. All other code uses it by these files alone, the runtime beside programs
by `shardir_runtime/compat.py`; test/compat says what a version does not have.
"""
