"""Steps in stages, and the time of their loop."""

from itertools import pairwise

from xdsl.context import Context

from shardir.cost.report import StagedCost, report
from shardir.dialects import train
from shardir.pipelines import build
from shardir.syntax.parser import parse

LAYERS = 8


def step_in_stages(
    pipeline: str, microbatches: int, skip: bool = False, options: str = ""
) -> StagedCost:
    """The cost of a step of products of different widths; with `skip` the last reads the input of
    the second too. `options`: of the passes."""
    widths = [16, *(32 * (1 + i % 3) for i in range(LAYERS - 1)), 16]
    arguments = ["%x: tensor<64x16xf32> {train.input = #train.init<normal>}"]
    body, last = list[str](), "%x"
    for i, (n, m) in enumerate(pairwise(widths)):
        arguments.append(f'%w{i}: tensor<{n}x{m}xf32> {{train.parameter = "w{i}"}}')
        types = f"(tensor<64x{n}xf32>, tensor<{n}x{m}xf32>) -> tensor<64x{m}xf32>"
        stages = train.PipelineAttr.read(pipeline).stages
        mark = f" {{train.stage = {i * stages // LAYERS} : i64}}"
        body += [f"%h{i} = nn.matmul {last}, %w{i}{mark} : {types}"]
        body += [f"%a{i} = nn.tanh %h{i} : (tensor<64x{m}xf32>) -> tensor<64x{m}xf32>"]
        last = f"%a{i}"
    if skip:
        two = "(tensor<64x16xf32>, tensor<64x16xf32>) -> tensor<64x16xf32>"
        body += [f"%both = nn.add {last}, %first : {two}"]
        body.insert(0, "%first = nn.tanh %x : (tensor<64x16xf32>) -> tensor<64x16xf32>")
        last = "%both"
    text = f"""
dist.mesh @m <d = 2>
func.func private @loss({", ".join(arguments)}) -> tensor<f32> {{
  {"; ".join(body).replace("; ", chr(10) + "  ")}
  %loss = nn.reduce <mean> {last} dims <0, 1> : (tensor<64x16xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <sgd, lr = 0.1> accumulate <mean, microbatches = {microbatches}>
    pipeline <{pipeline}>
"""
    module = parse(text)
    for p in build(f"train{options}"):
        p.apply(Context(), module)
    (cost,) = [c for c in report(module) if isinstance(c, StagedCost)]
    return cost


def ends_of_loop(cost: StagedCost) -> float:
    return max(t.end for runs in cost.ranks for t in runs if t.run.action is not None)
