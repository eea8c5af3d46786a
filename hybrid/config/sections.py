"""The sections of a profile: where the run lives, what it trains, and how. The docstring under a field is its
documentation.

`auto` is replaced by `hybrid.config.resolve` before anything starts; the value taken is in the run's `profile.yaml`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from hybrid.config.base import Bytes, Section, Size

Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
Auto = Literal["auto"]


class Cluster(Section):
    """Machines: how many nodes and GPUs, and how to reach them."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What computes. `auto`: cuda where a GPU is visible, else cpu."""
    num_nodes: Positive = 1
    """Nodes that the run spans."""
    gpus_per_node: Positive | Auto = "auto"
    """GPUs used on each node; on cpu, logical ones. `auto`: the visible GPUs of this node, on cpu 2."""
    address: Text | None = None
    """A running Ray cluster to join, `auto` for the one this node belongs to. null: start Ray here and end it with the
    run."""
    start_timeout_s: PositiveFloat = 120.0
    """Seconds to wait for Ray to start or, with an address, for the cluster to answer; and again for it to offer the GPUs."""
    call_timeout_s: PositiveFloat = 1800.0
    """Seconds that one call to a role or an engine may take before the run is ended with a diagnosis."""
    threads_per_process: Positive | Auto = "auto"
    """CPU threads of each process. `auto`: this machine's cores / gpus_per_node."""
    bind_numa: bool | Auto = "auto"
    """Keep each process that has one GPU on the cores of the NUMA node that the GPU hangs on: copies to pinned memory and
    launches of kernels then stay on one socket. Left alone where the machine does not say where a GPU is, or where a GPU
    would get fewer cores than its even part of those that affinity and control groups allow; the process's log says which.
    `auto`: true on cuda; there is nothing to lose, as Linux alone moves processes between sockets."""
    dashboard: bool = True
    """Start Ray's dashboard with a Ray of our own."""


