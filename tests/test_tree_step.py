"""A tree in one step: every node's logits are those of decoding its path token by token, and the path that stands can
be continued as if it had been.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moexp.runtime.engine.attention import branches_of
from moexp.runtime.engine.engine import AR, VERIFY, Block
from moexp.target.families import FAMILIES
from tests.engines import make_engine, prompt

PARENTS = [-1, 0, 0, 1, 1, 2, 3]  # paths 0-1-3-6, 0-1-4, 0-2-5


def path_of(parents, node):
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def token_by_token(engine, prefilled, ids):
    engine.rollback(prefilled)
    return torch.cat([engine.run(Block([token]), AR).logits_BV for token in ids])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_each_node_has_the_logits_of_its_path(tiny_folder, model_type, dtype):
    engine = make_engine(tiny_folder(model_type=model_type), dtype=dtype)
    prefix, tokens = prompt(125), prompt(len(PARENTS), seed=5)  # the longest path crosses a padded length
    engine.start(len(prefix) + 16)
    engine.prefill(prefix)
    tree = engine.run(Block(tokens, PARENTS), VERIFY)
    assert engine.length == len(prefix)
    for leaf in (6, 4, 5):
        path = path_of(PARENTS, leaf)
        alone = token_by_token(engine, len(prefix), [tokens[node] for node in path])
        assert torch.equal(tree.logits_BV[path], alone)


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_the_path_that_stands_is_continued_as_if_decoded_alone(tiny_folder, model_type):
    engine = make_engine(tiny_folder(model_type=model_type), dtype=torch.bfloat16)
    prefix, tokens, after = prompt(30), prompt(len(PARENTS), seed=5), prompt(3, seed=6)
    engine.start(len(prefix) + 16)
    engine.prefill(prefix)
    for nodes in ([0, 1, 4], [0, 2, 5], [0], [0, 1]):
        engine.rollback(len(prefix))
        engine.run(Block(tokens, PARENTS), VERIFY)
        engine.commit(nodes)
        assert engine.length == len(prefix) + len(nodes)
        continued = torch.cat([engine.run(Block([token]), AR).logits_BV for token in after])
        alone = token_by_token(engine, len(prefix), [*(tokens[node] for node in nodes), *after])
        assert torch.equal(continued, alone[len(nodes) :])


def test_a_chain_is_a_tree_of_one_branch(tiny_folder):
    engine = make_engine(tiny_folder(), dtype=torch.bfloat16)
    prefix, tokens = prompt(30), prompt(5, seed=5)
    engine.start(len(prefix) + 16)
    engine.prefill(prefix)
    chain = engine.run(Block(tokens), VERIFY)
    engine.rollback(len(prefix))
    tree = engine.run(Block(tokens, [-1, 0, 1, 2, 3]), VERIFY)
    assert torch.equal(chain.logits_BV, tree.logits_BV)
    assert (chain.routing_LBk == tree.routing_LBk).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), count=st.integers(1, 12))
def test_branches_cover_every_node_once_and_follow_its_ancestors(data, count):
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, count))]
    rows = 16
    taken = []
    for branch in branches_of(parents, rows, torch.device("cpu")):
        path = branch.rows_T.tolist()
        begin, end = branch.fresh
        assert len(path) == rows and path[:end] == path_of(parents, path[end - 1])
        assert path[end:] == [path[end - 1]] * (rows - end)
        taken += path[begin:end]
    assert sorted(taken) == list(range(count))
