"""Every optimizer, clipping, loss scaling and microbatches on four Gloo ranks, in one program, with
parameters that are replicated over an axis which splits their states; and the same chosen by the
search. Expected are torch's results on one device."""
# ruff: noqa: E402 (torch may not be installed)

import re

import numpy as np
import pytest
from support.extent import LONG
from support.ranks.orders import batch_rows

torch = pytest.importorskip("torch")

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.dist import type_layout
from shardir.dialects.random import fill
from shardir.dialects.train import arguments
from shardir.rewriting.functions import bodies

LOSS = """
func.func private @loss_NAME(
    %x: tensor<4x4xf32, #dist.layout<@m, [{dp}, {}]>>
        {train.input = #train.init<file, path = "rows.npz", array = "x">},
    %w: tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>
        {train.parameter = "NAME_w", train.init = #train.init<normal>,
         train.state_layout = #dist.layout<@m, [{dp}, {tp}]>},
    %b: tensor<6xf32> {train.parameter = "NAME_b", train.init = #train.init<normal>}
) -> tensor<f32> {
  %y = nn.matmul %x, %w : (tensor<4x4xf32, #dist.layout<@m, [{dp}, {}]>>,
      tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<4x6xf32>
  %z = nn.add %y, %b : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xf32>
  %t = nn.tanh %z : (tensor<4x6xf32>) -> tensor<4x6xf32>
  %s = nn.mul %t, %t : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
  %loss = nn.reduce <mean> %s dims <0, 1> : (tensor<4x6xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step_NAME of @loss_NAME <OPTIMIZER>
"""
STATE_LAYOUT = re.compile(r",\s*train.state_layout = #dist.layout<[^>]*>")
SLOW = """
dist.cluster @c <levels [node = 4 {bandwidth = 1e+7, latency = 1e-7}],
    memory = 8000000000 {bandwidth = 1e+8}, flops {f32 = 1e+6}>
dist.mesh @m <dp = 2, tp = 2> on @c
"""
STEPS = 4
NORMAL = {"mean": 0.0, "std": 1.0}
ROWS = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
DYNAMIC = "loss_scale <dynamic, initial = 256.0, interval = 3>"
O, S = torch.optim, torch.optim.lr_scheduler


def layerwise(kind, p):
    """Return a step of LAMB or LARS in torch."""
    m, v, t = [torch.zeros_like(w) for w in p], [torch.zeros_like(w) for w in p], [0]

    def step():
        t[0] += 1
        for i, w in enumerate(p):
            g, norm = w.grad, w.detach().norm()
            if kind == "lars":
                rate = 10.0 * 0.001 * norm / (g.norm() + 0.1 * norm)
                m[i] = 0.9 * m[i] + rate * (g + 0.1 * w.detach())
                w.data -= m[i]
                continue
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
            a, c = m[i] / (1 - 0.9 ** t[0]), v[i] / (1 - 0.999 ** t[0])
            r = a / (c.sqrt() + 1e-6) + 0.01 * w.detach()
            w.data -= 0.1 * norm / r.norm() * r

    return step


def clipped(optimizer, p):
    def step():
        torch.nn.utils.clip_grad_norm_(p, 0.05)
        optimizer.step()

    return step


def scheduled(optimizer, schedule):
    def step():
        optimizer.step()
        schedule.step()

    return step


def cosine(p):
    optimizer = O.SGD(p, 0.1)
    return scheduled(optimizer, S.CosineAnnealingLR(optimizer, 6))


CASES = {  # name: (options of the step, its microbatches, torch's)
    "sgd": ("sgd, lr = 0.1>", 1, lambda p: O.SGD(p, 0.1).step),
    "cosine": ("sgd, lr = cosine<rate = 0.1, steps = 6>>", 1, cosine),
    "nesterov": ("nesterov, lr = 0.1, momentum = 0.9>", 1,
                 lambda p: O.SGD(p, 0.1, 0.9, nesterov=True).step),
    "adam": ("adam, lr = 0.1, weight_decay = 0.1>", 1,
             lambda p: O.Adam(p, 0.1, weight_decay=0.1).step),
    "adamw": ("adamw, lr = constant<rate = 0.1>>", 1, lambda p: O.AdamW(p, 0.1).step),
    "rmsprop": ("rmsprop, lr = 0.1, momentum = 0.5, centered = 1, eps = 0.01>", 1,
                lambda p: O.RMSprop(p, 0.1, eps=0.01, momentum=0.5, centered=True).step),
    "adagrad": ("adagrad, lr = 0.1, lr_decay = 0.1, initial = 0.1>", 1,
                lambda p: O.Adagrad(p, 0.1, 0.1, initial_accumulator_value=0.1).step),
    "adamax": ("adamax, lr = 0.1, weight_decay = 0.1>", 1,
               lambda p: O.Adamax(p, 0.1, weight_decay=0.1).step),
    "nadam": ("nadam, lr = 0.1, weight_decay = 0.1, decoupled = 1>", 1,
              lambda p: O.NAdam(p, 0.1, weight_decay=0.1, decoupled_weight_decay=True).step),
    "lamb": ("lamb, lr = 0.1>", 1, lambda p: layerwise("lamb", p)),
    "lars": ("lars, lr = 10.0, weight_decay = 0.1>", 1, lambda p: layerwise("lars", p)),
    "adafactor": ("adafactor, lr = 0.1>", 1,
                  lambda p: O.Adafactor(p, 0.1, eps=(1e-7, 1e-3)).step),
    "clipped": ("sgd, lr = 0.1> clip <norm, max = 0.05>", 1,
                lambda p: clipped(O.SGD(p, 0.1), p)),
    "scaled": (f"adamw, lr = 0.1> {DYNAMIC}", 1, lambda p: O.AdamW(p, 0.1).step),
    "several": ("momentum, lr = 0.1, momentum = 0.9> accumulate <mean, microbatches = 3>", 3,
                lambda p: O.SGD(p, 0.1, 0.9).step),
}  # fmt: skip


