"""The plan of an engine against what vLLM holds, on CPU: weights and KV cache by their storages, tensor parallel 1 and 2.
`python tests/benchmarks/plan_vs_engine.py` from the repository's root, with it on PYTHONPATH. Bound: 1 %."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from hybrid.doctor.full.engine_process import EngineProcess
from launch.tiny_models import make_tiny_llama

KV_BYTES = 48 * 2**20
TOKENS = 512
FIELDS = dict(
    hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
    head_dim=64, vocab_size=8192,
)  # fmt: skip
SETTINGS = [
    (tied, dtype, tp) for tied, dtype, tp in ((True, "bfloat16", 1), (False, "bfloat16", 2), (True, "float32", 2))
]


def main() -> int:
    from hybrid.planning.engine import engine_weights, kv_cache
    from hybrid.planning.facts import CPU_BATCHED_TOKENS
    from hybrid.planning.shapes import read_config, shapes
    from hybrid.rollout.requests import EngineOptions

    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for tied, dtype, tp in SETTINGS:
            path = str(Path(folder) / f"tied-{tied}")
            if not Path(path).exists():
                make_tiny_llama(path, tie_word_embeddings=tied, **FIELDS)
            element = 2 if dtype == "bfloat16" else 4
            config = read_config(path)
            with EngineProcess(EngineOptions(path, dtype, "cpu", KV_BYTES, TOKENS, tensor_parallel_size=tp)) as engine:
                counted = engine.stats()["counted_bytes"]
            predicted = {
                "weights": tp * engine_weights(shapes(path, "policy"), config, tp, element, "cpu"),
                "kv_cache": tp * kv_cache(config, tp, element, "cpu", KV_BYTES, TOKENS, CPU_BATCHED_TOKENS).bytes,
            }
            ratios = {part: predicted[part] / counted[part] for part in predicted}
            worst = max(worst, *(abs(ratio - 1) for ratio in ratios.values()))
            print(f"tied {tied} {dtype} tp {tp}:", " ".join(f"{n} {r:.4f} of {counted[n]}" for n, r in ratios.items()))
    print(f"engines: off by at most {worst:.2%} (bound 1%): {'ok' if worst <= 0.01 else 'MISSED'}")
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main())
