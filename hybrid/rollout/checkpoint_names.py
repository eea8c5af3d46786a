"""The names and shapes of the weights that a model needs, read from its checkpoint without loading it.

A checkpoint may hold more: heads that another class has, layers that predict further tokens, constants of older versions.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hybrid.config.checkpoint import tensors, weight_files
from hybrid.errors import RolloutError

Shapes = dict[str, tuple[int, ...]]

HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of heads. One that is tied to the embeddings may lie in a checkpoint and is never sent."""
NOT_WEIGHTS = ("rotary_emb.inv_freq", "masked_bias", ".attn.bias")
"""Constants that some checkpoints carry and no parameter has."""


def checkpoint_shapes(folder: str | Path, left_out: Collection[str] = ()) -> Shapes:
    """Name -> shape of every tensor in the folder's `weight_files`, but for those `left_out`. Raises `RolloutError` when there are none."""
    files = weight_files(folder)
    if not files:
        raise RolloutError(
            f"{folder} holds no safetensors weights; save the model with transformers' `save_pretrained`."
        )
    shapes: Shapes = {}
    for file in files:
        shapes |= {n: tuple(v["shape"]) for n, v in tensors(file).items() if not n.endswith(NOT_WEIGHTS)}
    return {name: shape for name, shape in shapes.items() if name not in left_out}


def unused_tensors(path: str, trust_remote_code: bool = False) -> set[str]:
    """Names of tensors that a checkpoint holds and its causal language model has not: a value head, a vision tower. No weights are read.

    Not among them are those that transformers knows to be left out, such as the layers of DeepSeek-V3 that predict further tokens: vLLM
    knows them, too. Not for a process in which vLLM has run: it changes transformers' classes.
    """
    import transformers

    shown = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # it logs a table of these names
    try:
        _, told = transformers.AutoModelForCausalLM.from_pretrained(
            path, device_map="meta", output_loading_info=True, trust_remote_code=trust_remote_code
        )
    finally:
        transformers.logging.set_verbosity(shown)
    return set(told["unexpected_keys"])


def check_bucket(expected: Shapes, received: set[str], names: list[str], shapes: list[list[int]]) -> None:
    """Raise `RolloutError` when a bucket holds a tensor that the model has not, twice, or in another shape."""
    for name, shape in zip(names, shapes, strict=True):
        if name not in expected:
            raise RolloutError(
                f"Weight sync: the model has no weight `{name}`. It expects names such as {_some(expected)}."
            )
        if name in received:
            raise RolloutError(f"Weight sync: `{name}` was sent twice in one sync.")
        if tuple(shape) != expected[name]:
            raise RolloutError(
                f"Weight sync: `{name}` was sent with shape {tuple(shape)}; the model has {expected[name]}."
            )


def check_complete(expected: Shapes, received: set[str], needed: set[str]) -> None:
    """Raise `RolloutError` when an update ends without weights that vLLM takes: `needed`, of those that were not sent.

    A checkpoint may hold others: a value head, layers that predict further tokens.
    """
    missing = (set(expected) - received) & needed
    if missing:
        raise RolloutError(
            f"Weight sync: {len(missing)} of {len(expected)} weights were not sent: {_some(missing)}. "
            "The engine would go on with stale ones; send every weight of the model under its checkpoint name."
        )


def _some(names, count: int = 3) -> str:
    first = sorted(names)[:count]
    return ", ".join(f"`{n}`" for n in first) + (", ..." if len(names) > count else "")
