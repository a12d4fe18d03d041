"""The backend `shm` of torch.distributed: ranks of one machine, which share memory.

import shardir_runtime.shm
dist.init_process_group("shm")
"""

from .group import NAME, register

__all__ = ["NAME", "register"]
