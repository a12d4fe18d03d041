"""Recurrent networks, unrolled over layers and steps.

torch's own decomposition makes the same ops, but tracing their graph takes longer than exporting
the module, and it lacks dropout between layers.
"""

from collections.abc import Callable, Sequence

from shardir.build import Value, nn
from shardir.frontends.torch.aten.contraction import linear
from shardir.frontends.torch.aten.creation import dropout
from shardir.frontends.torch.aten.shape import pieces, stack, unbind
from shardir.frontends.torch.translation import AtenEntry, Translation

CellState = tuple[Value, ...]
"""The state of a cell: the hidden value, and the cell value of an LSTM."""

CellStep = Callable[[Value, Value, CellState], CellState]
"""Returns the new state, from the products of the input and of the hidden value, and the old
state."""


def _elman(activation: Callable[[Value], Value]) -> CellStep:
    return lambda x, hidden, state: (activation(hidden + x),)


def _gru(x: Value, hidden: Value, state: CellState) -> CellState:
    (reset, update, new), (reset_hidden, update_hidden, new_hidden) = (
        _gates(x, 3),
        _gates(hidden, 3),
    )
    reset, update = nn.sigmoid(reset + reset_hidden), nn.sigmoid(update + update_hidden)
    new = nn.tanh(new + new_hidden * reset)
    return ((state[0] - new) * update + new,)


def _lstm(x: Value, hidden: Value, state: CellState) -> CellState:
    into, forget, new, out = _gates(hidden + x, 4)
    memory = nn.sigmoid(forget) * state[1] + nn.sigmoid(into) * nn.tanh(new)
    return nn.sigmoid(out) * nn.tanh(memory), memory


def _gates(x: Value, n: int) -> tuple[Value, ...]:
    return pieces(x, (x.shape[-1] // n,) * n, len(x.shape) - 1)


def _cell(step: CellStep) -> AtenEntry:
    """The entry of one step of one layer."""

    def entry(
        t: Translation, x: Value, hx: Value | Sequence[Value], w_ih: Value, w_hh: Value,
        b_ih: Value | None = None, b_hh: Value | None = None,
    ) -> Value | CellState:  # fmt: skip
        state = _state(t, hx)
        state_after = step(linear(t, x, w_ih, b_ih), linear(t, state[0], w_hh, b_hh), state)
        return state_after[0] if isinstance(hx, Value) else state_after

    return entry


def _network(step: CellStep) -> AtenEntry:
    """The entry of all steps of all layers, for x [steps, batch, features]."""

    def entry(
        t: Translation, x: Value, hx: Value | Sequence[Value], params: Sequence[Value],
        has_biases: bool, num_layers: int, p: float, train: bool, bidirectional: bool,
        batch_first: bool,
    ) -> CellState:  # fmt: skip
        x, directions = t.value(x), 2 if bidirectional else 1
        x = x.transpose(1, 0, 2) if batch_first else x
        rows = num_layers * directions
        states = list(zip(*(unbind(t, s) for s in _state(t, hx)), strict=True))
        count = len(params) // rows
        for layer in range(num_layers):
            outputs: list[Value] = []
            for reverse in range(directions):
                i = layer * directions + reverse
                weights = params[i * count : (i + 1) * count]
                out, states[i] = _direction(t, step, x, states[i], weights, has_biases, reverse)
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
    """The outputs of one layer in one direction, and its last state. One product with the input
    serves all steps."""
    w_ih, w_hh, *biases = params
    b_ih, b_hh, *projection = biases if has_biases else (None, None, *biases)
    steps = unbind(t, linear(t, x, w_ih, b_ih))
    outputs: list[Value] = []
    for x_step in reversed(steps) if reverse else steps:
        hidden, *memory = step(x_step, linear(t, state[0], w_hh, b_hh), state)
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
