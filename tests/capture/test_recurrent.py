"""Recurrences over packed lists become recurrences over padded ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.nn.utils.rnn import pack_padded_sequence as pack

from capture.rows import CARD, DIM, Net, assert_same_scores, some_rows, trace, trace_serving
from rankopt.capture.agreement import verify_capture
from rankopt.capture.branches import trace_capturing
from rankopt.capture.recurrent import ROWS, padded_recurrences, with_rows
from rankopt.errors import ExportError


class Packed(Net):
    """Works on rows whose list is not empty, since torch packs no empty list."""

    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Return [b, ...] for the rows that are left."""
        packed = pack(steps, lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, last = self.gru(packed)
        padded, found = pad_packed_sequence(outputs, batch_first=True, total_length=6)
        return torch.cat([padded.sum(1), last[0], found[:, None].float()], dim=1)

    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        scores = price.sum(1)
        if valid.any():
            scores[valid] = self.recur(steps[valid], lengths[valid]).sum(1)
        return scores


class TimeMajor(Packed):
    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = rnn.pack_padded_sequence(steps.transpose(0, 1), lengths, enforce_sorted=False)
        outputs, _ = self.gru(packed)
        padded, _ = rnn.pad_packed_sequence(outputs, padding_value=0.5, total_length=8)
        return padded.transpose(0, 1).flatten(1)


class Deep(Packed):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.gru = nn.GRU(DIM, 3, num_layers=2, bidirectional=True, bias=False, dropout=0.5)
        for parameter in self.gru.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.eval()


class FirstState(Packed):
    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack(steps, lengths, batch_first=True, enforce_sorted=False)
        outputs, last = self.gru(packed, torch.tanh(steps[:, 0])[None])
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=6)
        return padded[:, 0] + last[0]


