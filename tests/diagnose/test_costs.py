"""What an operator counts as, and what it has to do, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rankopt.diagnose.costs import cost_of, describe_shapes, part_of
from rankopt.diagnose.profile import Notes, Site
from rankopt.diagnose.roofline import Limits
from rankopt.diagnose.rows_read import rows_read
from rankopt.diagnose.worker import sequence_lengths
from rankopt.models.card import ModelCard


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def notes(
    inputs: list[Tensor], outputs: list[Tensor], constants: list[Tensor] | None = None
) -> Notes:
    constants = constants or []
    return Notes(constants, inputs, outputs, [], [*inputs, *constants])


ROW, SEQUENCE = made(4, 16), made(4, 50, 16)
SQUARE = made(4, 3, 3)
TABLE, IDS = made(100, 8), made(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "held", "expected"),
    [
        ("rankopt::linear_int8", notes([ROW], [ROW]), "dense"),
        ("aten::linear", notes([SEQUENCE], [SEQUENCE]), "dense"),
        ("addmm_out", notes([ROW], []), "dense"),
        ("aten::lstm", notes([SEQUENCE], [SEQUENCE]), "dense"),
        ("bmm_out", notes([SQUARE, SQUARE], []), "interaction"),
        ("aten::bmm", notes([SEQUENCE, made(4, 16, 50)], [SEQUENCE]), "attention"),
        ("aten::matmul", notes([ROW, made(16, 8)], [made(4, 8)]), "dense"),
        ("aten::matmul", notes([SQUARE, SQUARE], [SQUARE]), "interaction"),
        ("rankopt::mlp_int8", notes([ROW], [ROW]), "dense"),
        ("request_matmul", notes([SQUARE, SQUARE], [SQUARE]), "interaction"),
        # One query's scores of fifty steps: the history is the last axis.
        ("request_matmul", notes([made(4, 1, 1, 16)], [made(4, 1, 1, 50)]), "attention"),
        ("rankopt::fm_interaction", notes([ROW], [made(4)]), "interaction"),
        ("rankopt::hstu_candidate_attention", notes([ROW], [ROW]), "attention"),
        ("rankopt::ragged_sum", notes([ROW], [ROW]), "attention"),
        ("rankopt::lookup_sequences", notes([IDS], [ROW]), "lookup"),
        ("rankopt::dot_interaction", notes([SQUARE], [ROW]), "interaction"),
        ("rankopt::target_attention", notes([SEQUENCE], [ROW]), "attention"),
        ("rankopt::masked_target_attention", notes([SEQUENCE], [ROW]), "attention"),
        ("aten::embedding_bag", notes([TABLE, IDS], [ROW]), "lookup"),
        ("rankopt::lookup_rows", notes([IDS], [ROW]), "lookup"),
        ("aten::quantize_per_tensor", notes([ROW], [ROW]), "quantise"),
        ("rankopt::eager_part", notes([ROW], [ROW]), "eager part"),
        ("aten::softmax", notes([ROW], [ROW]), "attention"),
        ("aten::cat", notes([ROW], [ROW]), "other compiled code"),
        ("aten::silu", notes([SEQUENCE], [SEQUENCE]), "attention"),
        ("aten::silu", notes([made(4, 49, 16)], []), "other compiled code"),
        # Fifty values of a row are not a history of fifty steps.
        ("aten::silu", notes([made(4, 50)], [made(4, 50)]), "other compiled code"),
    ],
)
def test_parts_go_by_name_and_shape(name: str, held: Notes, expected: str) -> None:
    assert part_of(Site(name), held, {50}) == expected


def test_a_fused_loop_counts_as_the_first_of_its_kinds() -> None:
    loop = Site("cpp_fused_cat_embedding_mul_2", generated=True)
    assert part_of(loop, notes([IDS], [SEQUENCE], [TABLE]), {50}) == "lookup"
    # Named after a lookup whose table it does not read.
    assert part_of(loop, notes([IDS], [SEQUENCE]), {50}) == "attention"
    product = Site("cpp_fused_bmm_cat_3", generated=True)
    assert part_of(product, notes([SQUARE], [ROW]), {50}) == "interaction"
    assert part_of(Site("cpp_fused_add_1", generated=True), notes([ROW], [ROW]), ()) == (
        "other compiled code"
    )


def test_a_history_is_as_long_as_its_list_and_the_ids_appended_to_it() -> None:
    def card(*inputs: dict[str, Any]) -> ModelCard:
        return ModelCard.model_validate(
            {"name": "x", "factory": "a:b", "inputs": inputs, "outputs": [{"label": "y"}]}
        )

    history = {
        "name": "history", "kind": "ragged_ids", "column": "h", "num_ids": 9, "max_length": 25,
    }  # fmt: skip
    single = {"name": "context", "kind": "ids", "columns": ["a", "b"], "num_ids": 9}
    # Two ids and one learned step may stand beside the list.
    assert sequence_lengths(card(history, single)) == {25, 26, 27, 28}
    assert sequence_lengths(card({**history, "max_length": 6}, single)) == set()
    assert sequence_lengths(card(single)) == set()
    # Nine ids and a bag: an axis of 10 or 11 is what an interaction works on.
    nine = {**single, "columns": list("abcdefghi")}
    lengths = sequence_lengths(card({**history, "max_length": 8}, nine))
    assert lengths == {8, 9, *range(12, 19)}


def test_products_are_counted() -> None:
    x, weight, out = made(4, 16), made(7, 16), made(4, 7)
    cost = cost_of(Site("aten::linear"), notes([x, weight], [out]), "dense", None)
    assert cost.num_operations == 2 * 4 * 16 * 7
    assert cost.arithmetic == "fp32"
    assert cost.num_bytes == 4 * (4 * 16 + 7 * 16 + 4 * 7)
    packed = made(7 * 16, dtype=torch.int8)
    cost = cost_of(Site("linear_int8"), notes([x], [out], [packed]), "dense", None)
    assert (cost.num_operations, cost.arithmetic) == (2 * 4 * 16 * 7, "int8")
    assert cost.parameter_bytes == 7 * 16
    left, right, into = made(4, 3, 5), made(4, 5, 2), made(4, 3, 2)
    cost = cost_of(Site("bmm_out"), notes([into, left, right], []), "interaction", None)
    assert cost.num_operations == 2 * 4 * 3 * 5 * 2
    cost = cost_of(Site("aten::addmm"), notes([made(7), x, made(16, 7)], [out]), "dense", None)
    assert cost.num_operations == 2 * 4 * 16 * 7
    x16 = made(4, 16, dtype=torch.bfloat16)
    assert cost_of(Site("mm"), notes([x16], [out]), "dense", None).arithmetic == "bf16"
    assert cost_of(Site("aten::relu"), notes([x], [x]), "dense", None).num_operations is None


def test_bytes_of_a_lookup_are_the_rows_it_reads() -> None:
    big = made(1_000, 8)
    eager = cost_of(Site("aten::embedding"), notes([big, IDS], [made(4, 8)]), "lookup", 4 * 32)
    assert eager.num_bytes == 4 * 32 + 4 * 8 + 4 * 8 * 4
    compiled = cost_of(Site("x_lookup"), notes([IDS], [made(4, 8)], [big]), "lookup", 4 * 32)
    assert compiled.num_bytes == eager.num_bytes


def test_an_operand_counts_once_and_activations_lie_nowhere() -> None:
    x = made(10)
    assert cost_of(Site("aten::mul"), notes([x, x], []), "dense", None).num_bytes == 40
    a, b = x.to("meta"), x.to("meta")
    assert cost_of(Site("aten::mul"), notes([a, b], []), "dense", None).num_bytes == 80


def test_shapes_are_written_short() -> None:
    held = notes([made(2, 3), IDS, *[made(1)] * 4], [made(2)])
    assert describe_shapes(held) == (
        "float32[2, 3], int64[4], float32[1], float32[1] and 2 more -> float32[2]"
    )


def test_the_nearest_limit_bounds_unless_it_explains_little() -> None:
    assert Limits(60.0, 20.0, "int8").bound(100.0) == "operations"
    assert Limits(20.0, 60.0, "int8").bound(100.0) == "bytes"
    assert Limits(20.0, 10.0, "int8").bound(100.0) == "overhead"
    assert Limits(None, 50.0, None).bound(100.0) == "bytes"


def test_rows_of_a_planned_lookup() -> None:
    store = torch.zeros(1_000, dtype=torch.uint8)
    plan = torch.tensor(
        [
            # mode, start, rows, values, int8, out, source, column, length, offsets, weights
            [0, 100, 10, 8, 2, 0, 0, 1, 2, -1, -1],
            [1, 400, 5, 4, 1, 8, 1, 0, 0, 2, -1],
            [2, 0, 0, 4, 0, 12, 3, 0, 0, -1, -1],
        ]
    )
    ids = torch.tensor([[0, 1, 2], [3, 4, 99]])
    values, offsets, piece = torch.tensor([4, 0, 1]), torch.tensor([0, 2, 3]), torch.zeros(2, 4)
    given = [store, plan, ids, values, offsets, piece]
    read = rows_read(Site("lookup_rows"), Notes(arguments=given))
    assert read is not None
    # Rows of 8 bytes with scale and bias; id 99 has no row. Then rows of four fp16 values.
    assert read.offsets.tolist() == [100 + 12, 100 + 24, 100 + 48, 432, 400, 408]
    assert read.row_bytes.tolist() == [12, 12, 12, 8, 8, 8]
    # Of sequences every id of an input is read, whatever its form.
    read = rows_read(Site("lookup_sequences"), Notes(arguments=[store, plan[:1], ids]))
    assert read is not None
    assert read.offsets.tolist() == [100 + 12 * row for row in range(5)]
    packed = [store, plan[:1], ids.float().to("meta")]
    assert rows_read(Site("lookup_rows"), Notes(arguments=packed)) is None
    assert rows_read(Site("other_lookup"), Notes(arguments=given)) is None
