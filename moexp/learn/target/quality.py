"""What a repaired target is worth: loss on held-out text, use of its experts, and answers a person can read.

Shapes: N rows, L tokens a row, T tokens, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, Glm4MoeForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from moexp.learn.core.experts import hooked, routers
from moexp.learn.core.logit_loss import logit_loss
from moexp.learn.target.routing import counting, zero_loads

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Give me three tips for staying healthy.",
)


@dataclass(frozen=True)
class Quality:
    """Nats a token on held-out text, of the dense model and of the carved one with top-k, top-3, top-1 and no experts.

    `kl` is KL(dense || carved); `dead_experts` counts experts of each layer that no token chose; `max_load` is the
    busiest expert's share over an even one.
    """

    dense_nats: float
    nats: dict[str, float]
    kl: float
    agreement: float
    dead_experts: tuple[int, ...]
    max_load: float
    tokens: int


@torch.no_grad()
def measure_quality(model: Glm4MoeForCausalLM, dense: LlamaForCausalLM, held_NL: Tensor, batch: int = 8) -> Quality:
    """Teacher-forced on held-out rows; loss is on the text's own next token."""
    model.eval()
    top_k = model.config.num_experts_per_tok
    loads = zero_loads(model)
    nats: dict[str, float] = {}
    kl = dense_nats = 0.0
    agree = tokens = 0
    for routed in sorted({top_k, min(3, top_k), 1, 0}, reverse=True):
        total = 0.0
        with _active_experts(model, routed), counting(loads) if routed == top_k else nullcontext():
            for rows_BL in held_NL.long().split(batch):
                hidden_TH = _hidden(model, rows_BL)
                next_T = rows_BL[:, 1:].flatten()
                total += float(F.cross_entropy(_logits(hidden_TH, model), next_T, reduction="sum"))
                if routed == top_k:
                    dense_TH = _hidden(dense, rows_BL)
                    dense_nats += float(F.cross_entropy(_logits(dense_TH, dense), next_T, reduction="sum"))
                    head_VH = dense.lm_head.weight
                    result = logit_loss(hidden_TH, dense_TH, model.lm_head.weight.to(hidden_TH.dtype), head_VH)
                    kl, agree, tokens = kl + result.kl, agree + result.agree, tokens + result.tokens
        nats[f"top-{routed}"] = total / tokens
    load_LE = torch.stack(list(loads.values()))
    return Quality(
        dense_nats=dense_nats / tokens,
        nats=nats,
        kl=kl / tokens,
        agreement=agree / tokens,
        dead_experts=tuple((load_LE == 0).sum(1).tolist()),
        max_load=float((load_LE.max(1).values / load_LE.mean(1)).max()),
        tokens=tokens,
    )


@torch.no_grad()
def sample_answers(
    model: Glm4MoeForCausalLM, tokenizer: PreTrainedTokenizerBase, limit: int = 48
) -> list[dict[str, str]]:
    """Greedy answers to three plain questions, in chat format."""
    answers = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        cache, fed, answer = DynamicCache(config=model.config), torch.tensor([prompt]), list[int]()
        while len(answer) < limit:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                token = int(model(input_ids=fed, cache=cache, use_cache=True).logits[0, -1].argmax())
            if token == tokenizer.eos_token_id:
                break
            answer.append(token)
            fed = torch.tensor([[token]])
        answers.append({"question": question, "answer": str(tokenizer.decode(answer))})
    return answers


def _active_experts(model: Glm4MoeForCausalLM, routed: int) -> AbstractContextManager[None]:
    """Inside, each token uses its `routed` first experts with the gates they have among the usual top-k."""

    def keep_first(_module: torch.nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits_TE, weight_Tk, index_Tk = output
        rank_Tk = weight_Tk.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        return logits_TE, weight_Tk * (rank_Tk < routed), index_Tk

    return hooked(routers(model).values(), keep_first)


def _hidden(model: Any, rows_BL: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=rows_BL, use_cache=False).last_hidden_state
    return hidden[:, :-1].flatten(0, 1).bfloat16()


def _logits(hidden_TH: Tensor, model: Any) -> Tensor:
    return F.linear(hidden_TH, model.lm_head.weight.to(hidden_TH.dtype)).float()
