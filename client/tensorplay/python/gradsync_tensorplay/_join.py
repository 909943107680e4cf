"""Ranks that run out of input at different times tell each other, in each forward, who goes on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

from gradsync.errors import MismatchError

from ._handles import Group


class _Flag(IntFlag):
    """What a rank says about the iteration that begins."""

    LIVING = 1  # it has input
    SYNCHRONISES = 2
    SYNCS_BUFFERS = 4


@dataclass
class Iteration:
    """One in which others take part."""

    living: list[int]  # the ranks that have input
    synchronise: bool
    sync_buffers: bool


class UnevenInputs:
    """One `join`, on one rank."""

    def __init__(
        self, group: Group, divide_by_initial_world_size: bool, throw_on_early_termination: bool
    ) -> None:
        self.divide_by_initial_world_size = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._group = group
        self.last_living = list(range(group.session.world_size))

    def go_on(self, synchronises: bool, syncs_buffers: bool) -> list[int]:
        """This rank begins another forward. Returns those that do."""
        own = _Flag.LIVING
        if synchronises:
            own |= _Flag.SYNCHRONISES
        if syncs_buffers:
            own |= _Flag.SYNCS_BUFFERS
        living = self._exchange(own).living
        if self._throws and len(living) < self._group.session.world_size:
            raise RuntimeError(
                "Detected at least one rank that exhausted inputs. Throwing across all ranks."
            )
        return living

    def wait_for_others(self) -> Iteration | None:
        """This rank is through. Returns the iteration that others begin; None: all are through."""
        iteration = self._exchange(_Flag(0))
        if not iteration.living:
            return None
        if self._throws:
            raise RuntimeError(f"Rank {self._group.session.rank} exhausted all inputs.")
        return iteration

    def _exchange(self, own: _Flag) -> Iteration:
        flags = [_Flag(one[0]) for one in self._group.all_gather(bytes([own]))]
        living = [rank for rank, flag in enumerate(flags) if flag]
        if living:
            self.last_living = living
        for rank in living:
            if flags[rank] != flags[living[0]]:
                raise MismatchError(
                    f"in one iteration of join rank {living[0]} does "
                    f"{_describe(flags[living[0]])}, but rank {rank} does {_describe(flags[rank])}:"
                    " enter no_sync and no_grad on every rank alike"
                )
        first = flags[living[0]] if living else _Flag(0)
        return Iteration(living, _Flag.SYNCHRONISES in first, _Flag.SYNCS_BUFFERS in first)


def _describe(flag: _Flag) -> str:
    gradients = "average gradients" if _Flag.SYNCHRONISES in flag else "not average gradients"
    return f"{gradients} and {'' if _Flag.SYNCS_BUFFERS in flag else 'not '}broadcast buffers"
