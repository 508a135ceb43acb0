"""Prompt templates: slot lists and sentence frames that expand, with a random generator, to many prompts.

The syntax is explained at the head of `moexp/data/workloads/seed_templates.yaml`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import yaml

# A doubled brace stands for one (Python snippets hold some); anything else in braces is a slot or a number.
TOKEN = re.compile(r"\{\{|\}\}|\{(\w+?)(?:#(\d+))?\}")


@dataclass(frozen=True)
class Template:
    """A text with slots, and its integers: `[low, high(, step)]` or an expression such as `a*n+rest`."""

    text: str
    numbers: Mapping[str, list[int] | str]

    @classmethod
    def parse(cls, entry: str | Mapping[str, Any]) -> Template:
        if isinstance(entry, str):
            return cls(entry, {})
        return cls(entry["text"], entry.get("numbers", {}))


@dataclass(frozen=True)
class Templates:
    """Templates by workload, the slot lists they draw from, and the frames that `{passage}` composes."""

    kinds: Mapping[str, tuple[Template, ...]]
    slots: Mapping[str, tuple[str, ...]]
    passages: tuple[tuple[tuple[str, ...], ...], ...]

    @classmethod
    def parse(cls, text: str) -> Templates:
        """Read the YAML text of a template file."""
        raw = yaml.safe_load(text)
        return cls(
            kinds={kind: tuple(map(Template.parse, entries)) for kind, entries in raw["kinds"].items()},
            slots={name: tuple(values) for name, values in raw["slots"].items()},
            passages=tuple(tuple(map(tuple, frame)) for frame in raw["passages"]),
        )

    def draw(self, kind: str, rng: Random) -> str:
        """One random prompt of a workload."""
        template = rng.choice(self.kinds[kind])
        return _Expansion(self, rng, _draw_numbers(template.numbers, rng)).expand(template.text)


@dataclass
class _Expansion:
    """The bindings of one prompt: a slot named twice keeps its value."""

    templates: Templates
    rng: Random
    bound: dict[str, str]

    def expand(self, text: str) -> str:
        return TOKEN.sub(self._substitute, text)

    def _substitute(self, match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0][0]
        name, index = match[1], match[2] or "1"
        value = self._value(name[0].lower() + name[1:], index)
        return value[0].upper() + value[1:] if name[0].isupper() else value

    def _value(self, slot: str, index: str) -> str:
        if slot in self.bound:
            return self.bound[slot]
        key = f"{slot}#{index}"
        if key not in self.bound:
            self.bound[key] = self._passage() if slot == "passage" else self._fresh(slot)
        return self.bound[key]

    def _fresh(self, slot: str) -> str:
        """A value of the slot that this prompt has not used under another index."""
        taken = {value for key, value in self.bound.items() if key.startswith(f"{slot}#")}
        # Values are expanded before the comparison, because two nested values may expand to the same text.
        options = [value for value in self.templates.slots[slot] if value not in taken]
        assert options, f"slot {slot!r} has too few values"
        return self.expand(self.rng.choice(options))

    def _passage(self) -> str:
        frame = self.rng.choice(self.templates.passages)
        sentences = [self.rng.choice(position) for position in frame]
        return self.expand(" ".join(filter(None, sentences)))


def _draw_numbers(numbers: Mapping[str, list[int] | str], rng: Random) -> dict[str, str]:
    drawn: dict[str, int] = {}
    for name, rule in numbers.items():
        if isinstance(rule, str):
            drawn[name] = _sum_of_products(rule, drawn)
        else:
            low, high, *step = rule
            drawn[name] = rng.randrange(low, high + 1, *step)
    return {name: str(value) for name, value in drawn.items()}


def _sum_of_products(expression: str, values: Mapping[str, int]) -> int:
    total = 0
    for term in expression.split("+"):
        product = 1
        for factor in term.split("*"):
            product *= int(factor) if factor.isdigit() else values[factor]
        total += product
    return total
