"""Corner cases of torch's semantics, each in a few lines, with torch: losses, gradients, parameters
and buffers after three steps, and outputs."""

import pytest
from support.extent import sampled
from support.modules.judge import GOOD, judged, outcome
from support.modules.reducer import reproducer
from support.modules.text import ClassText, ModuleText, Statement

Part = tuple[list[str], list[str], tuple[str, ...]]
"""A class within: the statements of __init__ and forward, and what forward returns."""


def texts(lines: list[str]) -> tuple[Statement, ...]:
    return tuple(Statement(line) for line in lines)


def M(
    name: str, init: list[str], forward: list[str], returns: str = "v", trained: bool = True,
    inner: Part | None = None,
) -> tuple[str, ModuleText]:  # fmt: skip
    classes = []
    if inner:
        classes.append(ClassText("Part", ("x0",), texts(inner[0]), texts(inner[1]), inner[2]))
    own = ClassText("Model", ("x0",), texts(init), texts(forward), tuple(returns.split()))
    return name, ModuleText((*classes, own), ((4, 6),), trained)


L = "self.l = nn.Linear(6, 6)"
W = "self.w = nn.Parameter(torch.randn(6, 6))"
B = "self.register_buffer('b', torch.zeros(6))"
NG = "with torch.no_grad():\n    "
CASES = dict(
    [
        M(
            "straight-through: no_grad clamp of an activation keeps its gradient",
            [L],
            ["v = self.l(x0)", NG + "v.clamp_(-0.3, 0.3)", "v = v + 0"],
        ),
        M(
            "no_grad write to a view of an activation",
            [L],
            ["v = self.l(x0)", NG + "v[0] = 0.5", "v = v + 0"],
        ),
        M(
            "running statistics of an instance norm whose result is not used",
            [L, "self.n = nn.InstanceNorm1d(4, track_running_stats=True)"],
            ["v = self.l(x0)", "self.n(v.reshape(2, 2, 6).repeat(1, 2, 1))"],
        ),
        M(
            "running statistics have no gradient",
            [L, "self.n = nn.BatchNorm1d(6)"],
            ["v = self.n(self.l(x0)) + self.n.running_mean"],
        ),
        M(
            "as_strided of a transpose is one of the memory",
            [L],
            ["v = self.l(x0).reshape(4, 6).T.as_strided((3, 4), (8, 1), 2)"],
        ),
        M(
            "as_strided of a copy is one of its memory",
            [W],
            ["v = self.w.T.reshape(4, 9)", "v = x0 @ v.as_strided((6, 6), (1, 6))"],
        ),
        M(
            "as_strided of a detached view has no gradient",
            [W],
            ["v = self.w.T.detach().T.as_strided((6, 6), (1, 6))", "v = x0 @ v + self.w.sum()"],
        ),
        M(
            "as_strided of a buffer that is assigned a detached sum",
            [
                "self.p = nn.Parameter(torch.randn(2, 2))",
                "self.register_buffer('b', torch.randn(2, 2))",
            ],
            [
                "self.b = (self.b + self.p).detach()",
                "v = self.b.as_strided((2,), (2,), 1) + self.p[0]",
            ],
        ),
        M(
            "as_strided of the result of a function that returns its operand",
            [W],
            [
                "v = torch.broadcast_tensors(self.w, x0.sum())[0]",
                "v = v * self.w.as_strided((6, 6), (6, 1)).sin()",
            ],
        ),
        M(
            "writes through as_strided of a transpose",
            [W],
            ["v = self.w * 1", "v.T.as_strided((3,), (7,)).mul_(0.5)", "v = x0 @ v"],
        ),
        M(
            "a write to data of broadcast_tensors",
            [W],
            [
                "v = torch.broadcast_tensors(self.w, torch.zeros(6))[0]",
                "v.data.mul_(0.5)",
                "v = x0 @ self.w",
            ],
        ),
        M(
            "a transpose under no_grad has no gradient",
            [W],
            [NG + "w = self.w.T", "v = x0 @ self.w + x0 @ w"],
        ),
        M(
            "a scalar copied into a matrix",
            [W, "self.register_buffer('c', torch.zeros(6, 6))"],
            ["self.c.copy_(self.w.detach().sum())", "v = x0 @ self.w"],
        ),
        M("data write of an activation", [L], ["v = self.l(x0)", "v.data.mul_(0.5)", "v = v + 0"]),
        M(
            "gradients written to a detached alias of a tensor without one",
            [L, "self.k = nn.Linear(6, 6).requires_grad_(False)"],
            ["v = self.l(x0)", "y = self.k(x0)", "y.detach().add_(v)"],
            "v y",
        ),
        M("detach write", [L], ["v = self.l(x0)", "v.detach().mul_(0.5)", "v = v + 0"]),
        M(
            "no_grad clamp of a weight, gradient as of the identity",
            [W],
            [NG + "self.w.clamp_(-0.3, 0.3)", "v = x0 @ self.w"],
        ),
        M("weight written after its use", [W], ["v = x0 + self.w[0]", NG + "self.w.mul_(0.5)"]),
        M(
            "weight written before and after",
            [W],
            [NG + "self.w.mul_(0.5)", "v = x0 + self.w[0]", NG + "self.w.add_(0.5)"],
        ),
        M("data of a row of a weight", [W], ["self.w.data[1].fill_(0.1)", "v = x0 @ self.w"]),
        M(
            "weight view kept while base is written",
            [W],
            ["r = self.w[0]", NG + "self.w.mul_(0.5)", "v = x0 * r"],
        ),
        M(
            "detached view of weight kept",
            [W],
            ["r = self.w.detach()", NG + "self.w.mul_(0.5)", "v = (x0 @ self.w) * r[0]"],
        ),
        M(
            "tied weights, one written",
            [W, "self.u = self.w"],
            [NG + "self.u.clamp_(-0.3, 0.3)", "v = x0 @ self.w"],
        ),
        M(
            "buffer in memory of a weight",
            [W, "self.register_buffer('b', self.w.detach()[0])"],
            ["v = x0 @ self.w + self.b"],
        ),
        M(
            "buffer in memory of a weight, written",
            [W, "self.register_buffer('b', self.w.detach()[0])"],
            ["self.b.mul_(0.5)", "v = x0 @ self.w"],
        ),
        M(
            "buffer is a view of a buffer",
            [W, B, "self.register_buffer('c', self.b[:2])"],
            ["self.c.add_(1)", "v = x0 @ self.w + self.b"],
        ),
        M(
            "buffer anew",
            [W, B],
            ["self.b = self.b + x0.detach().mean(0)", "v = x0 @ self.w + self.b"],
        ),
        M(
            "buffer anew, nested",
            ["self.p = Part()"],
            ["v = self.p(x0)"],
            inner=(
                [W, B],
                ["self.b = self.b + x0.detach().mean(0)", "v = x0 @ self.w + self.b"],
                ("v",),
            ),
        ),
        M(
            "buffer anew, then in place, then anew",
            [W, B],
            [
                "self.b = self.b + 1",
                "self.b.mul_(2)",
                "old = self.b",
                "self.b = self.b * 0.5",
                "old.add_(1)",
                "v = x0 @ self.w + self.b + old",
            ],
        ),
        M(
            "buffer anew as a view of an activation",
            [W, B],
            [
                "h = (x0 @ self.w).detach()",
                "self.b = h[0]",
                "h.mul_(2)",
                "v = x0 @ self.w + self.b",
            ],
        ),
        M(
            "buffer set to another buffer (aliases from now on)",
            [W, B, "self.register_buffer('c', torch.ones(6))"],
            ["v = x0 @ self.w + self.b * self.c", "self.b = self.c", "self.c.add_(1)"],
        ),
        M(
            "buffers exchanged",
            [W, B, "self.register_buffer('c', torch.ones(6))"],
            ["self.b, self.c = self.c, self.b + 0.5", "v = x0 @ self.w + self.b"],
        ),
        M(
            "buffers swapped",
            [W, B, "self.register_buffer('c', torch.ones(6))"],
            ["v = x0 @ self.w + self.b * 0.5", "self.b, self.c = self.c, self.b"],
        ),
        M(
            "buffer follows a weight from now on",
            [W, B],
            ["v = x0 @ self.w + self.b", "self.b = self.w.detach()[0]"],
        ),
        M(
            "buffer of two names anew",
            [W, B, "self.register_buffer('c', self.b)"],
            ["self.b = self.b + 1", "v = x0 @ self.w + self.b * self.c"],
        ),
        M(
            "child's buffer anew by the parent",
            ["self.p = Part()"],
            ["self.p.b = self.p.b + 1", "v = self.p(x0)"],
            inner=([W, B], ["v = x0 @ self.w + self.b"], ("v",)),
        ),
        M(
            "setattr, _buffers, register again",
            [
                W,
                B,
                "self.register_buffer('c', torch.ones(6))",
                "self.register_buffer('d', torch.ones(6))",
            ],
            [
                "setattr(self, 'b', self.b + 1)",
                "self._buffers['c'] = self.c + 1",
                "self.register_buffer('d', self.d + 1)",
                "v = x0 @ self.w + self.b * self.c * self.d",
            ],
        ),
        M(
            "non-persistent anew",
            [W, "self.register_buffer('b', torch.zeros(6), persistent=False)"],
            ["self.b = self.b + 1", "v = x0 @ self.w + self.b"],
        ),
        M("buffer += ", [W, B], ["self.b += x0.detach().mean(0)", "v = x0 @ self.w + self.b"]),
        M(
            "module used twice with a counter anew",
            ["self.p = Part()"],
            ["v = self.p(self.p(x0))"],
            inner=(
                [W, "self.register_buffer('n', torch.zeros(()))"],
                ["self.n = self.n + 1", "v = x0 @ self.w / (1 + self.n)"],
                ("v",),
            ),
        ),
        M(
            "two instances of one",
            ["self.p = Part()", "self.q = self.p"],
            ["v = self.p(self.q(x0))"],
            inner=(
                [W, "self.register_buffer('n', torch.zeros(()))"],
                ["self.n = self.n + 1", "v = x0 @ self.w / (1 + self.n)"],
                ("v",),
            ),
        ),
        M(
            "contiguous of a transposed: a copy",
            [W],
            ["v = x0 @ self.w", "q = v.T.contiguous()", "q.mul_(0.5)", "w = q.T"],
            "v w",
        ),
        M(
            "contiguous of a contiguous: the same",
            [W],
            ["v = x0 @ self.w", "q = v.contiguous()", "q.mul_(0.5)"],
        ),
        M(
            "reshape copy / view",
            [W],
            [
                "v = x0 @ self.w + 0",
                "q = v.T.reshape(-1)",
                "q.mul_(0.5)",
                "r = v.reshape(-1)",
                "r[0] = 0.1",
            ],
            "v q r",
        ),
        M(
            "expand().contiguous()",
            [W],
            ["v = x0 @ self.w + 0", "q = v[:1].expand(4, 6).contiguous()", "q[0] = 0.1"],
            "v q",
        ),
        M(
            "dropout off is the same tensor",
            [W],
            ["v = x0 @ self.w + 0", "q = F.dropout(v, 0.5, False)", "q.mul_(0.5)"],
        ),
        M(
            "dropout p=0 on",
            [W],
            ["v = x0 @ self.w + 0", "q = F.dropout(v, 0.0, True)", "q = q * 0.5"],
            "v q",
        ),
        M(
            "einsum view",
            [W],
            ["v = x0 @ self.w + 0", "q = torch.einsum('ij->ji', v)", "q[0] = 0.5"],
        ),
        M(
            "as_strided, unfold, diagonal written",
            [W],
            [
                "v = x0 @ self.w + 0",
                "v.as_strided((2,), (7,)).mul_(3)",
                "v.unfold(1, 2, 2)[0].add_(1)",
                "v.diagonal().zero_()",
            ],
        ),
        M("y.T[0] = ", [W], ["v = x0 @ self.w + 0", "v.T[0] = 0.25", "v.mT[..., 1] = 0.5"]),
        M(
            "t_ and unsqueeze_",
            [W],
            ["v = x0 @ self.w + 0", "v.t_()", "v.unsqueeze_(0)", "v[0, 0] = 0.5"],
        ),
        M(
            "out=",
            [W],
            ["v = torch.empty(4, 6)", NG + "torch.mul(x0, 2.0, out=v)", "v = x0 @ self.w + v"],
        ),
        M(
            "out= of a buffer",
            [W, B],
            ["torch.add(self.b, x0.mean(0), out=self.b)", "v = x0 @ self.w + self.b"],
        ),
        M("input written", [W], ["x0.mul_(2)", "v = x0 @ self.w"]),
        M("input view written and returned", [W], ["x0[0] = 0.5", "v = x0 @ self.w"], "v x0"),
        M(
            "enable_grad in no_grad",
            [W],
            ["with torch.no_grad():\n    with torch.enable_grad():\n        v = x0 @ self.w"],
        ),
        M(
            "computed under no_grad, used",
            [W],
            ["with torch.no_grad():\n    h = x0 @ self.w", "v = h * (x0 @ self.w)"],
        ),
        M(
            "write grad-requiring into a no-grad tensor",
            [W],
            ["v = torch.zeros(4, 6)", "v[:2] = (x0 @ self.w)[:2]", "v[2:].add_(x0[2:] @ self.w)"],
        ),
        M(
            "write into empty_like",
            [W],
            [
                "h = x0 @ self.w",
                "v = torch.empty_like(h)",
                "v[..., ::2] = h[..., 1::2]",
                "v[..., 1::2] = -h[..., ::2]",
            ],
        ),
        M(
            "new_zeros, full_like",
            [W],
            [
                "h = x0 @ self.w",
                "v = h.new_zeros(4, 6)",
                "v[0].copy_(h[0])",
                "v += torch.full_like(h, 0.5)",
            ],
        ),
        M(
            "list of rows, stack",
            [W],
            [
                "rows = list((x0 @ self.w).clone())",
                "v = torch.stack([r * i for i, r in enumerate(rows)])",
            ],
        ),
        M(
            "max_norm",
            ["self.l = nn.Embedding(5, 6, max_norm=0.7)"],
            ["v = self.l(torch.tensor([0, 3, 3]))"],
        ),
        M(
            "max_norm, twice used",
            ["self.l = nn.Embedding(5, 6, max_norm=0.7)"],
            ["v = self.l(torch.tensor([0, 3, 3]))", "w = x0 @ self.l.weight.T"],
            "v w",
        ),
        M(
            "spectral_norm",
            ["self.l = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))"],
            ["v = self.l(x0)"],
        ),
        M(
            "old spectral_norm",
            ["self.l = nn.utils.spectral_norm(nn.Linear(6, 3))"],
            ["v = self.l(x0)"],
        ),
        M(
            "weight_norm",
            ["self.l = nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))"],
            ["v = self.l(x0)"],
        ),
        M(
            "old weight_norm",
            ["self.l = nn.utils.weight_norm(nn.Linear(6, 3))"],
            ["v = self.l(x0)"],
        ),
        M(
            "orthogonal",
            [f"{L}\nnn.utils.parametrizations.orthogonal(self.l, orthogonal_map='cayley')"],
            ["v = self.l(x0)"],
        ),
        M(
            "parametrization that counts",
            [
                "self.l = nn.Linear(6, 3)",
                "nn.utils.parametrize.register_parametrization(self.l, 'weight', Counted())",
            ],
            ["v = self.l(x0) + self.l(x0 * 2)"],
        ),
        M(
            "parametrization cached",
            [
                "self.l = nn.Linear(6, 3)",
                "nn.utils.parametrize.register_parametrization(self.l, 'weight', Counted())",
            ],
            ["with nn.utils.parametrize.cached():\n    v = self.l(x0) + self.l(x0 * 2)"],
        ),
        M(
            "hook that writes the weight",
            [
                L,
                "clamped = lambda module, args: (module.weight.data.clamp_(-0.1, 0.1), args)[1]",
                "self.l.register_forward_pre_hook(clamped)",
            ],
            ["v = self.l(x0)"],
        ),
        M(
            "gradient hook on an activation",
            [L],
            ["v = self.l(x0)", "v.register_hook(lambda g: -g)", "v = v * 2"],
        ),
        M(
            "gradient hook on a parameter",
            [L, "self.l.weight.register_hook(lambda g: g * 0.5)"],
            ["v = self.l(x0)"],
        ),
        M(
            "backward hook of a module",
            [
                L,
                "self.l.register_full_backward_hook(lambda module, inputs, outputs: (-inputs[0],))",
                "self.k = nn.Linear(6, 6)",
            ],
            ["v = self.l(self.k(x0))"],
        ),
        M(
            "batch norm in eval in a trained module",
            ["self.l = nn.BatchNorm1d(6).eval()", W],
            ["v = self.l(x0 @ self.w)"],
        ),
        M(
            "batch norm called twice",
            ["self.l = nn.BatchNorm1d(6)", W],
            ["v = self.l(self.l(x0 @ self.w) * 2)"],
        ),
        M(
            "batch norm without running stats",
            ["self.l = nn.BatchNorm1d(6, track_running_stats=False)", W],
            ["v = self.l(x0 @ self.w)"],
            trained=False,
        ),
        M(
            "plain tensor attribute written",
            [W, "self.c = torch.zeros(6)"],
            ["self.c.add_(1)", "v = x0 @ self.w + self.c"],
        ),
        M(
            "plain tensor attribute anew",
            [W, "self.c = torch.zeros(6)"],
            ["self.c = self.c + 1", "v = x0 @ self.w + self.c"],
        ),
        M("python counter", [W, "self.n = 0"], ["self.n += 1", "v = x0 @ self.w / (1 + self.n)"]),
        M(
            "parameters in one memory",
            [L, "self.k = nn.Linear(6, 6)", "self.k.bias.data = self.l.bias.data"],
            ["v = self.k(self.l(x0))"],
        ),
        M(
            "frozen weight written without no_grad",
            ["self.w = nn.Parameter(torch.randn(6, 6), requires_grad=False)", L],
            ["self.w.mul_(0.9)", "v = self.l(x0) @ self.w"],
        ),
        M(
            "frozen weight, then written with gradient?",
            ["self.w = nn.Parameter(torch.randn(6, 6), requires_grad=False)", L],
            ["self.w[0] = 0.5", "v = self.l(x0) @ self.w"],
        ),
        M(
            "foreach",
            [L, "self.k = nn.Linear(6, 6).requires_grad_(False)"],
            [
                NG
                + "torch._foreach_lerp_(list(self.k.parameters()), list(self.l.parameters()), 0.1)",
                "v = self.l(x0) - self.k(x0)",
            ],
        ),
        M("detach in place", [L], ["h = self.l(x0)", "h.detach_()", "v = h * self.l.bias"]),
        M(
            "dropout off of a part, written",
            [L],
            ["h = self.l(x0)", "q = F.dropout(h[0], 0.5, False)", "q.mul_(3)", "v = h"],
        ),
        M(
            "teacher",
            [L, "self.k = nn.Linear(6, 6).requires_grad_(False)"],
            [
                NG
                + "for p, q in zip(self.l.parameters(), self.k.parameters()):\n"
                + "        q.data.mul_(0.9).add_(p.data, alpha=0.1)",
                "v = self.l(x0) - self.k(x0)",
            ],
        ),
        M("boolean mask write", [W], ["v = x0 @ self.w", "v[v > 0] = 0.5"]),
        M(
            "boolean mask buffer",
            [W, "self.register_buffer('m', torch.zeros(4, 6, dtype=torch.bool))"],
            ["self.m |= x0 > 0.5", "v = (x0 @ self.w).masked_fill(self.m, 0.0)"],
        ),
        M(
            "integer buffer anew",
            [W, "self.register_buffer('n', torch.tensor(0))"],
            ["self.n = self.n + (x0 > 0).sum()", "v = x0 @ self.w / (1 + self.n)"],
        ),
        M(
            "step by training flag",
            [W, "self.register_buffer('n', torch.tensor(0))"],
            ["if self.training:\n    self.n += 1", "v = x0 @ self.w / (1 + self.n)"],
            trained=False,
        ),
        M(
            "requires_grad_ of a copy",
            [W],
            ["v = (x0 @ self.w).detach().requires_grad_() * self.w[0]"],
        ),
        M(
            "returned alias, then written",
            [W],
            ["v = x0 @ self.w", "u = v[0]", "v.mul_(0.5)"],
            "v u",
        ),
        M(
            "buffer returned, written later",
            [W, B],
            ["u = self.b", "v = x0 @ self.w + self.b", "self.b.add_(1)"],
            "v u",
        ),
        M("parameter returned", [W], ["v = x0 @ self.w", NG + "self.w.mul_(0.9)"], "v self.w"),
        M(
            "copy_ with broadcast and type",
            [W],
            [
                "v = x0 @ self.w + 0",
                "v[0].copy_(torch.arange(6))",
                "v[:, 1].copy_(torch.tensor(1))",
            ],
        ),
        M(
            "masked select on a weight in place",
            [W],
            [NG + "self.w[self.w > 0.5] = 0.5", "v = x0 @ self.w"],
        ),
        M(
            "in place on reversed slices",
            [W],
            ["v = x0 @ self.w + 0", "v.flip(0)[0] = 1", "v[-1:, -2:] += 1", "v[:, [0, 2]] *= 2"],
        ),
        M(
            "renorm, weight divided by its norm",
            [W],
            [NG + "self.w.div_(self.w.norm(dim=1, keepdim=True))", "v = x0 @ self.w"],
        ),
        M(
            "set_grad_enabled by training",
            [W],
            [
                "with torch.set_grad_enabled(not self.training):\n    h = x0 @ self.w",
                "v = h + self.w[0]",
            ],
        ),
        M(
            "checkpoint with a write",
            [L],
            [
                "part = lambda t: self.l(t).tanh().mul_(0.5)",
                "v = torch.utils.checkpoint.checkpoint(part, x0, use_reentrant=False)",
            ],
        ),
        M(
            "ema of the mean, unbiased",
            [L, B, "self.register_buffer('n', torch.zeros(()))"],
            [
                "h = self.l(x0)",
                NG
                + "self.n.add_(1)\n    self.b.lerp_(h.mean(0), 0.1)\n"
                + "    c = self.b / (1 - 0.9 ** self.n)",
                "v = h - c",
            ],
        ),
        M(
            "composite ops whose kernels write in place",
            [L],
            [
                "h = self.l(x0)",
                "v = h - h.quantile(0.5, 1, keepdim=True)",
                "v = v * F.cosine_similarity(h[:1], h, dim=1)[:, None]",
            ],
        ),
    ]
)

PLANTED = (
    "composite ops whose kernels write in place",
    "running statistics of an instance norm whose result is not used",
    "running statistics have no gradient",
    "as_strided of a transpose is one of the memory",
    "as_strided of a copy is one of its memory",
    "as_strided of a detached view has no gradient",
    "as_strided of the result of a function that returns its operand",
    "dropout off is the same tensor",
    "a write to data of broadcast_tensors",
    "a transpose under no_grad has no gradient",
    "a scalar copied into a matrix",
    "gradients written to a detached alias of a tensor without one",
)
"""The cases that catch planted errors (test/mutants)."""


@pytest.mark.parametrize("name", sampled(CASES, 6, also=PLANTED))
def test_a_corner_case_is_as_in_torch(name: str) -> None:
    wanted = outcome(CASES[name])
    assert wanted is not None, "torch refuses the module"
    verdict = judged(CASES[name], wanted, outputs=True)
    assert verdict.kind in GOOD, reproducer(CASES[name], verdict)
