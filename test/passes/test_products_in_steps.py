"""decompose-collective-products: the same results, by the interpreter; never a longer step."""

from math import prod
from pathlib import Path
from random import Random

import pytest
from support.extent import extent
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.cost.functions import functions
from shardir.cost.memory import memory_of
from shardir.cost.report import cost_of_function
from shardir.cost.ring_products import ring_seconds
from shardir.dialects import dist
from shardir.interpret.equivalence import check_pass
from shardir.passes.decompose_collective_products import DecomposeCollectiveProducts
from shardir.syntax.parser import parse

FILES = Path(__file__).parents[1] / "filecheck" / "decompose-collective-products"

SIZES = {"b": 4, "i": 8, "k": 12, "j": 16}
EQUATIONS = ["ik,kj->ij", "bik,kj->bij", "bik,bkj->bij", "ki,kj->ji", "bik,kj->jib"]


def local(letters: str, split: str, axes: str, partial: str = "") -> str:
    """A local type whose dimension `split` is split over axes of a mesh of 2 x 4."""
    n = prod({"dp": 2, "tp": 4}[a] for a in axes.split(", "))
    shape = "x".join(str(SIZES[c] // (n if c == split else 1)) for c in letters)
    dims = ", ".join(f"{{{axes if c == split else ''}}}" for c in letters)
    return f"tensor<{shape}xf32, #dist.local<@m, [{dims}]{partial}>>"


def program(equation: str, letter: str, axes: str, gathers: bool, again: bool) -> str:
    """A product with an operand gathered along a letter, or with a result that is scattered."""
    terms, z = equation.split("->")
    x, y = terms.split(",")
    given = x if letter in x else y
    gathered = local(given, "", axes)
    types = [local(t, letter if gathers and t == given else "", axes) for t in (x, y)]
    inputs = ", ".join(f"%{n}: {t}" for n, t in zip("xy", types, strict=True))
    names = {t: f"%{n}" for n, t in zip("xy", (x, y), strict=True)}
    lines = ["dist.mesh @m <dp = 2, tp = 4>"]
    if gathers:
        (g, d), out = (names[given], given.index(letter)), local(z, "", axes)
        shard = local(given, letter, axes)
        operands = ", ".join("%g" if t == given else names[t] for t in (x, y))
        unsharded = ", ".join([local(t, "", axes) for t in (x, y)])
        more = f"  %s = nn.square %g : ({gathered}) -> {gathered}\n" if again else ""
        last = f", {gathered}" if again else ""
        lines.append(
            f"func.func @f({inputs}) -> ({out}{last}) {{\n"
            f"  %g = dist.all_gather {g} dim {d} over <{axes}> : ({shard}) -> {gathered}\n"
            f'  %p = nn.einsum "{equation}" {operands} : ({unsharded}) -> {out}\n{more}'
            f"  func.return %p{', %s' if again else ''} : {out}{last}\n}}"
        )
        return "\n".join(lines)
    (axis,) = [a for a in ("dp", "tp") if a == axes]
    types = [local(t, "k", axes) for t in (x, y)]
    inputs = ", ".join(f"%{n}: {t}" for n, t in zip("xy", types, strict=True))
    partial = local(z, "", axes, f", partial sum {{{axis}}}")
    out = local(z, letter, axes)
    lines.append(
        f"func.func @f({inputs}) -> {out} {{\n"
        f'  %p = nn.einsum "{equation}" %x, %y : ({", ".join(types)}) -> {partial}\n'
        f"  %r = dist.reduce_scatter <sum> %p dim {z.index(letter)} over <{axes}> : ({partial}) "
        f"-> {out}\n  func.return %r : {out}\n}}"
    )
    return "\n".join(lines)


def steps_of(module: ModuleOp) -> list[dist.RingProductOp]:
    return [op for op in module.walk() if isinstance(op, dist.RingProductOp)]


def cases() -> list[tuple[str, str, str, bool, bool]]:
    """Each equation with each letter of one operand and of the result."""
    found = []
    for equation in EQUATIONS:
        terms, z = equation.split("->")
        for letter in z:
            if sum(letter in t for t in terms.split(",")) == 1:
                found += [
                    (equation, letter, "tp", True, False),
                    (equation, letter, "dp", False, False),
                ]
                found += [(equation, letter, "dp, tp", True, True)]
    return [c for c in found if SIZES[c[1]] % (8 if "," in c[2] else 4) == 0]


@pytest.mark.parametrize("case", extent(Random("steps").sample(cases(), 3), cases()), ids=str)
def test_products_in_steps_compute_the_same(case: tuple[str, str, str, bool, bool]):
    given = parse(program(*case))
    module = given.clone()
    DecomposeCollectiveProducts(always=True).apply(Context(), module)
    module.verify()
    (op,) = steps_of(module)
    assert len(op.outs) == 1 + case[4] and op.axes.data == given_axes(given)
    assert not any(isinstance(x, dist.FusibleOp) for x in module.walk())
    check_pass(given, module, "decompose-collective-products")
    assert str(parse(str(module))) == str(module)


def given_axes(module: ModuleOp) -> object:
    (axes,) = [op.axes.data for op in module.walk() if isinstance(op, dist.FusibleOp)]
    return axes


REFUSED = """dist.mesh @m <tp = 4>
func.func @f(%x: tensor<8x3xf32, #dist.local<@m, [{}, {tp}]>>,
             %y: tensor<12x16xf32, #dist.local<@m, [{}, {}]>>,
             %z: tensor<LOCALx16xf32, #dist.local<@m, [{tp}, {}]>>)
    -> (tensor<8x16xf32, #dist.local<@m, [{}, {}]>>, tensor<GLOBALx16xf32, #dist.local<@m, [{}, {}]>>) {
  %g = dist.all_gather %x dim 1 over <tp> : (tensor<8x3xf32, #dist.local<@m, [{}, {tp}]>>) -> tensor<8x12xf32, #dist.local<@m, [{}, {}]>>
  %p = nn.matmul %g, %y : (tensor<8x12xf32, #dist.local<@m, [{}, {}]>>, tensor<12x16xf32, #dist.local<@m, [{}, {}]>>) -> tensor<8x16xf32, #dist.local<@m, [{}, {}]>>
  %h = dist.all_gather %z dim 0 over <tp> : (tensor<LOCALx16xf32, #dist.local<@m, [{tp}, {}]>>) -> tensor<GLOBALx16xf32, #dist.local<@m, [{}, {}]>>
  %q = nn.tanh %h : (tensor<GLOBALx16xf32, #dist.local<@m, [{}, {}]>>) -> tensor<GLOBALx16xf32, #dist.local<@m, [{}, {}]>>
  func.return %p, %q : tensor<8x16xf32, #dist.local<@m, [{}, {}]>>, tensor<GLOBALx16xf32, #dist.local<@m, [{}, {}]>>
}
"""  # noqa: E501 (types are longer than a line)
"""A gather along what is summed over, and one that no product reads."""


def test_other_collectives_stay():
    module = parse(REFUSED.replace("LOCAL", "2").replace("GLOBAL", "8"))
    text = str(module)
    DecomposeCollectiveProducts(always=True).apply(Context(), module)
    assert str(module) == text


@pytest.mark.parametrize(("rows", "steps"), [(32, True), (30, False)])
def test_shards_of_different_sizes_stay(rows: int, steps: bool):
    text = (FILES / "rows.ir").read_text().replace("<32x", f"<{rows}x")
    module = shardir.compile(text, "train,decompose-collective-products{always=true}").module
    assert bool(steps_of(module)) == steps


@pytest.mark.parametrize("seed", range(extent(2, 100)))
def test_the_time_of_steps_is_that_of_their_events(seed: int):
    """A rank sends in each step but the last, and computes; a transfer takes from computation."""
    random = Random(f"ring {seed}")
    n, c, a = random.randint(1, 8), random.random(), random.random() / 10
    sent, share = a + random.random() * 2, random.choice((0.0, 0.3, 1.0))
    at_work = random.choice((0.0, 0.6))
    levels = (Level("node", 8, 1e9, 1e-6),)
    on = Cluster(levels, interference=share, occupancy=at_work)
    now = 0.0
    for step in range(n):
        arrived = now + sent if step < n - 1 else now
        computed = now + c + (share * (sent - a) + at_work * a if step < n - 1 else 0.0)
        now = max(arrived, computed)
    assert ring_seconds(n, c, sent, a, on) == pytest.approx(now)


CLUSTER = (
    "dist.cluster @c <levels [node = 8 {{bandwidth = {0}, latency = {1}}}], memory = 1000 "
    "{{bandwidth = 1e+12}}, flops {{f32 = {2}}}, overhead = 1e-7, interference = {3}>\n"
)


@pytest.mark.parametrize("seed", range(extent(3, 60)))
def test_the_step_is_never_longer_and_needs_no_more_memory(seed: int):
    random = Random(f"gains {seed}")
    cluster = CLUSTER.format(
        random.choice(("1e+9", "1e+11")), random.choice(("1e-6", "1e-8")),
        random.choice(("1e+9", "1e+11")), random.choice(("0.0", "1.0")),
    )  # fmt: skip
    text = program(*random.choice(cases())).replace("tp = 4>", "tp = 4> on @c")
    module = parse(cluster + text)
    ((f, mesh),) = functions(module)
    before, peak = cost_of_function(f, mesh).seconds, memory_of(f, mesh).peak
    DecomposeCollectiveProducts().apply(Context(), module)
    after = cost_of_function(f, mesh).seconds
    assert after <= before and memory_of(f, mesh).peak <= max(peak, 1000)
    assert (after < before) == bool(steps_of(module))


def test_a_product_in_steps_has_the_layouts_of_both():
    text = program("ik,kj->ij", "i", "tp", True, False)
    module = parse(text)
    DecomposeCollectiveProducts(always=True).apply(Context(), module)
    good = str(module)
    for bad, message in (
        (good.replace('along "i"', 'along "k"'), "C17"),
        (good.replace("over <tp>", "over <dp>"), "C17"),
        (good.replace('"ik,kj->ij"', '"ik,kj->ji"'), "C17"),
    ):
        assert bad != good
        with pytest.raises(shardir.ShardirError, match=message):
            parse(bad, verify=True)
