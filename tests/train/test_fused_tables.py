"""Fused tables against plain PyTorch: the same weights after some steps, whatever is looked up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rankopt.errors import UsageError
from rankopt.kernels.train_lookup import table_step_reference
from rankopt.models.layers import EmbeddingBags
from rankopt.train.fused_tables import FusedTables, fuse_tables

RATE, STEPS, ROWS, DIM = 0.1, 6, 17, 12


@pytest.fixture(autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Tables(nn.Module):
    """Every kind of table, one of them read twice, and the numbers they give."""

    def __init__(self):
        super().__init__()
        self.batch = EmbeddingBags([ROWS, 5, 40], DIM)
        self.summed = nn.EmbeddingBag(ROWS, DIM, mode="sum", include_last_offset=True)
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=3)
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)
        self.rows = nn.EmbeddingBag(ROWS, DIM, mode="mean")

    def forward(self, batch):
        bags = self.batch(batch["ids"]).flatten(1)
        summed = self.summed(batch["values"], batch["offsets"], batch["weights"])
        mean = self.mean(batch["values"], batch["offsets"][:-1])
        history = self.item(batch["history"])
        pair = self.item(batch["ids"][:, 0] % ROWS) * history.sum(dim=1)
        return torch.cat([bags, summed, mean, pair, self.rows(batch["history"])], dim=1)


class Own(nn.Embedding):
    """A table with a forward of its own."""


def make_batch(seed, num_rows=64):
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    lengths = draw(6, num_rows)
    lengths[::5] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return {
        "ids": torch.stack([draw(high, num_rows) for high in (ROWS, 5, 40)], dim=1),
        "values": draw(ROWS, int(offsets[-1])),
        "offsets": offsets,
        "weights": torch.rand(int(offsets[-1]), generator=generator),
        "history": draw(ROWS, num_rows, 4),
    }


def loss_of(module, batch, target):
    out = module(batch)
    return (out * target[:, : out.shape[1]].to(out.dtype)).tanh().mean()


def run(module, optimizer, *, steps=STEPS, parts=1):
    target = torch.randn(64, 200, generator=torch.Generator().manual_seed(99)) + 1.5
    for step in range(steps):
        batch = make_batch(step)
        if module.summed.weight.dtype == torch.float64:
            batch["weights"] = batch["weights"].double()
        optimizer.zero_grad()
        for _ in range(parts):
            (loss_of(module, batch, target) / parts).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def modules():
    torch.manual_seed(0)
    plain = Tables()
    return plain, copy.deepcopy(plain), copy.deepcopy(plain).double()


def fused_optimizer(module, optimizer="adagrad"):
    groups, notes = fuse_tables(module)
    assert notes == []
    return FusedTables(groups, optimizer, RATE)


@pytest.mark.parametrize(("name", "make"), [("adagrad", torch.optim.Adagrad), ("sgd", None)])
def test_weights_are_those_of_plain_pytorch(name, make) -> None:
    plain, fused, wide = modules()
    make = make or torch.optim.SGD
    for table in plain.modules():
        if isinstance(table, nn.Embedding | nn.EmbeddingBag):
            table.sparse = True
    before = copy.deepcopy(fused.state_dict())
    ours = run(fused, fused_optimizer(fused, name))
    theirs = run(plain, make(plain.parameters(), lr=RATE))
    oracle = run(wide, make(wide.parameters(), lr=RATE))
    assert list(ours) == list(theirs)
    for key, expected in oracle.items():
        error = (ours[key].double() - expected).abs().max()
        plain_error = (theirs[key].double() - expected).abs().max()
        assert error <= max(4 * plain_error, 1e-6), key
        assert not torch.equal(ours[key], before[key])


def test_rowwise_adagrad_is_its_definition_in_float64() -> None:
    torch.manual_seed(0)
    bags = EmbeddingBags([9, 9], 6)
    groups, _ = fuse_tables(bags)
    optimizer = FusedTables(groups, "rowwise_adagrad", RATE)
    tables = [table.detach().clone() for table in groups[0].tables]
    states = [torch.zeros(9), torch.zeros(9)]
    empty = torch.empty(0)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 9, (30, 2), generator=generator)
        gradient = torch.rand(30, 12, generator=generator)
        bags(ids).flatten(1).backward(gradient)
        optimizer.step()
        results = table_step_reference(
            tables, states, [ids], [empty], [empty], [gradient], False, -1, 1, RATE, 1e-10
        )
        tables, states = list(results[:2]), list(results[2:])
    for table, expected in zip(groups[0].tables, tables, strict=True):
        torch.testing.assert_close(table.detach().double(), expected, rtol=1e-5, atol=1e-6)
        assert optimizer.state[table]["sum"].shape == (9,)


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad", "sgd"])
def test_one_and_two_threads_give_the_same_bits(optimizer) -> None:
    results = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        torch.manual_seed(0)
        module = Tables()
        results.append(run(module, fused_optimizer(module, optimizer)))
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[0])


def test_gradients_of_several_backwards_make_one_step() -> None:
    _, whole, halves = modules()
    halves = halves.float()
    one = run(whole, fused_optimizer(whole), steps=1)
    two = run(halves, fused_optimizer(halves), steps=1, parts=2)
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-5, atol=1e-6)


def test_the_state_dict_and_the_results_of_lookups_are_the_plain_modules() -> None:
    plain, fused, _ = modules()
    fused_optimizer(fused)
    assert list(fused.state_dict()) == list(plain.state_dict())
    batch = make_batch(3)
    torch.testing.assert_close(fused(batch), plain(batch), rtol=1e-6, atol=1e-6)
    with torch.inference_mode():
        torch.testing.assert_close(fused(batch), plain(batch), rtol=1e-6, atol=1e-6)


def test_learned_weights_of_ids_get_their_gradient() -> None:
    plain, fused, _ = modules()
    fused_optimizer(fused)
    batch = make_batch(1)
    gradients = []
    for module in (plain, fused):
        weights = batch["weights"].clone().requires_grad_()
        module.summed(batch["values"], batch["offsets"], weights).square().sum().backward()
        gradients.append(weights.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_optimizers_state_is_restored() -> None:
    torch.manual_seed(0)
    module = Tables()
    optimizer = fused_optimizer(module)
    run(module, optimizer, steps=3)
    other = Tables()
    again = fused_optimizer(other)
    other.load_state_dict(module.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first, second = run(module, optimizer, steps=2), run(other, again, steps=2)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_a_table_used_in_another_way_too_is_refused_by_name() -> None:
    table = nn.Embedding(9, 4)
    optimizer = FusedTables(fuse_tables(table)[0], "adagrad", RATE)
    ids = torch.tensor([1, 2])
    (table(ids).sum() + table.weight.sum()).backward()
    with pytest.raises(UsageError, match=r"weight: gets a gradient .*skip: \[weight\]"):
        optimizer.step()


def test_what_cannot_be_fused_is_left_with_its_reason() -> None:
    tied = nn.Embedding(5, 4)
    module = nn.ModuleDict(
        {
            "maximum": nn.EmbeddingBag(5, 4, mode="max"),
            "norm": nn.Embedding(5, 4, max_norm=1.0),
            "frequency": nn.Embedding(5, 4, scale_grad_by_freq=True),
            "frozen": nn.Embedding(5, 4).requires_grad_(False),
            "wide": nn.Embedding(5, 4).double(),
            "left": nn.Embedding(5, 4),
            "tied": tied,
            "out": nn.Linear(4, 5),
            "own": Own(5, 4),
            "good": nn.Embedding(5, 4),
        }
    )
    module["out"].weight = tied.weight
    groups, notes = fuse_tables(module, lambda name: name == "left.weight")
    assert [group.names for group in groups] == [["good.weight"]]
    reasons = {
        "maximum": "maximum",
        "norm": "max_norm",
        "frequency": "scale_grad_by_freq",
        "frozen": "frozen",
        "wide": "float64",
        "left": "skip",
        "tied": "several modules",
        "own is a Own, whose own forward must stay": "own forward",
    }
    assert [note.split(".")[0] for note in notes] == list(reasons)
    assert all(reason in note for note, reason in zip(notes, reasons.values(), strict=True))


def test_tables_of_torchrec_are_fused() -> None:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    def make():
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=8, num_embeddings=11, feature_names=[f"f{i}"]
            )
            for i in range(2)
        ]
        return EmbeddingBagCollection(tables=tables, is_weighted=True)

    plain, fused = make(), make()
    optimizer = FusedTables(fuse_tables(fused)[0], "adagrad", RATE)
    theirs = torch.optim.Adagrad(plain.parameters(), lr=RATE)
    jagged = KeyedJaggedTensor(
        keys=["f0", "f1"],
        values=torch.tensor([1, 1, 2, 10, 3]),
        lengths=torch.tensor([2, 0, 1, 2]),
        weights=torch.tensor([0.5, 1.0, 2.0, 1.0, 3.0]),
    )
    for _ in range(3):
        for module, step in ((plain, theirs), (fused, optimizer)):
            step.zero_grad()
            (module(jagged).values() * torch.arange(1.0, 17.0)).sum().backward()
            step.step()
    assert list(fused.state_dict()) == list(plain.state_dict())
    for ours, expected in zip(fused.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
