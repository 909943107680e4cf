"""Wrapped TensorPlay modules train as one process would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorplay as tp
import tp_scenarios as scenarios
from tp_scenarios import STEPS

if TYPE_CHECKING:
    from tp_ranks import Ranks

pytest_plugins = ["tp_ranks"]

SMALL = 0.001  # MiB: several buckets


def close(actual: Any, expected: Any) -> None:
    """Of lists of lists, or dicts of them, that may hold None."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            close(actual[key], value)
    elif expected is None:
        assert actual is None
    elif isinstance(expected, list) and any(isinstance(one, (dict, list)) for one in expected):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            close(one, other)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def same(states: list[Any]) -> None:
    """Bitwise: floats survive JSON."""
    for one in states[1:]:
        assert one == states[0]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": SMALL},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_ranks_train_as_one_process_on_the_whole_batch(
    ranks: Ranks, size: int, options: dict[str, Any]
) -> None:
    states = ranks.run(scenarios.train, size, options=options)
    same(states)
    close(states[0], scenarios.train_alone())


@pytest.mark.parametrize("views", [False, True])
def test_gradients_may_be_zeroed_in_place(ranks: Ranks, views: bool) -> None:
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL}
    states = ranks.run(scenarios.train, 2, options=options, set_to_none=False)
    same(states)
    close(states[0], scenarios.train_alone())


