"""Recurrent networks: their layers, step by step.

torch's own decomposition makes the same ops, but a graph of them takes longer to trace than the
module to export, and it has no dropout between layers.
"""

from collections.abc import Callable, Sequence

from shardir.build import Value, nn
from shardir.frontends.torch.aten.contraction import linear
from shardir.frontends.torch.aten.creation import dropout
from shardir.frontends.torch.aten.shape import pieces, stack, unbind
from shardir.frontends.torch.translation import AtenEntry, Translation

CellState = tuple[Value, ...]
"""What a cell retains: the hidden value, then that of an LSTM's memory."""

CellStep = Callable[[Value, Value, CellState], CellState]
"""Returns the new state, from the products of the input and of the hidden value, and the old
one."""


def _elman(activation: Callable[[Value], Value]) -> CellStep:
    return lambda given, kept, state: (activation(kept + given),)


def _gru(given: Value, kept: Value, state: CellState) -> CellState:
    (reset, update, new), (reset_kept, update_kept, new_kept) = _gates(given, 3), _gates(kept, 3)
    reset, update = nn.sigmoid(reset + reset_kept), nn.sigmoid(update + update_kept)
    new = nn.tanh(new + new_kept * reset)
    return ((state[0] - new) * update + new,)


def _lstm(given: Value, kept: Value, state: CellState) -> CellState:
    into, forget, new, out = _gates(kept + given, 4)
    memory = nn.sigmoid(forget) * state[1] + nn.sigmoid(into) * nn.tanh(new)
    return nn.sigmoid(out) * nn.tanh(memory), memory


def _gates(x: Value, n: int) -> tuple[Value, ...]:
    return pieces(x, (x.shape[-1] // n,) * n, len(x.shape) - 1)


def _cell(step: CellStep) -> AtenEntry:
    """An entry of one step of one layer."""

    def entry(
        t: Translation, x: Value, hx: Value | Sequence[Value], w: Value, w_kept: Value,
        b_ih: Value | None = None, b_hh: Value | None = None,
    ) -> Value | CellState:  # fmt: skip
        state = _state(t, hx)
        state_after = step(linear(t, x, w, b_ih), linear(t, state[0], w_kept, b_hh), state)
        return state_after[0] if isinstance(hx, Value) else state_after

    return entry


def _network(step: CellStep) -> AtenEntry:
    """An entry of all steps of all layers, [steps, batch, features]."""

    def entry(
        t: Translation, x: Value, hx: Value | Sequence[Value], params: Sequence[Value],
        has_biases: bool, num_layers: int, p: float, train: bool, bidirectional: bool,
        batch_first: bool,
    ) -> CellState:  # fmt: skip
        x, directions = t.value(x), 2 if bidirectional else 1
        x = x.transpose(1, 0, 2) if batch_first else x
        rows = num_layers * directions
        states = list(zip(*(unbind(t, s) for s in _state(t, hx)), strict=True))
        each = len(params) // rows
        for layer in range(num_layers):
            outputs: list[Value] = []
            for reverse in range(directions):
                at = layer * directions + reverse
                mine = params[at * each : (at + 1) * each]
                out, states[at] = _direction(t, step, x, states[at], mine, has_biases, reverse)
                outputs.append(out)
            x = outputs[0] if len(outputs) == 1 else nn.concat(*outputs, axis=2)
            if layer < num_layers - 1:
                x = dropout(t, x, p, train)
        x = x.transpose(1, 0, 2) if batch_first else x
        return x, *(stack(t, last_states) for last_states in zip(*states, strict=True))

    return entry


def _direction(
    t: Translation, step: CellStep, x: Value, state: CellState, params: Sequence[Value],
    has_biases: bool, reverse: int,
) -> tuple[Value, CellState]:  # fmt: skip
    """The outputs of one layer in one direction, and its last state. The product of the input is
    one for all steps."""
    w, w_kept, *params_of_rest = params
    b, b_kept, *projection = params_of_rest if has_biases else (None, None, *params_of_rest)
    projected = linear(t, x, w, b)
    order = unbind(t, projected)
    outputs: list[Value] = []
    for one in reversed(order) if reverse else order:
        hidden, *memory = step(one, linear(t, state[0], w_kept, b_kept), state)
        hidden = linear(t, hidden, projection[0]) if projection else hidden
        state = hidden, *memory
        outputs.append(hidden)
    return stack(t, outputs[::-1] if reverse else outputs), state


def _state(t: Translation, hx: Value | Sequence[Value]) -> CellState:
    return tuple(t.value(s) for s in ((hx,) if isinstance(hx, Value) else hx))


TABLE: dict[str, AtenEntry] = {
    "lstm.input": _network(_lstm),
    "gru.input": _network(_gru),
    "rnn_tanh.input": _network(_elman(nn.tanh)),
    "rnn_relu.input": _network(_elman(nn.relu)),
    "lstm_cell": _cell(_lstm),
    "gru_cell": _cell(_gru),
    "rnn_tanh_cell": _cell(_elman(nn.tanh)),
    "rnn_relu_cell": _cell(_elman(nn.relu)),
}
