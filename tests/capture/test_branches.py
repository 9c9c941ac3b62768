"""Filters and branches on data are traced on every row, and wrong guesses are found out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from capture.rows import CARD, DIM, Net, assert_same_scores, some_rows, trace, trace_serving
from rankopt.capture.agreement import verify_capture
from rankopt.capture.branches import depends_on_data, trace_capturing
from rankopt.errors import ExportError


class ReadAndWrite(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        pooled = torch.zeros(price.shape[0], DIM)
        if valid.any():
            chosen = steps[valid]
            pooled[valid] = self.layer(chosen.sum(1) / lengths[valid][:, None])
        return (pooled * price).sum(1)


class MaskedSelect(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        _, num_steps, dim = steps.shape
        valid = lengths > 0
        pooled = torch.zeros_like(price)
        if lengths[valid].shape[0] == 0:
            return pooled.sum(1)
        chosen = torch.masked_select(steps, valid.view(-1, 1, 1)).view(-1, num_steps, dim)
        query = price.masked_select(valid.view(-1, 1)).view(-1, dim)
        pooled[valid] = torch.tanh(self.layer(chosen)).sum(1) * query
        return pooled.sum(1)


class EarlyReturn(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        scores = price.sum(1)
        if not torch.any(valid):
            return scores
        scores[valid] += self.layer(steps[valid])[:, 0].sum(-1)
        return scores


class PartsOfRows(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        grid = torch.stack([steps, -steps], dim=1)
        if valid.any().item():
            grid[valid, 1, :2] = torch.sigmoid(grid[valid, 0, 1:3, :])
            grid[valid, ..., 0] = 0.25
            grid[valid, 0] = price[:1]
        return grid.sum((1, 2, 3))


class Positions(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        real = torch.arange(steps.shape[1]) < lengths[:, None]
        mixed = torch.zeros_like(steps)
        mixed[real] = torch.relu(self.layer(steps[real]))
        mixed[~real] = -1.0
        picked = steps.masked_select(real[:, :, None]).view(-1, DIM)
        mixed[real] += picked
        return mixed.mean((1, 2)) + price[:, 0]


class LastStep(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        last = torch.zeros_like(price)
        at_end = torch.arange(steps.shape[1]).repeat(lengths.shape[0], 1) == lengths.view(-1, 1) - 1
        last[valid] = steps[at_end]
        return (last * price).sum(1)


class ChangesItsCopy(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        chosen = price[valid]
        chosen *= 3.0
        flat = price.masked_select(valid[:, None])
        flat += 1.0
        view = price[:, 1:]
        view[valid] = 0.5
        return price.sum(1)

    def forward(self, price: Tensor, history: Tensor) -> Tensor:
        return super().forward(price.clone(), history)


class RowNumbers(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        pooled = torch.zeros_like(price)
        rows = torch.nonzero(valid).squeeze(1)
        if rows.numel() == 0:
            return price.sum(1)
        pooled[rows] = self.layer(steps[rows].sum(1))
        (again,) = torch.where(valid)
        pooled[again, 0] = torch.index_select(price, 0, valid.nonzero()[:, 0])[:, 1]
        return (pooled + price).sum(1)


class NanRows(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        past = torch.arange(steps.shape[1]) >= lengths[:, None]
        weights = torch.softmax(steps.sum(-1).masked_fill(past, -torch.inf), dim=1)
        empty = weights.isnan().any(dim=1)
        if empty.any():
            weights[empty] = 1.0 / weights.size(1)
        return (weights[:, :, None] * steps).sum((1, 2))


MODELS = [
    ReadAndWrite,
    MaskedSelect,
    EarlyReturn,
    PartsOfRows,
    Positions,
    LastStep,
    ChangesItsCopy,
    RowNumbers,
    NanRows,
]


@pytest.mark.parametrize("kind", MODELS)
def test_graph_scores_as_the_model(kind: type[Net]) -> None:
    net = kind()
    program, capture = trace(net, *some_rows(7))
    assert capture.filters
    assert_same_scores(program, net)


@pytest.mark.parametrize("kind", MODELS)
def test_batch_is_the_only_size_that_varies(kind: type[Net]) -> None:
    program, _ = trace(kind(), *some_rows(7))
    symbols = {
        symbol
        for node in program.graph.nodes
        if isinstance(node.meta.get("val"), Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
        for symbol in size.node.expr.free_symbols
    }
    assert len(symbols) == 1


def test_sizes_that_depend_on_data_are_seen() -> None:
    batch = torch.export.Dim("B", min=1, max=1 << 16)
    with torch.no_grad():
        program = torch.export.export(
            LastStep(), some_rows(7), dynamic_shapes=({0: batch}, {0: batch}), strict=False
        )
    assert depends_on_data(program)
    assert not depends_on_data(trace(LastStep(), *some_rows(7))[0])


def test_plain_export_refuses_a_branch_on_data() -> None:
    batch = torch.export.Dim("B", min=1, max=1 << 16)
    with pytest.raises(Exception, match="data-dependent"), torch.no_grad():
        torch.export.export(
            ReadAndWrite(), some_rows(7), dynamic_shapes=({0: batch}, {0: batch}), strict=False
        )


def test_assumptions_name_the_users_lines() -> None:
    _, capture = trace(ReadAndWrite(), *some_rows(7))
    (branch,) = capture.branches
    assert branch.text == "if valid.any()"
    assert str(branch).startswith("`if valid.any()` (test_branches.py:")
    assert {place.text for place in capture.filters} == {
        "chosen = steps[valid]",
        "pooled[valid] = self.layer(chosen.sum(1) / lengths[valid][:, None])",
    }


def test_module_is_left_as_it_was() -> None:
    net = ReadAndWrite()
    inputs = some_rows(7)
    before = net(*inputs)

    def broken() -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        trace_capturing(net, broken)
    trace(net, *inputs)
    assert "forward" not in vars(net)
    assert torch.equal(net(*inputs), before)


class OtherConditions(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        return price.sum(1) if lengths.max() > 2 else steps.sum((1, 2))


class Every(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        return price.sum(1) if (lengths > 0).all() else steps.sum((1, 2))


@pytest.mark.parametrize("kind", [OtherConditions, Every])
def test_other_branches_on_data_stay_refused(kind: type[Net]) -> None:
    with pytest.raises(Exception, match="data-dependent"):
        trace(kind(), *some_rows(7))


class Columns(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.tensor([True, False, True, True, False]))

    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        weight = self.layer.weight[self.kept]
        return (price @ weight.sum(0)) + steps.sum((1, 2))


def test_mask_over_weights_is_no_row_filter() -> None:
    net = Columns()
    program, capture = trace(net, *some_rows(7))
    assert not capture
    assert_same_scores(program, net)


@pytest.mark.parametrize("kind", [ReadAndWrite, EarlyReturn, NanRows])
def test_verification_tells_how_branches_went(kind: type[Net]) -> None:
    program, serving, capture = trace_serving(kind())
    notes = verify_capture(program, serving, CARD, capture)
    (branch,) = capture.branches
    assert notes[0].startswith(f"{branch} is taken as always true; equal to the eager model on ")
    num_rows, num_false = (int(word) for word in notes[0].split() if word.isdigit())
    assert 0 < num_false < num_rows
    assert any("row filters (test_branches.py:" in note for note in notes)


class MeanOverRows(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        centre = price[valid].mean(0)
        return ((price - centre) ** 2).sum(1) * valid


class DoublesWhenAny(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        if (lengths > 0).any():
            price = price * 2.0
        return price.sum(1)


class OtherRows(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        rows = torch.nonzero(valid).flatten()
        moved = price.clone()
        moved[valid] = price[rows.flip(0)]
        return moved.sum(1)


class HiddenByFreshWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.data.mul_(1e-6)

    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        pooled = self.layer(steps.sum(1))
        if (lengths > 0).any():
            pooled = -pooled
        return pooled.sum(1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (MeanOverRows, "`centre = price[valid].mean(0)` (test_branches.py:"),
        (OtherRows, "`moved[valid] = price[rows.flip(0)]` (test_branches.py:"),
        (DoublesWhenAny, "`if (lengths > 0).any()` (test_branches.py:"),
        (HiddenByFreshWeights, "`if (lengths > 0).any()` (test_branches.py:"),
    ],
)
def test_verification_names_the_line_that_breaks_the_assumption(kind: type[Net], text: str) -> None:
    program, serving, capture = trace_serving(kind())
    with pytest.raises(ExportError) as failure:
        verify_capture(program, serving, CARD, capture)
    message = str(failure.value)
    assert text in message
    assert "output score differs from the model's by" in message
    assert "torch.where" in message


class WritesItsInput(Net):
    def forward(self, price: Tensor, history: Tensor) -> Tensor:
        price[history[:, 0] > 0] = 2.0
        return price.sum(1)


def test_model_that_writes_into_its_input_is_compared_fairly() -> None:
    program, serving, capture = trace_serving(WritesItsInput())
    assert "equal to the eager model" in verify_capture(program, serving, CARD, capture)[0]


class GuardsItsInput(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        if torch.isnan(price).any():
            raise ValueError("price must not be NaN")
        assert not (lengths < 0).any(), "lengths"
        valid = lengths > 0
        if valid.any():
            price[valid] = price[valid] * 2.0
        return price.sum(1)

    def forward(self, price: Tensor, history: Tensor) -> Tensor:
        return super().forward(price.clone(), history)


def test_checks_that_raise_are_passed_by() -> None:
    net = GuardsItsInput()
    program, serving, capture = trace_serving(net)
    taken = {place.text.split()[0]: way for place, way in capture.branches.items()}
    assert sorted(capture.branches.values()) == [False, False, True]
    assert taken["assert"] is False
    notes = verify_capture(program, serving, CARD, capture)
    assert sum("raises an error where it is true" in note for note in notes) == 2
    assert_same_scores(trace(net, *some_rows(7))[0], net)


class RaisesWithoutBranch(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        if (lengths > 0).any():
            price = price + 1.0
        raise ValueError("never scores")


def test_an_error_on_both_ways_is_raised() -> None:
    with pytest.raises(ValueError, match="never scores"):
        trace(RaisesWithoutBranch(), *some_rows(7))


class RefusesEmpty(Net):
    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        valid = lengths > 0
        if lengths[valid].shape[0] == 0:
            raise ValueError("no list at all")
        scores = torch.zeros(price.shape[0])
        scores[valid] = steps[valid].sum((1, 2))
        return scores


def test_rows_that_the_model_itself_refuses_are_told_of() -> None:
    program, serving, capture = trace_serving(RefusesEmpty())
    notes = verify_capture(program, serving, CARD, capture)
    assert "ValueError: no list at all" in notes[-1]


class NeverRuns(Net):
    broken = False

    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("out of order")
        return price[:, 0]


def test_model_that_runs_on_no_row_is_an_error() -> None:
    net = NeverRuns()
    program, serving, capture = trace_serving(net)
    net.broken = True
    with pytest.raises(ExportError, match=r"none of the rows.*out of order"):
        verify_capture(program, serving, CARD, capture)


class BadIds(Net):
    def forward(self, price: Tensor, history: Tensor) -> Tensor:
        last = history[:, -1] - 1
        known = last >= 0
        scores = price.sum(1)
        scores[known] = self.table(last[known]).sum(1)
        return scores


def test_graph_that_cannot_run_the_filtered_rows_is_an_error() -> None:
    program, serving, capture = trace_serving(BadIds())
    with pytest.raises(ExportError, match=r"`scores\[known\] = .*the graph fails on rows that"):
        verify_capture(program, serving, CARD, capture)


def test_weights_come_out_of_verification_unchanged() -> None:
    program, serving, capture = trace_serving(ReadAndWrite())
    before = {name: value.clone() for name, value in serving.state_dict().items()}
    verify_capture(program, serving, CARD, capture)
    after = serving.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
