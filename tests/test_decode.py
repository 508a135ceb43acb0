"""The decoding loop at its edges: stop tokens, limits, nothing accepted, everything accepted, and what it records."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moexp.runtime.decoding.chain as chain_module
from moexp.base.errors import MoexpError
from moexp.runtime.decoding.cycle import routing_overlap, run_cycle, union_size
from moexp.runtime.decoding.decode import LogitsDigest, begin_answer, decode, decode_all
from moexp.runtime.decoding.method import Method, TreePlan
from moexp.runtime.decoding.speculation import Request
from moexp.runtime.drafters.self_chain import SelfDrafter
from moexp.runtime.verifiers.sampling import Sampling
from tests.branches import Branches
from tests.engines import WatchedStore, logits_to, make_engine, prompt, swap_store

pytestmark = pytest.mark.e2e

GREEDY = Sampling()
TARGET = Method("target", max_draft=4)


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return make_engine(tiny_folder())


@pytest.fixture
def watched(engine, tiny_folder):
    store = WatchedStore.of(tiny_folder())
    before = swap_store(engine, store)
    yield store
    swap_store(engine, before)


def tokens_of(engine, method, ids, **options):
    return decode_all(engine, ids, method, GREEDY, **{"max_new_tokens": 20, **options})[1].tokens


class WrongDrafter(SelfDrafter):
    """Drafts what the target would, but for one position, where the token is another."""

    wrong_at = 0

    def propose(self, pending):
        for at, drafted in enumerate(super().propose(pending)):
            wrong = at >= self.wrong_at
            yield replace(drafted, token=(drafted.token + 1) % 240) if wrong else drafted


@pytest.mark.parametrize("wrong_at", [0, 1, 3])
def test_as_many_are_accepted_as_are_right(engine, monkeypatch, wrong_at):
    ids = prompt(9)
    expected = tokens_of(engine, Method(), ids, max_new_tokens=15)
    monkeypatch.setattr(chain_module, "SelfDrafter", type("Wrong", (WrongDrafter,), {"wrong_at": wrong_at}))
    steps, record = decode_all(engine, ids, TARGET, GREEDY, max_new_tokens=15)
    assert record.tokens == expected
    room = 15
    for step in steps:
        drafted = min(4, room - 1)
        accepted = min(wrong_at, drafted)
        assert (step.drafted, step.accepted, step.emitted) == (drafted, accepted, accepted + 1)
        room -= step.emitted


def test_all_accepted_emits_the_bonus_too(engine):
    steps, record = decode_all(engine, prompt(9), TARGET, GREEDY, max_new_tokens=20)
    assert [(step.drafted, step.accepted, step.emitted) for step in steps] == [(4, 4, 5)] * 4
    assert record.tokens == tokens_of(engine, Method(), prompt(9))


@pytest.mark.parametrize("limit", range(1, 13))
def test_maximum_length_anywhere_in_a_block(engine, limit):
    steps, record = decode_all(engine, prompt(9), TARGET, GREEDY, max_new_tokens=limit)
    assert record.tokens == tokens_of(engine, Method(), prompt(9))[:limit]
    assert record.finish_reason == "length"
    assert all(step.accepted == step.drafted for step in steps), "nothing is drafted that could not be emitted"


@pytest.mark.parametrize("at", range(10))
@pytest.mark.parametrize("method", [Method(), TARGET, Method("top-r", r=2)], ids=lambda method: method.label)
def test_a_stop_token_anywhere_in_a_block_ends_the_answer(engine, method, at):
    ids = prompt(9)
    answer = tokens_of(engine, Method(), ids)
    stop = answer[at]
    steps, record = decode_all(engine, ids, method, GREEDY, max_new_tokens=20, stop_ids={stop, 999})
    assert record.tokens == answer[: answer.index(stop) + 1]
    assert record.finish_reason == "stop"
    assert sum(step.emitted for step in steps) == len(record.tokens)
    assert engine.length == len(ids) + len(record.tokens) - 1, "the last token has no keys and values yet"


def test_nothing_is_drafted_behind_a_stop_token(engine):
    answer = tokens_of(engine, Method(), prompt(9))
    steps, _ = decode_all(engine, prompt(9), TARGET, GREEDY, max_new_tokens=20, stop_ids={answer[1]})
    assert (steps[0].drafted, steps[0].accepted, steps[0].emitted) == (2, 2, 2)


@pytest.mark.parametrize("max_draft", [1, 2, 7])
@pytest.mark.parametrize("drafter", ["top-r", "draft-expert", "target"])
def test_any_draft_length(engine, drafter, max_draft):
    ids = prompt(12, seed=4)
    expected = tokens_of(engine, Method(), ids, max_new_tokens=30)
    assert tokens_of(engine, Method(drafter, max_draft=max_draft), ids, max_new_tokens=30) == expected


@pytest.mark.parametrize("method", [Method(), TARGET, Method("top-r")], ids=lambda method: method.label)
def test_a_prompt_of_one_token(engine, method):
    steps, record = decode_all(engine, [65], method, GREEDY, max_new_tokens=6)
    assert record.prompt_tokens == 1
    assert record.tokens == tokens_of(engine, Method(), [65], max_new_tokens=6)
    assert engine.length == 6


@pytest.mark.parametrize("length", [31, 32, 33, 34, 64, 65])
def test_prompts_around_a_prefill_chunk(engine, length):
    assert tokens_of(engine, TARGET, prompt(length)) == tokens_of(engine, Method(), prompt(length))


def test_a_bucket_crossed_inside_a_block(tiny_folder):
    engine = make_engine(tiny_folder(dtype=torch.bfloat16), torch.bfloat16)
    for length in (121, 124, 127):
        ids = prompt(length, seed=length)
        for method in (TARGET, Method("top-r", r=2)):
            assert tokens_of(engine, method, ids) == tokens_of(engine, Method(), ids)


def test_records_count_by_ids(engine):
    for method in (Method(), Method("top-r", r=2), Method("draft-expert"), TARGET):
        steps, record = decode_all(engine, prompt(9), method, GREEDY, max_new_tokens=25, request=3, workload="chat")
        assert [token for step in steps for token in step.tokens] == record.tokens
        assert [step.cycle for step in steps] == list(range(len(steps)))
        assert {(step.request, step.method) for step in steps} == {(3, method.label)}
        assert (record.request, record.workload, record.prompt_tokens, record.new_tokens) == (3, "chat", 9, 25)
        assert record.decode_s == pytest.approx(sum(step.cycle_s for step in steps))
        for step in steps:
            assert len(step.confidences) == step.drafted
            assert all(0 < confidence <= 1 for confidence in step.confidences)
            assert step.cycle_s >= step.draft_s + step.verify_s - 1e-9
            assert step.union_layers == 3
            verified = "ar_demanded" if method.is_ar else "verify_demanded"
            assert step.store[verified] == step.unique_verify


def test_what_ar_and_the_control_look_like(engine):
    for step in decode_all(engine, prompt(9), Method(), GREEDY, max_new_tokens=10)[0]:
        assert (step.drafted, step.emitted, step.unique_verify) == (0, 1, 12)
        assert step.unique_draft is None
        assert step.router_slots is None
    for step in decode_all(engine, prompt(9), TARGET, GREEDY, max_new_tokens=20)[0]:
        assert step.router_overlap == step.router_slots == 4 * 3 * 4, "four rows predicted: the last one was not run"
        assert step.unique_draft is not None
        assert step.unique_verify is not None
        assert step.unique_draft <= step.unique_verify


def test_draft_unions_grow_with_r(engine):
    def unique(r):
        steps, _ = decode_all(engine, prompt(9), Method("top-r", r=r, max_draft=1), GREEDY, max_new_tokens=10)
        return [step.unique_draft for step in steps if step.drafted]

    assert set(unique(1)) == {3}
    assert set(unique(3)) == {9}


def test_stores_see_phases_cycles_and_prefetches(engine, watched):
    steps, _ = decode_all(engine, prompt(9), Method("top-r", max_draft=2), GREEDY, max_new_tokens=8)
    assert [kind for kind, _ in watched.calls].count("begin_cycle") == 1 + len(steps)
    assert not watched.prefetched()
    assert len(watched.requested("draft")) == 3 * sum(step.drafted for step in steps)
    assert len(watched.requested("verify")) == 3 * len(steps)


def test_prefetch_once_a_token_is_kept_is_line_13(engine, watched):
    method = Method("top-r", max_draft=3, prefetch=True, prefetch_inline=False)
    steps, _ = decode_all(engine, prompt(9), method, GREEDY, max_new_tokens=2)
    assert steps[0].drafted == 1, "one token may still be drafted"
    drafts = [keys[0] for keys in watched.requested("draft")]
    announced = watched.prefetched()[0]
    assert len(announced) == 12
    assert set(drafts) <= set(announced)


def test_dropped_tokens_are_not_prefetched_for_unless_inline(engine, watched):
    never = Method("top-r", policy="confidence", tau=1.1, prefetch=True, prefetch_inline=False)
    steps, _ = decode_all(engine, prompt(9), never, GREEDY, max_new_tokens=3)
    assert [step.drafted for step in steps] == [0, 0, 0]
    assert not watched.prefetched()
    # Inline: the draft step's own input is verified in any case.
    decode_all(engine, prompt(9), replace(never, prefetch_inline=True), GREEDY, max_new_tokens=3)
    assert len(watched.prefetched()) == 3 * 2, "two cycles had room for a draft"


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("top", [1, 2, None])
def test_only_the_surest_predictions_are_prefetched(engine, watched, top: int | None, inline: bool):
    method = Method("top-r", max_draft=2, prefetch=True, prefetch_top=top, prefetch_inline=inline)
    steps, _ = decode_all(engine, prompt(9), method, GREEDY, max_new_tokens=5)
    kept = (top or 4) - inline  # inline: what drafting runs itself is not announced
    assert sum(map(len, watched.prefetched())) == kept * 3 * sum(step.drafted for step in steps)


def test_a_stop_before_the_first_token_is_an_ar_like_step(engine):
    ids = prompt(9)
    method = Method("top-r", policy="confidence-expansion", tau=1.1, budget=0)
    steps, record = decode_all(engine, ids, method, GREEDY, max_new_tokens=5)
    assert [(step.drafted, step.emitted) for step in steps] == [(0, 1)] * 5
    assert record.tokens == tokens_of(engine, Method(), ids, max_new_tokens=5)
    assert steps[0].unique_draft == 3, "the draft step that was made is counted"
    assert steps[0].router_slots == 12


def test_budget_from_the_cache_uses_the_stores_capacity(engine, watched):
    method = Method("top-r", policy="confidence-expansion", tau=1.1, budget="cache")
    watched.capacity = 11  # one token brings 12 layer-experts
    assert [s.drafted for s in decode_all(engine, prompt(9), method, GREEDY, max_new_tokens=3)[0]] == [0, 0, 0]
    watched.capacity = 12
    assert decode_all(engine, prompt(9), method, GREEDY, max_new_tokens=9)[0][0].drafted >= 1


def test_logits_are_those_of_the_emitted_positions(engine):
    ids = prompt(9)
    for method in (Method(), Method("top-r", r=2), TARGET):
        rows: list[torch.Tensor] = []
        _, record = decode_all(engine, ids, method, GREEDY, max_new_tokens=17, on_cycle=logits_to(rows))
        logits = torch.cat(rows)
        assert logits.argmax(-1).tolist() == record.tokens


def test_digests_tell_equal_rows_from_others(engine):
    def digests(method, ids):
        digest = LogitsDigest()
        decode_all(engine, ids, method, GREEDY, max_new_tokens=12, on_cycle=digest)
        return digest.rows

    assert digests(Method(), prompt(9)) == digests(TARGET, prompt(9))
    assert len(set(digests(Method(), prompt(9)))) == 12
    assert digests(Method(), prompt(9)) != digests(Method(), prompt(9, seed=1))


@pytest.mark.parametrize("method", [Method(), Method("top-r", r=2), TARGET], ids=lambda method: method.label)
def test_sampling_is_repeatable_by_its_seed(engine, method):
    def sampled(seed):
        sampling = Sampling(temperature=0.8, top_p=0.9, seed=seed)
        return decode_all(engine, prompt(9), method, sampling, max_new_tokens=20)[1].tokens

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_the_target_as_its_own_sampled_drafter_is_always_accepted(engine):
    sampling = Sampling(temperature=1.2, top_k=50, seed=5)
    steps, _ = decode_all(engine, prompt(9), TARGET, sampling, max_new_tokens=40)
    assert all(step.accepted == step.drafted for step in steps)


@pytest.mark.parametrize(
    "method",
    [
        Method("top-r", max_draft=2),
        Method("top-r", r=2, max_draft=1, policy="confidence", tau=0.6),
        Method("draft-expert", max_draft=2, policy="confidence-expansion", tau=0.6, budget=4),
        Method("top-r", tree=TreePlan(gamma=4)),
        Method("draft-expert", tree=TreePlan(selector="confidence", gamma=7)),
        TARGET,
    ],
    ids=lambda method: method.label,
)
@pytest.mark.parametrize("sampling", [Sampling(0.7, top_k=3), Sampling(1.5, top_k=2)], ids=str)
def test_sampled_tokens_follow_the_targets_distribution_exactly(engine, method, sampling):
    """End to end, by enumeration of every draw: the joint distribution of two tokens is AR's."""
    expected = token_distribution(engine, Method(), sampling)
    found = token_distribution(engine, method, sampling)
    assert sum(expected.values()) == pytest.approx(1)
    assert found.keys() == expected.keys()
    for tokens, probability in expected.items():
        assert found[tokens] == pytest.approx(probability, abs=1e-6)


