"""Three engines that decode the same weights with cold experts, each in a process of its own.

    python -m moexp.bench.peers.engines moexp '{"model": ..., "threads": 2}'

reads requests from standard input and answers on standard output, a line of JSON each: {"ids": [...], "tokens": n}
-> {"ids": [...], "seconds": [...], "read_bytes": [...]}, one entry a decoded token. Prefill and what makes experts
cold are not timed.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

CONTEXT = 512
_MADV_PAGEOUT = 21  # Linux: give these pages back now, those of a file that others map too


class Engine(Protocol):
    """Plain decoding, a token at a time."""

    def start(self, ids: Sequence[int]) -> None:
        """A new request: all but the last of its prompt's ids."""

    def step(self, token: int) -> int:
        """The next token after `token`, greedily."""

    def chill(self) -> None:
        """No routed expert is in memory after this."""


class Moexp:
    """The disk store, policy none: experts come by O_DIRECT, and none stays."""

    def __init__(self, model: str, threads: int, io_threads: int) -> None:
        from moexp.base.devices import prepare
        from moexp.runtime.engine.engine import AR, Block
        from moexp.runtime.engine.engine import Engine as Runtime
        from moexp.runtime.store.opening import open_store
        from moexp.runtime.store.transfer import StoreOptions
        from moexp.target.load import load_target

        prepare(threads)
        self.target = load_target(model)
        self.store = open_store(self.target.index, "disk", options=StoreOptions(io_threads))
        self.engine = Runtime(self.target, self.store)
        self._logits = lambda token: self.engine.run(Block([token]), AR).logits_BV[0]

    def start(self, ids: Sequence[int]) -> None:
        self.engine.start(CONTEXT)
        self.engine.prefill(ids)

    def step(self, token: int) -> int:
        self.store.begin_cycle()
        return int(self._logits(token).argmax())

    def chill(self) -> None:
        pass  # the store keeps nothing, and its reads left nothing in the page cache


class Accelerate:
    """transformers with the routed experts offloaded to disk by accelerate, everything else in memory."""

    def __init__(self, model: str, threads: int, offload: str) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        config = AutoConfig.from_pretrained(model)
        device_map: dict[str, str] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        device_map["lm_head"] = "cpu"
        for layer in range(config.num_hidden_layers):
            name = f"model.layers.{layer}"
            if layer < config.first_k_dense_replace:
                device_map[name] = "cpu"
                continue
            for part in ("self_attn", "input_layernorm", "post_attention_layernorm"):
                device_map[f"{name}.{part}"] = "cpu"
            device_map |= {
                f"{name}.mlp.gate": "cpu",
                f"{name}.mlp.shared_experts": "cpu",
                f"{name}.mlp.experts": "disk",
            }
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", device_map=device_map, offload_folder=offload
        ).eval()
        self.files = [file for folder in (model, offload) for file in Path(folder).rglob("*") if file.is_file()]
        # Later versions of transformers call it so, and warn of the name before.
        names = inspect.signature(type(self.model).forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"
        self.cache: Any = None

    def start(self, ids: Sequence[int]) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache(config=self.model.config)
        if ids:
            self._forward(ids)

    def step(self, token: int) -> int:
        return int(self._forward([token])[0, -1].argmax())

    def _forward(self, ids: Sequence[int]) -> Any:
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([ids]), **{self.cache_name: self.cache}, use_cache=True).logits

    def chill(self) -> None:
        for file in self.files:
            forget(file)


class LlamaCpp:
    """llama.cpp over mmap; the pages of routed experts are given back before each token."""

    def __init__(self, model: str, threads: int) -> None:
        import llama_cpp

        from moexp.bench.peers.gguf import expert_ranges

        self.api = llama_cpp
        self.file, self.experts = Path(model), expert_ranges(Path(model))
        self.llama = llama_cpp.Llama(
            model, n_ctx=CONTEXT, n_batch=64, n_threads=threads, n_threads_batch=threads, use_mmap=True, verbose=False
        )
        self.vocab = self.llama.n_vocab()

    def start(self, ids: Sequence[int]) -> None:
        self.llama.reset()
        if ids:
            self.llama.eval(list(ids))

    def step(self, token: int) -> int:
        import numpy as np

        self.llama.eval([token])
        return int(np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.llama.ctx, -1), (self.vocab,)).argmax())

    def chill(self) -> None:
        forget(self.file, self.experts)


def forget(file: Path, ranges: Iterable[tuple[int, int]] = ()) -> None:
    """Gives pages of a file back: of this process' mappings of it, then of the page cache.

    Args:
        ranges: bytes (begin, end); none: all of it.
    """
    wanted = list(ranges) or [(0, file.stat().st_size)]
    libc = ctypes.CDLL(None, use_errno=True)
    for start, stop, offset in _mappings(file):
        for begin, end in wanted:
            low, high = max(begin - offset, 0), min(end - offset, stop - start)
            low, high = -(-low // mmap.PAGESIZE) * mmap.PAGESIZE, high // mmap.PAGESIZE * mmap.PAGESIZE
            if low < high:
                for advice in (_MADV_PAGEOUT, mmap.MADV_DONTNEED):
                    libc.madvise(ctypes.c_void_p(start + low), ctypes.c_size_t(high - low), advice)
    handle = os.open(file, os.O_RDONLY)
    try:
        for begin, end in wanted:
            os.posix_fadvise(handle, begin, end - begin, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _mappings(file: Path) -> list[tuple[int, int, int]]:
    """(start, stop, offset in the file) of this process' mappings of a file."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5] == str(file.resolve()):
            start, stop = (int(address, 16) for address in fields[0].split("-"))
            mappings.append((start, stop, int(fields[2], 16)))
    return mappings


def read_bytes() -> int:
    """Bytes that this process had the disk read so far, by calls and by page faults."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no read_bytes")


def answer(engine: Engine, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """Decodes `tokens` tokens after a prompt."""
    engine.start(ids[:-1])
    decoded, seconds, read = [ids[-1]], [], []
    for _ in range(tokens):
        engine.chill()
        before, begin_s = read_bytes(), time.perf_counter()
        decoded.append(engine.step(decoded[-1]))
        seconds.append(time.perf_counter() - begin_s)
        read.append(read_bytes() - before)
    return {"ids": decoded[1:], "seconds": seconds, "read_bytes": read}


ENGINES: dict[str, Callable[..., Engine]] = {"moexp": Moexp, "accelerate": Accelerate, "llama.cpp": LlamaCpp}


def main(argv: Sequence[str]) -> None:
    """Serves requests until standard input ends."""
    name, options = argv
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine = ENGINES[name](**json.loads(options))
    print(json.dumps({"ready": name}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(engine, **json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
