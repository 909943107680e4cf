"""How the bench's numbers are put: units, tables that are Markdown too, and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One promise about speed or memory, and what was measured for it (None: nothing was)."""

    what: str
    unit: str
    value: float | None
    limit: float
    at_least: bool  # else: at most

    def met(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def measured(self) -> str:
        return "not measured" if self.value is None else self._put(self.value)

    def wanted(self) -> str:
        return f"at {'least' if self.at_least else 'most'} {self._put(self.limit)}"

    def as_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "measured": self.measured(),
            "wanted": self.wanted(),
            "value": self.value,
            "limit": self.limit,
            "met": self.met(),
        }

    def _put(self, value: float) -> str:
        if self.at_least:
            return f"{value:.1f}x {self.unit}"
        if self.unit.startswith("of "):
            return f"{value:.2f} {self.unit}"
        return f"{value:.1f} {self.unit}"


def at_most(what: str, unit: str, value: float | None, limit: float) -> Target:
    return Target(what, unit, value, limit, at_least=False)


def at_least(what: str, than: str, value: float | None, limit: float) -> Target:
    """The value is how many times faster than something it is."""
    return Target(what, f"as fast as {than}", value, limit, at_least=True)


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if abs(value) >= 1e-3:
        return f"{1e3 * value:.2f} ms"
    return f"{1e6 * value:.1f} us"


def size(value: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value // unit} {name}"
    return f"{value} B"


def table(head: list[str], rows: list[list[str]]) -> None:
    """A Markdown table whose columns also line up on a terminal."""
    full = [row + [""] * (len(head) - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *full, strict=True)]
    rule = [
        ("-" if i == 0 else "-" * (width - 1) + ":").ljust(width, "-")
        for i, width in enumerate(widths)
    ]
    for row in (head, rule, *full):
        cells = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print(f"| {' | '.join(cells)} |")


def sentence(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB of memory, "
        f"Linux {machine['linux']}, torch {machine['torch']}"
    )
