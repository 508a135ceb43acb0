"""The draft router as a predictor: the routing of a draft path stands in for the target's.

For the nodes that were expanded it comes with drafting; the leaves cost one more draft step.
"""

from __future__ import annotations

from moexp.runtime.drafters.draft_tree import DraftTree, blocks_of
from moexp.runtime.drafters.self_tree import NodeRouting, run_nodes
from moexp.runtime.engine.engine import Engine
from moexp.runtime.engine.moe import StepPath


def route_leaves(engine: Engine, path: StepPath, tree: DraftTree, routing: NodeRouting) -> None:
    """Runs the nodes that have no routing yet on a draft path, and adds theirs.

    Raises:
        MoexpError: a path longer than a block.

    Paper: DraftExpert eq. 12.
    """
    leaves = [node for node in range(len(tree)) if node not in routing]
    for block in blocks_of(tree, engine.block, leaves):
        run_nodes(engine, path, tree, block, routing)
