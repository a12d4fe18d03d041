"""Private names of other libraries, which their next versions may lack.

There is one file for each library. All other code uses private names through these files; the
runtime beside programs has `shardir_runtime/compat.py`. test/compat reports missing names.
"""