class Lstm(Packed):
    """Every result is read; two layers, both directions, first states given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.lstm = nn.LSTM(DIM, 3, num_layers=2, bidirectional=True, batch_first=True)
        for parameter in self.lstm.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.eval()

    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack(steps, lengths, batch_first=True, enforce_sorted=False)
        begin = torch.tanh(steps[:, 0, :3]).expand(4, -1, -1)
        outputs, (state, memory) = self.lstm(packed, (begin, begin * 0.5))
        padded, _ = pad_packed_sequence(outputs, batch_first=True, total_length=6)
        return torch.cat([padded.sum(1), state.sum(0), memory.sum(0)], dim=1)


class OwnCell(Packed):
    """A cell that walks over batch_sizes itself, as attention-gated units do."""

    def walk(self, packed: PackedSequence) -> PackedSequence:
        data, batch_sizes, in_order, back = packed
        state = torch.zeros(int(batch_sizes[0]), DIM)
        outputs = torch.zeros(data.size(0), DIM)
        begin = 0
        for batch in batch_sizes:
            now = data[begin : begin + batch]
            state = torch.tanh(self.layer(now) + 0.5 * state[0:batch])
            outputs[begin : begin + batch] = state
            begin += batch
        return PackedSequence(outputs, batch_sizes, in_order, back)

    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack(steps, lengths, batch_first=True, enforce_sorted=False)
        padded, _ = pad_packed_sequence(self.walk(packed), batch_first=True, total_length=6)
        return padded.sum(1)


def called(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("kind", [Packed, TimeMajor, Deep, FirstState, Lstm, OwnCell])
def test_graph_scores_as_the_model(kind: type[Packed]) -> None:
    net = kind()
    program, capture = trace(net, *some_rows(7))
    assert len(capture.recurrences) == 1
    assert_same_scores(program, net)


def test_recurrence_is_one_operator_on_the_layers_own_weights() -> None:
    program, _ = trace(Packed(), *some_rows(7))
    assert called(program).count("rankopt.gru.default") == 1
    assert not any(name.startswith("aten.sort") for name in called(program))
    (node,) = (n for n in program.graph.nodes if str(n.target) == "rankopt.gru.default")
    read = program.graph_signature.inputs_to_parameters
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"]
    assert [read[weight.name] for weight in node.args[2:6]] == [f"gru.{name}" for name in names]


def test_layers_and_directions_are_operators_of_their_own() -> None:
    program, _ = trace(Deep(), *some_rows(7))
    assert called(program).count("rankopt.gru.default") == 4


def test_verification_covers_recurrences() -> None:
    program, serving, capture = trace_serving(Packed())
    notes = verify_capture(program, serving, CARD, capture)
    assert any("run on padded rows; equal to the eager model on" in note for note in notes)


class PaddedGru(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        return self.gru(steps)[0].sum((1, 2))


def test_recurrence_over_padded_rows_is_left_alone() -> None:
    net = PaddedGru()
    program, capture = trace(net, *some_rows(7))
    assert not capture
    assert "aten.gru.input" in called(program)
    assert_same_scores(program, net)


class OtherLayer(Packed):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.other = layer.eval()

    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack(steps, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = self.other(packed)
        return pad_packed_sequence(outputs, batch_first=True, total_length=6)[0].sum(1)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.RNN(DIM, DIM, batch_first=True), "nn.RNN over packed lists is not captured"),
        (nn.LSTM(DIM, DIM, batch_first=True, proj_size=2), "nn.LSTM with proj_size"),
    ],
)
def test_other_layers_are_refused_by_name(layer: nn.Module, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        trace(OtherLayer(layer), *some_rows(7))


class OtherPadded(OtherLayer):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        scores = self.other(steps)[0].sum((1, 2))
        scores[lengths > 0] = 1.0
        return scores


def test_other_layers_over_padded_rows_still_run() -> None:
    net = OtherPadded(nn.RNN(DIM, DIM, batch_first=True))
    program, _ = trace(net, *some_rows(7))
    assert_same_scores(program, net)


class ListOfLengths(Packed):
    def recur(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packed = pack(steps, [6] * 7, batch_first=True)
        return self.gru(packed)[1][0]


def test_lengths_that_a_trace_would_freeze_are_refused() -> None:
    with pytest.raises(ExportError, match="lengths as a Python list"):
        trace(ListOfLengths(), *some_rows(7))


def test_dropout_of_a_training_layer_is_refused() -> None:
    net = Deep()
    net.gru.train()
    with pytest.raises(ExportError, match="call eval"):
        trace(net, *some_rows(7))


def test_torch_is_left_as_it_was_and_other_threads_see_it_all_along() -> None:
    before = (rnn.pack_padded_sequence, pack, nn.GRU.forward, nn.LSTM.forward, nn.RNN.forward)
    x, lengths = torch.randn(3, 4, DIM), torch.tensor([4, 2, 1])
    layer = nn.GRU(DIM, DIM, batch_first=True)
    with torch.no_grad():
        expected = layer(pack(x, lengths, batch_first=True))[1]
        seen: dict[str, Any] = {}

        def elsewhere() -> None:
            with torch.no_grad():
                packed = globals()["pack"](x, lengths, batch_first=True)
                seen["last"] = layer(packed)[1]

        with padded_recurrences(lambda counts: None):
            assert globals()["pack"] is not before[1]
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert torch.equal(seen["last"], expected)
    after = (rnn.pack_padded_sequence, pack, nn.GRU.forward, nn.LSTM.forward, nn.RNN.forward)
    assert after == before


def test_rows_stand_only_for_whole_batches() -> None:
    assert with_rows((ROWS, 3, [2 * ROWS, 0]), 7) == (7, 3, [14, 0])
    assert with_rows(slice(ROWS, 2 * ROWS), 7) == slice(7, 14)
    assert with_rows(True, 7) is True
    assert with_rows(ROWS + 1, 7) == ROWS + 1


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep deepctr_torch, which asks an index for its own version when imported, off the net."""
    requests = pytest.importorskip("requests")

    def refuse(*args: object, **kwargs: object) -> None:
        raise requests.exceptions.ConnectionError("no network in tests")

    monkeypatch.setattr(requests, "get", refuse)