@pytest.mark.parametrize("outside", [False, True], ids=["", "the last backward outside"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
def test_no_sync_accumulates(ranks: Ranks, options: dict[str, Any], outside: bool) -> None:
    states = ranks.run(scenarios.train, 2, options=options, accumulate=2, outside=outside)
    same(states)
    close(states[0], scenarios.train_alone())


@pytest.mark.parametrize("views", [False, True])
def test_nothing_is_averaged_under_no_sync(ranks: Ranks, views: bool) -> None:
    for rank, result in enumerate(ranks.run(scenarios.accumulate_only, 2, views=views)):
        assert result == {"weight": [[2.0 * (rank + 1)] * 6] * 6, "bias": [2.0] * 6}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_other_types(ranks: Ranks, dtype: str) -> None:
    for gradient in ranks.run(scenarios.train_types, 2, dtype=dtype):
        assert gradient == [[1.5] * 4] * 3


def test_the_callers_own_gradient_is_not_written_to(ranks: Ranks) -> None:
    for rank, (own, gradient) in enumerate(ranks.run(scenarios.lend_a_gradient, 2)):
        assert own == [float(rank)] * 6
        assert gradient == [0.5] * 6


def test_a_module_can_be_wrapped_again(ranks: Ranks) -> None:
    results = ranks.run(scenarios.wrap_again, 2)
    assert results[0]["averaged"] == results[1]["averaged"]
    assert results[0]["alone"] != results[1]["alone"]


def test_torch_is_not_loaded(ranks: Ranks) -> None:
    assert ranks.run(scenarios.modules_loaded, 2) == [[], []]


# ---- Unused parameters --------------------------------------------------------------------------


def average(everyones: list[dict[str, Any]], before: dict[str, Any]) -> dict[str, Any]:
    """Of what each rank's own backward gave: None where it used no parameter."""
    averages = {}
    for name, kept in before.items():
        given = [np.array(one[name]) for one in everyones if one[name] is not None]
        averages[name] = (np.sum(given, axis=0) / len(everyones)).tolist() if given else kept
    return averages


def train_branches_alone(size: int) -> list[Any]:
    model = scenarios.make(0, scenarios.Branches)
    model.never.weight.grad = tp.full([6, 6], 7.0)
    optimizer = tp.optim.SGD(
        [*model.trunk.parameters(), *model.branches.parameters()], lr=0.05, momentum=0.9
    )
    seen = []
    for step in range(STEPS):
        everyones = []
        for rank in range(size):
            for name, parameter in model.named_parameters():
                if not name.startswith("never"):
                    parameter.grad = None
            scenarios.branch_loss(model, rank, step).backward()
            own = scenarios.gradients(model)
            everyones.append({n: None if n.startswith("never") else g for n, g in own.items()})
        kept = {n: g if n.startswith("never") else None for n, g in own.items()}
        averages = average(everyones, kept)
        for name, parameter in model.named_parameters():
            value = averages[name]
            parameter.grad = None if value is None else tp.tensor(value)
        seen.append(averages)
        optimizer.step()
    return [seen, scenarios.state(model)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("views", [False, True])
def test_parameters_unused_on_some_ranks_do_not_drift(ranks: Ranks, size: int, views: bool) -> None:
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": SMALL}
    results = ranks.run(scenarios.train_branches, size, options=options)
    same(results)
    close(results[0], train_branches_alone(size))


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_with_gradients_zeroed_in_place_do_not_drift(
    ranks: Ranks, views: bool
) -> None:
    options = {"gradient_as_bucket_view": views}
    same(ranks.run(scenarios.train_branches, 4, options=options, set_to_none=False))


@pytest.mark.parametrize("views", [False, True])
def test_use_counts_while_accumulating(ranks: Ranks, views: bool) -> None:
    results = ranks.run(scenarios.use_in_accumulation, 2, views=views)
    for name in ("trunk.weight", "branches.0.weight", "branches.1.weight"):
        assert results[0][name] == results[1][name] != None  # noqa: E711 - a chain
    assert results[0]["branches.1.bias"] == [0.5] * 6
    assert results[0]["branches.0.bias"] == [1.5] * 6
    for rank, result in enumerate(results):  # what nobody has used is as it was
        assert result["branches.2.bias"] == [float(rank)] * 6
        assert result["branches.2.weight"] == results[0]["branches.2.weight"]
        assert result["never.weight"] is None


def test_a_rank_that_uses_nothing_holds_up_nobody(ranks: Ranks) -> None:
    results = ranks.run(scenarios.use_nothing, 2)
    assert results[0] == results[1]
    assert results[0]["layer.bias"] == [0.5] * 6


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_static_graph_may_differ_by_rank(ranks: Ranks, accumulate: bool) -> None:
    results = ranks.run(scenarios.train_static, 2, accumulate=accumulate)
    same(results)
    weight = 1.0 if accumulate else 0.5
    for step in results[0]:
        assert step["branches.0.bias"] == [weight] * 6
        assert step["branches.1.bias"] == [weight] * 6
        assert step["branches.2.bias"] is None


def test_a_graph_that_is_not_static_raises(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.change_static, 2, first=0, then=1):
        assert outcome.error == "FailedPreconditionError"
        assert "Your training graph has changed in this iteration" in outcome.message
        assert "branches.1." in outcome.message


def test_an_unused_parameter_is_named_by_the_next_forward(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.leave_unused, 2, options={}):
        assert outcome.error == "FailedPreconditionError"
        assert "Expected to have finished reduction in the prior iteration" in outcome.message
        assert "which did not receive grad for rank" in outcome.message
        assert ": branches.1.weight, branches.1.bias, branches.2.weight" in outcome.message


def test_an_output_without_a_part_in_the_loss_is_named(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.leave_an_output_out, 2):
        assert outcome.error == "FailedPreconditionError"
        assert "not all `forward` outputs participate in computing loss" in outcome.message
        assert "second.weight" in outcome.message


# ---- Buffers ------------------------------------------------------------------------------------


def test_buffers_are_rank_0s_in_each_forward(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.keep_buffers, 2, synced=True)
    grid = [[[float(n)] * 2] * 3 for n in range(8)]
    assert first == [grid[0], grid[0], grid[1], grid[2]]
    # Behind the forward under no_sync the buffers stay as they are, as with PyTorch.
    assert second == [grid[0], grid[0], grid[1], grid[3]]


def test_buffers_are_left_alone_where_that_is_asked(ranks: Ranks) -> None:
    _, second = ranks.run(scenarios.keep_buffers, 2, synced=False)
    assert [values[0][0] for values in second] == [1.0, 1.0, 3.0, 5.0]


# ---- Join ---------------------------------------------------------------------------------------


def train_unevenly_alone(size: int, divide: bool, first: int) -> list[Any]:
    """The gradients by step, and the final state."""
    model = scenarios.make(0, scenarios.mlp)
    optimizer = scenarios.sgd(model)
    seen = []
    for step in range(first + 2 * (size - 1)):
        living = [rank for rank in range(size) if step < first + 2 * rank]
        x, y = scenarios.batch(step)
        optimizer.zero_grad()
        divisor = size if divide else len(living)
        total = sum(
            scenarios.loss_of(model, x[rank : rank + 1], y[rank : rank + 1]) for rank in living
        )
        (total / divisor).backward()
        seen.append(scenarios.gradients(model))
        optimizer.step()
    return [seen, scenarios.state(model)]


@pytest.mark.parametrize("divide", [True, False])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {}),
        (2, {"gradient_as_bucket_view": True, "bucket_cap_mb": SMALL}),
        (2, {"find_unused_parameters": True}),
        (2, {"static_graph": True}),
        (4, {}),
    ],
    ids=str,
)
def test_uneven_inputs_are_averaged_as_asked(
    ranks: Ranks, size: int, options: dict[str, Any], divide: bool
) -> None:
    results = ranks.run(scenarios.train_unevenly, size, divide=divide, options=options)
    expected, final = train_unevenly_alone(size, divide, 2)
    for rank, (seen, _, _) in enumerate(results):
        close(seen, expected[: 2 + 2 * rank])
    same([final for _, final, _ in results])
    same([afterwards for _, _, afterwards in results])
    close(results[0][1], final)


def test_a_rank_without_any_input(ranks: Ranks) -> None:
    results = ranks.run(scenarios.train_unevenly, 2, divide=False, options={}, first=0)
    expected, final = train_unevenly_alone(2, False, 0)
    close(results[1][0], expected)
    close([result[1] for result in results], [final, final])


def test_joined_ranks_follow_the_buffers(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.join_with_buffers, 2)
    # Of the highest rank in each iteration: 0 + 2 + 2.
    assert first == second == [[4.0] * 2] * 3


def test_an_early_end_is_thrown_on_every_rank(ranks: Ranks) -> None:
    first, second = ranks.outcomes(scenarios.throw_early, 2)
    assert (first.error, first.message) == ("RuntimeError", "Rank 0 exhausted all inputs.")
    assert second.message == (
        "Detected at least one rank that exhausted inputs. Throwing across all ranks."
    )


def test_ranks_that_do_not_agree_in_join_are_named(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.disagree_in_join, 2):
        assert outcome.error == "MismatchError"
        assert "but rank 1 does not average gradients" in outcome.message


def test_join_can_be_switched_off(ranks: Ranks) -> None:
    same(ranks.run(scenarios.join_without_effect, 2))
