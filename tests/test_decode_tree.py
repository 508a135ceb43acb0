"""Tree decoding: what AR gives, to the bit, whatever is drafted, selected and prefetched; and what it records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from moexp.base.errors import MoexpError
from moexp.runtime.decoding.decode import decode_all
from moexp.runtime.decoding.method import Method, TreePlan
from moexp.runtime.drafters.draft_tree import TreeShape
from moexp.runtime.predictors.oracle import OraclePredictor, Recording
from moexp.runtime.verifiers.sampling import Sampling
from tests.engines import WatchedStore, logits_to, make_engine, prompt, swap_store
from tests.trees import full_size

pytestmark = pytest.mark.e2e

GREEDY = Sampling()


def tree(drafter: str = "top-r", **options: Any) -> Method:
    shape = TreeShape(**{name: options.pop(name) for name in ("steps", "width", "beam") if name in options})
    prefetch = options.pop("prefetch", False)
    return Method(drafter, prefetch=prefetch, tree=TreePlan(shape, **options))


def run(engine, method, ids, **options):
    logits: list[torch.Tensor] = []
    steps, record = decode_all(
        engine,
        ids,
        method,
        options.pop("sampling", GREEDY),
        on_cycle=logits_to(logits),
        **{"max_new_tokens": 24, **options},
    )
    return steps, record, torch.cat(logits)


@pytest.fixture(scope="module")
def engine(tiny_folder):
    return make_engine(tiny_folder(), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "method",
    [
        tree(),
        tree("draft-expert", selector="confidence", gamma=5),
        tree("draft-expert", selector="global-cost", gamma=6, epsilon=0.1, prefetch=True),
        tree("draft-expert", gamma=3, epsilon=10.0, prefetch=True),
        tree(selector="confidence", predictor="none", gamma=7, steps=2, width=3),
        tree(width=1, beam=1, steps=5, selector="confidence-expansion", prefetch=True),
        tree("target", gamma=8),
        tree(gamma=1),
    ],
    ids=lambda method: method.label.replace(" ", "_"),
)
def test_a_tree_gives_the_logits_of_plain_decoding(engine, method):
    for seed in (0, 1, 2):
        ids = prompt(20 + seed, seed)
        _, plain, expected = run(engine, Method(), ids)
        _, record, logits = run(engine, method, ids)
        assert record.tokens == plain.tokens
        assert torch.equal(logits, expected)


def test_the_target_drafting_for_itself_is_accepted_to_the_depth_of_its_tree(engine):
    whole = tree("target", selector="confidence", steps=2, gamma=7)  # 1 + 2 + 4 nodes: nothing is left out
    steps, record, _ = run(engine, whole, prompt(12))
    assert [step.accepted for step in steps[:-1]] == [2] * (len(steps) - 1)
    assert record.new_tokens == 24


def test_a_stop_token_ends_the_answer_and_the_limit_is_kept(engine):
    ids = prompt(12)
    plain = run(engine, Method(), ids)[1].tokens
    stop = plain[9]
    cut = plain[: plain.index(stop) + 1]
    _, record, _ = run(engine, tree("target"), ids, stop_ids={stop})
    assert record.tokens == cut and record.finish_reason == "stop"
    for limit in (1, 2, 5):
        _, record, _ = run(engine, tree("target"), ids, max_new_tokens=limit)
        assert record.tokens == plain[:limit] and record.finish_reason == "length"


def test_selection_keeps_to_its_budget_and_records_what_it_chose_from(engine):
    steps, _, _ = run(engine, tree(gamma=4), prompt(12))
    full = [step for step in steps if step.tree_nodes == full_size(TreeShape())]
    assert full and all(step.drafted == 3 for step in full)
    assert all(step.router_slots == engine.spec.experts_per_token * (step.drafted + 1) for step in full)


def test_a_cheaper_block_is_chosen_where_cost_counts(engine):
    def experts(epsilon: float) -> float:
        total = 0.0
        for seed in range(4):
            steps, _, _ = run(engine, tree(gamma=4, epsilon=epsilon), prompt(12, seed))
            total += sum(step.unique_verify or 0 for step in steps) / len(steps)
        return total

    assert experts(1e-3) < experts(1e6)


def test_each_expert_is_asked_for_once_a_layer_and_only_selected_nodes_are_prefetched(engine, tiny_folder):
    store = WatchedStore.of(tiny_folder(), dtype=torch.bfloat16)
    before = swap_store(engine, store)
    try:
        run(engine, tree(prefetch=True, gamma=4), prompt(12))
    finally:
        swap_store(engine, before)
    assert store.open_tickets == 0
    announced = [set(keys) for kind, keys in store.calls if kind == "prefetch"]
    assert announced and all(len(keys) == engine.spec.experts_per_token for keys in announced)  # one node's


def test_sampled_trees_repeat_with_their_seed(engine):
    sampling = Sampling(temperature=1.0, top_k=20, seed=3)
    one = run(engine, tree("draft-expert"), prompt(12), sampling=sampling)[1].tokens
    two = run(engine, tree("draft-expert"), prompt(12), sampling=sampling)[1].tokens
    other = run(engine, tree("draft-expert"), prompt(12), sampling=Sampling(temperature=1.0, top_k=20, seed=4))[
        1
    ].tokens
    assert one == two != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selector": "nope"}, "unknown selector 'nope'.*marginal-cost"),
        ({"selector": "oracle"}, "selector oracle with predictor draft-router"),
        ({"predictor": "none"}, "selector marginal-cost with predictor none"),
        ({"predictor": "nope"}, "unknown predictor 'nope'.*draft-router"),
        ({"gamma": 9}, "gamma = 9 in steps of 8 rows.*1 to 8"),
        ({"steps": 9, "beam": 2}, "inner nodes in steps of 8 rows"),
        ({"epsilon": 0.0}, "epsilon = 0.0"),
    ],
)
def test_a_plan_that_cannot_be_run_is_an_error(engine, options, message):
    with pytest.raises(MoexpError, match=message):
        run(engine, tree(**options), prompt(5))


# --- predictors of their own ---


class Recorded:
    """A predictor that keeps what it is asked and told."""

    def __init__(self, spec):
        self.spec, self.log = spec, []

    def begin(self, prompt_ids, max_new_tokens):
        self.log.append(("begin", list(prompt_ids), max_new_tokens))

    def predict(self, tree):
        self.log.append(("predict", int(tree.tokens_N[0])))
        shape = (len(tree), len(self.spec.moe_layers), self.spec.top_k)
        return np.broadcast_to(np.arange(self.spec.top_k, dtype=np.int16), shape)

    def commit(self, tokens):
        self.log.append(("commit", list(tokens)))


def test_a_predictor_follows_the_request_and_is_timed_apart(engine):
    made: list[Recorded] = []

    def make() -> Any:
        made.append(Recorded(engine.spec))
        return made[-1]

    engine.predictors["learned"] = make
    ids = prompt(12)
    try:
        steps, record, logits = run(engine, tree(predictor="learned", prefetch=True, gamma=4), ids)
        _, plain, expected = run(engine, Method(), ids)
    finally:
        engine.predictors.clear()
    assert record.tokens == plain.tokens and torch.equal(logits, expected)
    (predictor,) = made
    assert predictor.log[0] == ("begin", ids, 24)
    said = [tokens for kind, *rest in predictor.log for tokens in rest if kind == "commit"]
    assert [token for tokens in said for token in tokens] == record.tokens
    roots = [rest[0] for kind, *rest in predictor.log if kind == "predict"]
    assert roots == [ids[-1], *(step.tokens[-1] for step in steps[:-1])]
    assert all(step.predict_s is not None and step.draft_s >= 0 for step in steps)


class Announced:
    """What an engine prefetches outside of steps."""

    def __init__(self):
        self.routings = []

    def passed(self, path, routings):
        pass

    def prefetched(self, routing_Lk):
        self.routings.append(routing_Lk.copy())


def test_of_nodes_that_were_drafted_from_the_draft_router_is_believed(engine):
    found: dict[str, list[np.ndarray]] = {}
    engine.predictors["learned"] = lambda: Recorded(engine.spec)
    try:
        for predictor in ("draft-router", "learned"):
            announced = Announced()
            engine.observe(announced)
            run(engine, tree(predictor=predictor, selector="confidence", prefetch=True, gamma=8), prompt(12))
            found[predictor] = announced.routings
    finally:
        engine.observe(None)
        engine.predictors.clear()
    model = np.broadcast_to(np.arange(engine.spec.top_k), found["learned"][0].shape)
    same = [np.array_equal(one, other) for one, other in zip(*found.values(), strict=True)]
    assert all(alike or np.array_equal(one, model) for alike, one in zip(same, found["learned"], strict=True))
    assert 0 < sum(same) < len(same), "inner nodes by the router, leaves by the model"


def test_the_oracle_knows_the_routing_of_every_verified_node(engine, tiny_folder):
    recording: Recording = {}
    second = make_engine(tiny_folder(), dtype=torch.bfloat16)
    method, ids = tree(selector="oracle", predictor="oracle", gamma=4), prompt(12)
    try:
        engine.predictors["oracle"] = lambda: OraclePredictor(recording, second)
        first = run(engine, method, ids)
        engine.predictors["oracle"] = lambda: OraclePredictor(recording)  # replayed: nothing is run for it
        steps, record, logits = run(engine, method, ids)
        _, plain, expected = run(engine, Method(), ids)
    finally:
        engine.predictors.clear()
    assert record.tokens == plain.tokens == first[1].tokens and torch.equal(logits, expected)
    assert all(step.router_overlap == step.router_slots for step in steps)


def test_a_predictor_that_is_not_loaded_is_an_error(engine):
    for name in ("learned", "oracle"):
        with pytest.raises(MoexpError, match=f"no {name} predictor is loaded"):
            run(engine, tree(predictor=name), prompt(5))