class FirstOutput(nn.Module):
    """Takes the score alone, flat, as the calling convention does."""

    def __init__(self, model: nn.Module, names: list[str] | None = None) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        given = dict(zip(self.names, inputs, strict=True)) if self.names else inputs[0]
        result = self.model(given)
        return (result[0] if isinstance(result, tuple) else result).flatten()


def assert_same_where_the_model_runs(net: nn.Module, make: Any) -> set[int]:
    """Compare on many batches; return the sizes at which the model itself ran."""
    batch = torch.export.Dim("B", min=1, max=1 << 16)
    example = make(7, 3)
    shapes = (tuple({0: batch} for _ in example),)

    def export() -> ExportedProgram:
        return torch.export.export(net, example, dynamic_shapes=shapes, strict=False)

    with torch.no_grad():
        program, _ = trace_capturing(net, export)
    graph = program.module(check_guards=False)
    ran = set()
    with torch.no_grad():
        for num_rows in (1, 2, 7, 33):
            for longest in (0, 1, 10):
                inputs = make(num_rows, longest)
                try:
                    expected = net(*inputs)
                except ValueError:
                    assert longest == 0
                    continue
                torch.testing.assert_close(graph(*inputs), expected, rtol=1e-4, atol=1e-6)
                ran.add(num_rows)
    return ran


@pytest.mark.parametrize("gru_type", ["GRU", "AIGRU", "AGRU", "AUGRU"])
@pytest.mark.usefixtures("offline")
def test_deepctr_dien(gru_type: str) -> None:
    inputs = pytest.importorskip("deepctr_torch.inputs")
    from deepctr_torch.models.dien import DIEN

    item = inputs.SparseFeat("item", 40, embedding_dim=8)
    history = inputs.SparseFeat("hist_item", 40, embedding_dim=8, embedding_name="item")
    columns = [item, inputs.VarLenSparseFeat(history, 10, length_name="length")]
    net = DIEN(columns, ["item"], gru_type=gru_type, init_std=0.3, dnn_hidden_units=(8,)).eval()

    def make(num_rows: int, longest: int) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(num_rows + longest)
        lengths = torch.randint(0, longest + 1, (num_rows,), generator=generator)
        lengths[:1] = longest
        ids = torch.randint(1, 40, (num_rows, 10), generator=generator)
        ids[torch.arange(10) >= lengths[:, None]] = 0
        item = torch.randint(1, 40, (num_rows, 1), generator=generator)
        return (torch.cat([item, ids, lengths[:, None]], dim=1).float(),)

    assert assert_same_where_the_model_runs(FirstOutput(net), make) == {1, 2, 7, 33}


def test_rechub_dien() -> None:
    features = pytest.importorskip("torch_rechub.basic.features")
    from torch_rechub.models.ranking.dien import DIEN

    user = features.SparseFeature("user", vocab_size=20, embed_dim=8)
    item = features.SparseFeature("item", vocab_size=40, embed_dim=8, padding_idx=0)
    lists = [
        features.SequenceFeature(
            name, vocab_size=40, embed_dim=8, pooling="concat", shared_with="item", padding_idx=0
        )
        for name in ("history", "unseen")
    ]
    net = DIEN([user], lists[:1], lists[1:], [item], {"dims": [8]}).eval()
    generator = torch.Generator().manual_seed(4)
    for parameter in net.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.3

    def make(num_rows: int, longest: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(num_rows + longest)
        lengths = torch.randint(0, longest + 1, (num_rows,), generator=generator)
        ids = torch.randint(1, 40, (2, num_rows, 10), generator=generator)
        ids[:, torch.arange(10) >= lengths[:, None]] = 0
        user = torch.randint(0, 20, (num_rows,), generator=generator)
        return user, user + 1, ids[0], ids[1]

    wrapped = FirstOutput(net, ["user", "item", "history", "unseen"])
    assert assert_same_where_the_model_runs(wrapped, make) == {1, 2, 7, 33}
