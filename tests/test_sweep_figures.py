"""Figures of sweeps: the best setting at each place, and from where to where speculation pays."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moexp.base.errors import MoexpError
from moexp.cli.simulate import Simulation, run_simulate
from moexp.config.recipe import load_recipe
from moexp.sim.studies.sweep import SCHEMA
from moexp.sim.studies.sweep_file import find_sweep, load_sweep, parts_of
from moexp.tables.sweep_figures import best_rows, draw_sweep, paying

BANDWIDTHS = (1.0, 4.0, 16.0)


def row(method: str, rate: float, **changes: Any) -> dict[str, Any]:
    base = dict.fromkeys(SCHEMA.names)
    base |= {"platform": "p", "model": "m", "source": "s", "cache": "none", "method": method, "tag": "simulated",
             "tokens_per_s": rate, "bandwidth_gb_s": 1.0}  # fmt: skip
    if method != "ar":
        base |= {"policy": method, "prefetch": "no", "max_draft": 4, "drafter": "d"}
    return base | changes


def bandwidth_rows() -> list[dict[str, Any]]:
    """Truncated pays up to 8 GB/s, fixed K nowhere; of each policy K = 2 is the worse."""
    rows = []
    for place, rate in enumerate(BANDWIDTHS):
        ar = 10.0 * (place + 1)
        rows.append(row("ar", ar, bandwidth_gb_s=rate))
        for policy, speedup in (("fixed", 0.8), ("confidence-expansion", (1.5, 1.25, 0.75)[place])):
            for max_draft, share in ((2, 0.9), (4, 1.0)):
                found = speedup * share
                changes = {"bandwidth_gb_s": rate, "max_draft": max_draft, "speedup": found, "tau": 0.5}
                rows.append(row(policy, ar * found, **changes))
    return rows


def test_the_best_setting_of_each_series_is_shown_beside_its_ar():
    shown = best_rows(bandwidth_rows(), "bandwidth_gb_s")
    assert [(r["series"], r["bandwidth_gb_s"], r["speedup"]) for r in shown] == [
        *(("fixed K", rate, 0.8) for rate in BANDWIDTHS),
        *zip(["truncated"] * 3, BANDWIDTHS, (1.5, 1.25, 0.75), strict=True),
    ]
    assert {r["max_draft"] for r in shown} == {4}
    assert [r["ar_tokens_per_s"] for r in shown] == [10.0, 20.0, 30.0] * 2
    assert {(r["pays_from"], r["pays_to"]) for r in shown[:3]} == {(None, None)}
    assert shown[3]["pays_from"] is None and shown[3]["pays_to"] == pytest.approx(8.0)  # half way from 4 to 16


def test_caches_are_series_of_their_own():
    rows = []
    for cache in ("lru", "belady"):
        for slots in (2, 4, 8):
            place = {"cache": cache, "capacity": slots}
            rows += [row("ar", 1.0 * slots, **place), row("fixed", 2.0 * slots, speedup=2.0, **place)]
    shown = best_rows(rows, "capacity")
    assert [(r["series"], r["capacity"]) for r in shown] == [(c, s) for c in ("lru", "belady") for s in (2, 4, 8)]


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.2, 3.0)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_crossings_lie_between_the_points_that_they_part(points):
    points = sorted(points)
    pays_from, pays_to = paying(points)
    above = [speedup > 1 for _, speedup in points]
    assert (pays_from is None) == (not any(b and not a for a, b in zip(above, above[1:], strict=False)))
    assert (pays_to is None) == (not any(a and not b for a, b in zip(above, above[1:], strict=False)))
    for place in (pays_from, pays_to):
        if place is not None:
            assert points[0][0] * (1 - 1e-9) <= place <= points[-1][0] * (1 + 1e-9)


def test_a_crossing_is_straight_over_the_logarithm():
    assert paying([(1, 0.5), (100, 1.5)]) == (pytest.approx(10.0), None)
    up, down = paying([(1, 0.5), (4, 1.5), (16, 0.5)])
    assert up == pytest.approx(2.0) and down == pytest.approx(8.0)
    assert paying([(1, 1.2), (2, 1.1)]) == (None, None)


def test_a_sweep_is_drawn_beside_its_file(tmp_path: Path):
    rows = bandwidth_rows()
    columns = [pa.array([each[field.name] for each in rows], field.type) for field in SCHEMA]
    pq.write_table(pa.Table.from_arrays(columns, schema=SCHEMA), tmp_path / "mine.parquet")
    files = draw_sweep(tmp_path / "mine.parquet", ["from here"])
    assert [file.name for file in files] == [f"figure_sweep_mine.{kind}" for kind in ("png", "svg", "csv")]
    assert "from here" in files[1].read_text()
    with open(files[2], newline="") as file:
        shown = list(csv.DictReader(file))
    assert len(shown) == 6 and {each["tag"] for each in shown} == {"simulated"}
    assert math.isclose(float(shown[-1]["pays_to"]), 8.0)
    narrow = pa.Table.from_arrays([column[:4] for column in columns], schema=SCHEMA)  # one bandwidth
    pq.write_table(narrow, tmp_path / "narrow.parquet")
    assert draw_sweep(tmp_path / "narrow.parquet") == []


def test_shipped_sweeps_have_curves_and_names(tmp_path: Path):
    recipe = load_recipe("pocket")
    assert recipe.simulation.sweeps
    for name in recipe.simulation.sweeps:
        machines = [part.machine for part in parts_of(load_sweep(find_sweep(name)))]
        assert max(len({m.bandwidth_gb_s for m in machines}), len({m.cache_experts for m in machines})) >= 5
    with pytest.raises(MoexpError, match=r"no sweep 'bandwith'.*did you mean bandwidth"):
        run_simulate(recipe, Simulation(sweep="bandwith"))
