"""Reduction of a program that fails to the least that fails, by delta debugging.

    before = random_program(7)
    text = str(reduce(before, lambda program: is_wrong(program)))

1. Ops are left out: what they give to others becomes an argument. So every set of ops is a program.
2. Layouts and strategies are left out.
3. Sizes become smaller, each in all types at once.

Each result fails, and is verified; the last has no op that can be left out. The order is that of
the program, so that the result is a function of the program.
"""

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from shardir.compat.xdsl import set_type
from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.train import GradientOp
from shardir.rewriting.functions import update_signature
from shardir.testing.programs import FLOATS

Fails = Callable[[ModuleOp], object]
"""Whether a program fails. It may change the module, which is a copy."""


def reduce(program: ModuleOp, fails: Fails) -> ModuleOp:
    """Return the least program that fails as this one does: with the fewest ops, then layouts and
    sizes that are found.

    Args:
        fails: tells of a program whether it fails. One of which it raises an error does not.

    Raises:
        ShardirError: the program does not fail.
    """
    if not fails(program.clone()):
        raise ShardirError("expected a program that fails, got one that does not")

    def still_fails(candidate: ModuleOp) -> bool:
        try:
            candidate.verify()
            return bool(fails(candidate.clone()))
        except Exception:
            return False

    current = program.clone()
    while True:
        size = _size(current)
        current = _with_fewer_functions(current, still_fails)
        current = _with_fewer_ops(current, still_fails)
        current = _with_fewer_layouts(current, still_fails)
        current = _with_smaller_sizes(current, still_fails)
        if _size(current) == size:
            return current


def _size(module: ModuleOp) -> tuple[int, int]:
    """Return the number of ops, and the length of the text."""
    return sum(1 for _ in module.walk()), len(str(module))


def _functions(module: ModuleOp) -> list[FuncOp]:
    return [op for op in module.body.ops if isinstance(op, FuncOp) and op.body.blocks]


def _with_fewer_functions(module: ModuleOp, fails: Fails) -> ModuleOp:
    """Leave out functions, requests and meshes, the last first."""
    for i in reversed(range(len(module.body.block.ops))):
        candidate = module.clone()
        op = [*candidate.body.ops][i]
        op.detach()
        op.erase(safe_erase=False)
        if fails(candidate):
            module = candidate
    return module


# ---- ops ----


def _with_fewer_ops(module: ModuleOp, fails: Fails) -> ModuleOp:
    for i in range(len(_functions(module))):
        total = len(_body(_functions(module)[i]))
        kept = least(range(total), lambda kept, m=module, i=i: fails(_with_ops(m, i, kept)))
        if len(kept) < total:
            module = _with_ops(module, i, kept)
    return module


def _body(f: FuncOp) -> list[Operation]:
    return [op for op in f.body.block.ops if not isinstance(op, ReturnOp)]


def least(items: Sequence[int], fails: Callable[[Sequence[int]], object]) -> list[int]:
    """Return a subset that fails, of which no item can be left out; all items if no subset does.
    Zeller's ddmin: chunks are left out, of half the items first."""
    kept, parts = [*items], 2
    while kept:
        size = -(-len(kept) // parts)
        chunks = [kept[k : k + size] for k in range(0, len(kept), size)]
        for chunk in reversed(chunks):  # what comes last has no users
            rest = [k for k in kept if k not in chunk]
            if fails(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size <= 1:
                return kept
            parts = min(2 * parts, len(kept))
    return kept


def _with_ops(module: ModuleOp, index: int, kept: Sequence[int]) -> ModuleOp:
    """Return a copy in which a function has only some of its ops. Operands that other ops made are
    arguments; results are the values that were returned, and those without a user."""
    module = module.clone()
    f = _functions(module)[index]
    block, body = f.body.block, _body(f)
    end = block.last_op
    returned = [*end.operands] if isinstance(end, ReturnOp) else []
    new, values = Block(), dict[SSAValue, SSAValue]()

    def argument(v: SSAValue) -> SSAValue:
        made = new.insert_arg(v.type, len(new.args))
        made.name_hint = v.name_hint
        return made

    results = []
    for op in (body[k] for k in kept):
        for v in op.operands:
            if v not in values:
                values[v] = argument(v)
        clone = op.clone(dict(values))
        new.add_op(clone)
        values.update(zip(op.results, clone.results, strict=True))
    for op in (body[k] for k in kept):
        for v in op.results:
            if v in returned or values[v].first_use is None:
                results.append(values[v])
    new.add_op(ReturnOp(*results))
    arguments = [*new.args]
    replaced = FuncOp(
        f.sym_name.data, ([v.type for v in arguments], [v.type for v in results]), Region(new),
        f.sym_visibility.data if f.sym_visibility else None,
    )  # fmt: skip
    replaced.location = f.location
    module.body.block.insert_op_before(replaced, f)
    f.detach()
    f.erase(safe_erase=False)
    _update_requests(module, replaced)
    return module


def _update_requests(module: ModuleOp, f: FuncOp) -> None:
    """Let requests of gradients of a function be by all of its float arguments."""
    floats = [
        i for i, v in enumerate(f.body.block.args)
        if isinstance(v.type, TensorType) and str(v.type.element_type) in FLOATS
    ]  # fmt: skip
    for op in module.body.ops:
        if isinstance(op, GradientOp) and op.function.root_reference == f.sym_name:
            op.properties["wrt"] = dims_attr(*floats)


# ---- layouts ----


def _values(f: FuncOp) -> list[SSAValue]:
    return [*f.body.block.args, *(v for op in f.body.block.ops for v in op.results)]


def _with_fewer_layouts(module: ModuleOp, fails: Fails) -> ModuleOp:
    for i, f in enumerate(_functions(module)):
        for k, v in enumerate(_values(f)):
            if isinstance(v.type, TensorType) and dist.sharding_of(v) is not None:
                candidate = module.clone()
                g = _functions(candidate)[i]
                set_type(_values(g)[k], dist.with_layout(v.type, None))
                update_signature(g)
                if fails(candidate):
                    module = candidate
        for k, op in enumerate(_body(f)):
            if isinstance(op, TensorOp) and op.strategy is not None:
                candidate = module.clone()
                del _body(_functions(candidate)[i])[k].properties["strategy"]
                if fails(candidate):
                    module = candidate
    return module


# ---- sizes ----


def _with_smaller_sizes(module: ModuleOp, fails: Fails) -> ModuleOp:
    sizes = {
        n for f in _functions(module) for v in _values(f)
        if isinstance(v.type, TensorType) for n in v.type.get_shape()
    }  # fmt: skip
    for size in sorted(sizes, reverse=True):
        for smaller in _smaller(size):
            candidate = _with_size(module, size, smaller)
            if fails(candidate):
                module = candidate
                break
    return module


def _smaller(size: int) -> Sequence[int]:
    """Return the sizes to try in place of one: the least first."""
    return sorted({n for n in (1, 2, 3, size // 2, size - 1) if 0 < n < size})


def _with_size(module: ModuleOp, size: int, smaller: int) -> ModuleOp:
    module = module.clone()

    def changed(t: Attribute) -> Attribute:
        if not isinstance(t, TensorType):
            return t
        shape = [smaller if n == size else n for n in t.get_shape()]
        return TensorType(t.element_type, shape, t.encoding)

    for f in _functions(module):
        for v in _values(f):
            set_type(v, changed(v.type))
        update_signature(f)
    return module
