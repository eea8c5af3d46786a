"""Our options in vLLM's words."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config.checkpoint import INDEX, SINGLE, weight_files
from hybrid.rollout.requests import BLOCK_TOKENS, EngineOptions, SamplingOptions

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

CUDA_UTILISATION = 0.05
"""vLLM refuses to start unless this share of the GPU is free, even when the KV cache is given in bytes; it has no other use then."""
SET_HERE = ("VLLM_RPC_BASE_PATH",)
"""Variables that `hybrid.leftovers` sets."""
BACKEND = {"cpu": "shm", "cuda": "ipc"}
"""Weight transfer backend of each platform, on both sides."""


def environment(options: EngineOptions) -> dict[str, str]:
    """Variables that vLLM and its workers read while they are imported; set them before."""
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process tree, easy to account for
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(options.threads),
    }
    if options.device == "cpu":
        return env | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # binding gives an engine one core of several
    if options.tensor_parallel_size > 1:
        # Ray shows this process one GPU. Read when CUDA starts, and inherited by the workers, which then see no foreign GPU.
        env["CUDA_VISIBLE_DEVICES"] = ",".join(options.gpu_ids)
    # Their workspaces lie outside the pool that sleep empties, and would stay on the GPU.
    return env | {"VLLM_ALLREDUCE_USE_FLASHINFER": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}


def foreign_variables(options: EngineOptions, environ: Mapping[str, str]) -> str:
    """A hint at variables that vLLM reads and that are not ours: it does not name one whose value it cannot use. Empty without any."""
    ours = environment(options)
    names = sorted(name for name in environ if name.startswith("VLLM_") and name not in ours and name not in SET_HERE)
    if not names:
        return ""
    given = ", ".join(f"{name}={environ[name]}" for name in names)
    return f"\nThese variables of vLLM are set: {given}. Try without them: unset {' '.join(names)}"


def build(options: EngineOptions, folder: str) -> LLM:
    """Start vLLM on the model in `folder`. Raises vLLM's ValueError when options do not fit the model or the machine."""
    import torch
    from vllm import LLM

    from hybrid.rollout.model_loader import load_options

    on_cpu = options.device == "cpu"
    if on_cpu:
        torch.set_num_threads(options.threads)  # torch may have been imported before OMP_NUM_THREADS was set
    platform = (
        {"worker_cls": "hybrid.rollout.cpu_worker.SleepableCPUWorker", "block_size": BLOCK_TOKENS["cpu"]}
        if on_cpu
        else {"worker_cls": "hybrid.rollout.cuda_worker.SleepableCUDAWorker", "enable_sleep_mode": True}
    )
    return LLM(
        model=folder,
        # Left open, vLLM prefers Mistral's own files where a folder has them, too.
        config_format="hf",
        tokenizer_mode="hf",
        **load_options(options.left_out),
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni"
        if options.tensor_parallel_size == 1
        else "mp",  # left open, a Ray actor gets `ray`
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=CUDA_UTILISATION,
        enforce_eager=options.enforce_eager,
        seed=options.seed,
        enable_prefix_caching=True,
        disable_custom_all_reduce=not options.custom_all_reduce,
        logprobs_mode="processed_logprobs",
        weight_transfer_config={"backend": BACKEND[options.device]},
        worker_extension_cls="hybrid.rollout.worker_extension.WorkerExtension",
        profiler_config=_profiler(options),
        **platform,
    )


def give_back(llm: LLM, device: str) -> None:
    """On CUDA, give back what torch's allocator keeps of passes that are over: gigabytes of logits, which other roles need. A plan counts
    them while the engine generates."""
    if device == "cuda":
        llm.collective_rpc("hybrid_release_free_memory")


def _profiler(options: EngineOptions) -> dict[str, Any] | None:
    """`LLM.start_profile` works only where the engine was built with this; until then it costs nothing."""
    if options.trace_dir is None:
        return None
    return {
        "profiler": "torch",
        "torch_profiler_dir": options.trace_dir,
        "torch_profiler_with_stack": False,
        "torch_profiler_dump_cuda_time_total": False,
    }


def sampling_params(options: SamplingOptions, seed: int | None, detokenize: bool = True) -> SamplingParams:
    """`logprobs=0` returns the log-prob of the sampled token and of no other. `detokenize`: vLLM makes the text; see `texts`."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_tokens=options.max_new_tokens,
        min_tokens=options.min_new_tokens,
        stop=list(options.stop) or None,
        skip_special_tokens=not options.keep_special_tokens,
        spaces_between_special_tokens=False,  # the text as the model wrote it
        seed=seed,
        logprobs=0,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


@contextmanager
def without_strays(path: str) -> Iterator[str]:
    """`path`; where weights of another kind lie in the folder, one of links to all the rest, for vLLM loads every safetensors file.

    Needed only while vLLM loads.
    """
    folder = Path(path)
    wanted = {file.name for file in weight_files(folder)} if folder.is_dir() else set()
    strays = {file.name for file in folder.glob("*.safetensors")} - wanted
    if not wanted or not strays:
        yield path
        return
    left_out = strays | {"adapter_config.json", "params.json"} | ({INDEX} if SINGLE in wanted else set())
    with tempfile.TemporaryDirectory(prefix="hybrid-model-") as links:
        for entry in folder.iterdir():
            if entry.name not in left_out:
                (Path(links) / entry.name).symlink_to(entry.absolute())
        yield links
