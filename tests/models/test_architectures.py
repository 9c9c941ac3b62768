from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from models.reference import CASES, HISTORY, din_inputs, hstu_inputs, small_din, small_hstu
from rankopt.models.deepfm import DeepFM
from rankopt.models.dlrm import DLRM

BATCH = Dim("batch", min=1, max=4096)
NUM_IDS = Dim("num_ids", min=0, max=1 << 20)
NUM_GENRES = Dim("num_genres", min=0, max=1 << 20)


def dynamic(inputs):
    by_name = {"history_values": NUM_IDS, "genres_values": NUM_GENRES}
    return {name: {0: by_name.get(name, BATCH)} for name in inputs}


def model_of(name):
    torch.manual_seed(0)
    return CASES[name].model().eval()


@pytest.mark.parametrize("name", CASES)
def test_exported_graph_equals_eager_at_every_size(name):
    case, model = CASES[name], model_of(name)
    example = case.inputs(4, None)
    program = export(model, (), example, dynamic_shapes=dynamic(example), strict=False)
    exported = program.module()
    free = [limit for limit in program.range_constraints.values() if limit.upper >= 4096]
    assert len(free) == len({dim for dims in dynamic(example).values() for dim in dims.values()})
    for num_rows, lengths in [
        (1, None),
        (2, None),
        (5, None),
        (1, [0]),
        (5, [0] * 5),
        (3, [0, 9, 0]),
    ]:
        inputs = case.inputs(num_rows, lengths)
        score = model(**inputs)
        assert score.shape == (num_rows,)
        assert score.isfinite().all()
        torch.testing.assert_close(exported(**inputs), score)


@pytest.mark.parametrize("name", CASES)
def test_a_row_scores_the_same_alone_and_in_a_batch(name):
    case, model = CASES[name], model_of(name)
    inputs = case.inputs(6, None)
    together = model(**inputs)
    alone = torch.cat([model(**pick_row(inputs, row)) for row in range(6)])
    torch.testing.assert_close(together, alone)


def pick_row(inputs, row):
    picked = {}
    for name, tensor in inputs.items():
        if name.endswith("_values"):
            lengths = inputs[name.replace("_values", "_lengths")]
            start = int(lengths[:row].sum())
            picked[name] = tensor[start : start + int(lengths[row])]
        else:
            picked[name] = tensor[row : row + 1]
    return picked


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_gets_a_gradient(name):
    case = CASES[name]
    torch.manual_seed(0)
    model = case.model().train()
    model(**case.inputs(8, None)).square().sum().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_dlrm_equals_its_formula_in_fp64():
    torch.manual_seed(0)
    model = DLRM([6, 7], num_dense=3, embedding_dim=4, bottom_mlp=(5,), top_mlp=(6,)).double()
    dense, sparse = torch.randn(3, 3, dtype=torch.float64), torch.randint(0, 6, (3, 2))
    bottom = model.bottom(dense)
    first, second = (model.tables.bags[t].weight[sparse[:, t]] for t in range(2))
    pairs = [(first * bottom).sum(1), (second * bottom).sum(1), (second * first).sum(1)]
    expected = model.top(torch.cat([bottom, torch.stack(pairs, dim=1)], dim=1))[:, 0]
    torch.testing.assert_close(model(dense, sparse), expected)


def test_deepfm_is_first_order_plus_pairs_plus_deep():
    torch.manual_seed(0)
    model = DeepFM([6, 7], num_dense=2, embedding_dim=4, deep_mlp=(5,)).double()
    dense, sparse = torch.randn(3, 2, dtype=torch.float64), torch.randint(0, 6, (3, 2))
    fields = [dense[:, c : c + 1] * model.dense_vectors[c] for c in range(2)]
    fields += [model.tables.bags[t].weight[sparse[:, t]] for t in range(2)]
    linear = sum(model.first_order.bags[t].weight[sparse[:, t], 0] for t in range(2))
    linear = linear + model.first_order_dense(dense)[:, 0]
    pairs = sum((fields[i] * fields[j]).sum(1) for i in range(4) for j in range(i))
    expected = linear + pairs + model.deep(torch.cat(fields, dim=1))[:, 0]
    torch.testing.assert_close(model(dense, sparse), expected)


