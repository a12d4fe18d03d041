"""Mutants of algebra: schedules of pipelines."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "stages of a pipeline wait for nothing",
        "A schedule whose ranks wait for each other is accepted.",
        "shardir/algebra/schedules/checking.py",
        "after[before].add(a)",
        "after[a].update()",
        "test/algebra/test_schedules.py::test_the_check_accepts_exactly_what_can_run",
    ),
    Mutant(
        "receives have an order of their own",
        "Ranks receive messages of a channel in another order than they are sent.",
        "shardir/algebra/schedules/transfers.py",
        "if s != r:",
        "if not s:",
        "test/algebra/test_schedule_transfers.py -k other_values",
    ),
    Mutant(
        "a transfer starts at once",
        "The proof of transfers ignores what stands before a send or a receive in its list.",
        "shardir/algebra/schedules/transfers.py",
        "elif last:",
        "elif not nodes:",
        "test/algebra/test_schedule_transfers.py",
    ),
    Mutant(
        "a gradient waits for those of weights",
        "I and W of a stage are one action also where the step takes longer.",
        "shardir/algebra/schedules/merging.py",
        "if (end := self._end(orders)) > self.end * (1 + ROUNDING):",
        'if (end := self._end(orders)) == float("inf"):',
        "test/algebra/test_schedule_search.py",
    ),
    Mutant(
        "a transfer takes no time",
        "Results of adjacent stages arrive on other ranks when they are computed.",
        "shardir/algebra/schedules/simulation.py",
        "now = max(now, at + delay[code])",
        "now = max(now, at)",
        "test/algebra/test_schedule_simulation.py -k figures",
    ),
    Mutant(
        "the last gradient is of the last stage",
        "Of some stages of a rank the way back of the last gradient is counted from the last one.",
        "shardir/algebra/schedules/costs.py",
        "tails[some[0]] + first_weight)",
        "tails[some[-1]] + first_weight)",
        "test/algebra/test_schedule_simulation.py -k bound",
    ),
    Mutant(
        "no weight gradients hide the end of a pipeline",
        "The bound of a schedule's time counts the way of the last gradient as a wait.",
        "shardir/algebra/schedules/costs.py",
        "tail = max(0.0, tail - _most(weights, microbatches, limit))",
        "tail = max(0.0, tail)",
        "test/algebra/test_schedule_simulation.py -k bound",
    ),
    Mutant(
        "a pipeline has all memory",
        "Schedules are filled as if ranks held any number of microbatches.",
        "shardir/algebra/schedules/filling.py",
        "return self.held[rank] + size <= self.filling.memory[rank]",
        "return True",
        "test/algebra/test_schedule_search.py -k within_memory",
    ),
]
