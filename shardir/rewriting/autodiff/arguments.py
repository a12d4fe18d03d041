"""The arguments of a function under construction, with their attributes."""

from collections.abc import Sequence
from dataclasses import replace

from xdsl.dialects.builtin import FunctionType, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, BlockArgument, Region, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Mesh
from shardir.dialects.dist import laid_out, layout_of, tensor
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    Argument,
    FirstValue,
    InitAttr,
    Request,
    set_arg_attrs,
    set_result_attrs,
    state_attrs,
)
from shardir.rewriting.rewriter import Rewriter

ArgAttributes = dict[str, Attribute]


class Arguments:
    """The arguments of a block, with the attributes of each."""

    def __init__(self, block: Block, attributes: list[ArgAttributes]):
        self.block, self.attributes = block, attributes

    def __getitem__(self, i: int) -> SSAValue:
        return self.block.args[i]

    def annotation(self, i: int) -> Argument:
        """Return the role of argument i, and further annotations in its attributes."""
        return Argument.of(self.attributes[i])

    def state_layout(self, i: int, mesh: Mesh | None) -> Layout | None:
        """Return the layout of the states of parameter i: the annotated layout; otherwise the
        parameter's, if values have layouts on a mesh or the parameter is on the host; otherwise
        None."""
        layout, own = self.annotation(i).state_layout, layout_of(self[i])
        if mesh is None:
            return layout or (own if own is not None and own.host else None)
        return layout.simplified(mesh) if layout else own

    def as_function(self, request: Request, results: list[ArgAttributes]) -> FuncOp:
        """Return the requested function, with the block as its body; `results` are the attributes
        of its results."""
        last = self.block.last_op
        assert isinstance(last, ReturnOp)
        types = [a.type for a in self.block.args], [v.type for v in last.operands]
        if (region := self.block.parent) is not None:
            region.detach_block(self.block)
        name = request.sym_name.data
        f = FuncOp(name, FunctionType.from_lists(*types), Region(self.block))
        f.location = request.location
        if any(self.attributes):
            set_arg_attrs(f, self.attributes)
        if any(results):
            set_result_attrs(f, results)
        return f

    def add(self, type: Attribute, name: str, attributes: ArgAttributes) -> SSAValue:
        """Add an argument."""
        arg = self.block.insert_arg(type, len(self.block.args))
        arg.name_hint = name if SSAValue.is_valid_name(name) else None
        self.attributes.append(attributes)
        return arg

    def add_state(self, type: TensorType, key: str, name: str, first: FirstValue = 0.0) -> SSAValue:
        """Add a state, whose elements are `first` before the first step."""
        init = first if isinstance(first, InitAttr) else InitAttr(("constant", (("value", first),)))
        return self.add(type, name, state_attrs(key, init))

    def add_scalar_state(
        self, b: Rewriter, key: str, element: Attribute, first: float = 0.0
    ) -> SSAValue:
        """Add a replicated scalar state; its name is the end of `key`."""
        layout = replicated(b.mesh.name, 0) if b.mesh is not None else None
        type = laid_out(element, (), layout) if layout is not None else tensor(element, ())
        return self.add_state(type, key, key.rpartition(".")[2], first)

    def move_to_end(self, arg: SSAValue) -> SSAValue:
        """Move an argument behind all arguments, and return it."""
        assert isinstance(arg, BlockArgument)
        new = self.block.insert_arg(arg.type, len(self.block.args))
        new.name_hint, new.location = arg.name_hint, arg.location
        self.attributes.append(self.attributes.pop(arg.index))
        arg.replace_all_uses_with(new)
        self.block.erase_arg(arg)
        return new

    def add_state_of(
        self, i: int, mesh: Mesh | None, key: str, name: str, dims: Sequence[int],
        first: FirstValue, element: Attribute,
    ) -> SSAValue:  # fmt: skip
        """Add a state of parameter i, with the dimensions `dims` of it, in the layout of its
        states; its elements are `first` before the first step: with `copy`, the parameter's."""
        w, layout = self[i], self.state_layout(i, mesh)
        shape = tuple(unsharded_type(w).get_shape()[d] for d in dims)
        type = tensor(element, shape)
        if layout is not None:
            state_layout = replace(layout, dims=tuple(layout.dims[d] for d in dims))
            type = laid_out(element, shape, state_layout)
        if isinstance(first, InitAttr) and first.kind == "copy":
            first = InitAttr(("copy", (("of", self.annotation(i).key or ""),)))
        return self.add_state(type, key, f"{w.name_hint or 'w'}_{name}", first)
