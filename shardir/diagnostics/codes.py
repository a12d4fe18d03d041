"""The table of error codes: one record for each invariant of the language.

A message is `[code] expected X, got Y; fix`. The code, the invariant and the usual fix stand here
alone: `coded` makes messages of them, and docs/reference.py the page of errors.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Code:
    """An invariant that input can violate, and the usual fix, which ends the message."""

    invariant: str
    fix: str


SECTIONS: dict[str, dict[str, Code]] = {
    "Meshes and layouts": {
        "M1": Code("A mesh has 1 to 64 axes.", "write <dp = 2>"),
        "M2": Code(
            "Layouts, strategies and ops name meshes that the module declares, and a mesh has a "
            "name that a layout can spell.",
            "declare the mesh, or correct the name",
        ),
        "M3": Code("A mesh has at most 1,048,576 devices.", "make an axis smaller"),
        "M4": Code(
            "A mesh is on a cluster that the module declares.",
            "declare the cluster, or correct the name",
        ),
        "M5": Code(
            "A cluster has as many devices as the mesh, and each unit of it is made up of the "
            "mesh's minor axes and a minor sub-axis of the next one.",
            "change the size of an axis, or the count of a level",
        ),
        "L1": Code(
            "A layout (and its `of`) has one entry for each dimension of the tensor.",
            "write an entry for each dimension, {} for an unsharded one",
        ),
        "L2": Code(
            "A layout names axes of its mesh, and sub-axes that divide them.",
            "use an axis of the mesh",
        ),
        "L3": Code(
            "An axis occurs once in a layout, and sub-axes of one axis do not overlap.",
            "a device holds one shard only: drop one of them",
        ),
        "L4": Code(
            "A partial value has a reduction: sum, max, min, mean, or any. No redistribution makes "
            "a `partial any`.",
            "use sum, max, min or mean",
        ),
        "L5": Code(
            "The shape of a local type is that of the largest shard of `of`.",
            "use ceil(N / n) in each dimension",
        ),
        "L6": Code(
            "Explicit sizes of shards are one for each shard, and add up to the dimension.",
            "write one size for each shard",
        ),
        "L7": Code(
            "An axis that a `#dist.sharding` lists as replicated splits no dimension of it.",
            "drop it in one place",
        ),
        "L8": Code(
            "A dimension that is unsharded and closed has no priority.",
            "drop the priority, or open the dimension: {?}",
        ),
        "L9": Code(
            "Shardings are those of this language; those of Shardy and XLA are not read.",
            "write dist.mesh and #dist.layout, to which shardir.from_sdy translates, or drop it",
        ),
    },
    "Redistributions and collectives": {
        "R1": Code(
            "A redistribution takes a value with a `#dist.layout`, of the global view.",
            "use a collective in the local view",
        ),
        "R2": Code(
            "A redistribution and a barrier keep the shape and the element type.",
            "use nn.reshape or nn.convert",
        ),
        "R3": Code("A redistribution stays on one mesh.", "use one mesh in a function"),
        "C1": Code(
            "A collective has a value, and one result for each value.",
            "write as many results as values",
        ),
        "C2": Code(
            "A collective takes values with a `#dist.local`, of the local view.",
            "use dist.redistribute in the global view",
        ),
        "C3": Code(
            "The type of a collective's result has the layout that the collective produces.",
            "write the layout that the collective produces",
        ),
        "C4": Code(
            "A collective preserves the global shape and the element type, and no shard replaces "
            "one of another size.",
            "use nn.reshape or nn.convert for another shape or element type",
        ),
        "C5": Code(
            "A reduction is over axes over which the value is partial, of the same kind; a value "
            "is partial in one kind only.",
            "drop the second reduction, or use the kind that the type has",
        ),
        "C6": Code(
            "A collective names existing dimensions; an all-to-all names two.",
            "use dimensions of the tensor, and two different ones in an all-to-all",
        ),
        "C7": Code(
            "An all-gather is over the minor axes of its dimension.",
            "use axes that split the dimension, minor ones first",
        ),
        "C8": Code(
            "A slice, a scatter and a new partial value use axes over which the value is "
            "replicated.",
            "gather first, or use an axis that replicates",
        ),
        "C9": Code(
            "Positions count from 0 within the group, and a `dist.send` is to another position "
            "than its own.",
            "use a position of the group",
        ),
        "C10": Code(
            "In a permute each position sends at most once and receives at most once.",
            "drop one of the pairs",
        ),
        "C11": Code(
            "Each `dist.recv` has a `dist.send` of its type before it, and each send a receive; a "
            "device receives what another one sends to it in the order of the sends.",
            "pair them, the send first",
        ),
        "C12": Code(
            "An exchange is over the axes that split the dimensions which change.",
            "use those axes",
        ),
        "C13": Code(
            "A gather, a slice, a pad and an all-to-all move shards of usual sizes.",
            "use dist.exchange for explicit sizes",
        ),
        "C14": Code(
            "One `dist.wait` takes all results of an `async` collective, and nothing else uses "
            "them.",
            "wait for it, and use the results of the wait",
        ),
        "C15": Code(
            "A `dist.wait` takes all results of one `async` collective, and has their types.",
            "write `async` after the collective's axes, or drop the wait",
        ),
        "C16": Code(
            "Devices communicate values in their own memory, and none that are `on host`.",
            "copy the value to the device first: dist.copy",
        ),
        "C17": Code(
            "A ring product has one einsum index of an operand and of the result that is split "
            "evenly over the group.",
            "use the collective and the product apart",
        ),
    },
    "Sharding groups and propagation barriers": {
        "P1": Code(
            "Sharding groups and propagation barriers take values of the global view.",
            "drop it: a local value has its layout",
        ),
        "P2": Code("The values of a sharding group have one shape.", "drop one of them"),
        "P3": Code(
            "The annotations of the values of a sharding group agree.",
            "annotate one of them, or all with the same layout",
        ),
    },
    "Strategies": {
        "S1": Code("A strategy has numbers or axes, not both.", "write axes for all"),
        "S2": Code(
            "A strategy has at most as many slices as the mesh has devices.",
            "use numbers whose product is at most the mesh's size",
        ),
        "S3": Code(
            "The numbers of a strategy divide the sizes of the mesh's axes, in their order.",
            "use numbers made of the sizes of the axes",
        ),
        "S4": Code(
            "A strategy has one group for each operand (and result), and one entry for each "
            "dimension.",
            "write an entry for each",
        ),
        "S5": Code(
            "Dimensions that share a factor are split over the same axes.",
            "write the same entry for both",
        ),
        "S6": Code(
            "A dimension is split as its factors allow: evenly, major factor first, and not at all "
            "without a factor.",
            "leave the dimension at 1",
        ),
        "S7": Code("A dimension that the op needs unsharded is not split.", "leave it at 1"),
        "S8": Code("A strategy names axes of the mesh.", "use an axis of the mesh"),
        "S9": Code("A strategy uses an axis for one factor only.", "use different axes"),
        "S10": Code("Only a linear op takes partial operands.", "drop `partial`"),
    },
    "Modes": {
        "A1": Code("A mode that splits inputs needs a mesh.", "declare one: dist.mesh @m <dp = 4>"),
        "A2": Code(
            "The mode data takes functions of the global view.", "use the mode manual or hybrid"
        ),
        "A3": Code(
            "In the mode data every annotation is data parallel.",
            "drop the annotation, or use the mode hybrid",
        ),
        "A4": Code(
            "In the mode manual every value has a layout.",
            "annotate its type or its op, or use the mode semi_auto",
        ),
        "A5": Code(
            "In the mode manual every op is computable with the layouts of its operands.",
            "use dist.redistribute, or annotate the op with a strategy",
        ),
    },
    "Plans": {
        "N1": Code(
            "A line of a plan parses, and says each thing once.",
            'write "PATTERN" : [{axis}, ...]',
        ),
        "N2": Code(
            "A pattern matches a name of the program, or of the function of its line.",
            "correct the pattern",
        ),
        "N3": Code(
            "The annotations of the program agree with the plan.",
            "drop the annotation, or put a line that agrees with it before",
        ),
        "N4": Code(
            "A preset exists, and is on axes of the mesh that no other one is on.",
            "name its axes: megatron(tp) * fsdp(dp)",
        ),
        "N5": Code(
            "The program has what a preset splits, of a size that its devices divide.",
            "put the preset on a smaller axis, or write the layouts",
        ),
        "N6": Code(
            "A product with a parameter of `parts` is cut along its columns, by nn.split or "
            "nn.slice.",
            "drop parts",
        ),
        "N7": Code("A strategy is of an op with factors.", "drop strategy"),
    },
    "Types of tensor ops": {
        "T1": Code("The type of a result follows from the operands.", "write the inferred type"),
        "T2": Code(
            "In the local view all values of an op have layouts, or none.", "annotate all or none"
        ),
        "T3": Code(
            "An op is computable with the layouts of its operands.",
            "run insert-redistributions, or insert a collective before the op",
        ),
        "T4": Code(
            "Dimensions exist and occur once; a permutation has each of them.",
            "use each dimension once",
        ),
        "T5": Code("Operands have element types that the op takes together.", "use nn.convert"),
        "T6": Code("Shapes broadcast or match.", "use equal sizes, or 1"),
        "T7": Code(
            "A contraction has an equation of two operands that fits their shapes.",
            'write letters as in "ik,kj->ij", each in two of the three',
        ),
        "T8": Code(
            "A mean, a maximum and a minimum are over at least one element.",
            "reduce a dimension that has elements",
        ),
        "T9": Code(
            "A reshape preserves the number of elements.", "use the same number of elements"
        ),
        "T10": Code(
            "Options of an op are present, within their range, and fit the operands.",
            "correct the option",
        ),
        "T11": Code(
            "What is needed of a custom op is registered and agrees with its use; its name and its "
            "options can be spelled.",
            "register it with shardir.register_custom_op, in Python or in a module for --import",
        ),
        "T12": Code(
            "A value is a tensor with a number for each size and at most 2^59 elements, of the "
            "type f64, f32, f16, bf16, i64, i32 or i1, with a layout or without an encoding.",
            "write such a tensor, as tensor<8x4xf32>",
        ),
        "T13": Code(
            "`dist.manual` is in the global view, over axes of the mesh, and names a function of "
            "the local view. The arguments and results of this function are the shards that the "
            "strategy makes of operands and results over these axes, all of one size. Other axes "
            "split dimensions that the function maps.",
            "write the types of the shards",
        ),
        "T14": Code(
            "Both regions of `nn.while` take the carried values, and use no others. The condition "
            "yields an i1, the body the carried values of the next run. Their values have no "
            "layouts, and their ops compute the same in each run: none communicates or draws "
            "random numbers.",
            "carry the value",
        ),
    },
    "Functions": {
        "F1": Code("A function that is called has a body.", "write its body"),
        "F2": Code(
            "No function calls itself, directly or through others.", "write the repetitions out"
        ),
        "F3": Code("Layouts do not propagate through calls.", "run inline-calls first"),
        "F4": Code(
            "The calls of a module add at most 200,000 ops, once they are inlined.",
            "use fewer calls",
        ),
        "F5": Code(
            "Values of a memory plan (`offsets`) that are live at once do not overlap.",
            "run plan-memory again",
        ),
    },
    "Training": {
        "G1": Code(
            "What is differentiated is a function of this module with a body, and not its own "
            "gradient.",
            "name a function of this module",
        ),
        "G2": Code(
            "The function of a step returns one scalar of a float type.",
            "reduce the loss, and convert it to floats",
        ),
        "G3": Code(
            "The function of a step has a parameter.",
            'write {train.parameter = "w", train.init = #train.init<...>}',
        ),
        "G4": Code(
            "A gradient is with respect to existing arguments, each once.",
            "count arguments from 0, each once",
        ),
        "G5": Code("`train.fusion` is an index, 0 or more.", "write train.fusion = 2 : i64"),
        "G6": Code(
            "Parameters of a step have distinct, non-empty names, and an argument has one role: "
            "parameter, state or input.",
            "use one argument for a shared weight, and one role for an argument",
        ),
        "G7": Code(
            "A result updates a state or a parameter of the function, of its type, once.",
            'write {train.state = "n", train.init = #train.init<...>} on an argument of its type',
        ),
        "G8": Code(
            "An op on the way to a gradient has a gradient, and a layout describes each cotangent.",
            "put nn.stop_gradient before it, or reduce or gather the value first",
        ),
        "G9": Code(
            "`train.weight_decay` and `train.lr_scale` are numbers, 0 or more, and `train.lr` is a "
            "schedule.",
            "write train.weight_decay = 0.0 : f64",
        ),
        "G10": Code(
            "The numbers of optimizers, schedules, distributions, `accumulate`, `clip` and "
            "`loss_scale` are within their ranges.",
            "use a number of the range",
        ),
        "G11": Code(
            "`train.state_layout` is a complete layout, on an argument that is a parameter.",
            "write train.state_layout = #dist.layout<@m, [{dp}, {}]>",
        ),
        "G12": Code(
            "A loop has a beginning and an end. One over microbatches is in no other, and a "
            "collective ends in it if it starts in it. `train.microbatch`, `train.accumulate`, "
            "`train.collect`, `train.item`, `train.items` and `train.carry` are in a loop of their "
            "kind; sums, collected values and items are used after it.",
            "put the op into the loop, between its two marks",
        ),
        "G13": Code(
            "A result that is the gradient of a parameter has its type, and is the only one.",
            "write the name of one parameter",
        ),
        "G14": Code(
            "The ops of a step, or of a forward part alone, in stages have stages: in the forward "
            "part no op reads a value of a later stage, each stage has ops, each result is made on "
            "one, and a value is transferred from the stage that makes it to others.",
            "give the op that stage, or a later one",
        ),
        "G15": Code(
            "A result that is a metric of a step is a scalar of a float type, after the loss, and "
            "has a name of its own.",
            'write {train.metric = "accuracy"}',
        ),
        "G16": Code(
            "A step in stages comes to its end on all ranks: `train.schedule` runs each function "
            "once for each microbatch, no runs and transfers wait for each other, a value is "
            "transferred to the ranks that read it and to no others, and the two ends of a channel "
            "between ranks have its transfers in the same order.",
            "move an action in the schedule, use another schedule, or mark other stages",
        ),
        "G17": Code(
            "Microbatches whose losses or metrics are means over tokens, whose numbers follow from "
            "inputs, are accumulated by `<tokens>`. Then such a mean is the quotient of two sums, "
            "or two means, with a denominator of inputs alone, in which the loss is linear.",
            "write accumulate <tokens, microbatches = 4>",
        ),
        "G18": Code(
            "A parameter's `train.rule` is a function from the parameter, its gradient, its states "
            "and scalars to the new parameter and the new states. With `<rules>` each parameter "
            'has one. An `"elementwise"` rule has ops on elements alone.',
            'write attributes {train.rule = "elementwise"} at the function',
        ),
        "G19": Code(
            'Steps that train a parameter in common have states of their own, `states "a"` and '
            '`states "b"`, or share the states of one optimizer: both have `states "a"`. '
            "Averages of parameters (`ema`) are not of replicas, and a step with `separate_update` "
            "has neither replicas, nor stages, nor metrics of its update.",
            'write states "adam" in both, or other names for states of their own',
        ),
    },
}
"""The sections of docs/reference/invariants.md, each with its codes."""

CODES = {code: entry for section in SECTIONS.values() for code, entry in section.items()}


def coded(code: str, found: str, use: str | None = None) -> str:
    """Return the message `[code] found; use`.

    Args:
        code: a key of CODES.
        found: `expected X, got Y`, with the place where the operation alone does not tell it.
        use: the fix, if it is more specific than the table's; "" for none.
    """
    fix = CODES[code].fix if use is None else use
    return f"[{code}] {found}; {fix}" if fix else f"[{code}] {found}"