def test_din_attention_equals_a_loop_over_the_history_in_fp64():
    torch.manual_seed(0)
    model = small_din().double()
    query, keys = torch.randn(2, 8).double(), torch.randn(2, HISTORY, 8).double()
    mask = torch.tensor([[True, True, False, False], [False] * 4])
    interest = model.attention(query, keys, mask)
    expected = torch.zeros(8).double()
    for key in keys[0, :2]:
        pair = torch.cat([query[0], key, query[0] - key, query[0] * key])
        expected = expected + model.attention.score(pair[None])[0, 0] * key
    torch.testing.assert_close(interest[0], expected)
    assert torch.equal(interest[1], torch.zeros(8).double())


@pytest.mark.parametrize("softmax", [False, True])
def test_din_padding_has_no_influence(softmax):
    torch.manual_seed(0)
    model = small_din(softmax=softmax).eval()
    inputs = din_inputs(3, [0, 2, 1])
    before = model(**inputs)
    rows = {int(i) for i in inputs["history_values"]} | {int(i) for i in inputs["item"]}
    with torch.no_grad():
        for padding in set(range(20)) - rows:
            model.item.weight[padding] = 1e4
    assert torch.equal(model(**inputs), before)


def test_din_reads_the_last_ids_of_a_long_history():
    model = model_of("din")
    inputs = din_inputs(1, [9])
    short = inputs | {
        "history_values": inputs["history_values"][-HISTORY:],
        "history_lengths": torch.tensor([HISTORY]),
    }
    torch.testing.assert_close(model(**inputs), model(**short))
    changed = inputs | {"history_values": inputs["history_values"].clone()}
    changed["history_values"][-1] = 0
    assert not torch.allclose(model(**inputs), model(**changed))


def test_hstu_is_causal():
    torch.manual_seed(0)
    model = small_hstu().eval()
    inputs = hstu_inputs(1, [HISTORY])
    before = model.encode(**inputs)
    for changed_at in range(HISTORY):
        values = inputs["history_values"].clone()
        values[changed_at] = (values[changed_at] + 1) % 20
        after = model.encode(**(inputs | {"history_values": values}))
        position = 2 + changed_at  # two context columns stand first
        assert torch.equal(after[:, :position], before[:, :position])
        assert not torch.allclose(after[:, -1], before[:, -1])
    other = model.encode(**(inputs | {"item": (inputs["item"] + 1) % 20}))
    assert torch.equal(other[:, :-1], before[:, :-1])
    assert not torch.allclose(other[:, -1], before[:, -1])


def test_hstu_padding_has_no_influence():
    torch.manual_seed(0)
    model = small_hstu().eval()
    inputs = hstu_inputs(2, [1, 0])
    before = model(**inputs)
    used = {int(i) for i in inputs["history_values"]} | {int(i) for i in inputs["item"]}
    with torch.no_grad():
        for padding in set(range(20)) - used:
            model.item.weight[padding] = 1e4
    assert torch.equal(model(**inputs), before)


def test_hstu_block_equals_a_loop_over_heads_and_positions_in_fp64():
    torch.manual_seed(0)
    block = small_hstu().blocks[0].double()
    num_positions, width, num_heads = block.num_positions, 8, 2
    state = torch.randn(1, num_positions, width).double()
    allowed = torch.ones(num_positions, num_positions).tril().bool()
    allowed[:, 1] = False
    u, v, q, k = torch.nn.functional.silu(block.project(block.norm(state[0]))).chunk(4, dim=-1)
    gathered = torch.zeros(num_positions, width).double()
    size = width // num_heads
    for head in range(num_heads):
        part = slice(head * size, (head + 1) * size)
        for i in range(num_positions):
            for j in range(i + 1):
                score = q[i, part] @ k[j, part] + block.position_bias[head, i - j]
                if allowed[i, j]:
                    weight = score * torch.sigmoid(score) / num_positions
                    gathered[i, part] += weight.detach() * v[j, part].detach()
    expected = state[0] + block.transform(block.gathered_norm(gathered) * u)
    torch.testing.assert_close(block(state, allowed[None])[0], expected)
