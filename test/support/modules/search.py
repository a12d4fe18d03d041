"""Judges random modules in parallel, and prints those that are wrong, each reduced.

python test/modules.py --modules 2000 --jobs 2 [--seed 7]        # also: make modules
python test/modules.py --show 1234                               # the module of a seed
"""

import argparse
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from support.modules.generator import drawn_module
from support.modules.judge import GOOD, Verdict, in_double, judged, outcome, valid_part
from support.modules.reducer import reduced, reproducer, symptom
from support.modules.text import ModuleText

SECONDS = 60
"""The time of a module, after which it hangs, and that of its reduction as a multiple."""


@dataclass(frozen=True)
class Result:
    """The verdict on the module of a seed.

    Attributes:
        verdict: None if torch refuses the module.
        text: what is printed of it.
    """

    seed: int
    verdict: Verdict | None
    features: frozenset[str] = frozenset()
    text: str = ""
    symptom: tuple[str, str] = ("", "")


class LateError(BaseException):
    """A module took too long. No `except Exception` takes it for a refusal."""


def late(*_: object) -> None:
    raise LateError(f"not judged after {SECONDS} s of the CPU")


def limit(seconds: float) -> None:
    """Raise LateError after so many seconds of the CPU; never, if 0."""
    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)


def optimizer_of(seed: int) -> str:
    return "adamw" if seed % 4 == 3 else "sgd"


def valid_module(seed: int) -> tuple[ModuleText, object] | None:
    with in_double():
        module = drawn_module(seed)
    return valid_part(module, optimizer_of(seed))


def result_of(seed: int, shrink: bool = True, ranks: int = 0) -> Result:
    """Judge the module of a seed; each of so many seeds on real ranks too."""
    torch.set_num_threads(1)
    optimizer = optimizer_of(seed)
    with in_double():
        module = drawn_module(seed)
    valid = valid_part(module, optimizer)
    if valid is None:
        return Result(seed, None)
    module, wanted = valid
    options = {"outputs": seed % 3 == 0, "ranks": bool(ranks) and seed % ranks == 0}
    try:
        limit(SECONDS)
        verdict = judged(module, wanted, optimizer, **options)
    except LateError as error:
        verdict = Verdict("late", str(error))
    finally:
        limit(0)
    found = symptom(verdict)
    if verdict.kind in GOOD:
        return Result(seed, verdict, module.features)
    features = module.features
    if shrink:
        try:
            limit(SECONDS)
            module = reduced(module, verdict, optimizer, **options)
        except LateError:
            pass
        finally:
            limit(0)
        wanted = outcome(module, optimizer)
        if wanted is not None:
            verdict = judged(module, wanted, optimizer, **options)
    return Result(seed, verdict, features, reproducer(module, verdict), found)


def results(seeds: range, jobs: int, shrink: bool, ranks: int) -> Iterator[Result]:
    work = partial(result_of, shrink=shrink, ranks=ranks)
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=200) as pool:
        yield from pool.imap_unordered(work, seeds, chunksize=4)


def main() -> int:
    parser = argparse.ArgumentParser(description="Judges random modules of torch.")
    parser.add_argument("--modules", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--ranks", type=int, default=50, help="one in so many on real ranks; 0: none"
    )
    parser.add_argument("--no-reduction", action="store_true")
    parser.add_argument("--show", type=int, help="print the module of a seed")
    args = parser.parse_args()
    if args.show is not None:
        valid = valid_module(args.show)
        print("refused by torch" if valid is None else valid[0])
        return 0
    kinds, features, failed = Counter[str](), Counter[str](), Counter[str]()
    seen = Counter[tuple[str, str]]()
    start, seeds = time.monotonic(), range(args.seed, args.seed + args.modules)
    print(f"modules {seeds.start} to {seeds.stop - 1}", flush=True)
    for n, r in enumerate(results(seeds, args.jobs, not args.no_reduction, args.ranks), 1):
        kinds[r.verdict.kind if r.verdict else "refused by torch"] += 1
        features.update(r.features if r.verdict else [])
        if r.verdict and r.verdict.kind not in GOOD:
            failed.update(r.features)
            seen[r.symptom] += 1
        if r.text and (r.symptom[0] == "wrong" or seen[r.symptom] <= 3):
            print(f"\n### seed {r.seed}\n{r.text}", flush=True)
        if n % 100 == 0:
            print(
                f"# {n} of {len(seeds)}, {time.monotonic() - start:.0f} s: {dict(kinds)}",
                flush=True,
            )
    print("\nfeature: modules, failed")
    for name, n in features.most_common():
        print(f"{name}: {n}, {failed[name]}")
    for (kind, text), n in seen.most_common():
        print(f"{n} {kind} {text}")
    print(f"{len(seeds)} modules in {time.monotonic() - start:.0f} s: {dict(kinds)}")
    return int(bool(seen))
