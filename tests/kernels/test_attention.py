"""What the attention kernels promise beyond the parity grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rankopt.kernels import attention, ops
from rankopt.kernels.attention_cases import (
    AttentionCase,
    candidate_arguments,
    hstu_arguments,
    masked_arguments,
    target_arguments,
)
from rankopt.kernels.registry import KERNELS

CASES = [
    pytest.param("hstu_attention", hstu_arguments, id="hstu"),
    pytest.param("hstu_candidate_attention", candidate_arguments, id="candidate"),
    pytest.param("target_attention", target_arguments, id="target"),
    pytest.param("masked_target_attention", masked_arguments, id="masked"),
]
each_operator = pytest.mark.parametrize(("name", "draw"), CASES)
Draw = Callable[[AttentionCase], tuple[Any, ...]]


def case_of(name: str, **more: Any) -> AttentionCase:
    context = 0 if "target_attention" in name else 3
    more = {"activation": "dice", "hidden": (80, 40), **more}
    return AttentionCase(9, 40, 2, 24, num_context=context, **more)


@each_operator
def test_bits_do_not_depend_on_instruction_set_or_threads(name: str, draw: Draw) -> None:
    arguments = draw(case_of(name, candidates_per_list=3))
    results = []
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(KERNELS[name](*arguments))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("softmax", [False, True])
def test_a_masked_row_scores_the_same_bits_alone(softmax: bool) -> None:
    case = AttentionCase(9, 40, 2, 24, hidden=(80, 40), activation="row_dice", softmax=softmax)
    query, keys, mask, *rest = masked_arguments(case)
    together = KERNELS["masked_target_attention"](query, keys, mask, *rest)
    for row in range(case.num_lists):
        one = slice(row, row + 1)
        alone = KERNELS["masked_target_attention"](query[one], keys[one], mask[one], *rest)
        assert torch.equal(alone, together[one])


def test_what_a_mask_hides_is_not_read() -> None:
    case = AttentionCase(5, 12, 1, 8, softmax=True, fill=-1e9)
    query, keys, mask, *rest = masked_arguments(case)
    some = mask.any(1)
    before = KERNELS["masked_target_attention"](query[some], keys[some], mask[some], *rest)
    keys = keys.masked_fill(~mask[..., None], torch.nan)
    after = KERNELS["masked_target_attention"](query[some], keys[some], mask[some], *rest)
    assert torch.equal(before, after)


def test_a_row_without_a_true_place_gets_what_softmax_gives_it() -> None:
    for fill in (-(2.0**32) + 1, -torch.inf):
        case = AttentionCase(3, 7, 1, 8, lengths="empty", softmax=True, fill=fill)
        query, keys, mask, *rest = masked_arguments(case)
        found = KERNELS["masked_target_attention"](query, keys, mask, *rest)
        if fill == -torch.inf:
            assert bool(found.isnan().all())
        else:
            torch.testing.assert_close(found, keys.mean(1))


def test_a_fill_without_softmax_is_refused() -> None:
    arguments = masked_arguments(AttentionCase(3, 7, 1, 8, fill=-1.0))
    with pytest.raises(RuntimeError, match="fill must be 0 without softmax; got -1"):
        KERNELS["masked_target_attention"](*arguments)


@pytest.mark.parametrize(("name", "draw"), CASES[:3])
def test_a_list_scores_the_same_bits_alone(name: str, draw: Draw) -> None:
    case = case_of(name)
    arguments = list(draw(case))
    together = KERNELS[name](*arguments)
    place = next(i for i, value in enumerate(arguments) if _is_lengths(value))
    lengths = arguments[place]
    ends = lengths.cumsum(0)
    base = case.num_lists * case.num_context
    for index in range(case.num_lists):
        begin, end = int(ends[index] - lengths[index]), int(ends[index])
        context = torch.arange(index * case.num_context, (index + 1) * case.num_context)
        tokens = torch.cat([context, base + torch.arange(begin, end)])
        per_token = base + int(ends[-1])
        alone = [
            value[tokens]
            if isinstance(value, Tensor) and value.dim() == 2 and len(value) == per_token
            else value[index : index + 1]
            if isinstance(value, Tensor) and value.dim() < 3 and len(value) == case.num_lists
            else value
            for value in arguments
        ]
        result = KERNELS[name](*alone)
        assert torch.equal(result, together[tokens if name == "hstu_attention" else [index]])


def _is_lengths(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64


def test_candidates_of_one_request_score_as_with_their_own_copy_of_it() -> None:
    arguments = candidate_arguments(case_of("candidate", candidates_per_list=30))
    q, k, v, own_k, own_v, lengths, index, *rest = arguments
    shared = KERNELS["hstu_candidate_attention"](*arguments)
    ends = lengths.cumsum(0)
    context = torch.stack([torch.arange(3) + 3 * int(request) for request in index]).flatten()
    history = [
        torch.arange(int(ends[request] - lengths[request]), int(ends[request])) + 3 * len(lengths)
        for request in index
    ]
    tokens = torch.cat([context, *history])
    copied = (q, k[tokens], v[tokens], own_k, own_v, lengths[index], None, *rest)
    assert torch.equal(KERNELS["hstu_candidate_attention"](*copied), shared)


def test_ids_that_do_not_count_are_not_read() -> None:
    arguments = list(hstu_arguments(AttentionCase(4, 6, 1, 8, lengths="long")))
    lengths = arguments[3]
    before = KERNELS["hstu_attention"](*arguments)
    ends = lengths.cumsum(0)
    place = torch.arange(int(ends[-1]))
    row = attention.ragged_rows(lengths, place)
    dropped = place < ends[row] - 6
    assert bool(dropped.any())
    assert float(before[dropped].abs().max()) == 0.0
    arguments[:3] = [each.masked_fill(dropped[:, None], torch.nan) for each in arguments[:3]]
    assert torch.equal(KERNELS["hstu_attention"](*arguments), before)


def test_rows_name_their_lists() -> None:
    lengths = torch.tensor([2, 0, 3, 0])
    rows = attention.ragged_rows(lengths, torch.zeros(5))
    assert rows.tolist() == [0, 0, 2, 2, 2]
    assert attention.ragged_rows(torch.zeros(3, dtype=torch.int64), torch.zeros(0)).shape == (0,)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([3, 3], "lie within"),
        ([1, 1], "add up to 2 and there are 5"),
        ([6, -1], "lie within"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        attention.ragged_sum(torch.zeros(5), torch.zeros(5, 2), torch.tensor(lengths), max_length=9)


def test_a_candidate_of_no_request_is_refused() -> None:
    arguments = list(candidate_arguments(case_of("candidate", candidates_per_list=2)))
    arguments[6] = arguments[6].clone()
    arguments[6][1] = 9
    with pytest.raises(RuntimeError, match=r"request_index\[1\] must lie within 0 and 8; got 9"):
        torch.ops.rankopt.hstu_candidate_attention(*arguments)
    arguments[6] = None
    with pytest.raises(RuntimeError, match="without request_index"):
        torch.ops.rankopt.hstu_candidate_attention(*arguments)


def test_shapes_are_known_without_running() -> None:
    for name, draw in (
        ("hstu_attention", hstu_arguments),
        ("target_attention", target_arguments),
        ("masked_target_attention", masked_arguments),
    ):
        arguments = draw(case_of(name))
        on_meta = [v.to("meta") if isinstance(v, Tensor) else v for v in arguments]
        expected = KERNELS[name](*arguments)
        assert getattr(torch.ops.rankopt, name)(*on_meta).shape == expected.shape
