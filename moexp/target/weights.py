"""How a checkpoint's bytes divide between routed experts and everything else, by its headers alone."""

from __future__ import annotations

from pathlib import Path

from moexp.target.experts import ExpertIndex, checkpoint_files, read_header


def weight_sizes(folder: Path | str) -> dict[str, int]:
    """Sizes of a checkpoint's weights as they are stored.

    Returns:
        `expert_width`; `routed_bytes` of all routed experts; `rest_bytes` of all other tensors.

    Raises:
        MoexpError: see `ExpertIndex.from_checkpoint`.
    """
    index = ExpertIndex.from_checkpoint(folder)
    sizes: dict[str, int] = {}
    for file in checkpoint_files(folder):
        for name, entry in read_header(file).items():
            begin, end = entry["data_offsets"]
            sizes[name] = end - begin
    routed = sum(sizes[name] for name in index.tensor_names)
    width, _ = index.shape(index.keys[0])
    return {"expert_width": width, "routed_bytes": routed, "rest_bytes": sum(sizes.values()) - routed}
