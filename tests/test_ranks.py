"""Commands that several processes share: the same as one process, one voice, one end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from moexp.base import ranks
from moexp.cli import main as cli
from moexp.config.locations import draft_folder, draft_work, head_folder, predictor_folder, trace_folder
from moexp.config.recipe import load_recipe

REPO = Path(__file__).parents[1]
ERRORS = "errors.txt"
UNTIMED = ["draft.max_minutes=null", "head.max_minutes=null", "predictor={max_minutes: null, dropout: 0}"]

METRICS, WEIGHTS, FP32 = 2e-3, 0.05, 1e-4
"""How far two processes may be from one: the last step's losses and gradient norm (each process's gradient is rounded
to bf16, by autocast, before the two are added), and the trained weights, relative to their size. Some start at zero and
are all update, and Adam's first updates are near to signs, which such rounding flips where a gradient is small. What
is computed in fp32 is nearer. `TOGETHER` holds a whole run in fp32 to 1e-6."""


def test_a_single_process_gets_back_what_it_gave():
    rows = torch.arange(6)
    assert (ranks.world(), ranks.rank(), ranks.is_main()) == (1, 0, True)
    assert ranks.share(rows) is rows and ranks.concatenated(rows) is rows
    assert ranks.gathered("a") == ["a"] and ranks.from_main(3) == 3 and ranks.mean(3) == 3
    assert ranks.on_main(lambda: 5) == 5 and ranks.any_of(True) and not ranks.any_of(False)
    gradient = torch.randn(4)
    before = gradient.clone()
    ranks.average([gradient])
    ranks.take_main([gradient])
    assert torch.equal(gradient, before)


TOGETHER = """
import sys, torch
from moexp.base import ranks
from moexp.base.errors import MoexpError
from moexp.learn.core.loop import Schedule, own_rows, train

def trained():
    torch.manual_seed(ranks.rank())  # replicas that start apart are made equal; on_main starts as rank 0 does
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    rows = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))

    def step_fn(step):
        x = own_rows(rows, 12, step, 0)
        loss = (net(x) - x[:, :2].sin()).square().mean()
        loss.backward()
        return {"loss": float(loss.detach())}

    train(dict(net.named_parameters()), Schedule(20, 0.02), step_fn)
    return [parameter.detach() for parameter in net.parameters()]

with ranks.joined() as run:
    me = ranks.rank()
    assert ranks.world() == 3 and ranks.is_main() == (me == 0)
    assert ranks.gathered(me) == [0, 1, 2] and ranks.from_main(me) == 0
    assert ranks.share(torch.arange(6)).tolist() == [2 * me, 2 * me + 1]
    assert ranks.concatenated(torch.tensor([me])).tolist() == [0, 1, 2]
    assert ranks.any_of(me == 2) and not ranks.any_of(False) and ranks.mean(me + 1) == 2
    # Alone in on_main: a collective in there must not wait for the others.
    assert ranks.on_main(lambda: (ranks.world(), ranks.gathered(me), ranks.mean(7))) == (1, [0], 7)
    ranks.BUCKET_BYTES = 256
    drawn = lambda r, n: torch.randn(n, generator=torch.Generator().manual_seed(10 * r + n))
    parts = [[drawn(r, n) for n in (3, 50, 200, 1)] for r in range(3)]
    mine = [part.clone() for part in parts[me]]
    ranks.average(mine)
    for a, b, c, made in zip(*parts, mine):
        assert torch.equal(made, (a + b + c) / 3), "not the sum in the order of ranks"
    ranks.take_main([mine[0].fill_(me)])
    assert mine[0].tolist() == [0, 0, 0]
    try:
        ranks.share(torch.arange(8))
    except MoexpError as error:
        assert "8 rows of a batch for 3 processes (--nproc-per-node); valid: 1, 2, 4, 8" in str(error)
    else:
        raise AssertionError
    made = [part.numpy().tobytes() for part in trained()]
    assert ranks.gathered(made) == [made] * 3, "replicas drift apart"
    for part, whole in zip(trained(), ranks.on_main(trained)):
        torch.testing.assert_close(part, whole, atol=1e-6, rtol=1e-6)
    assert sum(ranks.gathered(run.speaks())) == 1, "one voice"
    with run.silenced():
        print("heard", me)
ranks.leave(0)
"""


def launch(count: int, *words: str, home: Path) -> subprocess.Popen[str]:
    """`torchrun` with so many processes; the package and its tests are those of this repository."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {
        "MOEXP_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(REPO),
        "COLUMNS": "80",
    }
    with (home / ERRORS).open("w") as errors:
        return subprocess.Popen(
            [*launcher, *words], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=home, env=environment
        )


