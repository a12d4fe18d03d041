"""Mutants of cost: time, memory and the relative model."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "a loop costs one run",
        "The ops of a loop count as if they ran once.",
        "shardir/cost/seconds.py",
        "            runs = loops.runs(op)\n",
        "            runs = 1\n",
        "test/rewriting/test_microbatches.py -k as_many_ops",
    ),
    Mutant(
        "an op takes the sum of its flops and its bytes",
        "The roofline adds computation and memory traffic.",
        "shardir/cost/seconds.py",
        "max(computing, moving)",
        "(computing + moving)",
        (
            "test/cost/test_cost.py::test_one_op_without_ir "
            "test/cost/test_cost.py::test_an_elementwise_op_costs_the_time_of_its_bytes"
        ),
    ),
    Mutant(
        "several values are joined for free",
        "A fused collective does not count its copies to the buffer.",
        "shardir/cost/seconds.py",
        "if len(each) > 1 else 0.0",
        "if False else 0.0",
        "test/cost/test_cost.py::test_several_values_are_put_into_one_buffer",
    ),
    Mutant(
        "a loss is a gain",
        "fuse-communication fuses two collectives whatever it costs to pack them.",
        "shardir/cost/buckets.py",
        "return (a + b).seconds < (a.seconds + b.seconds) * IMPROVEMENT",
        "return True",
        "test/cost/test_fused_seconds.py",
    ),
    Mutant(
        "links are not shared",
        "Collectives on the same links run at the same time.",
        "shardir/cost/schedule.py",
        "end = max(now, free.get(name, 0.0)) +",
        "end = now +",
        "test/cost/test_schedule.py -k queues",
    ),
    Mutant(
        "storages are freed before they are read",
        "Memory is freed before the last op that reads it.",
        "shardir/cost/memory.py",
        "            now += born[i]\n",
        "            now += born[i] - died[i]\n            died[i] = 0\n",
        "test/cost/test_cost_memory.py::test_a_step_needs_what_torch_needs",
    ),
    Mutant(
        "buffers are freed at the start",
        "The buffers of a started collective are free before its wait.",
        "shardir/cost/memory.py",
        "found[op] = size, Span(i, ends.get(op, i))",
        "found[op] = size, Span(i, i)",
        "test/cost/test_cost_memory.py::test_collectives",
    ),
    Mutant(
        "reductions are between ops",
        "The bytes of reductions count as D_inter.",
        "shardir/cost/terms.py",
        "            inner += received\n",
        "            inter += received\n",
        "test/cost/test_cost_terms.py",
    ),
    Mutant(
        "the fit multiplies measured and predicted",
        "The error of a fit is the logarithm of measured times predicted.",
        "shardir/cost/fit.py",
        ") / y)",
        ") * y)",
        "test/cost/test_calibrate.py -k coefficients",
    ),
    Mutant(
        "gathers start early",
        "An all-gather starts when its operand is available, not as late as computation hides it.",
        "shardir/cost/overlap.py",
        "            if grows(op):",
        "            if False:",
        "test/cost/test_starts.py",
    ),
    Mutant(
        "a collective is started for nothing",
        "A collective is started though almost none of it would be hidden.",
        "shardir/cost/overlap.py",
        "MIN_HIDDEN = 0.05",
        "MIN_HIDDEN = 0.0",
        "test/cost/test_starts.py",
    ),
    Mutant(
        "a reduction over no dimensions takes time",
        "In the search a reduction over no dimensions costs what a copy does.",
        "shardir/cost/seconds.py",
        "    if is_free(kind, factors, types):\n        return 0.0",
        "    if issubclass(kind, FREE):\n        return 0.0",
        "test/search/test_candidates.py",
    ),
    Mutant(
        "a storage ends before its last reader",
        "In a memory plan the results of an op overwrite the operands that it reads last.",
        "shardir/cost/memory_plan.py",
        "yield v.op, v.index, LiveBuffer(start, end + 1, live.sizes[v])",
        "yield v.op, v.index, LiveBuffer(start, max(end, start + 1), live.sizes[v])",
        "test/passes/test_plan_memory.py",
    ),
]
