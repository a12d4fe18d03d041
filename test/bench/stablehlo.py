"""Import of StableHLO: a step of a transformer of JAX with unrolled layers, by both readers.

CPU seconds, the minimum of some turns. The text is in MLIR's generic form with locations, which
both readers read: jaxlib's bindings, and our own parser.
"""

import time
from collections.abc import Callable
from typing import Any

LAYERS = 44
TURNS = 3
SMOKE = {"LAYERS": 2, "TURNS": 1}


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per part: part, ops, seconds."""
    import jax
    from support import jax_programs

    from shardir.api import stablehlo
    from shardir.frontends.stablehlo import bindings, generic

    draw = jax_programs.Draw()
    params = jax_programs.gpt_params(draw)
    params["layers"] *= LAYERS // 2

    def step(p: Any, state: Any, ids: Any) -> Any:
        def loss(p: Any) -> Any:
            x = p["emb"][ids]
            for layer in p["layers"]:
                x = jax_programs.block(x, layer)
            return jax_programs.cross_entropy(jax_programs.rms(x, p["g"]) @ p["emb"].T, ids)

        value, grads = jax.value_and_grad(loss)(p)
        return value, *jax_programs.adam(p, grads, state)

    ids = draw.below(jax_programs.V, jax_programs.B, jax_programs.T)
    lowered = jax.jit(step).lower(params, jax_programs.adam_state(params), ids)
    module: Any = lowered.compiler_ir("stablehlo")
    text = module.operation.get_asm(print_generic_op_form=True, enable_debug_info=True)
    program = generic.read_text(text)
    parts: dict[str, Callable[[], object]] = {
        "jaxlib's reader": lambda: bindings.read_text(text),
        "our reader": lambda: generic.read_text(text),
        "importer": lambda: stablehlo.import_program(program),
    }
    ops = text.count('"stablehlo.')
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(TURNS):
        for name, run in parts.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
            log(f"turn {turn + 1}: {name} {seconds[name][-1]:.2f} s")
    return [{"part": name, "ops": ops, "seconds": min(s)} for name, s in seconds.items()]
