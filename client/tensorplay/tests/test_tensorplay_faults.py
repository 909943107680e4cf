"""What goes wrong is said, on every rank."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tp_scenarios as scenarios

if TYPE_CHECKING:
    from tp_ranks import Ranks

pytest_plugins = ["tp_ranks"]

PROMPTLY_S = 1.0


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("shape", 'rank 0 has parameter "1.weight" (float32 [4, 6]) where rank {last} has '),
        ("dtype", 'where rank {last} has parameter "1.weight" (float64 [4, 6])'),
        ("frozen", 'where rank {last} has frozen parameter "0.bias"'),
        ("buffer", 'buffer "extra" (float32 [3]) where rank {last} has buffer "extra" (float32'),
        ("setting", "find_unused_parameters=False where rank {last} has find_unused_parameters="),
    ],
)
@pytest.mark.parametrize("size", [2, 4])
def test_models_that_differ_are_refused_everywhere(
    ranks: Ranks, size: int, what: str, said: str
) -> None:
    for outcome in ranks.outcomes(scenarios.wrap_different, size, what=what):
        assert outcome.error == "MismatchError"
        assert "DDP expects same model across all ranks" in outcome.message
        assert said.format(last=size - 1) in outcome.message


def test_a_killed_rank_is_named_to_the_others_within_a_second(ranks: Ranks, tmp_path: Path) -> None:
    note = tmp_path / "killed"
    outcomes = ranks.outcomes(scenarios.lose_a_rank, 4, note=str(note))
    killed = float(note.read_text())
    assert outcomes[scenarios.VICTIM].status == -signal.SIGKILL
    for rank in (0, 2, 3):
        assert outcomes[rank].error == "RankLostError"
        assert "rank 1" in outcomes[rank].message
        assert outcomes[rank].at - killed < PROMPTLY_S


def test_a_rank_that_stays_away_is_named_at_the_deadline(ranks: Ranks) -> None:
    outcome = ranks.outcomes(scenarios.stay_away, 2)[0]
    assert outcome.error == "DeadlineExceededError"
    assert "rank 1" in outcome.message


def test_a_second_backward_after_one_forward_is_refused(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.go_backward_twice, 2):
        assert outcome.error == "FailedPreconditionError"
        assert "Expected to mark a variable ready only once." in outcome.message
        assert "4.weight" in outcome.message or "4.bias" in outcome.message


@pytest.mark.parametrize("how", ["type", "replaced"])
def test_a_converted_parameter_is_named(ranks: Ranks, how: str) -> None:
    for outcome in ranks.outcomes(scenarios.convert, 2, how=how):
        assert outcome.error == "FailedPreconditionError"
        name = "0.weight" if how == "type" else "2.weight"
        assert f'parameter "{name}" was converted or replaced' in outcome.message


def test_an_error_of_the_trainers_own_does_not_end_training(ranks: Ranks) -> None:
    first, second = ranks.run(scenarios.raise_in_backward, 2)
    assert first == second
    error, failed, afterwards = first
    assert error == "enough"
    assert failed == afterwards


def test_a_module_without_gradients_is_refused(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.wrap_unfit, 2, what="frozen"):
        assert outcome.error == "RuntimeError"
        assert outcome.message.startswith("DistributedDataParallel is not needed when a module")


def test_a_type_that_cannot_be_averaged_is_named(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(scenarios.wrap_unfit, 2, what="type"):
        assert outcome.error == "TypeError"
        assert 'parameter "0.odd" cannot be averaged: it is complex32 [2]' in outcome.message
