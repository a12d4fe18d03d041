"""Text from a function that returns the logits of each next token.

    text = trainer.generate(prompt, 100, temperature=0.8, top_k=40)

The whole function is called for each token, since it is that of the training: it has no cache of
keys and values. Only the logits of the last position move between ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..collectives.reductions import all_reduce
from ..plan.program import PlanError, PlanFunction, PlanResult, ProgramPlan
from .states import DTYPES, States
from .trained_steps import without_files


@dataclass(frozen=True)
class Sampling:
    """The choice of a token by its logits.

    Attributes:
        temperature: by which logits are divided; 0: the token with the largest logit.
        top_k: the number of tokens with the largest logits that are drawn from; None: all.
        seed: of the random numbers, which are the same on all ranks.

    Raises:
        PlanError: one has a wrong value.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        t, k = self.temperature, self.top_k
        if not isinstance(t, int | float) or not math.isfinite(t) or t < 0:
            raise PlanError(f"expected a temperature of at least 0, got {t!r:.60}")
        if k is not None and (not isinstance(k, int) or isinstance(k, bool) or k < 1):
            raise PlanError(f"expected a number of tokens of at least 1 as top_k, got {k!r:.60}")
        if k is not None and not t:
            raise PlanError(f"top_k={k}: expected a temperature above 0, which draws tokens")
        if not isinstance(self.seed, int):
            raise PlanError(f"expected an integer as seed, got {self.seed!r:.60}")

    def tokens(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Return the token of each row of logits, [B, V] to [B]."""
        if not self.temperature:
            return logits.argmax(-1)
        logits = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def generating(plan: ProgramPlan, name: str | None) -> PlanFunction:
    """Return a function beside the steps from tokens [B, S] to logits [B, S, V].

    Args:
        name: its name, by default of the only one.

    Raises:
        PlanError: there is no such function, or there are several.
    """
    others = {f.name: f for f in plan.functions if f.is_beside}
    fitting = [key for key, f in others.items() if _is_of_tokens(f)]
    if name is not None and name not in others:
        raise PlanError(f"expected a function of {', '.join(others) or 'none'}, got {name!r:.60}")
    if (name is None and len(fitting) == 1) or name in fitting:
        return without_files(others[fitting[0] if name is None else name])
    if name is None and fitting:
        raise PlanError(f"expected the name of a function of {', '.join(fitting)}, got none")
    raise PlanError(
        "expected a function from tokens [B, S] to logits [B, S, V], got "
        f"{name or ', '.join(others) or 'a program without functions beside the steps'}; compile "
        'with steps={..., "logits": shardir.Inference(lambda model, tokens: model(tokens), tokens)}'
    )


def _is_of_tokens(f: PlanFunction) -> bool:
    inputs = [arg for arg in f.args if arg.role == "input"]
    results = [r for r in f.results if not r.updates and r.weighs is None]
    if len(inputs) != 1 or len(results) != 1 or inputs[0].microbatches:
        return False
    (tokens,), (logits,) = inputs, results
    is_integer = tokens.dtype in ("i64", "i32")
    return is_integer and len(logits.shape) == 3 and logits.shape[:2] == tokens.shape


def checked_prompt(f: PlanFunction, prompt: Any, count: Any) -> Tensor:
    """Return the tokens to go on from, [B, P] of integers.

    Raises:
        PlanError: they have another shape or dtype, or `count` is no number of at least 0.
    """
    tokens = next(arg for arg in f.args if arg.role == "input")
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise PlanError(f"expected a number of new tokens of at least 0, got {count!r:.60}")
    rows = tokens.shape[0]
    wanted = f"expected tokens of [{rows}, P] of integers, P of at least 1"
    if not isinstance(prompt, Tensor):
        raise PlanError(f"{wanted}, got {type(prompt).__name__}; use torch.tensor")
    if prompt.dim() != 2 or prompt.is_floating_point() or prompt.dtype == torch.bool:
        raise PlanError(f"{wanted}, got {list(prompt.shape)} and {prompt.dtype}")
    if prompt.shape[0] != rows or not prompt.shape[1]:
        raise PlanError(
            f"{wanted}, got {list(prompt.shape)}; {f.name} has {rows} rows: repeat a prompt, or "
            "compile the function for another batch"
        )
    return prompt.detach().cpu().to(DTYPES[tokens.dtype])


def generated(
    states: States, f: PlanFunction, call: Callable[[Tensor], list[Tensor]], prompt: Tensor,
    count: int, sampling: Sampling,
) -> Tensor:  # fmt: skip
    """Return a prompt and the tokens after it, the same on all ranks.

    Args:
        call: calls the function on a global input [B, S]; returns this rank's shards of results.
        prompt: [B, P]. Of more than S tokens the function reads the last S; after fewer there are
            zeros, which a causal function does not read.
        count: the number of new tokens.

    Returns:
        [B, P + count].
    """
    length = next(arg for arg in f.args if arg.role == "input").shape[1]
    i, result = next((i, r) for i, r in enumerate(f.results) if not r.updates and r.weighs is None)
    generator = torch.Generator().manual_seed(sampling.seed)
    text = prompt
    for _ in range(count):
        window = text[:, -length:]
        padded = torch.nn.functional.pad(window, (0, length - window.shape[1]))
        logits = _row(states, call(padded)[i], result, window.shape[1] - 1).cpu()
        text = torch.cat([text, sampling.tokens(logits, generator)[:, None].to(text)], 1)
    return text


def _row(states: States, x: Tensor, value: PlanResult, row: int) -> Tensor:
    """Return a row of dimension 1, whole, from this rank's shard of a value of 3 dimensions. Where
    the dimension is split, the ranks without the row add zeros."""
    (start, stop), axes = states.bounds(value)[1], value.dims[1]
    is_here = start <= row < stop
    own = x[:, row - start] if is_here else x.new_zeros(x.shape[0], x.shape[2])
    row_of = replace(
        value, shape=(value.shape[0], value.shape[2]), dims=(value.dims[0], value.dims[2])
    )
    if value.partial is not None:
        own = all_reduce(states.mesh, own, *value.partial)
    return states.gathered(own, row_of, ("sum", tuple(axes)) if axes else None)
