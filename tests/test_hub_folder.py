"""Checkpoints by hub id: what is fetched, and what each thing that can go wrong says. No network is used."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from moexp.base.errors import MoexpError
from moexp.cli import main as cli
from moexp.target import hub_folder as module
from moexp.target.hub_folder import LEFT_OUT, PATTERNS, hub_folder

ID = "allenai/OLMoE-1B-7B-0924"


def http(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """An error as the client raises it, with a response of its own library."""
    client = __import__(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])  # httpx, or what follows it
    request = client.Request("GET", f"https://huggingface.co/api/models/{ID}")
    return kind(f"{status} Client Error.\nmore", response=client.Response(status, request=request))


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(module, "reachable", lambda endpoint: True)


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`snapshot(answer)`: snapshot_download returns or raises it; its calls are listed."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def put(answer: Path | Exception) -> list[tuple[str, dict[str, Any]]]:
        def fetch(repo: str, **options: Any) -> str:
            calls.append((repo, options))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        return calls

    return put


PROBLEMS = [
    (http(errors.GatedRepoError, 403), f"{ID} is gated.*https://huggingface.co/{ID}.*HF_TOKEN"),
    (
        http(errors.RepositoryNotFoundError, 401),
        f"no model {ID}, or it is private.*owner/name as in https://huggingface.co/",
    ),
    (http(errors.RevisionNotFoundError, 404), rf"{ID} has no revision v9 \(target.revision\).*null"),
    (http(errors.DisabledRepoError, 403), f"{ID} was disabled"),
    (http(errors.HfHubHTTPError, 503), f"answers 503 for {ID} at revision v9"),
    (errors.LocalEntryNotFoundError("Cannot find\nan entry"), f"{ID} at revision v9 is not .* in the local cache"),
    (errors.OfflineModeIsEnabled("offline"), f"{ID} at revision v9 is not .* in the local cache"),
    (errors.HFValidationError("Repo id must\nbe"), "is neither a folder nor a hub id"),
    (OSError(errno.ENOSPC, "No space left on device"), "no space left.*moexp plan"),
    (
        RuntimeError("\nfirst line\nsecond"),
        f"cannot fetch {ID} at revision v9: RuntimeError: first line .*local folder",
    ),
]


@pytest.mark.parametrize(("error", "message"), PROBLEMS, ids=lambda value: type(value).__name__)
def test_each_problem_is_one_line_that_says_what_helps(online: None, snapshot: Any, error: Exception, message: str):
    snapshot(error)
    with pytest.raises(MoexpError, match=message) as caught:
        hub_folder(ID, "v9")
    assert "\n" not in str(caught.value) and caught.value.valid
    assert caught.value.__cause__ is error


def test_commands_end_with_that_line_and_exit_code_2(online: None, snapshot: Any):
    snapshot(http(errors.GatedRepoError, 403))
    result = CliRunner().invoke(cli.app, ["eval", "--recipe", "ds-v2-lite"])
    assert result.exit_code == 2
    assert result.stderr.startswith("moexp: error: deepseek-ai/DeepSeek-V2-Lite is gated")
    assert result.stderr.count("\n") == 1


def test_what_is_asked_of_the_hub(online: None, snapshot: Any, tmp_path: Path):
    (tmp_path / "model.safetensors").touch()
    calls = snapshot(tmp_path)
    assert hub_folder(ID, "v9") == tmp_path
    assert calls == [(ID, {"revision": "v9", "allow_patterns": PATTERNS, "ignore_patterns": LEFT_OUT,
                           "local_files_only": False})]  # fmt: skip


def test_weights_configuration_and_tokenizer_are_fetched_and_nothing_that_runs():
    repository = [
        "config.json", "generation_config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "special_tokens_map.json",
        "chat_template.jinja", "vocab.json", "merges.txt",
    ]  # fmt: skip
    others = [
        "modeling_deepseek.py", "tokenization_moonshot.py", "tokenizer.py", "pytorch_model.bin",
        "pytorch_model.bin.index.pkl", "consolidated.00.pt", "consolidated.safetensors", "training.ckpt", "README.md",
        "original/model-00001.safetensors", "original/dtypes.json", "metal/model.bin", "figures/loss.png",
    ]  # fmt: skip
    kept = filter_repo_objects(repository + others, allow_patterns=PATTERNS, ignore_patterns=LEFT_OUT)
    assert list(kept) == repository


def test_a_repository_without_safetensors_is_refused(online: None, snapshot: Any, tmp_path: Path):
    (tmp_path / "config.json").touch()
    snapshot(tmp_path)
    with pytest.raises(MoexpError, match=f"{ID} has no safetensors weights.*pickled weights are never read"):
        hub_folder(ID)


def test_offline_only_the_cache_is_asked_and_the_line_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(MoexpError, match="in the local cache, and HF_HUB_OFFLINE is set"):
        hub_folder(ID)


def test_a_dead_network_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(MoexpError, match=f"in the local cache, and http://127.0.0.1:{port} cannot be reached"):
        hub_folder(ID)


def test_a_snapshot_in_the_cache_serves_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    commit = "0123456789" * 4
    folder = tmp_path / f"models--{ID.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "snapshots" / commit / "model.safetensors").touch()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub_folder(ID) == hub_folder(ID, commit) == folder / "snapshots" / commit
    with pytest.raises(MoexpError, match="at revision other is not"):
        hub_folder(ID, "other")


def test_local_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub_folder(str(tmp_path / "model")) == hub_folder("~/model") == tmp_path / "model"
    with pytest.raises(MoexpError, match=r"has no revisions \(target.revision\); valid: null"):
        hub_folder(str(tmp_path / "model"), "main")
    for missing in (str(tmp_path / "none"), "./none", "~/none", "a/b/c"):
        with pytest.raises(MoexpError, match="no folder .*valid: a checkpoint folder, or a hub id"):
            hub_folder(missing)
