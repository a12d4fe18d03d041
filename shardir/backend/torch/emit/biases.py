"""Products plus a bias vector, which torch computes in one call: `F.linear(x, w, bias)`."""

from collections.abc import Iterator

from xdsl.dialects.builtin import AnyFloat, ModuleOp, TensorType
from xdsl.ir import Operation

from shardir.backend.torch.emit.einsum import kinds_of
from shardir.dialects import nn
from shardir.dialects.blocks import ops_in
from shardir.rewriting.copying import copied


def with_biases(module: ModuleOp) -> ModuleOp:
    """Return a copy of the module with each product directly before the op that adds a vector to
    it, so that results do not depend on the schedule of collectives bit for bit. Return the module
    itself if nothing moves."""
    if not list(_separated_products(module)):
        return module
    module = copied(module)
    for product, add in list(_separated_products(module)):
        block = add.parent_block()
        assert block is not None
        product.detach()
        block.insert_op_before(product, add)
    return module


def _separated_products(module: ModuleOp) -> Iterator[tuple[nn.Contraction, Operation]]:
    """Yield each product, with the op that adds a vector to it, that has other ops in between."""
    for op in ops_in(module):
        if (product := biased_product(op)) is not None and op.prev_op is not product:
            yield product, op


def biased_product(op: Operation) -> nn.Contraction | None:
    """Return the product to which an op adds a vector along the columns, if nothing else reads
    it."""
    if not isinstance(op, nn.AddOp):
        return None
    product, type = op.lhs.owner, op.out.type
    if not isinstance(product, nn.Contraction) or weight_is_transposed(product) is None:
        return None
    bias = op.rhs.type
    assert isinstance(type, TensorType) and isinstance(bias, TensorType)
    fits = bias.get_shape() == type.get_shape()[-1:] and op.lhs.type == type
    alone = op.lhs.has_one_use() and product.parent_block() is op.parent_block()
    return product if fits and alone and isinstance(type.element_type, AnyFloat) else None


def bias_addition(product: Operation) -> nn.AddOp | None:
    """The op directly after a product, if it adds a vector to the product."""
    add = product.next_op
    return add if isinstance(add, nn.AddOp) and biased_product(add) is product else None


def weight_is_transposed(product: nn.Contraction) -> bool | None:
    """Whether the right operand is transposed, as F.linear takes it: its rows are the result's
    columns. None if it is not a matrix that multiplies all rows of the left operand."""
    x, y, z = product.letters
    kinds = kinds_of(x, y, z)
    wide = x == kinds.left + kinds.summed and z == kinds.left + kinds.right and not kinds.batch
    if not wide or not kinds.left or len(kinds.summed) != 1 or len(kinds.right) != 1:
        return None
    return y == kinds.right + kinds.summed