def finished(process: subprocess.Popen[str], home: Path) -> tuple[int, str, str]:
    """Exit code, what went to stdout, what went to stderr."""
    try:
        output, _ = process.communicate()
    finally:
        process.kill()
    return process.returncode, output, (home / ERRORS).read_text()


def own_lines(errors: str) -> list[str]:
    """Lines that our processes wrote as their end; the launcher adds its own report."""
    return [line for line in errors.splitlines() if line.startswith(("moexp: error", "interrupted"))]


def moexp_(count: int, home: Path, command: str, *changes: str) -> subprocess.Popen[str]:
    options = [word for change in (*UNTIMED, *changes) for word in ("--set", change)]
    return launch(count, "-m", "moexp", command, "--recipe", "tiny", *options, home=home)


def alone(home: Path, monkeypatch: pytest.MonkeyPatch, command: str, *changes: str) -> str:
    """The command in this process."""
    monkeypatch.setenv("MOEXP_HOME", str(home))
    monkeypatch.chdir(home)
    options = [word for change in (*UNTIMED, *changes) for word in ("--set", change)]
    result = CliRunner().invoke(cli.app, [command, "--recipe", "tiny", *options], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def slow(*values: Any) -> Any:
    """A case that goes the way of another one, which is not slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tiny target."""
    home = tmp_path_factory.mktemp("built")
    with pytest.MonkeyPatch.context() as patch:
        alone(home, patch, "build-target")
    return home


@pytest.fixture
def homes(built: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two homes with the same tiny target."""
    one, two = tmp_path / "one", tmp_path / "two"
    for home in (one, two):
        shutil.copytree(built, home)
    return one, two


def assert_near(one: Path, two: Path, weights: float) -> None:
    """The weights of two folders, and the loss and gradient of the last step."""
    files = sorted(file.relative_to(one) for file in one.rglob("*.safetensors"))
    assert files and files == sorted(file.relative_to(two) for file in two.rglob("*.safetensors"))
    for file in files:
        left, right = load_file(one / file), load_file(two / file)
        assert left.keys() == right.keys()
        for name, tensor in left.items():
            apart = (right[name].float() - tensor.float()).norm()
            assert apart <= weights * tensor.float().norm(), (name, apart, tensor.float().norm())
    (header,) = [file.name for file in one.glob("*.json") if "training" in json.loads(file.read_text())]
    last = [json.loads((folder / header).read_text())["training"]["last"] for folder in (one, two)]
    kept = [{name: metrics[name] for name in ("loss", "kl", "grad_norm") if name in metrics} for metrics in last]
    assert len(kept[0]) >= 2 and kept[1] == pytest.approx(kept[0], rel=METRICS)


@pytest.mark.e2e
def test_the_collectives_do_what_they_say(tmp_path: Path):
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    code, output, errors = finished(launch(3, str(script), home=tmp_path), tmp_path)
    assert code == 0, errors
    assert output == "heard 0\n"


@pytest.mark.e2e
def test_a_trace_by_two_processes_is_that_of_one_byte_for_byte(homes: tuple[Path, Path], monkeypatch):
    one, two = homes
    alone(one, monkeypatch, "trace-routing")
    code, output, errors = finished(moexp_(2, two, "trace-routing"), two)
    assert code == 0, errors
    assert output.count("trace: ") == 1 and errors.count("Load the target") == 1
    folders = []
    for home in homes:
        monkeypatch.setenv("MOEXP_HOME", str(home))
        folders.append(trace_folder(load_recipe("tiny", UNTIMED)))
    names = sorted(file.name for file in folders[0].iterdir())
    assert len([name for name in names if name.endswith(".parquet")]) == 2
    assert names == sorted(file.name for file in folders[1].iterdir())
    for name in names:
        if name != "manifest.json":  # names the time and the folder
            assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
    shards = [json.loads((folder / "manifest.json").read_text())["shards"] for folder in folders]
    assert shards[0] == shards[1]


@pytest.mark.e2e
@pytest.mark.parametrize(
    "command, changes",
    [
        ("train-draft-expert", []),
        ("train-drafter", ["head={kind: eagle3, steps: 3, rows: 2, unroll: 2, draft_vocab: 64}"]),
        slow("train-drafter", ["head={kind: gto, steps: 2, rows: 2, unroll: 2, draft_vocab: 64}"]),
        slow("train-drafter", ["head={kind: mtp, steps: 3, rows: 2, unroll: 2}"]),
        ("train-predictor", []),
    ],
)
def test_training_by_two_processes_is_that_of_one(
    homes: tuple[Path, Path], monkeypatch, command: str, changes: list[str]
):
    one, two = homes
    said = alone(one, monkeypatch, command, *changes)
    code, output, errors = finished(moexp_(2, two, command, *changes), two)
    assert code == 0, errors
    assert len(output.splitlines()) == len(said.splitlines()), "more than one process prints"
    recipe = load_recipe("tiny", [*UNTIMED, *changes])
    folder = {"train-draft-expert": draft_folder, "train-drafter": head_folder, "train-predictor": predictor_folder}
    made = []
    for home in homes:
        monkeypatch.setenv("MOEXP_HOME", str(home))
        made.append(folder[command](recipe))
    assert_near(made[0], made[1], weights=FP32 if command == "train-predictor" else WEIGHTS)


@pytest.mark.e2e
def test_a_batch_that_cannot_be_dealt_is_one_line(homes: tuple[Path, Path]):
    code, output, errors = finished(moexp_(2, homes[1], "train-draft-expert", "draft.warmup_rows=3"), homes[1])
    assert code != 0 and not output
    assert own_lines(errors) == ["moexp: error: 3 rows of a batch for 2 processes (--nproc-per-node); valid: 1, 3"]


@pytest.mark.e2e
def test_other_commands_run_in_one_process(tmp_path: Path):
    code, _, errors = finished(launch(2, "-m", "moexp", "eval", "--recipe", "tiny", home=tmp_path), tmp_path)
    assert code != 0
    (line,) = own_lines(errors)
    assert line.startswith("moexp: error: eval runs in one process (torchrun); valid: train-draft-expert, ")


STRIKE = """
import os, sys
from moexp.base import ranks
from moexp.cli.main import main
from moexp.learn.draft_expert import distill

number, at, strike = (int(word) for word in sys.argv[1:4])
del sys.argv[1:4]
train = distill.train

def struck(named, schedule, step_fn, updates, run):
    def step(n):
        if (run.checkpoint.name, n, ranks.rank()) == ("end-to-end", at, number):
            os.kill(os.getpid(), strike)
        return step_fn(n)

    return train(named, schedule, step, updates, run)

distill.train = struck
main()
"""
"""The program, in which rank `number` sends itself a signal in step `at` of stage two."""


def strike(home: Path, number: int, at: int, strike: signal.Signals, *changes: str) -> tuple[int, str, str]:
    """Two processes train draft experts until one of them is struck; as `finished` says."""
    script = home / "strike.py"
    script.write_text(STRIKE)
    words = [str(number), str(at), str(int(strike)), "train-draft-expert", "--recipe", "tiny"]
    options = [word for change in (*UNTIMED, *changes) for word in ("--set", change)]
    return finished(launch(2, str(script), *words, *options, home=home), home)


@pytest.mark.e2e
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ctrl_c_in_one_process_stops_all_and_another_number_of_them_goes_on(
    homes: tuple[Path, Path], monkeypatch, number: int
):
    one, two = homes
    code, _, errors = strike(two, number, 2, signal.SIGINT, "draft.steps=6")
    assert code != 0 and 'Traceback (most recent call last):\n  File "' + str(REPO) not in errors
    (line,) = own_lines(errors)
    assert line.startswith(
        "interrupted; finished work is kept. To resume, run again: torchrun --nproc-per-node 2 -m moexp"
    )
    monkeypatch.setenv("MOEXP_HOME", str(two))
    recipe = load_recipe("tiny", [*UNTIMED, "draft.steps=6"])
    header = json.loads((draft_work(recipe) / "state" / "end-to-end" / "state.json").read_text())
    assert header["step"] == 3, "the step in which it came is done, and no other"
    alone(two, monkeypatch, "train-draft-expert", "draft.steps=6")
    resumed = draft_folder(recipe)
    alone(one, monkeypatch, "train-draft-expert", "draft.steps=6")
    left, right = (load_file(folder / "draft_experts.safetensors") for folder in (draft_folder(recipe), resumed))
    for name, tensor in left.items():  # the same rows in the same order were seen
        assert (tensor - right[name]).float().norm() <= WEIGHTS * tensor.float().norm(), name


@pytest.mark.e2e
def test_a_process_that_is_killed_ends_the_others_with_one_line(homes: tuple[Path, Path]):
    code, output, errors = strike(homes[1], 1, 1, signal.SIGKILL, "draft.steps=6")
    assert code != 0 and not output
    assert len(own_lines(errors)) <= 1  # the launcher may end rank 0 before it has noticed
    assert "SIGKILL" in errors or "exitcode  : -9" in errors
