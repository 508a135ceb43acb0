"""Running a sweep: parts in parallel processes, each saved when it is finished, all of them in one Parquet file.

A part is one machine with all its settings. Finished parts lie in `<out>.parts/` under a name that depends on all that
decides their numbers, so a sweep that was killed goes on, and one whose file changed reuses the parts that still hold.
Workers import no torch.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from moexp.base import atomic
from moexp.base.progress import stage
from moexp.sim.platforms.simulated import load_simulated
from moexp.sim.routing.blocks import Blocks
from moexp.sim.routing.sources import open_source
from moexp.sim.studies.study import COLUMNS, Arms
from moexp.sim.studies.sweep_file import Part, SweepSection, parts_of
from moexp.tables.core.table import Row

FORMAT = "moexp-sweep-1"
NUMBERS = (
    "tau", "bandwidth_gb_s", "tokens_per_s", "speedup", "alpha", "hit", "prefetch_waste", "bytes_per_token",
    "compute_share",
)  # fmt: skip
COUNTS = ("capacity", "max_draft", "prefetch_top", "tokens")
SCHEMA = pa.schema(
    [
        (name, pa.float64() if name in NUMBERS else pa.int64() if name in COUNTS else pa.string())
        for name in (*COLUMNS, "bandwidth_gb_s")
    ]
)


class Sweeper:
    """One process' view of a sweep: the routing is read, and cut to layers, once."""

    def __init__(self, sweep: SweepSection) -> None:
        routing = self.routing = open_source(sweep.source())
        self.simulated = load_simulated(sweep.platform, routing.geometry, routing.expert_bytes, sweep.model)

    @cached_property
    def blocks(self) -> Blocks:
        """The routing's blocks, for the platform's model."""
        return self.routing.blocks(self.simulated.moe_layers)

    def identity(self) -> str:
        """Digest of what every part's numbers depend on beside the part."""
        values = {"source": asdict(self.routing.source), "file": self.routing.source.fingerprint()}
        values["machine"] = asdict(self.simulated)
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def run(self, part: Part) -> list[Row]:
        """AR and every setting on the part's machine."""
        simulated, point = self.simulated, part.machine
        if point.bandwidth_gb_s is not None:
            simulated = simulated.with_bandwidth(point.bandwidth_gb_s * 1e9)
        if point.cache_experts is not None:
            simulated = replace(simulated, machine=replace(simulated.machine, capacity=point.cache_experts))
        rate = simulated.machine.link.bandwidth_bytes_s / 1e9
        arms = Arms(self.routing, self.blocks, simulated, point.cache)
        return [row | {"bandwidth_gb_s": rate} for row in arms.rows((each.policy, each) for each in part.settings)]


def run_sweep(sweep: SweepSection, out: Path) -> Path:
    """Simulates the points that are not saved yet; returns `out`, one row a point and AR for each machine.

    Raises:
        MoexpError: a source or platform that does not exist, or that cannot be simulated.
    """
    sweeper = Sweeper(sweep)
    parts, identity = parts_of(sweep), sweeper.identity()
    folder = out.with_name(out.name + ".parts")
    files = {folder / f"{identity}-{part.digest}.parquet": part for part in parts}
    missing = {file: part for file, part in files.items() if not file.exists()}
    done = len(files) - len(missing)
    points = len(parts[0].settings) + 1
    with stage(f"Sweep of {len(parts) * points} points", len(files)) as advance:
        for file, rows in _results(sweep, sweeper, missing):
            _write(file, rows)
            done += 1
            advance(done, f"best {max(float(row['speedup'] or 0) for row in rows):.2f} times AR")
    table = pa.concat_tables([pq.read_table(file) for file in files])
    _write_table(out, table.replace_schema_metadata({"format": FORMAT, "tag": "simulated", "identity": identity}))
    shutil.rmtree(folder)
    return out


def _results(sweep: SweepSection, sweeper: Sweeper, missing: dict[Path, Part]) -> Iterator[tuple[Path, list[Row]]]:
    workers = min(sweep.workers or os.cpu_count() or 1, len(missing))
    if workers <= 1:
        for file, part in missing.items():
            yield file, sweeper.run(part)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _begin_worker, (sweep, os.getpid())) as pool:
        coming = {pool.submit(_run_part, part): file for file, part in missing.items()}
        try:
            for future in as_completed(coming):
                yield coming[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


_sweeper: list[Sweeper] = []  # a worker process' own


def _begin_worker(sweep: SweepSection, parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _sweeper.append(Sweeper(sweep))


def _run_part(part: Part) -> list[Row]:
    return _sweeper[0].run(part)


def _end_with(parent: int) -> None:
    """A parent that was killed cannot end its workers, and their queue never ends by itself."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _write(file: Path, rows: Sequence[Row]) -> None:
    texts = {field.name for field in SCHEMA if field.type == pa.string()}
    plain = [
        {name: str(value) if name in texts and value is not None else value for name, value in row.items()}
        for row in rows
    ]
    _write_table(file, pa.Table.from_pylist(plain, SCHEMA))


def _write_table(file: Path, table: pa.Table) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    atomic.write_bytes(file, sink.getvalue().to_pybytes())
