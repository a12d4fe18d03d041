"""Updates by rules (shardir/dialects/train/rules.py): the ops of a function, put into a step."""

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import replicated
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.symbols import find_symbol
from shardir.rewriting.rewriter import Rewriter, erase


def rule_of(request: train.StepOp, parameter: train.Argument) -> FuncOp | None:
    """Return the rule of a parameter of a step, if it has one."""
    module = request.parent_op()
    if parameter.rule is None or module is None:
        return None
    return find_symbol(module, FuncOp, parameter.rule)


def erase_unused_rules(module: ModuleOp) -> None:
    """Erase the rules of a module that no parameter names any more."""
    functions = [f for f in module.body.ops if isinstance(f, FuncOp)]
    named = {a.rule for f in functions for a in train.arguments(f)}
    for f in functions:
        if train.is_rule(f) and f.sym_name.data not in named:
            erase(f)


def by_rule(b: Rewriter, f: FuncOp) -> Callable[[train.ParameterStep], list[SSAValue]]:
    """Return the update of a parameter by a rule: its new value and its new states. The parameter
    is first laid out as its states are."""

    def update(p: train.ParameterStep) -> list[SSAValue]:
        given = _arguments(b, f, p)
        block, location = f.body.block, b.location
        known: dict[SSAValue, SSAValue] = dict(zip(block.args, given, strict=True))
        whole, last = _on_whole(ops_of(block)), block.last_op
        assert isinstance(last, ReturnOp)
        before = (p.w, *given[2:])
        names = {v: old.name_hint for v, old in zip(last.operands, before, strict=False)}
        for op in block.ops:
            if not isinstance(op, TensorOp):  # the end
                break
            operands = [known[v] for v in op.operands]
            if op in whole and b.mesh is not None:
                ranks = [len(unsharded_type(v).get_shape()) for v in operands]
                operands = [b.redistribute(v, replicated(b.mesh.name, rank))
                            for v, rank in zip(operands, ranks, strict=True)]  # fmt: skip
            b.location = op.location
            types = [unsharded_type(v) for v in op.results]
            if op.regions:
                regions = [region.clone() for region in op.regions]
                new = b.op(type(op), *operands, props=op.properties, regions=regions).results
            else:
                new = b.results(type(op), *operands, props=op.properties, result=types)
            for old, v in zip(op.results, new, strict=True):
                v.name_hint = names.get(old) or v.name_hint or old.name_hint
                known[old] = v
        b.location = location
        return [known[v] for v in last.operands]

    return update


def _arguments(b: Rewriter, f: FuncOp, p: train.ParameterStep) -> list[SSAValue]:
    """Return the arguments of a rule for a parameter."""
    found = [p.w if b.mesh is None else b.redistribute(p.w, b.layout(p.g)), p.g]
    for v, argument in list(zip(f.body.block.args, train.arguments(f), strict=True))[2:]:
        if argument.key is not None:
            assert isinstance(argument.init, train.InitAttr)
            t = unsharded_type(v)
            dims = range(len(t.get_shape()))
            found.append(p.state(argument.key, dims, argument.init, t.element_type))
        elif train.text_attr(argument.attributes, train.SCALAR) == "lr":
            found.append(p.lr)
        else:
            found.append(p.scalars.done_as_float)
    return found


def _on_whole(ops: Sequence[Operation]) -> set[Operation]:
    """Return the ops that run on unsharded values: those that are not elementwise, those between
    two such, and those before them that read what is gathered anyway."""
    after = set[Operation]()
    for op in ops:
        if not train.acts_on_elements(op) or any(v.owner in after for v in op.operands):
            after.add(op)
    whole = set[Operation]()
    for op in reversed(ops):
        users = {use.operation for v in op.results for use in v.uses}
        gathered = any(use.operation in whole for v in op.operands for use in v.uses)
        if (
            not train.acts_on_elements(op)
            or (op in after and not users.isdisjoint(whole))
            or (gathered and users and users <= whole)
        ):
            whole.add(op)
    return whole
