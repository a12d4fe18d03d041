"""The kinds of statements of random modules: what torch's users write, and its corner cases.

Each kind is a function of the `Writer`, which adds a statement or raises `ImpossibleError`.
"""

import re
from collections.abc import Callable, Sequence
from math import prod

import torch

from support.modules.writer import MAX_ELEMENTS, ImpossibleError, Writer

Kind = Callable[[Writer], None]
KINDS: dict[Kind, int] = {}
"""The kinds, each with its weight."""


def kind(weight: int) -> Callable[[Kind], Kind]:
    def known(f: Kind) -> Kind:
        KINDS[f] = weight
        return f

    return known


# Expressions.

UNARY = (
    "{}.sin()",
    "{}.tanh()",
    "torch.sigmoid({})",
    "F.gelu({})",
    "F.silu({})",
    "F.softplus({})",
    "({} * 0.5)",
    "({} + 1)",
    "(1 - {})",
    "(-{})",
    "({} / 2)",
    "{}.clamp(-0.5, 0.5)",
    "F.relu({})",
    "({} * {} + 0.1).sqrt()",
    "{}.square()",
    "{}.exp().log1p()",
    "F.leaky_relu({}, 0.1)",
    "{}.erf()",
    "torch.where({} > 0.1, {}, 0.5 * {})",
    "{}.softmax(-1)",
    "{}.log_softmax(0)",
    "{}.cumsum(0)",
    "{}.tril()",
    "F.layer_norm({}, {}.shape[-1:])",
    "F.normalize({} + 3.0, dim=-1)",
    "{}.atan()",
    "({}.abs() + 0.5)",
    "{}.masked_fill({} > 0.5, 0.25)",
    "{}.nan_to_num(0.0)",
    "{}.reciprocal().tanh()",
)
REDUCED = (
    "{}.sum(0)",
    "{}.mean(-1)",
    "{}.mean()",
    "{}.sum(-1, keepdim=True)",
    "{}.var(0)",
    "{}.logsumexp(-1)",
    "{}.norm()",
    "{}.prod(0)",
    "{}.std()",
)
BINARY = (
    "{a} + {b}",
    "{a} * {b}",
    "{a} - {b}",
    "{a} / (1 + {b} * {b})",
    "torch.maximum({a}, {b})",
    "torch.lerp({a}, {b}, 0.3)",
    "torch.addcmul({a}, {b}, {b}, value=0.5)",
    "torch.atan2({a}, {b})",
    "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "torch.hypot({a}, {b})",
)
COPIES = (
    "{}.clone()",
    "{}.flip(0)",
    "{}.roll(1, 0)",
    "{}[[1, 0]]",
    "{}.repeat(2, *[1] * ({}.dim() - 1))",
    "torch.cat([{}, {}])",
    "torch.stack([{}, {}])",
    "{} + 0",
    "{}.index_select(0, torch.tensor([1, 0]))",
    "{}.to(torch.float64, copy=True)",
    "F.pad({}, (0, 0))",
    "F.dropout({}, 0.0, training=True)",
    "torch.tile({}, (1,))",
    "{}.nan_to_num()",
    "{}.contiguous()",
    "{}.mT.contiguous()",
    "{}.T.reshape(-1)",
    "{}.mT.flatten()",
    "{}.mT.reshape({}.shape)",
    "{}.mT.clone(memory_format=torch.contiguous_format)",
    "{}.unsqueeze(0).expand(2, *{}.shape).reshape(-1)",
    "{}[None].expand(2, *{}.shape).contiguous()",
    "{}.repeat_interleave(2, 0)",
    "torch.take_along_dim({}, torch.tensor([0]))",
)
ALIASES = (
    "{}.contiguous()",
    "{}.to(torch.float64)",
    "{}.double()",
    "{}.type_as({})",
    "{}.cpu()",
    "{}.reshape({}.shape)",
    "F.dropout({}, 0.4, training=False)",
    "nn.Identity()({})",
    "torch.atleast_1d({})",
    "torch.atleast_2d({})",
    "{}.positive()",
    "{}.sum_to_size({}.shape)",
    "{}.expand_as({})",
    "{}.view_as({})",
    "{}.squeeze()",
    "{}.detach()",
    "{}.ravel()",
    "torch.einsum('...ij->...ji', {})",
    "torch.broadcast_to({}, {}.shape)",
    "{}.expand(*[-1] * {}.dim())",
    "nn.Flatten()({})",
    "nn.Dropout(0.3).eval()({})",
    "{}.data",
    "{}.adjoint()",
    "{}.view({}.shape)",
    "{}.narrow(0, 0, {}.shape[0])",
    "{}[...]",
    "{}[:]",
    "torch.broadcast_tensors({}, torch.zeros(()))[0]",
    "{}.to({}.device)",
    "{}.unsqueeze(0).squeeze(0)",
    "{}.resolve_conj()",
    "torch.as_tensor({})",
    "torch.squeeze({})",
    "{}.reshape_as({})",
    "{}.flatten(0)",
)


