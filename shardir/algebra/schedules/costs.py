"""The costs of the stages of a pipeline, and lower bounds of the time of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import isfinite
from typing import Self

from shardir.diagnostics import ShardirError


@dataclass(frozen=True)
class PipelineCosts:
    """The costs of each stage for one microbatch: the seconds of its forward part and of the
    gradients of its inputs and of its weights, and the bytes from its forward part to the end of
    its backward part.

    `transfer` has the seconds of results of forward parts between adjacent stages that are on
    different ranks, one number fewer than stages; `transfer_back` those of gradients, by default
    the same. `overhead` is the seconds of an action beside its work, which are part of the others:
    B takes them once, I and W twice.
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
        """The seconds that B takes less than I and W."""
        pairs = zip(self.input, self.weight, strict=True)
        return tuple(min(self.overhead, i, w) for i, w in pairs)

    def delays(self, placement: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the seconds from the end of each stage but the last to the begin of the next one,
        and of a gradient in the other direction: those of transfers, where ranks differ."""
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
        """Return the costs of stages that are equal.

        `seconds` are those of F, I and W of all stages of a rank together, which hold one byte.
        """
        stages = ranks * chunks
        forward, input, weight = ((each / chunks,) * stages for each in seconds)
        memory = (1.0 / chunks,) * stages
        return cls(forward, input, weight, (transfer,) * (stages - 1), memory)


def lower_bound(
    placement: Sequence[int],
    microbatches: int,
    costs: PipelineCosts,
    memory: Sequence[float] | None = None,
) -> float:
    """Return a time in seconds below which no schedule of stages on these ranks ends, if each rank
    holds at most its `memory`, in bytes.

    The first part of a microbatch begins on a rank after those on the stages before the rank's
    first one, with the transfers between ranks (`head`). With p ranks, v equal stages on each, and
    equal transfers, that is (p - 1) (F / v + transfer) on the last one.

    From then on the rank has all of its work before it. Up to the time at which the first gradient
    can reach it (`back`: all forward parts, and the backward parts of the stages after the rank's
    last one) it can only compute forward parts, at most as many as fit into its memory; so it
    waits for the rest of that time. In the same way, after its last input gradient there remain
    the stages before its first one (`tail`), in which the rank computes at most the weight
    gradients that fit into its memory. The step cannot end earlier than the microbatch with all
    stages in turn, either. W counts as what B takes more than I.

    Of the rank's stages from any one on, the forward parts and input gradients alone take their
    time too, with the wait for the first gradient, and the stages before the first of them remain
    after the last gradient. With fewer microbatches than ranks that is the larger bound: the last
    stage computes F and I of all microbatches, and the last gradient passes all other stages.
    """
    stages = range(len(placement))
    weight = [w - n for w, n in zip(costs.weight, costs.saved, strict=True)]
    hops, hops_back = ([*each, 0.0] for each in costs.delays(placement))
    # The time at which the first microbatch can begin on each stage, and its gradient can arrive.
    arrives = [0.0, *accumulate(f + h for f, h in zip(costs.forward, hops, strict=True))]
    returns = [arrives[-1]] * len(stages)
    for s in reversed(stages[:-1]):
        returns[s] = returns[s + 1] + costs.input[s + 1] + hops_back[s]
    tails = [0.0, *accumulate(i + h for i, h in zip(costs.input, hops_back, strict=True))]
    first_weight = weight[0]
    bound = returns[0] + costs.input[0] + first_weight

    def end(some: Sequence[int], seconds: float, limit: float | None) -> float:
        """The earliest end of so many seconds of a rank's work on some of its stages, gradients
        among it."""
        head, back = arrives[some[0]], min(returns[s] for s in some)
        forwards = [(costs.forward[s], costs.memory[s]) for s in some]
        return head + seconds + max(0.0, back - head - _most(forwards, microbatches, limit))

    for rank in set(placement):
        own = [s for s in stages if placement[s] == rank]
        limit = None if memory is None else memory[rank]
        work = microbatches * sum(costs.forward[s] + costs.input[s] + weight[s] for s in own)
        weights = [(weight[s], costs.memory[s]) for s in own]
        tail = tails[own[0]] + (first_weight if own[0] else 0.0)
        tail = max(0.0, tail - _most(weights, microbatches, limit))
        bound = max(bound, end(own, work, limit) + tail)
        for some in (own[k:] for k in range(len(own))):
            work = microbatches * sum(costs.forward[s] + costs.input[s] for s in some)
            bound = max(bound, end(some, work, limit) + tails[some[0]] + first_weight)
    return bound


def _most(parts: Sequence[tuple[float, float]], microbatches: int, memory: float | None) -> float:
    """Return the largest time that parts with these seconds and bytes take, of each at most one for
    each microbatch, if their bytes fit into the memory; or more, since the last counts in part."""
    if memory is None:
        return microbatches * sum(seconds for seconds, _ in parts)
    found = 0.0
    timed = [p for p in parts if p[0]]
    for seconds, size in sorted(timed, key=lambda p: p[1] / p[0]):
        count = min(microbatches, memory / size) if size else microbatches
        found += count * seconds
        memory -= count * size
    return found
