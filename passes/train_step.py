"""The parts of a training step around its gradients, for distributed-autodiff.

    forward and backward part, seeded with the loss scale
    gradients -> without the scale, clipped
    optimizers' updates, all parameters side by side
    where a gradient was not finite, everything as it was

Numbers of all gradients together (their norm, whether all are finite) are partial sums over the
axes that split a gradient; what is replicated counts once. They are brought together in one go.
"""

from collections.abc import Sequence

from xdsl.dialects.builtin import TensorType, f32, f64, i64
from xdsl.ir import Attribute, Block, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.dialects import nn, train
from shardir.dialects.builder import Builder
from shardir.dialects.dist import laid_out, layout_of, tensor
from shardir.dialects.nn.base import Props, float_attr, int_attr, plain

CLIP_EPS = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides by it."""

Marks = dict[str, Attribute]


class TrainStep:
    """One `train.step` on its way to a function: states become arguments of `block`, whose
    attributes are `attrs`."""

    def __init__(
        self, request: train.StepOp, builder: Builder, block: Block, attrs: list[Marks]
    ):  # fmt: skip
        self.request, self.b, self.block, self.attrs = request, builder, block, attrs
        self.name, self.count = request.sym_name.data, request.microbatches
        self.finite: SSAValue | None = None
        """Whether all gradients were finite, where that is asked."""
        self.scale: SSAValue | None = None
        if (scaling := request.loss_scale) is not None and scaling.kind == "dynamic":
            self.scale = self._number("loss_scale", f32, scaling.values["initial"])

    # ---- states ----

    def _argument(self, type: TensorType, name: str, hint: str, first: float) -> SSAValue:
        arg = self.block.insert_arg(type, len(self.block.args))
        arg.name_hint = hint if SSAValue.is_valid_name(hint) else None
        init = train.InitAttr(("constant", (("value", first),)))
        self.attrs.append(train.state_attrs(name, init))
        return arg

    def _number(self, name: str, element: Attribute, first: float = 0.0) -> SSAValue:
        """A state that is one number, the same on all devices."""
        mesh = self.b.mesh
        layout = replicated(mesh.name, 0) if mesh is not None else None
        type = laid_out(element, (), layout) if layout is not None else tensor(element, ())
        return self._argument(type, f"{self.name}.{name}", name, first)

    def _state(self, w: SSAValue, key: str, name: str, dims: Sequence[int]) -> SSAValue:
        """A state of a parameter, along those of its dimensions, split as they are."""
        t, layout = plain(w), layout_of(w)
        shape = tuple(t.get_shape()[d] for d in dims)
        type = tensor(t.element_type, shape)
        if layout is not None:
            mine = Layout(layout.mesh, tuple(layout.dims[d] for d in dims))
            type = laid_out(t.element_type, shape, mine)
        return self._argument(type, f"{key}.{name}", f"{w.name_hint or 'w'}_{name}", 0.0)

    # ---- before the backward part ----

    def seed(self, element: Attribute) -> SSAValue:
        """The cotangent of the loss of a microbatch."""
        part = 1.0
        if (several := self.request.accumulate) is not None and several.kind == "mean":
            part = 1 / self.count
        if self.scale is not None:
            scale = self.b.convert(self.scale, element)
            return scale if part == 1.0 else self.b.scale(scale, part)
        if self.request.loss_scale is not None:
            part *= self.request.loss_scale.values["factor"]
        return self.b.constant(part, element)

    def loss(self, losses: Sequence[SSAValue]) -> SSAValue:
        """The loss of all microbatches."""
        total = losses[0]
        for x in losses[1:]:
            total = self.b.add(total, x)
        several = self.request.accumulate
        if len(losses) > 1 and several is not None and several.kind == "mean":
            total = self.b.scale(total, 1 / len(losses))
        total.name_hint = losses[0].name_hint
        return total

    # ---- behind it ----

    def update(self, gradients: dict[int, SSAValue | None]) -> list[tuple[SSAValue, str]]:
        """The new values of parameters and states, each with the name of what it updates."""
        args = self.block.args
        given = {i: g for i, g in gradients.items() if g is not None}
        if given:
            given = self._prepared(given)
        clock = train.Clock(self.b, self.request.optimizer, lambda: self._number("count", i64))
        keys = {i: train.Argument.of(self.attrs[i]).key or "" for i in gradients}
        old: dict[int, list[tuple[SSAValue, str]]] = {i: [(args[i], keys[i])] for i in gradients}
        running = {i: self._optimizer(i, g, clock, old[i]) for i, g in given.items()}
        new: dict[int, list[SSAValue]] = {i: [args[i]] for i in gradients}
        while running:
            for i, steps in list(running.items()):
                try:
                    next(steps)
                except StopIteration as end:
                    pairs = zip(old[i], end.value, strict=True)
                    new[i] = [self.becomes(was, v) for (was, _), v in pairs]
                    del running[i]
        results = [
            (v, name) for i in gradients for v, (_, name) in zip(new[i], old[i], strict=True)
        ]
        if clock.is_used:
            count = self.becomes(clock.done, clock.step)
            results.append((count, f"{self.name}.count"))
        if self.scale is not None and self.finite is not None:
            results += self._next_scale(self.scale, self.finite)
        return results

    def becomes(self, before: SSAValue, after: SSAValue) -> SSAValue:
        """The new value of a parameter or state, where it lies; as before where a gradient was not
        finite."""
        if (layout := layout_of(before)) is not None:
            after = self.b.redistribute(after, layout)
        if self.finite is not None and after is not before:
            after = self.b.select(self.finite, after, before)
        after.name_hint = after.name_hint or before.name_hint
        return after

    def _optimizer(
        self, i: int, g: SSAValue, clock: train.Clock, old: list[tuple[SSAValue, str]]
    ) -> train.Updated:
        w, key, parameter = self.block.args[i], old[0][1], train.Argument.of(self.attrs[i])

        def state(name: str, dims: Sequence[int]) -> SSAValue:
            old.append((self._state(w, key, name, dims), f"{key}.{name}"))
            return old[-1][0]

        numbers = self.request.optimizer.values
        decay = parameter.weight_decay(numbers["weight_decay"])
        rate = clock.rate(parameter.lr_scale)
        numbers = {n: x for n, x in numbers.items() if n != "lr"} | {"weight_decay": decay}
        target = train.Target(self.b, clock, w, g, numbers, rate, state)
        return train.OPTIMIZERS[self.request.optimizer.kind].update(target)

    # ---- gradients as the optimizer gets them ----

    def _prepared(self, gradients: dict[int, SSAValue]) -> dict[int, SSAValue]:
        """The gradients without the loss scale, clipped."""
        b, clip = self.b, self.request.clip
        scaling = self.request.loss_scale
        by_norm = clip is not None and clip.kind == "norm"
        elements = {plain(g).element_type for g in gradients.values()}
        common = f64 if f64 in elements else f32
        values = [b.convert(g, common) for g in gradients.values()] if scaling or by_norm else []
        # Both sums, then what is made of them: so that they are communicated together.
        nothing = b.total([_nothing(b, x) for x in values]) if scaling is not None else None
        squares = b.total([train.sum_of_squares(b, x) for x in values]) if by_norm else None
        factor = None
        if nothing is not None:
            self.finite = b.compare("eq", nothing, b.constant(0.0, common))
            self.finite.name_hint = "finite"
            factor = self._unscale()
        if squares is not None:
            assert clip is not None
            factor = self._clip_factor(b.convert(squares, f64), factor, clip.values["max"])
        out = gradients
        if factor is not None:
            factors = {e: b.convert(factor, e) for e in dict.fromkeys(map(_element, out.values()))}
            out = {i: b.mul(g, factors[_element(g)]) for i, g in out.items()}
        if clip is not None and clip.kind == "value":
            most = clip.values["max"]
            ends: Props = {"min": float_attr(-most), "max": float_attr(most)}
            out = {i: b.value(nn.ClampOp, g, props=ends) for i, g in out.items()}
        for i, g in gradients.items():
            out[i].name_hint = g.name_hint
        return out

    def _unscale(self) -> SSAValue:
        """One over the loss scale."""
        one = self.b.constant(1.0, f64)
        if self.scale is not None:
            return self.b.div(one, self.b.convert(self.scale, f64))
        assert self.request.loss_scale is not None
        return self.b.constant(1 / self.request.loss_scale.values["factor"], f64)

    def _clip_factor(self, squares: SSAValue, unscale: SSAValue | None, most: float) -> SSAValue:
        """What brings the gradients' global norm to `most` where it is greater, and undoes the
        loss scale."""
        b = self.b
        norm = b.value(nn.SqrtOp, squares)
        if unscale is not None:
            norm = b.mul(norm, unscale)
        norm.name_hint = "norm"
        ratio = b.div(b.constant(most, f64), b.add(norm, b.constant(CLIP_EPS, f64)))
        factor = b.value(nn.ClampOp, ratio, props={"max": float_attr(1.0)})
        return factor if unscale is None else b.mul(factor, unscale)

    def _next_scale(self, scale: SSAValue, finite: SSAValue) -> list[tuple[SSAValue, str]]:
        assert self.request.loss_scale is not None
        numbers = self.request.loss_scale.values
        good = self._number("good_steps", i64)
        props: dict[str, Attribute] = {n: float_attr(numbers[n]) for n in ("growth", "backoff")}
        props["interval"] = int_attr(numbers["interval"])
        new = self.b.op(train.NextLossScaleOp, scale, good, finite, props=props).results
        new[0].name_hint, new[1].name_hint = scale.name_hint, good.name_hint
        return [(new[0], f"{self.name}.loss_scale"), (new[1], f"{self.name}.good_steps")]


def _element(v: SSAValue) -> Attribute:
    return plain(v).element_type


def _nothing(b: Builder, x: SSAValue) -> SSAValue:
    """The sum of x - x: 0 where all elements are finite, else NaN; partial where x is split."""
    return b.reduce(b.sub(x, x), "sum", range(len(plain(x).get_shape())))
