"""The sweep of `moexp tune` as a table: what was measured of it, and all of it as simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moexp.base import atomic
from moexp.tables.core.provenance import provenance_text
from moexp.tables.core.rows import Bootstrapped, throughput, with_ends
from moexp.tables.core.run import ArmRecords
from moexp.tables.core.table import Columns, Row, shown, to_csv, view_of, view_text
from moexp.tables.core.tags import SIMULATED

if TYPE_CHECKING:
    from moexp.bench.replay import Setting

AR = "ar"
MEASURED_COLUMNS = with_ends("tokens_per_s", "speedup", "alpha")
COLUMNS = ["target", "platform", "method", "max_draft", "tau", "budget", "prefetch_top", "tag", "prompts"]
COLUMNS += [*MEASURED_COLUMNS, "chosen"]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """What a sweep found.

    Attributes:
        keys: `target` and `platform` of every row.
        tag: of what was measured.
        guesses: setting -> simulated tokens a second.
        settings: those that were measured, by the names of their methods.
        arms: method -> what it did, AR included.
        chosen: the method that is best of those that saw every prompt.
        samples: of the bootstrap.
        invocations: that measured.
    """

    keys: Mapping[str, str]
    tag: str
    guesses: Mapping[Setting, float]
    settings: Mapping[str, Setting]
    arms: Mapping[str, Sequence[ArmRecords]]
    chosen: str
    samples: int
    invocations: Sequence[dict[str, Any]]

    def rows(self) -> list[Row]:
        """Measured rows: AR, then those that saw most prompts, the fastest first."""
        rows = [self._row(name) for name in self.arms]
        rows.sort(key=lambda row: (row["method"] != AR, -int(row["prompts"] or 0), -float(row["tokens_per_s"] or 0)))
        return rows

    def simulated(self) -> list[Row]:
        """Simulated rows, the fastest first."""
        ranked = sorted(self.guesses, key=lambda setting: -self.guesses[setting])
        return [self._keys(setting, SIMULATED) | {"tokens_per_s": self.guesses[setting]} for setting in ranked]

    def _row(self, name: str) -> Row:
        setting = self.settings.get(name)
        arms, ar = ({arm.request.request: arm for arm in self.arms[method]} for method in (name, AR))
        measured = throughput(Bootstrapped(samples=self.samples), arms, ar if setting else None, 1)
        return {
            **self._keys(setting, self.tag),
            "prompts": len(arms),
            **{column: measured[column] for column in MEASURED_COLUMNS},
            "chosen": "yes" if name == self.chosen else None,
        }

    def _keys(self, setting: Setting | None, tag: str) -> Row:
        values = {} if setting is None else dataclasses.asdict(setting)
        return {**self.keys, "method": AR if setting is None else "draft-expert", **values, "tag": tag}


def write_sweep(path: Path, sweep: Sweep) -> list[Row]:
    """Writes the sweep as CSV, measured rows first, and what was measured of it as Markdown beside it; returns that."""
    rows = sweep.rows()
    atomic.write_text(path, to_csv(COLUMNS, [*rows, *sweep.simulated()]))
    atomic.write_text(path.with_suffix(".md"), _markdown(sweep, rows))
    return rows


def _markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    columns: Columns = {
        "method": "method", "K": "max_draft", "tau": "tau", "B": "budget", "top": "prefetch_top", "prompts": "prompts",
        "tokens/s": shown("tokens_per_s", ends=True), "speedup": shown("speedup", ends=True),
        "alpha": shown("alpha", ends=True), "": lambda row: "chosen" if row["chosen"] else "",
    }  # fmt: skip
    parts = [
        f"# Tuning of `{sweep.keys['target']}`",
        view_text(view_of(f"{sweep.keys['platform']} ({rows[0]['tag']})", rows, columns)),
        f"The best of {len(sweep.guesses)} settings by a simulation from recorded drafts (`tune.csv` has it in full), "
        "measured on prompts of their own by successive halving; `chosen` is the fastest of those that saw every "
        "prompt.",
        f"Provenance: {provenance_text(sweep.invocations)}.",
    ]
    return "\n\n".join(parts) + "\n"