def at(w: Writer, n: int) -> int:
    """An index of a dimension of n elements, of either sign."""
    return w.draw.randrange(-n, n)


def view_of(w: Writer, e: str, shape: Sequence[int]) -> str:
    """A view of an expression, by a random one of torch's ways."""
    r, d = w.draw, len(shape)
    if not d:
        return r.choice([f"{e}[None]", f"{e}.view(1)", f"{e}.unsqueeze(0)", f"{e}.expand(3)"])
    i = r.randrange(d)
    n = shape[i]
    cut = r.randrange(n)
    end = r.randint(cut + 1, n)
    index = [":"] * d
    index[i] = r.choice([str(at(w, n)), f"{cut}:{end}", "::2", "1:", ":-1", f"-{n - cut}:", "1::2"])
    many = r.choice(
        [
            "chunk(2, {})",
            "split(2, {})",
            "tensor_split(2, {})",
            "unbind({})",
            f"split_with_sizes([1, {n - 1}], {{}})",
        ]
    ).format(i)
    found = [
        f"{e}[{', '.join(index)}]",
        f"{e}[{', '.join(index)}]",
        f"{e}[{', '.join(index)}]",
        f"{e}[{at(w, shape[0])}]",
        f"{e}[..., {at(w, shape[-1])}]",
        f"{e}.select({i}, {at(w, n)})",
        f"{e}.narrow({i}, {cut}, {end - cut})",
        f"{e}.unsqueeze({r.randint(-1, d)})",
        f"{e}[None]",
        f"{e}[..., None]",
        f"{e}.flatten()",
        f"{e}.view(-1)",
        f"{e}.reshape(-1)",
        f"{e}.{many}[{r.choice([0, -1])}]",
        f"{e}.unfold({i}, {r.randint(1, n)}, {r.randint(1, 3)})",
    ]
    if d > 1:
        j = r.randrange(d)
        order = r.sample(range(d), d)
        found += [
            f"{e}.transpose({i}, {j})",
            f"{e}.permute({', '.join(map(str, order))})",
            f"{e}.swapaxes({i - d}, {j})",
            f"{e}.movedim({i}, {j})",
            f"{e}.mT",
            f"{e}.mT",
            f"{e}.mT",
            f"{e}.diagonal()",
            f"{e}.diagonal({r.choice([-1, 1])}, {order[0]}, {order[1]})",
            f"{e}.flatten({d - 2}, {d - 1})",
            f"torch.einsum('...ii->...i', {e})",
        ]
    if d == 2:
        found += [f"{e}.T", f"{e}.t()", f"{e}.T", f"{e}.expand(2, -1, -1)"]
    for k in (2, 3):
        if n % k == 0 and n > k:
            found += [f"{e}.unflatten({i}, ({k}, {n // k}))", f"{e}.unflatten({i}, (-1, {k}))"]
    if (size := prod(shape)) % 2 == 0:
        found += [
            f"{e}.{way}({r.choice([2, size // 2])}, -1)" for way in ("view", "reshape", "reshape")
        ]
        found += [
            f"{e}.as_strided((2, {size // 2}), ({size // 2}, 1))"
            if r.random() < 0.5
            else f"{e}.as_strided((2,), (2,), 1)"
        ]
    return r.choice(found)


def op_of(template: str) -> str:
    """The name of the function of a template, as a feature."""
    found = re.findall(r"(?:torch|F|nn|Tensor|\{p?\}|\))\.(\w+)\(", template)
    return found[-1] if found else template


def filled(w: Writer, template: str, e: str) -> str:
    return template.replace("{}", e)


def place(w: Writer, atoms: Sequence[str] | None = None, views: int = 2) -> str:
    """An expression of memory of a tensor: an atom, a view, an alias, or a view of these."""
    e = w.recent(w.floats() if atoms is None else atoms)
    for _ in range(w.draw.choice(range(views + 1))):
        shape = shape_of(w, e)
        use_alias = w.draw.random() < 0.2
        made = filled(w, w.draw.choice(ALIASES), e) if use_alias else view_of(w, e, shape)
        if is_small(w, made):
            e = made
    return e


def is_small(w: Writer, e: str) -> bool:
    """Whether torch takes an expression, and it is a small tensor."""
    try:
        x = w.value(e)
    except Exception:
        return False
    return isinstance(x, torch.Tensor) and 0 < x.numel() <= 2 * MAX_ELEMENTS and x.dim() < 5


def shape_of(w: Writer, e: str) -> tuple[int, ...]:
    """The shape of a small tensor. Raises ImpossibleError if it is none."""
    if not is_small(w, e):
        raise ImpossibleError
    return tuple(w.value(e).shape)


