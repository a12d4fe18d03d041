"""One rank of test_loaded_programs.py: the example's program, called token by token.

python generate_rank.py DIRECTORY WEIGHTS PORT RANK: it prints the tokens of the example, then those
of other weights, each after a reset.
"""

import os
import sys

import generate
import torch
from support.device import DEVICE

import shardir

directory, weights, port, rank = sys.argv[1:]
os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": port}  # fmt: skip

torch.set_num_threads(1)
program = shardir.load(directory, device=DEVICE, timeout=60)
print(generate.generate(program, 12).tolist())
program.reset()
program.load_weights(weights)
print(generate.generate(program, 12).tolist())
token = torch.zeros(generate.BATCH, 1, dtype=torch.long)
shard = program(token, torch.tensor([12]), gathered=False)
print(list(shard.shape), "of", list(program(token, torch.tensor([12])).shape))
keys = program.state_dict()["layers.0.attention.keys"]
print(keys.shape, keys.abs().sum((0, 1, 3)).count_nonzero().item())
