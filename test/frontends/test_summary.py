"""What a prompt, a notebook and help() show of a program and of a run."""

import argparse
from dataclasses import fields
from inspect import signature

import torch
from torch import nn

import shardir
from shardir.api.model import CompiledModel
from shardir.backend.runs import Options, Report
from shardir.diagnostics import size_text

torch.manual_seed(0)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def test_a_program_is_shown_with_its_figures() -> None:
    net, x, y = model(), torch.randn(8, 16), torch.randint(4, (8,))
    program = shardir.compile(
        net, x, labels=y, loss=nn.functional.cross_entropy, optimizer="sgd, lr = 0.1",
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    rows = dict(program.summary().rows)
    elements = sum(p.numel() for p in net.parameters())
    # the bias of the second product is whole over tp
    on_device = 4 * sum(n // 4 for n in (16 * 32, 32, 32 * 4)) + 4 * 4 // 2
    assert rows["mesh"] == "@m <dp = 2, tp = 2>"
    assert rows["plan"] == "megatron(tp) * fsdp(dp)"
    assert rows["parameters"] == (
        f"{elements:,} elements, {size_text(4 * elements)}; {size_text(on_device)} on a device"
    )
    cost = program.cost()
    assert rows["@step"].endswith(f"; {size_text(cost.memory.peak)} on a device")
    assert f"{cost.seconds * 1e3:.3g} ms estimated" in rows["@step"]
    shown = repr(program)
    assert shown.startswith("Sequential on 4 devices\n") and len(shown.splitlines()) <= 10
    assert all(f"{name:10}  {text}" in shown for name, text in rows.items())
    assert "<td" in program._repr_html_() and "@m &lt;dp = 2" in program._repr_html_()


def test_where_the_layouts_come_from() -> None:
    x = torch.randn(8, 16)
    texts = {}
    for mode in ("auto", "data", "semi_auto"):
        program = shardir.compile(model(), x, train=False, mesh="dp = 2", mode=mode)
        texts[mode] = dict(program.summary().rows)["plan"]
    assert texts["auto"].startswith("searched: ") and "slower" in texts["auto"]
    assert texts["data"] == "the batch is split"
    assert texts["semi_auto"] == "propagated from the program's annotations"


def test_a_report_is_shown_by_its_first_and_last_values() -> None:
    report = Report(4, "gloo", losses={"step": [2.5, 1.0, 0.25]}, steps_per_second={"step": 20.0})
    report.evaluations = [
        {"function": "accuracy", "name": "share", "value": v} for v in (0.25, 0.75)
    ]
    assert repr(report) == (
        "run on 4 ranks, gloo\n"
        "  @step: 3 steps, loss 2.5 -> 0.25, 20 steps/s\n"
        "  @accuracy: share 0.75"
    )


def test_help_names_every_option_of_a_run() -> None:
    for method in (shardir.Compiled.run, CompiledModel.run):
        parameters, doc = signature(method).parameters, method.__doc__ or ""
        for f in fields(Options):
            assert parameters[f.name].default == f.default
            assert f"    {f.name}: " in doc
        assert "--" not in doc, "flags are the words of the command line"
    parser = argparse.ArgumentParser(add_help=False)
    Options.add_to(parser)
    flags = {word[2:].replace("-", "_") for a in parser._actions for word in a.option_strings}
    assert flags < {f.name for f in fields(Options)}