class Model(Section):
    """The model that is trained."""

    path: Text
    """A folder with a Hugging Face model, or a hub name such as `Qwen/Qwen2.5-7B-Instruct`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Number type of forward passes and of the engines; the optimizer's masters are fp32 in any case. `auto`: bfloat16,
    float32 on a CPU without bf16 instructions."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attention_2"] = "auto"
    """Attention of the trainer. `varlen`: torch's own flash kernel, one call per layer, each prompt computed once for all its
    responses; on cuda with bfloat16, from Ampere on (compute capability 8.0). Layers that the kernel does not take run as
    with `sdpa`: heads larger than 256, of 193 to 224 or not a multiple of 8, dropout, chunks, float32. `sdpa`: a masked
    call per response, on any device and type. `flash_attention_2`: the package flash-attn, which computes a prompt once
    per response, but knows soft caps. `auto`: on cuda varlen where GPU and model.dtype can, flash_attention_2 for models
    with soft caps where flash-attn can be imported; else sdpa."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time in training."""
    dropout: Literal["none", "config"] = "none"
    """Dropout, layer drop and router noise in training. `none`: off, whatever the model's config says. `config`: as it says;
    ratios to the old policy then differ from 1 at the first update."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    @property
    def shares_prompts(self) -> bool:
        """Whether the trainer computes a prompt once for all its responses."""
        return self.attention != "flash_attention_2"


class TrainedRole(Section):
    """ZeRO stage, AdamW and learning-rate schedule of a model that is trained."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] = 2
    """What DeepSpeed shards over the ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
    learning_rate: PositiveFloat = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up; linear and cosine reach min_lr_ratio at the last optimizer step."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises from 0."""
    min_lr_ratio: Share = 0.0
    """Last learning rate of a linear or cosine schedule, as a share of the peak."""
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm over all parameters."""
    optimizer: Literal["auto", "device", "cpu"] = "auto"
    """Where fp32 masters and moments live and are stepped: on the GPU, or in host memory by AdamW on the CPU, which is
    slower (cuda, zero_stage 1 to 3). `auto`: device; cpu where the run fits in no other way."""


class Actor(TrainedRole):
    """ZeRO stage, AdamW and schedule of the policy."""


class Critic(TrainedRole):
    """The value model of `algorithm.advantage: gae`: a causal LM with a value head. Only with gae."""

    path: Text | None = None
    """Model to start from: a causal LM, whose trunk gets a new value head, or a reward model (a sequence classifier with
    one label), whose head becomes the value head. It must read the actor's tokens. null: model.path, the actor's own."""
    learning_rate: PositiveFloat = 1e-5
    """Peak learning rate."""


class Reference(Section):
    """The frozen model that KL is measured against. Only with `algorithm.kl_coef` above 0."""

    path: Text | None = None
    """Model folder or hub name. null: model.path, as it was before training."""
    zero_stage: Literal[0, 3] = 0
    """0: every GPU has all weights. 3: sharded over the ranks."""


class Rollout(Section):
    """vLLM engines and how they sample."""

    engines: Positive | Auto = "auto"
    """vLLM instances. `auto`: GPUs / tensor_parallel_size, the only number that fills the pool."""
    tensor_parallel_size: Positive = 1
    """GPUs of one engine, all on one node."""
    samples_per_prompt: Positive = 8
    """Responses to each prompt, the group of the group estimators."""
    max_new_tokens: Positive = 512
    """Longest response, in tokens."""
    min_new_tokens: NonNegative = 0
    """Tokens before which a response may not end: sampler and trainer leave the end tokens out of the softmax there. The texts of
    `stop` stay drawable, and end nothing before."""
    temperature: Annotated[float, Field(ge=0.01)] = 1.0
    """Sampling temperature; the trainer's log-probs use the same one. vLLM samples below 0.01 as at 0.01."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this much probability. 1: off. Below 1 the sampler's log-probs are
    those of the cut distribution, the trainer's those of the whole: ratios between the two are biased."""
    top_k: NonNegative = 0
    """Sample from the k likeliest tokens. 0: off. Cuts the distribution as top_p does."""
    min_p: Share = 0.0
    """Leave out tokens with less than this share of the likeliest one's probability. 0: off. Cuts the distribution as
    top_p does."""
    stop: list[Text] = Field(default_factory=list)
    """Texts that end a response."""
    repeatable: bool | Auto = "auto"
    """Seed every request, so that a run samples the same again; slows vLLM's sampler on GPUs. `auto`: true on cpu."""
    kv_cache: Size | Auto = "auto"
    """KV cache of an engine, bytes per GPU. `auto`: what max_num_seqs sequences of full length need, or less where that
    lets the run fit or move less; a quarter of memory.device_bytes where the model's config.json is not at hand."""
    max_num_seqs: Positive = 256
    """Sequences that an engine works on at a time."""
    enforce_eager: bool | Auto = "auto"
    """No CUDA graphs, and nothing compiled: starts faster, generates slower. `auto`: true on cpu, where false compiles for a
    minute or two and then takes a quarter less time to generate (135M parameters, 32 sequences): for runs of an hour or more."""
    custom_all_reduce: bool = True
    """Add up what the GPUs of an engine computed by vLLM's own all-reduce, which beats NCCL on messages up to 8 MiB, those of
    decoding; tensor_parallel_size above 1 on cuda. Its buffers, 34 MiB on each GPU, stay while the engine sleeps. vLLM does
    without where GPUs have no access to each other's memory. false: NCCL alone, as where vLLM hangs or fails in it."""
    weight_bucket: Size | Auto = "auto"
    """Bytes of weights that one message of a weight sync carries; on cuda at least the largest tensor, at most the model, and
    twice on each GPU. `auto`: 256MiB on cpu, 2GiB on cuda."""
    replay: Text | None = None
    """Train on the rollouts recorded in this file in place of generating."""
    record: Text | None = None
    """Write the rollouts to this file, for `replay`."""


class Train(Section):
    """How long, in which portions."""

    steps: Positive
    """Steps: one rollout and the training on it."""
    prompts_per_step: Positive = 32
    """Prompts of a rollout, over all engines."""
    prompts_per_update: Positive | None = None
    """Prompts (with all their samples) of one optimizer step, over all ranks. null: prompts_per_step, one optimizer
    step per rollout."""
    epochs: Positive = 1
    """Passes over each rollout."""
    micro_batch_tokens: Positive | Auto = "auto"
    """Tokens, prompt and response, of one forward/backward pass on one rank. Bounds the memory of activations; changes
    no result. `auto`: 16384, on cpu 4096, or less where that lets the run fit or move less; never less than the longest
    sequence."""
    overlap_comm: bool | Auto = "auto"
    """Exchange gradients (zero_stage 2 and 3) and gather weights (3) on a CUDA stream of their own while the GPU computes; a
    second bucket of gradients in stage 2, and copies that live longer, are the price. `auto`: true on cuda with several
    GPUs. A 7B model in stage 2 exchanges 15 GB with every micro-batch, which otherwise waits."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of sampling, shuffling and initial value head."""
    max_skipped_steps: Positive = 3
    """Optimizer steps skipped in a row, for a loss or gradient that is not finite, after which the run stops."""


