"""The parameters of a model from its config.json alone, built on torch's meta device: names and shapes, no bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config.architectures import ANOTHER
from hybrid.config.known_models import known_models
from hybrid.errors import ConfigError, NotExact

if TYPE_CHECKING:
    from torch import nn

KINDS = ("policy", "critic", "reward")
"""What a role makes of a config: a causal LM, its trunk with a value head, a sequence classifier with one label."""

LONGEST_REASON = 300
"""Characters of another library's message that are shown; some list every model they know."""


@dataclass(frozen=True)
class ModelShapes:
    """`parameters` in the order of `named_parameters`: tied ones come once. `buffer_bytes` are those of rotary tables and the like."""

    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    buffer_bytes: int
    layers: int
    hidden_size: int
    vocab_size: int

    @property
    def sizes(self) -> list[int]:
        """Elements of each parameter."""
        return [prod(shape) for _, shape in self.parameters]

    @property
    def elements(self) -> int:
        return sum(self.sizes)


def read_config(path: str, trust_remote_code: bool = False) -> Any:
    """The transformers config of a model folder or a hub name: from the folder or the hub's cache, else as known (`known_models.yaml`),
    else from the hub.

    Raises `ConfigError` when there is none, or one that transformers does not take.
    """
    from transformers import AutoConfig

    if Path(path).is_dir():
        with model_errors(path):
            return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError):
        if path in known_models():
            return AutoConfig.for_model(**known_models()[path])
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The config.json of {path}, from which a plan is made, is neither here nor on the hub ({str(error).splitlines()[0]}). Name a "
            f"folder that holds one, or download it where there is a network: hf download {path} config.json."
        ) from error


@contextmanager
def model_errors(path: str) -> Iterator[None]:
    """What transformers and torch raise while they build or run what the config.json at `path` describes becomes a `ConfigError`: that file
    is the user's, and what it may lead to has no bounded list of classes."""
    try:
        yield
    except NotExact as error:
        raise ConfigError(f"{path}: {error}") from error
    except ConfigError:
        raise
    except Exception as error:
        from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

        if isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
            raise ConfigError(
                f"{path} is invalid: the memory of its passes depends on values that only a run has ({error}), and cannot be planned. "
                f"{ANOTHER}"
            ) from error
        said = " ".join(str(error).split())[:LONGEST_REASON]
        raise ConfigError(
            f"The config.json of {path} describes no causal language model that can be planned for ({type(error).__name__}: {said}). "
            "Correct the file, or name another model."
        ) from error


@lru_cache(maxsize=16)
def shapes(path: str, kind: str, trust_remote_code: bool = False) -> ModelShapes:
    """Shapes of the model that role `kind` makes of the config at `path`. Raises `ConfigError` as `read_config`."""
    import torch

    config = read_config(path, trust_remote_code)
    with model_errors(path), torch.device("meta"):
        model = build(config, kind, torch.float32, trust_remote_code=trust_remote_code)
    buffers = {b.untyped_storage()._cdata: b.untyped_storage().nbytes() for b in model.buffers()}
    text = config.get_text_config()
    return ModelShapes(
        tuple((name, tuple(p.shape)) for name, p in model.named_parameters()),
        sum(buffers.values()),
        text.num_hidden_layers,
        text.hidden_size,
        text.vocab_size,
    )


def build(
    config: Any,
    kind: str,
    dtype: Any,
    attention: str | None = None,
    trust_remote_code: bool = False,
    dropout: bool = False,
) -> nn.Module:
    """The module of role `kind`, on the default device, with no weights loaded and none drawn."""
    from torch import nn
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.initialization import no_init_weights

    from hybrid.roles.apart import check_apart
    from hybrid.roles.models import PolicyModel, ValueModel

    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    options |= {"attn_implementation": attention} if attention else {}
    auto = {"policy": AutoModelForCausalLM, "critic": AutoModel, "reward": AutoModelForSequenceClassification}[kind]
    with no_init_weights():
        model = auto.from_config(config, **options)
    model.tie_weights()
    if kind != "reward":
        check_apart(model)
    if kind == "policy":
        return PolicyModel(model, dropout)
    if kind == "critic":
        return ValueModel(model, nn.Linear(config.get_text_config().hidden_size, 1, dtype=dtype), dropout)
    return model
