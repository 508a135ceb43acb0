"""Shared by all tests: one compute thread, no network, artifacts in a temporary folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before anything imports torch: spinning threads of two processes slow each other down many times.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# Who runs the tests in the background may have had Ctrl-C ignored; tests send it, and their processes inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says more about what else the machine does than about the code.
settings.register_profile(
    "moexp", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("moexp")


@pytest.fixture(autouse=True)
def moexp_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$MOEXP_HOME of this test: empty, and not the user's."""
    home = tmp_path_factory.mktemp("moexp-home")
    monkeypatch.setenv("MOEXP_HOME", str(home))
    return home


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_folder(model_type=..., dtype=..., **options)`: a random tiny checkpoint, each kind built once."""
    built: dict[str, Path] = {}

    def build(**options: object) -> Path:
        from moexp.target.tiny import TinyTarget, build_tiny_target

        name = "-".join(["tiny", *(f"{key}={options[key]}" for key in sorted(options))])
        if name not in built:
            folder = tmp_path_factory.mktemp(name, numbered=False)
            built[name] = build_tiny_target(folder, TinyTarget(**options))  # type: ignore[arg-type]
        return built[name]

    return build


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Under `make test`: how lint and types went, so that the end of the output says it all."""
    checks = os.environ.get("MOEXP_CHECKS")
    if checks:
        terminalreporter.write_line(f"checks before the tests: {checks}", red="FAILED" in checks)