class Data(Section):
    """Prompts, labels and held-out evaluation."""

    train: Text
    """`reasoning_gym:TASK`, a .jsonl file, a saved `datasets` folder, or a hub name."""
    eval: Text | None = None
    """Held-out data, as `train`; of data with splits, test, else validation. null: for a reasoning_gym task, problems that
    training never sees; else no evaluation."""
    eval_size: Positive = 64
    """Held-out problems that are answered greedily at the start and the end."""
    eval_function: Text | None = None
    """Scores the evaluation; accuracy is the share of scores of at least 1.0. null: reward.function; with a
    reward model, the scorer of the reasoning_gym task."""
    task_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the reasoning_gym task."""
    prompt_field: Text = "prompt"
    """Column with the prompt: a text, a list of chat messages or its JSON text. An answer at the end is left out.
    All keys that name columns take paths into nested ones: reward_model.ground_truth."""
    label_field: Text = "label"
    """Column with what the reward compares with."""
    tools_field: Text | None = "tools"
    """Column with the tools that the chat template shows, a list or its JSON text; records may lack the column
    `tools`. null: none."""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """Variables for the chat template, such as enable_thinking: false."""
    system_prompt: str | None = None
    """System message in front of each prompt. null: none."""
    prompt_suffix: str = ""
    """Text added to the end of each prompt."""
    max_prompt_tokens: Positive = 1024
    """Longest prompt in tokens, chat template included."""
    too_long: Literal["drop", "error"] = "drop"
    """Prompts that are longer: left out and counted, or refused."""
    shuffle: bool = True
    """Shuffle anew for each pass over the data."""
    split: Text = "train"
    """Split of hub data."""


class Memory(Section):
    """What stays on a GPU between phases, and where the rest goes."""

    policy: Literal["auto", "resident", "swap_all"] = "auto"
    """`auto`: only what must leaves for the next phase to fit, at the least cost per step. `resident`: nothing moves.
    `swap_all`: what a phase does not need leaves the device."""
    tier: Literal["auto", "file", "pinned"] = "auto"
    """Where it goes: a file on disk, or pinned host memory (cuda only). `auto`: file on cpu, pinned on cuda."""
    swap_dir: Text | None = None
    """Folder of the file tier, on a real disk. null: `swap` in the run's folder."""
    device_bytes: Size | Auto = "auto"
    """Memory that a GPU may hold. `auto`: 0.95 x the GPU's own; on cpu 0.8 x RAM / gpus_per_node."""
    tier_bytes: Size | Auto = "auto"
    """Bytes on each node for what leaves. `auto`: 0.8 x RAM (pinned), 0.9 x free disk (file); not bounded in a plan for
    other machines."""
    keep_heap: bool | Auto = "auto"
    """On cpu: roles keep what a phase leaves free in their heaps for their next one, instead of touching new memory, which costs
    up to a third of a step. `auto`, true: where nothing moves in a step and the plan has room for it. Never on cuda."""
    residue_tolerance: Share = 0.10
    """After a tenant left, measured memory may exceed counted memory by this share ..."""
    residue_slack: Bytes = 64 * 2**20
    """... plus these bytes; beyond, the run stops: something did not leave. Residue that grows by more is reported."""
    barrier_timeout_s: PositiveFloat = 300.0
    """Seconds that all ranks may take to move a tenant."""


class Checkpoint(Section):
    """What a run leaves behind."""

    export: bool = True
    """Write a Hugging Face folder, `model` in the run's folder, at the end."""


class Logging(Section):
    """Where a run writes, and what it shows."""

    runs_dir: Text | None = None
    """Folder of all runs. null: `runs` in the working directory."""
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Folder of this run inside it; must not exist yet. null: the profile's name and the time."""
    samples_per_step: NonNegative = 4
    """Rollouts written to samples.jsonl each step."""
    wandb: bool = False
    """Log to Weights & Biases; offline unless WANDB_API_KEY is set."""
    wandb_project: Text = "hybrid"
    """Project that the run is logged to there."""
    profile: Positive | None = None
    """Step whose timeline is written to trace.json.gz in the run's folder, for ui.perfetto.dev: phases, moves, calls and
    torch's operations of all processes. Recording slows that step. null: none."""
    progress: Literal["auto", "bar", "lines"] = "auto"
    """A progress bar or a line per step. `auto`: a bar on a terminal."""