def trained(name, count, make):
    """Return the losses and parameters of torch."""
    p = []
    for key, shape in (("w", (4, 6)), ("b", (6,))):
        first = fill("normal", NORMAL, shape, None, f"0/{name}_{key}", np.float32)
        p.append(torch.nn.Parameter(torch.tensor(first).double()))
    step, losses = make(p), []
    for t in range(STEPS):
        for w in p:
            w.grad = None
        total = 0.0
        for k in range(count):
            rows = batch_rows(len(ROWS), t * count + k, 4, 0)
            x = torch.tensor(ROWS[rows]).double()
            loss = ((x @ p[0] + p[1]).tanh() ** 2).mean() / count
            loss.backward()
            total += loss.item()
        step()
        losses.append(total)
    return losses, [w.detach().numpy() for w in p]


def compare_on_ranks(text, names, pipeline, folder):
    """Compare the losses and parameters of the steps `names` of a program with torch's; return the
    program and what the ranks dumped."""
    np.savez(folder / "rows.npz", x=ROWS)
    program = shardir.compile(text, pipeline, name=str(folder / "steps.ir"))
    dump = folder / "dump.npz"
    report = run(program.save(folder / "out"), Options(timeout=60, dump=dump, steps=STEPS))
    with np.load(dump) as found:
        dumped = dict(found)
    for name in names:
        _, count, make = CASES[name]
        losses, parameters = trained(name, count, make)
        np.testing.assert_allclose(report.losses[f"step_{name}"], losses, rtol=1e-4, err_msg=name)
        for k, want in zip("wb", parameters, strict=True):
            np.testing.assert_allclose(
                dumped[f"states/{name}_{k}"], want, rtol=2e-4, atol=2e-5, err_msg=name
            )
    return program, dumped


def program_of(loss, names):
    """Return the text of the steps `names`."""
    return "".join(
        loss.replace("NAME", name).replace("OPTIMIZER>", CASES[name][0]) for name in names
    )


def assert_two_runs_are_one(program, dumped, folder):
    """A run of half of the steps, and one that begins with its states, have the same bits."""
    states, out = {}, folder / "half.npz"
    for start in (0, STEPS // 2):
        backend, base = program.backend, folder
        backend.emit_directory(program.context, program.module, program.original,
                               folder / f"from{start}", base, states=states)  # fmt: skip
        options = Options(timeout=60, dump=out, steps_done=start, steps=start + STEPS // 2)
        run(folder / f"from{start}", options)
        with np.load(out) as found:
            states = {k.removeprefix("states/"): found[k] for k in found if k.startswith("states/")}
    assert all(np.array_equal(x, dumped[f"states/{key}"]) for key, x in states.items())


def test_every_optimizer_on_real_ranks(tmp_path):
    text = "dist.mesh @m <dp = 2, tp = 2>\n" + program_of(LOSS, CASES)
    program, dumped = compare_on_ranks(text, CASES, None, tmp_path)
    if LONG:  # test_continued_runs.py has some of them
        assert_two_runs_are_one(program, dumped, tmp_path)
    assert dumped["states/step_scaled.loss_scale"] == 512.0
    assert dumped["states/step_adamw.count"] == STEPS


def test_the_search_shards_the_states_of_replicated_parameters(tmp_path):
    names = ["adam", "several"]
    loss = STATE_LAYOUT.sub("", LOSS).replace("[{}, {tp}]", "[{}, {}]")
    program, _ = compare_on_ranks(SLOW + program_of(loss, names), names, "auto", tmp_path)
    split = {
        a.key: layout.used
        for f, _ in bodies(program.module)
        for a, t in zip(arguments(f), f.function_type.inputs, strict=True)
        if a.key and (layout := type_layout(t)) is not None
    }  # fmt: skip
    assert not split["adam_w"] and not split["several_w"]
    assert all(split[k] for k in ("adam_w.exp_avg", "adam_w.exp_avg_sq", "several_w.momentum"))
