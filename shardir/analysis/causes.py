"""What causes a collective: the ops that make its operands, and those that read its results."""

from collections.abc import Iterator

from xdsl.ir import Operation, OpResult, SSAValue

from shardir.dialects import dist, nn, train

PASSING = (
    nn.ReshapeOp, nn.TransposeOp, nn.BroadcastOp, nn.ConvertOp, nn.StopGradientOp,
    nn.StraightThroughOp,
)  # fmt: skip
"""Views, and ops that hand a value on."""


def producer(v: SSAValue) -> SSAValue:
    """Return the value from which views and other collectives derive `v`."""
    while isinstance(v.owner, (*PASSING, dist.CollectiveOp, dist.WaitOp, dist.HandsOn)):
        assert isinstance(v, OpResult)
        v = v.owner.operands[0 if isinstance(v.owner, dist.HandsOn) else v.index]
    return v


def readers(v: SSAValue, seen: tuple[SSAValue, ...] = ()) -> Iterator[Operation]:
    """Yield the ops that read a value, looking through collectives and loops."""
    for use in v.uses:
        user = use.operation
        if isinstance(user, dist.HandsOn):
            to = user.results[0] if not isinstance(user, train.CarryOp) else user.carried
            if to not in seen:
                yield from readers(to, (*seen, to))
        elif isinstance(user, dist.CollectiveOp | dist.WaitOp):
            yield from readers(user.results[use.index], seen)
        else:
            yield user


def partial_values(kind: str) -> str:
    """Return the name of values that a reduction of a kind combines."""
    return {"sum": "partial sums", "mean": "partial means"}.get(kind, f"a {kind} of its own rows")
