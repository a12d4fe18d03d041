"""`out` forms: calls of torch that write their result into given memory.

    x @ w                           ->  torch.matmul(x, w, out=slots.h)
    F.gelu(h, approximate="tanh")   ->  aten.gelu.out(h, approximate="tanh", out=slots.a)
    (a.mT @ b).unflatten(0, sizes)  ->  torch.matmul(a.mT, b, out=slots.d).unflatten(0, sizes)

A form gives equal bits and strides: `out` is a tensor without elements, which torch resizes to the
shape and strides of a new result. Calls whose result torch would compute elsewhere and copy, such
as layer norms and attention, have no form."""

import ast

from shardir.backend.torch.emit.imports import NAMES

SIGNS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Mod: "remainder",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.BitAnd: "bitwise_and", ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor", ast.USub: "neg", ast.Invert: "bitwise_not", ast.Eq: "eq",
    ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge",
}  # fmt: skip
"""The function of torch for each operator."""

METHODS = frozenset({
    "abs", "amax", "amin", "atan", "ceil", "clamp", "cos", "cumsum", "erf", "exp", "exp2", "expm1",
    "floor", "log", "log1p", "log2", "log_softmax", "logsumexp", "mean", "nan_to_num", "reciprocal",
    "round", "rsqrt", "sigmoid", "sign", "sin", "softmax", "sqrt", "square", "std", "sum", "tan",
    "tanh", "tril", "triu", "trunc", "var",
})  # fmt: skip
"""The methods of tensors that torch also has as functions with an argument `out`."""

OVER_DIMENSIONS = frozenset({"mean", "std", "sum", "var"})
"""The methods without such a form over all dimensions."""

CALLS: dict[str, tuple[str, str]] = {
    **{f"torch.{n}": (f"torch.{n}", "out") for n in ("cat", "full", "lerp", "maximum", "minimum",
       "zeros")},
    **{f"F.{n}": (f"aten.{n}.out", "out") for n in ("elu", "gelu", "hardtanh", "leaky_relu",
       "silu", "softplus")},
    **{f"aten.{n}_backward": (f"aten.{n}_backward.grad_input", "grad_input") for n in ("gelu",
       "sigmoid", "silu", "tanh", "threshold")},
    "aten._softmax_backward_data": ("aten._softmax_backward_data.out", "grad_input"),
    "aten._log_softmax_backward_data": ("aten._log_softmax_backward_data.out", "out"),
    "F.embedding": ("ops_memory.embedding", "into"),
    "F.linear": ("ops_memory.linear", "into"),
    "ops_products.linear": ("ops_products.linear", "into"),
    **{f"ops.{n}": (f"ops.{n}", "into") for n in ("cross_entropy_grad", "pick_grad", "take",
       "take_grad")},
}  # fmt: skip
"""The function of each call's form, and the name of its `out` argument."""

VIEWS = frozenset({"mT", "permute", "squeeze", "transpose", "unflatten", "unsqueeze", "view"})
"""Views of a whole result that may follow a call."""


def out_form(text: str, out: str) -> str | None:
    """Return the form of an expression that writes into `out`, or None."""
    return OutForm(text, out).of(ast.parse(text, mode="eval").body)


def _is_number(node: ast.expr) -> bool:
    """Whether an expression is a literal, perhaps with a sign or `float("inf")`."""
    match node:
        case ast.UnaryOp(_, operand):
            return _is_number(operand)
        case ast.Call(ast.Name("float")):
            return True
    return isinstance(node, ast.Constant)


class OutForm:
    """Rewrites an expression to its `out` form."""

    def __init__(self, text: str, out: str):
        self.text, self.out = text, out

    def of(self, node: ast.expr) -> str | None:
        match node:
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
                return self._sign(sign, left, right)
            case ast.UnaryOp(sign, operand):
                return self._sign(sign, operand)
            case ast.Attribute(value, name) if name in VIEWS:
                inner = self.of(value)
                return inner and f"{inner}.{name}"
            case ast.Call(ast.Attribute(value, name) as function, args, keywords):
                arguments = [*map(self._source, (*args, *keywords))]
                if isinstance(value, ast.Name) and value.id in NAMES:
                    return self._call(self._source(function), args, arguments)
                if name in VIEWS:
                    inner = self.of(value)
                    return inner and f"{inner}.{name}({', '.join(arguments)})"
                return self._method(value, name, args, arguments)
        return None

    def _source(self, node: ast.AST) -> str:
        return ast.get_source_segment(self.text, node) or ""

    def _sign(self, sign: ast.AST, *operands: ast.expr) -> str | None:
        if _is_number(operands[0]):  # torch takes a tensor first
            return None
        return (
            f"torch.{SIGNS[type(sign)]}({', '.join(map(self._source, operands))}, out={self.out})"
        )

    def _method(
        self, of: ast.expr, name: str, args: list[ast.expr], arguments: list[str]
    ) -> str | None:
        x = self._source(of)
        if name == "relu":
            return f"torch.clamp_min({x}, 0, out={self.out})"
        if name == "to":
            return f"ops_memory.converted({x}, into={self.out})"
        if name == "reshape":  # one that copies
            return f"ops_memory.contiguous({x}, into={self.out}).view({', '.join(arguments)})"
        if name not in METHODS or (name in OVER_DIMENSIONS and not args):
            return None
        return f"torch.{name}({', '.join([x, *arguments])}, out={self.out})"

    def _call(self, function: str, args: list[ast.expr], arguments: list[str]) -> str | None:
        if function == "torch.where":
            return self._where(args, arguments)
        if function not in CALLS:
            return None
        form, word = CALLS[function]
        return f"{form}({', '.join(arguments)}, {word}={self.out})"

    def _where(self, args: list[ast.expr], arguments: list[str]) -> str | None:
        """Turn a number into a tensor of the other operand's type: the form takes two tensors."""
        numbers = [k for k in (1, 2) if _is_number(args[k])]
        if len(numbers) > 1:
            return None
        for k in numbers:
            arguments[k] = f"{arguments[3 - k]}.new_full((), {arguments[k]})"
        return f"torch.where({', '.join(arguments)}, out={self.out})"
