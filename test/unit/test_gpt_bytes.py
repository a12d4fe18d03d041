"""The language model of the benchmark: its bytes are the formula's, its step is torch's."""

import numpy as np
import pytest
import torch
from harness import apply, compiled, differs, function, numbers, to_torch, torch_forward
from xdsl.dialects.builtin import TensorType

from shardir.dialects import train
from shardir.interpret import run
from shardir.syntax.parser import parse
from shardir.tools import bench

gpt_bytes = bench.load("gpt-bytes")

MEGATRON = {2: 7_224_324, 4: 12_999_684, 8: 24_550_404, 16: 47_651_844}


def test_a_language_model_communicates_what_megatron_does():
    found = gpt_bytes.records(lambda line: None)
    megatron = [r for r in found if r["plan"] == "megatron"]
    assert {r["layers"]: r["megatron_bytes"] for r in megatron} == MEGATRON
    assert all(r["bytes"] <= r["megatron_bytes"] for r in megatron)
    assert all(r["bytes"] <= r["zero3_bytes"] for r in found if r["plan"] == "fsdp+tp")


@pytest.mark.parametrize("fsdp", [False, True])
def test_its_step_is_that_of_torch(fsdp: bool):
    small = {"layers": 2, "batch": 4, "seq": 6, "hidden": 16, "heads": 4, "vocab": 12}
    module = parse(gpt_bytes.gpt(**small, mesh=(2, 4), lr=0.5, fsdp=fsdp))
    plain = apply(module.clone(), "strip-layouts")
    compiled(module, check=True)
    f = function(plain, "loss")
    attrs = train.arg_attrs(f)
    rng = np.random.default_rng(0)
    values = []
    for t, a in zip(f.function_type.inputs, attrs, strict=True):
        assert isinstance(t, TensorType)
        kind = "normal" if "train.parameter" in a else "below:12"
        values.append(numbers(rng, str(t.element_type), t.get_shape(), kind))
    loss, *new = run(module, "step", values)
    leaves = [to_torch(v) for v in values]
    names = [train.text_attr(a, "train.parameter") for a in attrs]
    weights = [w.requires_grad_() for w, n in zip(leaves, names, strict=True) if n]
    (wanted,) = torch_forward(f, leaves)
    wanted.backward()
    torch.optim.SGD(weights, lr=0.5).step()
    assert not differs(loss, wanted.detach().numpy().astype(np.float32), "f32", 10)
    marks = function(module, "step").res_attrs
    assert marks is not None
    ours = dict(
        zip([train.text_attr(dict(m.data), "train.updates") for m in marks][1:], new, strict=True)
    )
    for name, w in zip(filter(None, names), weights, strict=True):
        assert not differs(ours[name], w.detach().numpy().astype(np.float32), "f32", 10), name
