"""What packages extend shardir by: the bases of ops and passes, and Extension, which names what a
package adds. docs/contribute/extending.md has a whole package.

    from shardir.extend import Extension

    EXTENSION = Extension(name="acme", dialects={"acme": load_dialect}, clusters={"acme8": TEXT})

A package is found by its entry point in the group `shardir.extensions`; `register` adds one to this
process.
"""

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.backend.interface import Backend
from shardir.cost.clusters import names as names_of_clusters
from shardir.diagnostics import Failure, ShardirError
from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.definition import op_definition
from shardir.dialects.installed import Extension, installed
from shardir.dialects.nn.base import STRATEGY, Array, Composite, Device, Props, TensorOp, Types
from shardir.dialects.nn.elementwise import (
    Binary,
    Elementwise,
    Float,
    FloatUnary,
    Unary,
)
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr, string_attr
from shardir.pipelines import known_modes
from shardir.rewriting.bases import Function, FunctionPass, GlobalPass, LocalPass
from shardir.rewriting.registry import known_passes, known_pipelines, run_pipeline
from shardir.rewriting.rewriter import Rewriter, erase
from shardir.search.plans.preset_entries import known_products
from shardir.syntax.source import warn

__all__ = [
    "STRATEGY",
    "Array",
    "Backend",
    "Binary",
    "Composite",
    "Device",
    "Elementwise",
    "Extension",
    "Factors",
    "Failure",
    "Float",
    "FloatUnary",
    "Function",
    "FunctionPass",
    "GlobalPass",
    "Layout",
    "LocalPass",
    "Mesh",
    "OpBuilder",
    "Props",
    "Rewriter",
    "ShardirError",
    "TensorOp",
    "Types",
    "Unary",
    "dims_attr",
    "erase",
    "float_attr",
    "int_attr",
    "nn",
    "op_definition",
    "register",
    "run_pipeline",
    "string_attr",
    "warn",
]


def register(extension: Extension) -> None:
    """Add an extension to this process. One that is installed needs no call.

    Raises:
        ShardirError: it is no Extension, or a name is taken; nothing was added.
    """
    if not isinstance(extension, Extension):
        raise ShardirError(f"expected a shardir.extend.Extension, got {extension!r:.60}")
    for own in (known_passes, known_pipelines, known_modes, names_of_clusters, known_products):
        own()  # the registry knows the names of shardir from here on
    try:
        installed().add(extension)
    except ValueError as e:
        raise ShardirError(f"the extension {extension.name}: {e}; rename them") from None
