"""How a checkpoint's bytes divide between routed experts and everything else, by its headers alone."""

from __future__ import annotations

from pathlib import Path

from moexp.target.pack_format import PackedIndex, read_index
from moexp.target.shards import list_tensors


def weight_sizes(folder: Path | str) -> dict[str, int]:
    """Sizes of a checkpoint's weights as they are stored.

    Returns:
        `expert_width`; `routed_bytes` of all routed experts; `rest_bytes` of all other tensors.

    Raises:
        MoexpError: see `ExpertIndex.from_checkpoint`.
    """
    index = read_index(folder)
    sizes = {name: tensor.stop - tensor.start for name, tensor in list_tensors(Path(folder)).items()}
    rest = sum(size for name, size in sizes.items() if name not in index.tensor_names)
    routed = sum(sizes.values()) - rest
    if isinstance(index, PackedIndex):
        routed = index.stored_bytes * len(index.keys)
    width, _ = index.shape(index.keys[0])
    return {"expert_width": width, "routed_bytes": routed, "rest_bytes": rest}