def token_distribution(engine, method, sampling, ids=(5, 77, 130)):
    """(first token, second token) -> probability, over everything that the loop can draw."""
    engine.start(64)
    engine.prefill(ids[:-1])

    def program(branches):
        engine.rollback(len(ids) - 1)
        answer = begin_answer(engine, method, sampling, branches, Request(ids, 2))
        while not answer.finish:
            run_cycle(engine, [answer])
        return tuple(answer.tokens)

    found: dict[tuple[int, ...], float] = {}
    for weight, tokens in Branches().outcomes(program):
        found[tokens] = found.get(tokens, 0.0) + weight
    return found


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Method("nonesuch"), "unknown drafter 'nonesuch'.*ar, head, draft-expert, target, top-r"),
        (Method("top-r", r=0), "r = 0.*1 to 4"),
        (Method("top-r", r=5), "r = 5.*1 to 4"),
        (Method("top-r", max_draft=0), "max_draft = 0.*1 to 7"),
        (Method("top-r", max_draft=8), "max_draft = 8 in steps of 8 rows.*1 to 7"),
        (Method("top-r", policy="nonesuch"), "unknown policy"),
    ],
)
def test_a_method_that_cannot_be_run_is_one_clear_error(engine, method, message):
    with pytest.raises(MoexpError, match=message):
        next(decode(engine, [1], method, GREEDY, max_new_tokens=1))


