"""Mutants of cost: when ops and collectives run."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "computation hides that another device is late",
        "A device loses no time to the last one of a collective in flight.",
        "shardir/cost/schedule.py",
        "            now += late\n            begin = max(now, free.get(name, 0.0))\n",
        "            now += 0.0 if dist.is_started(op) else late\n"
        "            begin = max(reached + late, free.get(name, 0.0))\n",
        "test/cost/test_schedule.py -k late",
    ),
    Mutant(
        "devices are together when a step begins",
        "What devices compute after the last collective of a step makes the next step's not late.",
        "shardir/cost/schedule.py",
        "            self._met[group] -= computed\n",
        "            self._met[group] = 0.0\n",
        "test/cost/test_schedule.py -k late",
    ),
    Mutant(
        "the last device is late after no computation too",
        "A collective after another one begins late by all of the skew.",
        "shardir/cost/schedule.py",
        "late = min(computed - self._met[axes], sqrt(self._skew * squares))",
        "late = self._skew",
        "test/cost/test_schedule.py -k late",
    ),
    Mutant(
        "who has waited for others is as far from the rest as before",
        "A collective over other axes leaves the distances of devices as they are.",
        "shardir/cost/schedule.py",
        "self._squares[group] += remains * ",
        "self._squares[group] += ",
        "test/cost/test_schedule.py -k in_turn",
    ),
    Mutant(
        "a collective does not bring devices together",
        "What devices have computed before they begin a collective makes the next one late.",
        "shardir/cost/schedule.py",
        "            self._met[group] = self._counted[group] = computed\n",
        "            pass\n",
        "test/cost/test_schedule.py -k late",
    ),
    Mutant(
        "collectives in flight wait for each other's last message",
        "Latencies do not overlap, though devices work for a share of them.",
        "shardir/cost/schedule.py",
        "                    free[name] = end - (1 - on.gap) * latency\n",
        "                    free[name] = end\n",
        "test/cost/test_schedule.py -k links_are_held",
    ),
    Mutant(
        "a collective brings all devices together",
        "Those that it does not wait for are not late in the next one, over other axes.",
        "shardir/cost/schedule.py",
        "if mesh.without(a, b) is not None]",
        "]",
        "test/cost/test_schedule.py -k late",
    ),
    Mutant(
        "links are not shared",
        "Collectives on the same links run at the same time.",
        "shardir/cost/schedule.py",
        "            begin = max(now, free.get(name, 0.0))\n",
        "            begin = now\n",
        "test/cost/test_schedule.py -k queues",
    ),
    Mutant(
        "what a collective takes when it is started is not exposed",
        "Waits are those for collectives alone, not their interference.",
        "shardir/cost/schedule.py",
        "        if t.left > t.reached:\n            yield Waiting",
        "        if t.left > t.reached and not dist.is_started(op):\n            yield Waiting",
        "test/cost/test_simulator.py -k by_hand",
    ),
]
