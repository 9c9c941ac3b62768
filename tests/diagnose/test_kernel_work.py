"""Operations and bytes of the library's kernels, against counts by hand over their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankopt.diagnose.costs import Cost, cost_of
from rankopt.diagnose.kernel_work import Operations, mlp_bits, mlp_layers
from rankopt.diagnose.profile import Notes, Site
from rankopt.diagnose.roofline import limits_of
from rankopt.diagnose.schema import MachinePeaks, ReadPeak
from rankopt.kernels.lookup import COPY, SUM, PlanRow, encode_plan
from rankopt.kernels.packing import pack_linear_fp32, pack_linear_int8
from rankopt.tables import TYPE_CODES

LENGTHS = torch.tensor([0, 3, 9])
MAX_LENGTH, NUM_CONTEXT, WIDTH = 5, 2, 8


def form(*shape: int) -> Tensor:
    """Make an activation as notes keep it."""
    return torch.empty(shape, device="meta")


def cost(site: Site, arguments: list[Tensor], values: list[int], result: Tensor) -> Cost:
    constants = [given for given in arguments if given.is_floating_point() and not given.is_meta]
    inputs = [given for given in arguments if all(given is not each for each in constants)]
    return cost_of(site, Notes(constants, inputs, [result], values, arguments), "dense", None)


def work(name: str, arguments: list[Tensor], values: list[int], result: Tensor) -> Operations:
    return cost(Site(name), arguments, values, result).by_arithmetic


def chain() -> tuple[Site, list[Tensor], list[int]]:
    packed = [
        pack_linear_int8(torch.ones(7, 16, dtype=torch.int8)),
        pack_linear_fp32(torch.ones(5, 7)),
        pack_linear_int8(torch.ones(3, 5, dtype=torch.int8)),
    ]
    scales, biases = [torch.ones(7), torch.ones(3)], [torch.ones(5)]
    slope, peak = torch.zeros(1), torch.ones(1)
    optionals = (
        (True, False, True), (False, True, False), (True, False, False), (False, False, True),
    )  # fmt: skip
    site = Site("mlp_int8", optionals=optionals)
    arguments = [form(4, 2, 16), *packed, *scales, *biases, slope, peak]
    return site, arguments, [3, 3, 3, 3, 3, 7, 5, 3, 3, 8, 0, 3, 0, 3]


def test_a_chain_is_put_together_again() -> None:
    site, arguments, values = chain()
    layers = mlp_layers(site, Notes(values=values, arguments=arguments))
    assert layers is not None
    _, *packed, first_scale, last_scale, bias, slope, peak = arguments
    assert [layer.packed is each for layer, each in zip(layers, packed, strict=True)] == [True] * 3
    assert [layer.scale for layer in layers] == [first_scale, None, last_scale]
    assert [layer.bias for layer in layers] == [None, bias, None]
    assert [layer.negative_slope for layer in layers] == [slope, None, None]
    assert [layer.peak for layer in layers] == [None, None, peak]
    assert [layer.num_outputs for layer in layers] == [7, 5, 3]
    assert [layer.activation for layer in layers] == [0, 3, 0]
    assert mlp_bits(Notes(values=values)) == 8
    plain = mlp_layers(site, Notes(values=[*values[:10], 0], arguments=arguments))
    assert plain is not None
    assert [layer.activation for layer in plain] == [0, 0, 0]
    assert mlp_layers(site, Notes(values=[*values[:10], 1, 1], arguments=arguments)) is None
    assert mlp_layers(Site("mlp_int8"), Notes(values=values, arguments=arguments)) is None
    assert mlp_layers(site, Notes(values=values, arguments=arguments[:-1])) is None


def test_each_layer_of_a_chain_is_held_to_its_own_peak() -> None:
    site, arguments, values = chain()
    found = cost(site, arguments, values, form(4, 2, 3))
    assert found.by_arithmetic == {"int8": 2 * 8 * (16 * 7 + 5 * 3), "fp32": 2 * 8 * 7 * 5}
    assert found.num_operations == 2 * 8 * (16 * 7 + 7 * 5 + 5 * 3)
    assert found.arithmetic == "int8"
    rate = {"median_per_s": 1.0, "lowest_per_s": 1.0, "num_samples": 1}
    machine = MachinePeaks(
        fingerprint="x", cpu_model=None, isa="scalar", num_threads=1, made_at="now", bf16=None,
        int8={"per_s": 4e9, **rate}, fp32={"per_s": 1e9, **rate}, gathers=(),
        reads=(ReadPeak(working_set_bytes=1 << 30, peak={"per_s": 1e9, **rate}),),
    )  # fmt: skip
    limits = limits_of(found, machine, 1 << 20, None)
    assert limits.operations_ns == pytest.approx(2 * 8 * ((16 * 7 + 5 * 3) / 4 + 7 * 5))
    assert limits.peak == "int8"


def test_pairs_of_fields() -> None:
    before, fields = [form(4, 16), form(4, 3)], [form(4, 16), form(4, 80)]
    given, values = [*before, *fields], [2, 2, 16, 0, 0, 0]
    assert work("dot_interaction", given, values, form(4, 34)) == {"fp32": 2 * 4 * 15 * 16}
    values[4] = 1  # each field with itself too
    assert work("dot_interaction", given, values, form(4, 40)) == {"fp32": 2 * 4 * 21 * 16}
    # Without lists' lengths what stands in front cannot be told from the fields.
    assert work("dot_interaction", given, [16, 0], form(4, 34)) == {}
    # Five fields behind the first: a product, and two sums; then the columns are added up.
    assert work("fm_interaction", fields, [2, 16, 1, 0], form(4)) == {"fp32": 4 * 16 * (5 * 3 + 1)}
    assert work("fm_interaction", fields, [2, 16, 0, 0], form(4, 16)) == {"fp32": 4 * 16 * 15}


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_tokens_that_see_each_other(causal: bool) -> None:
    pairs = 0
    for length in LENGTHS.tolist():
        num_tokens = NUM_CONTEXT + min(length, MAX_LENGTH)
        for query in range(num_tokens):
            pairs += query + 1 if causal else num_tokens
    tokens = form(len(LENGTHS) * NUM_CONTEXT + 12, WIDTH)
    values = [2, NUM_CONTEXT, MAX_LENGTH, 1, int(causal)]
    for bias in ([], [torch.zeros(2, 15)]):
        found = work("hstu_attention", [tokens, tokens, tokens, LENGTHS, *bias], values, tokens)
        assert found == {"fp32": pairs * 2 * (2 * WIDTH)}
    assert work("hstu_attention", [tokens, tokens, tokens, form(3)], values, tokens) == {}


@pytest.mark.parametrize("index", [None, torch.tensor([1, 2, 2, 0])])
def test_pairs_of_candidates_and_tokens(index: Tensor | None) -> None:
    lists = [0, 1, 2] if index is None else index.tolist()
    seen = [NUM_CONTEXT + min(int(LENGTHS[each]), MAX_LENGTH) + 1 for each in lists]
    query, tokens = form(len(lists), WIDTH), form(18, WIDTH)
    given = [query, tokens, tokens, query, query, LENGTHS]
    more = [] if index is None else [index]
    values = [2, NUM_CONTEXT, MAX_LENGTH, 1]
    for bias in ([], [torch.zeros(2, 15)]):
        found = work("hstu_candidate_attention", [*given, *more, *bias], values, query)
        assert found == {"fp32": sum(seen) * 2 * (2 * WIDTH)}


@pytest.mark.parametrize("index", [None, torch.tensor([1, 2, 2, 0])])
def test_a_target_attention_works_on_the_pairs_there_are(index: Tensor | None) -> None:
    lists = [0, 1, 2] if index is None else index.tolist()
    pairs = sum(min(int(LENGTHS[each]), MAX_LENGTH) for each in lists)
    query, keys, weights = form(len(lists), WIDTH), form(12, WIDTH), torch.zeros(99)
    more = [] if index is None else [index]
    values = [6, 4, 1, 3, 1, 1, 2, MAX_LENGTH]  # widths and how many, activations and how many
    found = work("target_attention", [query, keys, LENGTHS, *more, weights], values, query)
    a_pair = WIDTH * 6 + 6 * 4 + 4 * 1 + WIDTH
    a_candidate = WIDTH * 6 + WIDTH * 6
    assert found == {"fp32": 2 * (pairs * a_pair + len(lists) * a_candidate)}
    unknown = [MAX_LENGTH]
    assert work("target_attention", [query, keys, LENGTHS, *more, weights], unknown, query) == {}


def test_a_masked_target_attention_works_on_the_places_that_count() -> None:
    query, keys, weights = form(2, WIDTH), form(2, 5, WIDTH), torch.zeros(99)
    mask = torch.tensor([[True, False, True, True, False], [False] * 5])
    values = [6, 4, 1, 3, 1, 1, 2, 0]
    found = work("masked_target_attention", [query, keys, mask, weights], values, query)
    a_pair = WIDTH * 6 + 6 * 4 + 4 * 1 + WIDTH
    assert found == {"fp32": 2 * (3 * a_pair + 2 * (WIDTH * 6 + WIDTH * 6))}
    given = [query, keys, form(2, 5), weights]
    assert work("masked_target_attention", given, values, query) == {}


def test_sums_of_lists_and_products_by_request() -> None:
    found = work("ragged_sum", [form(12), form(12, WIDTH), LENGTHS], [MAX_LENGTH], form(3, WIDTH))
    assert found == {"fp32": 2 * (0 + 3 + 5) * WIDTH}
    x, y, index = form(6, 2, 1, 8), form(3, 2, 8, 5), torch.zeros(6, dtype=torch.int64)
    found = work("request_matmul", [x, y, index], [], form(6, 2, 1, 5))
    assert found == {"fp32": 2 * 6 * 2 * 1 * 8 * 5}


def test_bytes_of_planned_lookups() -> None:
    store = torch.zeros(100_000, dtype=torch.uint8)
    code = TYPE_CODES["fp32"]
    rows = [
        PlanRow(SUM, 0, 100, 8, code, 0, source=0, length=2),
        PlanRow(SUM, 3200, 100, 8, code, 8, source=1, length=0, offsets=2),
        PlanRow(COPY, 0, 0, 4, 0, 16, source=3),
    ]
    plan = encode_plan(rows)
    ids, listed = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(7, dtype=torch.int32)
    offsets = torch.zeros(4, dtype=torch.int64)
    result, plan_bytes = form(4, 20), plan.numel() * 8
    inputs = [ids, listed, offsets, form(4, 4)]
    held = Notes([store, plan], inputs, [result], [4, 4, 20], [store, plan, *inputs])
    found = cost_of(Site("lookup_rows"), held, "lookup", None)
    tables, read = (8 + 7) * 32, 8 * 8 + 7 * 4 + 4 * 8
    assert found.num_bytes == plan_bytes + tables + read + 4 * 20 * 4 + 4 * 4 * 4
    assert found.parameter_bytes == plan_bytes
    # One row an id of every input, which lists may be or not.
    plan = encode_plan([PlanRow(SUM, 0, 100, 8, code, 0, source) for source in (0, 1)])
    held = Notes([store, plan], [ids, listed], [form(15, 8)], [2, 8], [store, plan, ids, listed])
    found = cost_of(Site("lookup_sequences"), held, "lookup", None)
    assert found.num_bytes == plan.numel() * 8 + 15 * 32 + 8 * 8 + 7 * 4 + 15 * 32