def number(w: Writer) -> str:
    return str(round(w.draw.uniform(0.2, 0.9) * w.draw.choice([1, -1]), 2))


def operand(w: Writer, shape: Sequence[int], target: str | None = None) -> str:
    """An expression whose shape broadcasts to `shape`, and that shares no memory with `target`."""
    r = w.draw
    if r.random() < 0.15:
        return number(w)
    e = place(w, views=1)
    if r.random() < 0.3:
        e = filled(w, r.choice(UNARY), e)
    found = shape_of(w, e)
    try:
        fits = torch.broadcast_shapes(found, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        size = prod(shape)
        if prod(found) >= size and r.random() < 0.5:
            e = f"{e}.reshape(-1)[:{size}].reshape({tuple(shape)})"
        else:
            e = r.choice([f"{e}.mean()", f"{e}.sum()", f"{e}.flatten()[{at(w, prod(found))}]"])
    if target is not None and shares_memory(w, e, target):
        e = f"{e}.clone()"
    return e


def shares_memory(w: Writer, e: str, target: str) -> bool:
    x, y = w.value(e), w.value(target)
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def repeats(x: torch.Tensor) -> bool:
    """Whether two elements of a tensor have one place in memory."""
    places = torch.zeros((), dtype=torch.int64)
    for n, stride in zip(x.shape, x.stride(), strict=True):
        places = places[..., None] + torch.arange(n) * stride
    return places.unique().numel() < x.numel()


# What is computed.


@kind(5)
def computed(w: Writer) -> None:
    e, v = place(w, views=1), w.fresh()
    template = w.draw.choice(UNARY if w.draw.random() < 0.75 else REDUCED)
    w.add(f"{v} = {filled(w, template, e)}", ["computed", op_of(template)], made=[v])


@kind(4)
def combined(w: Writer) -> None:
    a, v = place(w, views=1), w.fresh()
    b, template = operand(w, shape_of(w, a)), w.draw.choice(BINARY)
    w.add(f"{v} = {template.format(a=a, b=b)}", ["computed"], made=[v])


@kind(4)
def viewed(w: Writer) -> None:
    v = w.fresh()
    w.add(f"{v} = {place(w)}", ["view"], made=[v])


@kind(3)
def copied(w: Writer) -> None:
    v = w.fresh()
    template = w.draw.choice(COPIES)
    e = filled(w, template, place(w, views=1))
    w.add(f"{v} = {e}", ["copy", op_of(template)], made=[v])


@kind(1)
def renamed(w: Writer) -> None:
    v = w.fresh()
    w.add(f"{v} = {w.recent(w.floats())}", ["second name"], made=[v])


@kind(2)
def multiplied(w: Writer) -> None:
    """A product with a new weight."""
    e = place(w, views=1)
    shape = shape_of(w, e)
    if not shape:
        raise ImpossibleError
    p, v, m = w.fresh("p"), w.fresh(), w.draw.choice([2, 3, 6])
    form, sizes = w.draw.choice(
        [
            ("{e} @ self.{p}", (shape[-1], m)),
            ("F.linear({e}, self.{p})", (m, shape[-1])),
            ("{e} @ self.{p}.T", (m, shape[-1])),
            ("torch.matmul({e}, self.{p}.mT)", (m, shape[-1])),
            ("torch.einsum('...i,ij->...j', {e}, self.{p})", (shape[-1], m)),
        ]
    )
    init = f"self.{p} = nn.Parameter(torch.randn({sizes[0]}, {sizes[1]}) / {sizes[1]})"
    text = f"{v} = {form.format(e=e, p=p)}"
    w.add(text, ["weight"], [init], [v, f"self.{p}"])


# Parameters and buffers.


@kind(2)
def new_parameter(w: Writer) -> None:
    shape, p = shape_of(w, w.recent(w.floats())), w.fresh("p")
    trained = w.draw.choice(["", "", ", requires_grad=False"])
    init = f"self.{p} = nn.Parameter(torch.randn({tuple(shape)}){trained})"
    w.add("", ["frozen parameter" if trained else "parameter"], [init], [f"self.{p}"])


@kind(3)
def new_buffer(w: Writer) -> None:
    shape, b = shape_of(w, w.recent(w.floats())), w.fresh("b")
    shape = w.draw.choice([shape, shape, ()])
    persistent = w.draw.choice(["", ", persistent=False"])
    value = w.draw.choice([f"torch.randn({tuple(shape)})", f"torch.zeros({tuple(shape)})"])
    init = f"self.register_buffer('{b}', {value}{persistent})"
    w.add("", ["buffer", *(["non-persistent buffer"] if persistent else [])], [init], [f"self.{b}"])


@kind(1)
def tied(w: Writer) -> None:
    """A second name of a parameter or a buffer, or a view of one as a buffer."""
    own = [a for a in w.floats() if a.startswith("self.")]
    a, p = w.recent(own), w.fresh("t")
    is_parameter = isinstance(w.value(a), torch.nn.Parameter)
    forms = [(f"self.{p} = {a}", "tied parameter" if is_parameter else "tied buffer")]
    view = view_of(w, f"{a}.detach()", shape_of(w, a))
    forms += [(f"self.register_buffer('{p}', {view})", "buffer in memory of another")]
    init, feature = w.draw.choice(forms)
    try:
        kept = w.value(init.split(", ", 1)[1][:-1]) if "register" in init else w.value(a)
    except Exception:
        raise ImpossibleError from None
    if repeats(kept):
        raise ImpossibleError
    w.add("", [feature], [init], [f"self.{p}"])


@kind(2)
def counted(w: Writer) -> None:
    """A buffer of an integer or a flag, and what is done with it."""
    b, v = w.fresh("b"), w.fresh()
    x = w.recent(w.floats())
    forms = [
        ("torch.zeros((), dtype=torch.int64)", f"self.{b} += 1\n{v} = {x} * self.{b}", "in place"),
        (
            "torch.zeros((), dtype=torch.int64)",
            f"self.{b}.add_(1)\n{v} = {x} / self.{b}",
            "in place",
        ),
        (
            "torch.zeros((), dtype=torch.int64)",
            f"self.{b} = self.{b} + 1\n{v} = {x} * self.{b}",
            "anew",
        ),
        ("torch.tensor(0)", f"self.{b} = self.{b} + ({x} > 0).sum()\n{v} = {x} + self.{b}", "anew"),
        (
            "torch.tensor(False)",
            f"self.{b} = ~self.{b}\n{v} = torch.where(self.{b}, {x}, -{x})",
            "anew",
        ),
        (
            "torch.tensor(False)",
            f"{v} = torch.where(self.{b}, {x}, {x}.sin())\nself.{b}.fill_(True)",
            "in place",
        ),
        (
            f"torch.zeros({shape_of(w, x)}, dtype=torch.bool)",
            f"self.{b}.logical_or_({x} > 0.5)\n{v} = {x}.masked_fill(self.{b}, 0.5)",
            "in place",
        ),
        (
            f"torch.zeros({shape_of(w, x)}, dtype=torch.int64)",
            f"self.{b}[1:] += 1\n{v} = {x} * self.{b}",
            "in place",
        ),
        (
            f"torch.zeros({shape_of(w, x)}, dtype=torch.int64)",
            f"self.{b}.copy_({x} > 0)\n{v} = {x} * self.{b}.double()",
            "in place",
        ),
        ("torch.arange(3)", f"self.{b} = self.{b}.roll(1)\n{v} = {x} * self.{b}[0]", "anew"),
        (
            "torch.arange(4)",
            f"self.{b}[1:].add_(self.{b}[:-1].clone())\n{v} = {x} + self.{b}.sum() / 8",
            "in place",
        ),
    ]
    value, text, how = w.draw.choice(forms)
    init = f"self.register_buffer('{b}', {value})"
    w.add(text, ["integer buffer", f"buffer written {how}"], [init], [v, f"self.{b}"])


@kind(4)
def buffer_anew(w: Writer) -> None:
    """A buffer of floats that is assigned anew."""
    own = [a for a in w.floats() if a in buffers(w)]
    a, r = w.recent(own), w.draw
    name = a.rpartition(".")[2]
    owner = a.rpartition(".")[0]
    shape = shape_of(w, a)
    e = operand(w, shape)
    if not isinstance(w.value(e), torch.Tensor):
        e = f"({a} * {e})"
    new = r.choice(
        [
            f"{a} + {e}.detach()",
            f"0.9 * {a} + 0.1 * {e}.detach()",
            f"{a}.lerp({e}.detach(), 0.1)",
            f"{a} * 0.5",
            f"({a} + {e}).detach()",
            f"torch.zeros_like({a}) + {e}.detach()",
            f"{a}.clone()",
            f"{e}.detach().clone().expand({shape}).contiguous()",
            f"{a}.roll(1, 0)",
            f"{a}.mT.contiguous().view({shape})",
            f"torch.cat([{a}[1:], {a}[:1] * 0.5])",
            f"{e}.data + {a}",
        ]
    )
    texts = [f"{a} = {new}"] * 4 + [f"setattr({owner}, '{name}', {new})"]
    text = r.choice(texts)
    how = r.choice(["plain"] * 3 + ["no_grad", "training", "both"])
    if how in ("no_grad", "both"):
        text = f"with torch.no_grad():\n    {text}"
    if how in ("training", "both"):
        text = "if self.training:\n" + "\n".join("    " + line for line in text.split("\n"))
    w.add(text, ["buffer written anew", *([] if how == "plain" else [f"written anew, {how}"])])


@kind(1)
def buffers_exchanged(w: Writer) -> None:
    own = [a for a in w.floats() if a in buffers(w)]
    a = w.recent(own)
    b = w.recent([b for b in own if b != a and shape_of(w, b) == shape_of(w, a)])
    t = w.fresh()
    texts = [
        f"{a}, {b} = {b}, {a}",
        f"{a}, {b} = {b}.clone(), {a} + 0.1",
        f"{t} = {a}.clone()\n{a}.copy_({b})\n{b}.copy_({t})",
    ]
    text = w.draw.choice(texts)
    w.add(
        text, ["buffers exchanged", "buffer written " + ("in place" if "copy_" in text else "anew")]
    )


def buffers(w: Writer) -> list[str]:
    found = w.names["self"].named_buffers(remove_duplicate=False)
    return [f"self.{name}" for name, _ in found]


# Writes.

IN_PLACE = (
    "{p}.mul_({c})",
    "{p}.mul_({v})",
    "{p}.add_({v})",
    "{p}.add_({v}, alpha=0.5)",
    "{p}.sub_({v})",
    "{p}.div_(1.5)",
    "{p}.copy_({v})",
    "{p}.copy_({v})",
    "{p}.zero_()",
    "{p}.fill_({c})",
    "{p}.lerp_({v}, 0.3)",
    "{p}.lerp_({v}, 0.3)",
    "{p}.addcmul_({v}, {u}, value=0.5)",
    "{p}.addcdiv_({v}, {u}.exp())",
    "{p}.clamp_(-0.5, 0.5)",
    "{p}.clamp_(min=-0.2)",
    "{p}.clamp_max_(0.3)",
    "{p}.tanh_()",
    "{p}.sigmoid_()",
    "{p}.sin_()",
    "{p}.relu_()",
    "{p}.neg_()",
    "{p}.square_()",
    "{p}.abs_()",
    "{p}.masked_fill_({p} > 0.1, {c})",
    "{p}.masked_fill_({w} > 0, {c})",
    "{p}[...] = {v}",
    "{p}[:] = {v}",
    "{p} += {v}",
    "{p} *= {v}",
    "{p} -= {v}",
    "{p} /= 1.25",
    "{p}[0] = {v0}",
    "{p}[..., -1] = {c}",
    "{p}[0] += {v0}",
    "{p}[..., 0] *= {c}",
    "{p}[1:] = {c}",
    "{p}[::2] = {c}",
    "{p}.T[0] = {c}",
    "{p}[{p} > 0.2] = {c}",
    "{p}[[1, 0]] = {v}",
    "{p}[[0]] += {c}",
    "{p}[torch.tensor([1])] = {c}",
    "{p}.index_add_(0, torch.tensor([0, 0]), {p}[:2].detach() * 0.5)",
    "{p}.index_fill_(-1, torch.tensor([1]), {c})",
    "{p}.index_copy_(0, torch.tensor([1, 0]), {p}[:2].clone())",
    "{p}.index_put_((torch.tensor([1, 1]),), {v}, accumulate=True)",
    "{p}.scatter_(0, torch.zeros({s}, dtype=torch.int64)[:1], {c})",
    "{p}.scatter_add_(0, torch.zeros({s}, dtype=torch.int64), {p}.clone())",
    "{p}.fill_diagonal_({c})",
    "{p}.tril_()",
    "{p}.triu_()",
    "{p}.cumsum_(0)",
    "F.relu({p}, inplace=True)",
    "F.dropout({p}, 0.0, inplace=True)",
    "F.silu({p}, inplace=True)",
    "F.leaky_relu({p}, 0.1, inplace=True)",
    "F.elu({p}, inplace=True)",
    "F.hardtanh({p}, -0.5, 0.5, inplace=True)",
    "F.threshold({p}, 0.1, 0.2, inplace=True)",
    "nn.ReLU(inplace=True)({p})",
    "nn.SiLU(True)({p})",
    "nn.Dropout(0.0, inplace=True)({p})",
    "torch._foreach_mul_([{p}], 0.9)",
    "torch._foreach_add_([{p}], [{v}])",
    "{p}.copy_({p}.flip(0))",
    "torch.relu_({p})",
    "{p}.exp_()",
    "{p}.masked_scatter_({p} > 0.1, {p}.clone())",
    "{p}.where({p} > 0, 0.1 * {p}).mul_({c})",
    "{p}.mul_({p})",
    "{p}.add_(1).mul_(0.5)",
    "{p}.addmm_({p}.clone(), torch.eye({p}.shape[-1]))",
    "{p}.mul_(0.5).T.add_({c})",
    "torch.Tensor.mul_({p}, {c})",
    "{p}.view(-1)[0] = {c}",
    "{p}.view(-1)[1:3] += {c}",
    "{p}.data.mul_({c})",
    "{p}.detach().add_({v})",
    "{p}.flatten()[0] = {c}",
    "{p}.reshape(-1).mul_({c})",
    "{p}.contiguous().mul_({c})",
    "{p}.mT.reshape(-1).mul_({c})",
)
OUT = (
    "torch.mul({v}, {u}, out={p})",
    "torch.add({v}, {u}, out={p})",
    "torch.sin({p}, out={p})",
    "torch.sub({p}, {v}, out={p})",
    "torch.div({v}, 2.0, out={p})",
    "torch.cumsum({p}, 0, out={p})",
    "torch.clamp({v}, -0.5, 0.5, out={p})",
    "torch.exp({v}, out={p})",
)
UNDER = {
    "with torch.no_grad():\n    {}": "no_grad",
    "with torch.set_grad_enabled(False):\n    {}": "no_grad",
    "with torch.no_grad():\n    with torch.enable_grad():\n        {}": "enable_grad",
    "if self.training:\n    {}": "if self.training",
    "for _ in range(2):\n    {}": "loop",
}


@kind(14)
def written(w: Writer) -> None:
    """A write to an activation, a parameter or a buffer, or to a view of one."""
    r = w.draw
    atoms = w.floats()
    own = [a for a in atoms if a.startswith("self.")]
    p = place(w, own if own and r.random() < 0.45 else atoms, r.choice([0, 1, 1, 2]))
    write(w, p, r.choice(IN_PLACE), [])


@kind(2)
def written_out(w: Writer) -> None:
    """A write by out=."""
    p = place(w, None, w.draw.choice([0, 0, 1]))
    write(w, p, w.draw.choice(OUT), ["out="])


@kind(1)
def written_new_out(w: Writer) -> None:
    v, e = w.fresh(), place(w, views=1)
    u, shape = operand(w, shape_of(w, e)), shape_of(w, e)
    if not isinstance(w.value(u), torch.Tensor):
        raise ImpossibleError
    made = f"{v} = torch.empty({shape})"
    text = w.draw.choice(["torch.mul({e}, {u}, out={v})", "torch.add({e}, {u}, out={v})"])
    text = f"{made}\nwith torch.no_grad():\n    {text.format(e=e, u=u, v=v)}"
    w.add(text, ["out="], made=[v])


def write(w: Writer, p: str, template: str, names: Sequence[str]) -> None:
    """Add a write to a place; where torch refuses it, under no_grad."""
    r, shape = w.draw, shape_of(w, p)
    if repeats(w.value(p)):
        raise ImpossibleError
    v, u = operand(w, shape, p), operand(w, shape, p)
    if "{u}" in template or "torch." in template or "masked" in template:
        v, u = (e if isinstance(w.value(e), torch.Tensor) else f"torch.tensor({e})" for e in (v, u))
    v0 = operand(w, shape[1:], p) if "{v0}" in template else ""
    text = template.format(p=p, v=v, u=u, v0=v0, w=u, c=number(w), s=shape)
    x = w.value(p)
    kept = {f"self.{n}" for n, _ in w.names["self"].named_parameters(remove_duplicate=False)}
    pointer = x.untyped_storage().data_ptr()
    into = "activation"
    for a in w.atoms:
        if w.value(a).untyped_storage().data_ptr() == pointer and a.startswith("self."):
            into = "parameter" if a in kept else "buffer"
    names = [*names, f"{into} written in place", op_of(template)]
    if "data" in text or "detach" in text:
        names.append("detached")
    under = r.choice([*UNDER, *["{}"] * 8])
    if under in UNDER:
        names = [*names, UNDER[under]]
    if w.add(under.format(text), names):
        return
    w.add(f"with torch.no_grad():\n    {text}", [*names, "no_grad"])


@kind(1)
def written_by_rows(w: Writer) -> None:
    """A loop over rows, or over names of tensors."""
    e = place(w, views=1)
    shape = shape_of(w, e)
    if not shape or repeats(w.value(e)):
        raise ImpossibleError
    c = number(w)
    f = w.recent(w.floats())
    text = w.draw.choice(
        [
            f"for row in {e}:\n    row.mul_({c})",
            f"for row in {e}.unbind(0):\n    row.add_({c})",
            f"for i in range({shape[0]}):\n    {e}[i] = {e}[i].sin() * i",
            f"for y in ({e}, {f}):\n    y.mul_({c})",
            f"rows = [row for row in {e}]\nrows[0].fill_({c})\nrows[-1].add_(rows[0].clone())",
            f"a, b = {e}[0], {e}[-1]\na.copy_(b.clone() * {c})",
            f"{e}[0], {e}[-1] = {e}[-1].clone(), {e}[0].clone()",
        ]
    )
    if not w.add(text, ["loop", "written by rows"]):
        indented = text.replace("\n", "\n    ")
        w.add(f"with torch.no_grad():\n    {indented}", ["loop", "written by rows", "no_grad"])


@kind(1)
def changed_form(w: Writer) -> None:
    """A tensor whose shape is changed in place."""
    e = w.recent([a for a in w.floats() if not a.startswith("self.") and not a.startswith("x")])
    way = w.draw.choice(
        ["t_()", "unsqueeze_(0)", "squeeze_()", "transpose_(0, 1)", "swapaxes_(0, -1)"]
    )
    w.add(f"{e}.{way}", ["shape changed in place"])


@kind(1)
def straight_through(w: Writer) -> None:
    e, v = place(w, views=1), w.fresh()
    text = w.draw.choice(
        [
            f"{v} = {e} + ({e}.round() - {e}).detach()",
            f"{v} = {e} + ({e}.sign() - {e}).data",
            f"{v} = {e}.clone()\n{v}.data.round_()",
            f"{v} = {e} * 1\nwith torch.no_grad():\n    {v}.round_()",
            f"with torch.no_grad():\n    {v} = {e} * 2\n{v} = {v} * {e}",
            f"{v} = ({e} * 2).requires_grad_()",
            f"{v} = {e}.detach() * {e}",
        ]
    )
    w.add(text, ["straight-through"], made=[v])


# Modules of torch.

BEFORE = "with torch.no_grad():\n    self.{l}.{p}.{write}"


@kind(4)
def layer(w: Writer) -> None:
    """A module of torch, perhaps parametrized, with hooks, or with a weight that is written."""
    r, e = w.draw, place(w, views=1)
    shape = shape_of(w, e)
    if not shape:
        raise ImpossibleError
    n, v, l = shape[-1], w.fresh(), w.fresh("l")
    c = shape[1] if len(shape) > 1 else 1
    m = r.choice([2, 3, 6])
    parametrized, second = "nn.utils.parametrizations", f"\nself.{l}k = nn.Linear({n}, {n})"
    square, linear = f"nn.Linear({n}, {n})", f"nn.Linear({n}, {m})"
    registered = f"\nnn.utils.parametrize.register_parametrization(self.{l}, 'weight', {{}})"
    hook = f"\nself.{l}.register_forward_{{}}hook(lambda module, {{}})"
    forms = [
        (f"nn.Linear({n}, {m})", "linear"),
        (f"nn.Linear({n}, {m}, bias=False)", "linear"),
        (f"nn.Linear({n}, {n})", "linear"),
        (f"nn.LayerNorm({n})", "norm"),
        (f"nn.BatchNorm1d({c})", "batch norm"),
        (f"nn.BatchNorm1d({c}, momentum=None)", "batch norm"),
        (f"nn.BatchNorm1d({c}, affine=False)", "batch norm"),
        (f"nn.BatchNorm1d({c}).eval()", "batch norm"),
        (f"nn.BatchNorm1d({c}, track_running_stats=False)", "batch norm"),
        (f"nn.BatchNorm1d({c}, momentum=0.3)", "batch norm"),
        (f"nn.InstanceNorm1d({c}, track_running_stats=True)", "batch norm"),
        ("nn.ReLU(inplace=True)", "inplace=True"),
        ("nn.SiLU(inplace=True)", "inplace=True"),
        ("nn.Dropout(0.0, inplace=True)", "inplace=True"),
        ("nn.Hardswish(inplace=True)", "inplace=True"),
        ("nn.ELU(inplace=True)", "inplace=True"),
        ("nn.Dropout(0.5).eval()", "dropout"),
        ("nn.Dropout(0.0)", "dropout"),
        (
            f"nn.Sequential(nn.Linear({n}, {n}), nn.ReLU(inplace=True), nn.Linear({n}, {m}))",
            "linear",
        ),
        (f"nn.Sequential(nn.LayerNorm({n}), nn.Dropout(0.0), nn.Tanh())", "norm"),
        ("nn.Flatten(0)", "view"),
        ("nn.PReLU(init=0.3)", "prelu"),
        (f"{parametrized}.weight_norm(nn.Linear({n}, {m}))", "weight_norm"),
        (f"{parametrized}.spectral_norm(nn.Linear({n}, {m}))", "spectral_norm"),
        (f"nn.utils.weight_norm(nn.Linear({n}, {m}))", "old weight_norm"),
        (f"nn.utils.spectral_norm(nn.Linear({n}, {m}))", "old spectral_norm"),
        (square + registered.format("Symmetric()"), "parametrization"),
        (linear + registered.format(f"Scaled({m})"), "parametrization"),
        (linear + registered.format("Counted()"), "parametrization"),
        (linear + hook.format("", "args, y: y.mul_(0.5)"), "hook"),
        (linear + hook.format("pre_", "args: (args[0] * 2,)"), "hook"),
        (
            linear + hook.format("pre_", "args: (module.weight.data.clamp_(-0.3, 0.3), args)[1]"),
            "hook",
        ),
        (f"nn.Linear({n}, {m})\nself.{l}.weight.requires_grad_(False)", "frozen parameter"),
        (f"nn.Linear({n}, {n}).requires_grad_(False)", "frozen parameter"),
        (square + f"{second}\nself.{l}k.weight = self.{l}.weight", "tied parameter"),
        (
            square + f"{second}\nself.{l}k.bias.data = self.{l}.bias.data",
            "parameters in one memory",
        ),
        (f"nn.ModuleList([nn.Linear({n}, {n}) for _ in range(2)])", "module list"),
        (f"nn.ParameterList([torch.randn({n}) for _ in range(2)])", "parameter list"),
    ]
    made, feature = r.choice(forms)
    text = f"{v} = self.{l}({e})"
    if feature == "module list":
        text = f"{v} = {e}\nfor part in self.{l}:\n    {v} = part({v}).tanh()"
    elif feature == "parameter list":
        text = f"{v} = {e} * self.{l}[0] + self.{l}[1]"
    elif second in made:
        text = f"{v} = self.{l}k(self.{l}({e}).tanh())"
    atoms = [v]
    if feature in ("linear", "norm", "frozen parameter") and "Sequential" not in made:
        atoms.append(f"self.{l}.weight")
    if feature == "batch norm" and "track" not in made:
        atoms.append(f"self.{l}.running_mean")
    w.add(text, [feature], [f"self.{l} = {made}"], atoms)


@kind(1)
def embedded(w: Writer) -> None:
    """A table, whose rows may be cut to a norm in place."""
    l, v, r = w.fresh("l"), w.fresh(), w.draw
    e = w.recent(w.floats())
    options = r.choice(
        [
            "",
            ", max_norm=0.8",
            ", max_norm=0.8",
            ", padding_idx=1",
            ", scale_grad_by_freq=True",
            ", max_norm=1.0, norm_type=1.0",
        ]
    )
    init = [f"self.{l} = nn.Embedding(5, 3{options})"]
    ids = (
        f"({e}.detach().flatten()[:4] > 0).long()"
        if r.random() < 0.5
        else "torch.tensor([3, 1, 1])"
    )
    text = f"{v} = self.{l}({ids})"
    feature = "max_norm" if "max_norm" in options else "embedding"
    w.add(text, [feature], init, [v, f"self.{l}.weight"])


@kind(1)
def teacher(w: Writer) -> None:
    """A layer and its exponential moving average."""
    e, r = place(w, views=1), w.draw
    shape = shape_of(w, e)
    if not shape:
        raise ImpossibleError
    l, v, n = w.fresh("l"), w.fresh(), shape[-1]
    init = [
        f"self.{l} = nn.Linear({n}, {n})",
        f"self.{l}t = nn.Linear({n}, {n}).requires_grad_(False)",
    ]
    pairs = f"zip(self.{l}.parameters(), self.{l}t.parameters())"
    update = r.choice(
        [
            f"for p, q in {pairs}:\n        q.lerp_(p, 0.1)",
            f"for p, q in {pairs}:\n        q.mul_(0.9).add_(p, alpha=0.1)",
            f"for p, q in {pairs}:\n        q.data.mul_(0.9).add_(p.data * 0.1)",
            f"for p, q in {pairs}:\n        q.copy_(0.9 * q + 0.1 * p)",
            f"torch._foreach_lerp_(list(self.{l}t.parameters()), list(self.{l}.parameters()), 0.1)",
        ]
    )
    update = f"with torch.no_grad():\n    {update}"
    use = r.choice(
        [f"{v} = self.{l}({e}) - self.{l}t({e}).detach()", f"{v} = self.{l}({e}) * self.{l}t({e})"]
    )
    texts = [update, use]
    if r.random() < 0.5:
        texts.reverse()
    w.add("\n".join(texts), ["teacher"], init, [v, f"self.{l}.weight"])


@kind(1)
def data_assigned(w: Writer) -> None:
    p = w.recent(
        [f"self.{n}" for n, _ in w.names["self"].named_parameters() if f"self.{n}" in w.atoms]
    )
    text = w.draw.choice(
        [
            f"{p}.data = {p}.data * 0.9",
            f"{p}.data = {p}.data.clamp(-0.5, 0.5)",
            f"{p}.data /= 1.1",
            f"{p}.data *= 0.9",
        ]
    )
    w.add(text, ["parameter's data assigned"])


@kind(1)
def plain_attribute(w: Writer) -> None:
    """A tensor that is an attribute, and no buffer."""
    e, a, v = w.recent(w.floats()), w.fresh("c"), w.fresh()
    shape = shape_of(w, e)
    init = [f"self.{a} = torch.randn({shape})"]
    w.add(f"{v} = {e} + self.{a}", ["tensor attribute"], init, [v])


STARTS: tuple[Kind, ...] = (multiplied, multiplied, layer)
"""The kinds of a first statement, with something that is trained."""
