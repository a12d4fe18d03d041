"""One rank of a script for torchrun: python loop_rank.py SCRIPT PORT WORD ... RANK"""

import os
import runpy
import sys

script, port, *words, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
sys.argv[1:] = words
runpy.run_path(script, run_name="__main__")
