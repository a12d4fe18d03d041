"""One rank of a script for torchrun: python loop_rank.py SCRIPT PORT WORD ... RANK

Where STOPS_AT is in the environment, rank 0 stops after it has printed a line with that text.
"""

import builtins
import os
import runpy
import signal
import sys
from typing import Any

script, port, *words, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip
sys.argv[1:] = words
if (stops_at := os.environ.get("STOPS_AT")) is not None and rank == "0":
    plain_print, names = print, vars(builtins)

    def print_and_stop(text: str, **options: Any) -> None:
        plain_print(text, **options)
        if stops_at in text:
            signal.pause()

    names["print"] = print_and_stop
runpy.run_path(script, run_name="__main__")