def test_draft_experts_must_be_loaded(tiny_folder):
    engine = make_engine(tiny_folder(), draft_experts=None)
    with pytest.raises(MoexpError, match="no draft experts"):
        next(decode(engine, [1], Method("draft-expert"), GREEDY, max_new_tokens=1))


@pytest.mark.parametrize(
    ("ids", "limit", "message"), [([], 1, "empty prompt"), ([1], 0, "0 new tokens"), ([1], 5000, "5001 positions")]
)
def test_impossible_requests_are_one_clear_error(engine, ids, limit, message):
    with pytest.raises(MoexpError, match=message):
        next(decode(engine, ids, Method(), GREEDY, max_new_tokens=limit))


def test_labels_name_the_method():
    assert Method().label == "ar"
    assert Method("top-r", r=2).label == "top-2 K4"
    method = Method("draft-expert", max_draft=3, policy="confidence-expansion", prefetch=True)
    assert method.label == "draft-expert K3 confidence-expansion prefetch"
    assert replace(method, name="DraftExpert").label == "DraftExpert"


ROUTING = st.integers(1, 4).flatmap(
    lambda rows: st.lists(
        st.lists(st.permutations(range(6)).map(lambda order: order[:3]), min_size=rows, max_size=rows),
        min_size=1,
        max_size=3,
    )
)


@given(ROUTING)
def test_union_size_is_the_sum_over_layers_of_distinct_experts(routing):
    expected = sum(len({expert for row in layer for expert in row}) for layer in routing)
    assert union_size([np.array(routing)], 6) == expected


@given(ROUTING, st.randoms(use_true_random=False))
def test_routing_overlap_ignores_order(routing, random):
    other = [[random.sample(range(6), 3) for _ in layer] for layer in routing]
    pairs = [pair for layers in zip(routing, other, strict=True) for pair in zip(*layers, strict=True)]
    expected = sum(len({*a} & {*b}) for a, b in pairs)
    assert routing_overlap(np.array(routing), np.array(other)) == (expected, 3 * len(pairs))
