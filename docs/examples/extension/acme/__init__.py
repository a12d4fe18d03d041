"""A package that extends shardir: an op, a pass, a pipeline, a mode, a cluster, presets, a target.

Each part is imported when a program uses it: an entry point costs no other program time.
"""

from shardir.extend import Extension

CLUSTER = """
// Machines of 4 devices.
dist.cluster @acme4 <levels [machine = 4 {bandwidth = 2e+11, latency = 4e-06},
  network = 16 {bandwidth = 2.5e+10, latency = 1e-05}],
  memory = 34359738368 {bandwidth = 1e+12}, flops {f32 = 2e+13, bf16 = 1.6e+14}>
"""


def _dialect():
    from acme.ops import ACME

    return ACME


def _fuse_swish():
    from acme.passes import FuseSwish

    return FuseSwish


def _listing():
    from acme.listing import Listing

    return Listing


def _torch():
    from acme.ops import SwishOp

    return {SwishOp: "{x} * torch.sigmoid({beta} * {x})"}


def _cases():
    from acme.samples import SAMPLES

    return SAMPLES


EXTENSION = Extension(
    name="acme",
    dialects={"acme": _dialect},
    passes={"fuse-swish": _fuse_swish},
    targets={"listing": _listing},
    pipelines={"acme-train": "fuse-swish,train"},
    modes={"fused": ("acme-train", "swish is one op; annotations are propagated")},
    torch=_torch,
    clusters={"acme4": CLUSTER},
    presets={
        "acme2d": "ddp * megatron",
        "rows": lambda axes: {"inputs": f"[{{{axes}}}]", "*": f"[{{{axes}}}]"},
    },
    cases=_cases,
)
