"""The costs of the stages of a pipeline, and lower bounds of the time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import Self

from shardir.diagnostics import ShardirError


@dataclass(frozen=True)
class PipelineCosts:
    """The costs of each stage for one microbatch.

    Attributes:
        forward: seconds of F.
        input: seconds of I, the gradients of inputs.
        weight: seconds of W, the gradients of weights.
        transfer: seconds of forward results between adjacent stages on different ranks: one number
            fewer than stages.
        memory: bytes that are held from F to the end of the backward part.
        transfer_back: seconds of gradients between adjacent stages; equal to `transfer` if None.
        overhead: seconds of an action besides its work. The numbers above contain it, so I and W
            take it twice, and B once.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    transfer: tuple[float, ...]
    memory: tuple[float, ...]
    transfer_back: tuple[float, ...] | None = None
    overhead: float = 0.0

    def __post_init__(self) -> None:
        stages = len(self.forward)
        for name, numbers in vars(self).items():
            if numbers is None:
                continue
            numbers = (numbers,) * len(self.forward) if name == "overhead" else numbers
            between = name.startswith("transfer")
            expected = stages - 1 if between else stages
            if len(numbers) != expected or not stages:
                raise ShardirError(
                    f"expected {max(expected, 0)} costs of {name} for {stages} stages, got "
                    f"{len(numbers)}; write one for each "
                    + ("two adjacent stages" if between else "stage, at least one")
                )
            wrong = [n for n in numbers if not (isfinite(n) and n >= 0)]
            if wrong:
                raise ShardirError(
                    f"expected costs of {name} that are 0 or more, got {wrong[0]}; use a cost of 0 "
                    "or more"
                )

    @property
    def stages(self) -> int:
        return len(self.forward)

    @property
    def saved(self) -> tuple[float, ...]:
        """The seconds by which B is shorter than I and W together."""
        pairs = zip(self.input, self.weight, strict=True)
        return tuple(min(self.overhead, i, w) for i, w in pairs)

    def delays(self, placement: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds of the transfer from each stage to the next one, and of the gradient
        back; 0 between stages on one rank."""
        back = self.transfer if self.transfer_back is None else self.transfer_back
        moves = [a != b for a, b in pairwise(placement)]

        def of(times: Sequence[float]) -> list[float]:
            return [t if moved else 0.0 for t, moved in zip(times, moves, strict=True)]

        return of(self.transfer), of(back)

    @classmethod
    def equal(
        cls,
        ranks: int,
        chunks: int = 1,
        seconds: tuple[float, float, float] = (1.0, 1.0, 1.0),
        transfer: float = 0.0,
    ) -> Self:
        """Return the costs of equal stages.

        Args:
            seconds: of F, I and W of all stages of a rank together, which hold one byte.
            transfer: seconds between adjacent stages.
        """
        stages = ranks * chunks
        forward, input, weight = ((total / chunks,) * stages for total in seconds)
        memory = (1.0 / chunks,) * stages
        return cls(forward, input, weight, (transfer,) * (stages - 1), memory)


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: PipelineCosts,
    memory: Sequence[float] | None = None,
) -> float:
    """Return a lower bound, in seconds, of any schedule of stages on ranks.

    The bound is the maximum of:

    1. One microbatch through all stages, forward and back.
    2. For each rank: `head`, the forward parts of the stages before its first stage, with
       transfers; then all its work; then `tail`, the stages before its first stage on the way back.
       Until the first gradient arrives (`back`) the rank computes only forward parts that fit into
       its memory, and waits otherwise. In `tail` it computes only weight gradients that fit. W
       counts as B less I. With p ranks, v equal stages on each and equal transfers, `head` is
       (p - 1) (F / v + transfer) on the last rank.
    3. For each rank, and its stages from any one on: F and I of these stages only, with the wait
       for the first gradient, and the way back from the first of them. With fewer microbatches than
       ranks this is the larger bound: the last stage computes F and I of all microbatches, and the
       last gradient passes all other stages.

    Args:
        placement: the rank of each stage.
        memory: the bytes that each rank may hold; unlimited if None.
    """
    stages = range(len(placement))
    weight = [w - n for w, n in zip(costs.weight, costs.saved, strict=True)]
    hops, hops_back = ([*delays, 0.0] for delays in costs.delays(placement))
    # When the first microbatch can begin on each stage, and when its gradient can arrive.
    arrives = [0.0, *accumulate(f + h for f, h in zip(costs.forward, hops, strict=True))]
    returns = [arrives[-1]] * len(stages)
    for s in reversed(stages[:-1]):
        returns[s] = returns[s + 1] + costs.input[s + 1] + hops_back[s]
    tails = [0.0, *accumulate(i + h for i, h in zip(costs.input, hops_back, strict=True))]
    first_weight = weight[0]
    bound = returns[0] + costs.input[0] + first_weight

    def end(stages: Sequence[int], seconds: float, limit: float | None) -> float:
        """Return the earliest end of `seconds` of work, gradients included, on stages of a rank."""
        head, back = arrives[stages[0]], min(returns[s] for s in stages)
        forwards = [(costs.forward[s], costs.memory[s]) for s in stages]
        computed = _fitting_seconds(forwards, microbatches, limit)
        return head + seconds + max(0.0, back - head - computed)

    for rank in set(placement):
        own = [s for s in stages if placement[s] == rank]
        limit = None if memory is None else memory[rank]
        work = microbatches * sum(costs.forward[s] + costs.input[s] + weight[s] for s in own)
        weights = [(weight[s], costs.memory[s]) for s in own]
        tail = tails[own[0]] + (first_weight if own[0] else 0.0)
        tail = max(0.0, tail - _fitting_seconds(weights, microbatches, limit))
        bound = max(bound, end(own, work, limit) + tail)
        for last in (own[k:] for k in range(len(own))):
            work = microbatches * sum(costs.forward[s] + costs.input[s] for s in last)
            bound = max(bound, end(last, work, limit) + tails[last[0]] + first_weight)
    return bound


def _fitting_seconds(
    parts: Sequence[tuple[float, float]], microbatches: int, memory: float | None
) -> float:
    """Return an upper bound of the seconds of parts that fit into memory: the fractional knapsack.

    Args:
        parts: seconds and bytes; each part occurs at most once for each microbatch.
    """
    if memory is None:
        return microbatches * sum(seconds for seconds, _ in parts)
    total = 0.0
    timed = [p for p in parts if p[0]]
    for seconds, size in sorted(timed, key=lambda p: p[1] / p[0]):
        count = min(microbatches, memory / size) if size else microbatches
        total += count * seconds
        memory -= count * size
    return total
