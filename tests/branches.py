"""Every way in which a random program can run, for tests that compare distributions exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


class Branches:
    """Runs a random program once for each way its choices can fall, with the probability of each.

    It has a sampler's `flip` and `draw`, so it can stand in its place.
    """

    def outcomes(self, program: Callable[[Branches], Any]) -> Iterator[tuple[float, Any]]:
        """(probability, result) of every path."""
        pending: list[list[Any]] = [[]]
        while pending:
            self.script: list[Any] = pending.pop()
            self.taken: list[tuple[Any, list[Any]]] = []
            self.weight = 1.0
            result = program(self)
            yield self.weight, result
            # Alternatives of the choices that this run was the first to make.
            for at in range(len(self.script), len(self.taken)):
                for other in self.taken[at][1]:
                    pending.append([choice for choice, _ in self.taken[:at]] + [other])

    def _choose(self, options: list[tuple[Any, float]]) -> Any:
        options = [(option, weight) for option, weight in options if weight > 0]
        at = len(self.taken)
        choice = self.script[at] if at < len(self.script) else options[0][0]
        self.weight *= dict(options)[choice]
        self.taken.append((choice, [option for option, _ in options if option != choice]))
        return choice

    def flip(self, probability: float) -> bool:
        return bool(self._choose([(True, probability), (False, 1 - probability)]))

    def draw(self, probs: Tensor) -> int:
        return int(self._choose(list(enumerate(probs.tolist()))))
