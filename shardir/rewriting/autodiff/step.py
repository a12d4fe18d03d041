"""A training step around its gradients.

1. the forward and the backward part, seeded with the loss scale
2. the gradients without the loss scale, clipped
3. the optimizer's updates of all parameters, in lockstep
4. if a gradient is not finite, the old parameters and states
5. the requested metrics
"""

from collections.abc import Iterator, Sequence

from xdsl.dialects.builtin import f32, f64, i64
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import train
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.gradients import prepare_gradients
from shardir.rewriting.autodiff.rules import by_rule, rule_of
from shardir.rewriting.rewriter import Rewriter


class TrainStep:
    """The ops that a `train.step` adds to a function."""

    def __init__(
        self, request: train.StepOp, builder: Rewriter, arguments: Arguments,
        is_update: bool = False,
    ):  # fmt: skip
        """`is_update`: whether the ops are of an update apart from the backward part."""
        self.request, self.b, self.arguments = request, builder, arguments
        self.name, self.microbatches = request.sym_name.data, request.microbatches
        self.is_loop, self.is_update = request.is_loop, is_update
        self.finite: SSAValue | None = None
        """Whether all gradients are finite, if losses are scaled."""
        self.scale: SSAValue | None = None
        """The loss scale, if it is a state."""
        self.weight: SSAValue | None = None
        """The weight of a loss in a sum of gradients, if they are summed over calls."""
        if request.separate_update is not None and not is_update:
            key = request.keys.of_step("loss_weight")
            self.weight = arguments.add_scalar_state(builder, key, f64, 1.0)
        self.metrics: list[tuple[SSAValue, str]] = []
        """The requested scalars with their names; `update` makes them."""
        if (scaling := request.loss_scale) is not None and scaling.kind == "dynamic":
            key = request.keys.of_step("loss_scale")
            self.scale = arguments.add_scalar_state(builder, key, f32, scaling.values["initial"])

    @property
    def averages(self) -> bool:
        """Whether loss and gradients are means over microbatches; otherwise they are sums."""
        accumulate = self.request.accumulate
        return accumulate is None or accumulate.averages

    @property
    def scales(self) -> bool:
        """Whether the cotangent of a microbatch's loss differs from 1."""
        mean = self.averages and self.microbatches > 1
        weighs = self.weight is not None or self.request.loss_scale is not None
        return mean or weighs

    def seed(self, element: Attribute) -> SSAValue:
        """Return the cotangent of a microbatch's loss."""
        seed = self._seed(element)
        return seed if self.weight is None else self.b.mul(
            seed, self.b.convert(self.weight, element)
        )  # fmt: skip

    def _seed(self, element: Attribute) -> SSAValue:
        factor = 1.0
        if self.averages:
            factor = 1 / self.microbatches
        if self.scale is not None:
            scale = self.b.convert(self.scale, element)
            return scale if factor == 1.0 else self.b.scale(scale, factor)
        if self.request.loss_scale is not None:
            factor *= self.request.loss_scale.values["factor"]
        return self.b.constant(factor, element)

    def inverse_scale(self) -> SSAValue | None:
        """Return the reciprocal of the loss scale, in f64, if losses are scaled."""
        if self.scale is not None:
            return self.b.div(self.b.constant(1.0, f64), self.b.convert(self.scale, f64))
        if (scaling := self.request.loss_scale) is None:
            return None
        return self.b.constant(1 / scaling.values["factor"], f64)

    def loss(self, total: SSAValue) -> SSAValue:
        """Return the loss of all microbatches, from the sum of their losses."""
        return self.mean(total) if self.averages else total

    def mean(self, total: SSAValue) -> SSAValue:
        """Return the mean over all microbatches, from the sum over them."""
        if self.microbatches == 1:
            return total
        mean = self.b.scale(total, 1 / self.microbatches)
        mean.name_hint = total.name_hint
        return mean

    def update(
        self, gradients: dict[int, SSAValue | None], written: dict[int, SSAValue]
    ) -> list[tuple[SSAValue, str]]:
        """Return the new values of parameters and states, each with its key.

        Args:
            gradients: by the indices of parameters.
            written: values that the function has assigned to parameters, from which the optimizer
                proceeds.
        """
        bases = {i: self._in_layout_of(self.arguments[i], v) for i, v in written.items()}
        known = {i: g for i, g in gradients.items() if g is not None}
        requested = () if self.request.metrics is None else self.request.metrics.data
        norm = None
        if known:
            # The sums of a separate update have no loss scale.
            inverse = None if self.is_update else self.inverse_scale()
            prepared = prepare_gradients(
                self.b, self.request, inverse, known, "gradient_norm" in requested
            )
            known, self.finite, norm = prepared.gradients, prepared.finite, prepared.norm
        scalars = train.StepScalars(
            self.b, self.request.optimizer,
            lambda name, element, first: self.arguments.add_scalar_state(
                self.b, self.request.keys.of_step(name), element, first
            ),
        )  # fmt: skip
        keys = {i: self.arguments.annotation(i).key or "" for i in gradients}
        old = {i: [(self.arguments[i], keys[i])] for i in gradients}
        new = {i: [bases.get(i, self.arguments[i])] for i in gradients}
        steps_of = {i: self.optimizer(i, new[i][0], g, scalars, old[i]) for i, g in known.items()}
        while steps_of:
            for i, step in list(steps_of.items()):
                try:
                    next(step)
                except StopIteration as end:
                    pairs = list(zip(old[i], end.value, strict=True))
                    averages = list(self.average(i, end.value[0], old[i]))
                    new[i] = [self.select_new(was, v) for (was, _), v in pairs]
                    new[i] += averages
                    del steps_of[i]
        for i in gradients.keys() - known.keys():  # a parameter without effect on the loss
            new[i] += self.average(i, new[i][0], old[i])
        # Behind the states of parameters, which are at equal distances then.
        states = {n: (self.arguments.move_to_end(before), after)
                  for n, (before, after) in scalars.states.items()}  # fmt: skip
        if scalars.given is not None:
            scalars.given = self.arguments.move_to_end(scalars.given)
        if scalars.is_used:
            scalars.done = self.arguments.move_to_end(scalars.done)
        metric_values = {
            "gradient_norm": lambda: norm or self.b.constant(0.0, f64),
            # An op makes a result of a step in stages.
            "learning_rate": lambda: (
                scalars.rate() if scalars.given is None else self.b.scale(scalars.given, 1.0)
            ),
        }
        self.metrics = [(metric_values[name](), name) for name in requested]
        results = [(v, key) for i in gradients for v, (_, key) in zip(new[i], old[i], strict=True)]
        if scalars.is_used:
            states["count"] = scalars.done, scalars.step
        key_of = self.request.keys.of_step
        results += [(self.select_new(*of), key_of(name)) for name, of in states.items()]
        if self.scale is not None and self.finite is not None:
            results += self.next_scale(self.scale, self.finite)
        return results

    def select_new(self, before: SSAValue, after: SSAValue) -> SSAValue:
        """Return the new value of a parameter or state, in its layout; the old value if a gradient
        is not finite."""
        after = self._in_layout_of(before, after)
        if self.finite is not None and after is not before:
            after = self.b.select(self.finite, after, before)
        after.name_hint = after.name_hint or before.name_hint
        return after

    def _in_layout_of(self, like: SSAValue, v: SSAValue) -> SSAValue:
        layout = layout_of(like)
        return v if layout is None else self.b.redistribute(v, layout)

    def optimizer(
        self, i: int, base: SSAValue, g: SSAValue, scalars: train.StepScalars,
        old: list[tuple[SSAValue, str]],
    ) -> train.Updated:  # fmt: skip
        """Return the optimizer's steps for parameter i, from its value `base`; append the states
        that the optimizer requests to `old`."""
        parameter = self.arguments.annotation(i)

        def state(
            name: str, dims: Sequence[int], first: train.FirstValue, element: Attribute
        ) -> SSAValue:
            added = self.add_state(i, name, dims, first, element)
            old.append(added)
            return added[0]

        numbers = self.request.optimizer.values
        decay = parameter.weight_decay(numbers.get("weight_decay", 0.0))
        own = parameter.lr
        schedule = own if isinstance(own, train.ScheduleAttr) else None
        rate = scalars.rate(parameter.lr_scale, schedule)
        numbers = {n: x for n, x in numbers.items() if n != "lr"} | {"weight_decay": decay}
        rule = rule_of(self.request, parameter)
        update = None if rule is None else by_rule(self.b, rule)
        target = train.ParameterStep(self.b, scalars, base, g, numbers, rate, state, update)
        kind = self.request.optimizer.kind if rule is None else train.RULES
        return train.OPTIMIZERS[kind].update(target)

    def add_state(
        self, i: int, name: str, dims: Sequence[int], first: train.FirstValue, element: Attribute
    ) -> tuple[SSAValue, str]:
        """Add a state of parameter i; return it and its key."""
        parameter = self.arguments.annotation(i).key or ""
        key = self.request.keys.of_parameter(parameter, name)
        mesh = self.b.mesh
        return self.arguments.add_state_of(i, mesh, key, name, dims, first, element), key

    def average(self, i: int, new: SSAValue, old: list[tuple[SSAValue, str]]) -> Iterator[SSAValue]:
        """Yield the new moving average of parameter i, if the step has them, and append the old one
        to `old`: average + (1 - decay) (parameter - average)."""
        if (ema := self.request.ema) is None:
            return
        type = unsharded_type(self.arguments[i])
        dims = range(len(type.get_shape()))
        copy = train.InitAttr(("copy", ()))
        average, key = self.add_state(i, train.EMA, dims, copy, type.element_type)
        old.append((average, key))
        new = self._in_layout_of(average, new)
        change = self.b.scale(self.b.sub(new, average), 1 - ema.data)
        after = self.b.add(average, change)
        after.name_hint = average.name_hint
        yield after

    def next_scale(self, scale: SSAValue, finite: SSAValue) -> list[tuple[SSAValue, str]]:
        """Return the new loss scale, and the number of steps since a gradient was last not
        finite."""
        assert self.request.loss_scale is not None
        numbers = self.request.loss_scale.values
        count = self.request.keys.of_step("good_steps")
        good = self.arguments.add_scalar_state(self.b, count, i64)
        props: dict[str, Attribute] = {n: float_attr(numbers[n]) for n in ("growth", "backoff")}
        props["interval"] = int_attr(numbers["interval"])
        new = self.b.op(train.NextLossScaleOp, scale, good, finite, props=props).results
        new[0].name_hint, new[1].name_hint = scale.name_hint, good.name_hint
        return [(new[0], self.request.keys.of_step("loss_scale")), (new[1], count)]
