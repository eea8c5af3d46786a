"""What the roles run: a policy that gives log-probs, a critic that gives values, both on packed batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from hybrid.algorithms.logprobs import EndMask, chunk_count, chunked_logprobs, tokens_per_chunk
from hybrid.errors import ConfigError
from hybrid.roles import attention
from hybrid.roles.apart import check_apart, check_ran
from hybrid.roles.dropout import QuietInTraining
from hybrid.roles.head import trunk_of, whole_head
from hybrid.roles.packing import PackedBatch
from hybrid.roles.varlen import check_alignment


@dataclass(frozen=True)
class ModelOptions:
    """How a role's model is loaded."""

    path: str
    dtype: torch.dtype
    attention: str
    """sdpa or varlen (packed, prompts shared), or flash_attention_2 (packed, one response per segment)."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    dropout: bool = False
    """Train with the dropout and router noise of the model's config."""
    seed: int = 0
    """Makes new heads equal on every rank."""

    @property
    def share_prompts(self) -> bool:
        return self.attention in attention.NAMES


class PolicyModel(QuietInTraining):
    """A causal language model as a function from packed tokens to log-probs of the response tokens."""

    def __init__(self, hf: nn.Module, dropout: bool = False):
        super().__init__()
        self.hf, self.dropout = hf, dropout

    def forward(
        self,
        batch: PackedBatch,
        temperature: float,
        with_entropy: bool = False,
        entropy_gradient: bool = True,
        ends: EndMask | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """float32 log-probs R of `batch.targets_R` at `temperature`, without `ends` where the sampler drew without them, and entropies R
        when asked for, with or without a gradient."""
        hidden_RH = _hidden(trunk_of(self.hf), batch)[batch.predict_R]
        weight = self.hf.get_output_embeddings().weight
        vocabulary = getattr(weight, "ds_shape", weight.shape)[0]
        chunk = tokens_per_chunk(vocabulary, hidden_RH.element_size())
        return chunked_logprobs(
            hidden_RH,
            whole_head(self.hf),
            batch.targets_R,
            temperature,
            chunk,
            with_entropy=with_entropy,
            entropy_gradient=entropy_gradient,
            masked_N=None if ends is None else batch.positions_R() < ends.min_new_tokens,
            masked_ids=() if ends is None else tuple(i for i in ends.token_ids if i < vocabulary),
            min_chunks=self._chunks_of_longest_rank(chunk_count(len(hidden_RH), chunk)),
        )

    def _chunks_of_longest_rank(self, chunks: int) -> int:
        """Under ZeRO-3 each call of the head gathers its weight from all ranks, so all must make as many calls."""
        if not hasattr(self.hf.get_output_embeddings().weight, "ds_id"):
            return chunks
        longest = torch.tensor(chunks)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return int(longest)


class ValueModel(QuietInTraining):
    """A causal language model's trunk with a scalar head: the value of the state before each response token."""

    def __init__(self, trunk: nn.Module, head: nn.Linear, dropout: bool = False):
        super().__init__()
        self.trunk = trunk
        self.head = head
        self.dropout = dropout

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """float32 values R."""
        hidden_RH = _hidden(self.trunk, batch)[batch.predict_R]
        return self.head(hidden_RH).squeeze(-1).float()


def _hidden(trunk: nn.Module, batch: PackedBatch) -> torch.Tensor:
    """N x H last hidden states. Raises `NotExact` for a layer that did not keep the segments apart."""
    name = trunk.config._attn_implementation
    shares_prompts = name in attention.NAMES.values()
    layout = (
        attention.layout(name, batch.segments, batch.input_ids_N.device) if shares_prompts else batch.varlen_kwargs()
    )
    ids, positions = batch.input_ids_N[None], batch.position_ids_N[None]
    with attention.modules_that_ran() as ran:
        out = trunk(input_ids=ids, position_ids=positions, use_cache=False, **layout)
    if name in attention.RECORDED:
        check_ran(trunk, ran)
    return out.last_hidden_state[0]


def load_policy(options: ModelOptions, device: torch.device | None = None) -> PolicyModel:
    """The causal language model at `options.path`, read to `device` (see `reading`). Raises `ConfigError` when the folder does not hold
    one, `NotExact` where rows cannot be packed."""
    return PolicyModel(_load(AutoModelForCausalLM, options, device), options.dropout)


def load_critic(options: ModelOptions) -> ValueModel:
    """The model at `options.path` as a critic.

    A sequence classifier with one label, a reward model that is, keeps its head. Of any other model the trunk is taken, with a new
    head: zero bias, small weights equal on every rank. Raises `ConfigError` for a classifier with more labels or a head that is not
    one matrix.
    """
    architectures = _config(options).architectures or ()
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        model = _load(AutoModelForSequenceClassification, options)
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            raise ConfigError(
                f"critic.path={options.path}: a critic starts from a sequence classifier with one label and a linear head `score`; this "
                f"is a {type(model).__name__} with {model.config.num_labels} labels."
            )
        return ValueModel(model.base_model, head, options.dropout)
    trunk = _load(AutoModel, options)
    head = nn.Linear(trunk.config.get_text_config().hidden_size, 1, dtype=options.dtype)
    generator = torch.Generator().manual_seed(options.seed)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.01)
        head.bias.zero_()
    return ValueModel(trunk, head, options.dropout)


def load_reward_model(
    path: str, dtype: torch.dtype, trust_remote_code: bool, device: torch.device | None = None
) -> nn.Module:
    """A transformers sequence-classification model with one label, read to `device` (see `reading`). Raises `ConfigError` when it has
    more."""
    model = AutoModelForSequenceClassification.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, **reading(device)
    )
    if model.config.num_labels != 1:
        raise ConfigError(f"reward.model={path} has {model.config.num_labels} labels; a reward model has one.")
    return _own_memory(model).eval()


def reading(device: torch.device | None) -> dict[str, dict[str, torch.device]]:
    """Arguments of `from_pretrained` that read a model straight to a GPU, tensor by tensor: no rank of a node then needs host memory for
    all of it. None for host memory and for ZeRO-3, which reads by itself and refuses a device."""
    return {} if device is None or device.type == "cpu" else {"device_map": {"": device}}


def _config(options: ModelOptions) -> PretrainedConfig:
    return AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)


def _load(auto: type, options: ModelOptions, device: torch.device | None = None) -> nn.Module:
    config = _config(options)
    implementation = attention.NAMES.get(options.attention, options.attention)
    if options.attention == "varlen" and torch.cuda.is_available():
        check_alignment("cuda", options.dtype)
    model, found = auto.from_pretrained(
        options.path,
        config=config,
        dtype=options.dtype,
        attn_implementation=implementation,
        trust_remote_code=options.trust_remote_code,
        output_loading_info=True,
        **reading(device),
    )
    if missing := sorted(set(found["missing_keys"]) - set(getattr(model, "all_tied_weights_keys", None) or ())):
        raise ConfigError(
            f"{options.path} is invalid as a model: its files lack {len(missing)} weights, such as `{missing[0]}`, which would be random. "
            "Complete the folder."
        )
    check_apart(model)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _own_memory(model)


def _own_memory(model: nn.Module) -> nn.Module:
    """`model` with every parameter and buffer in memory of its own: loaded ones are mapped from the file and cannot leave the device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return model
