"""ARCHITECTURES.md, made from the table: python -m hybrid.config.architecture_page"""

from __future__ import annotations

from pathlib import Path

from hybrid.config.architectures import KEYS_OF_LAYERS, NOT_ON_CPU, OTHER_LAYERS, SINKS, TIED_ONLY, TRAINED, UNTIED_ONLY

PAGE = Path(__file__).with_name("ARCHITECTURES.md")
HEAD = """# Architectures

A model trains exactly, or it is refused before anything starts.
`hybrid plan`, `hybrid train --dry-run` and `hybrid train` read config.json, name the reason and end with status 2.
This page is made from the tables in `trained.py` and `architectures.py`: `python -m hybrid.config.architecture_page`.

## These train

`tests/e2e/test_architectures.py` takes a tiny model of each from its plan to its export. It compares

- log-probs of packed rows with transformers' log-probs of single sequences, in fp32 to 1e-5 nats,
- the gradient with that of transformers' eager attention,
- vLLM's log-probs after a weight sync with the trainer's,
- the export, loaded by transformers and by vLLM, with the trained model.

| model_type | models |
|---|---|
"""
OTHERS = """
Other types are not listed, and not refused as such: they train where none of the reasons below holds.
The self-test after the first weight sync then compares vLLM with the trainer, and ends a run whose log-probs differ.

## These are refused

| what config.json asks for | reason |
|---|---|
"""
REASONS: tuple[tuple[str, str], ...] = (
    ("`is_encoder_decoder`: T5, BART", "A policy is a decoder alone."),
    ("an encoder whose `is_decoder` is not true: BERT, RoBERTa", "Its tokens see those after them."),
    ("`vision_config`, `audio_config`", "Parts beside the language model are not trained."),
    (
        "`num_kv_shared_layers`: Gemma 3n, Gemma 4",
        "Layers take keys and values of earlier ones, which the trainer does not keep.",
    ),
    ("`alibi`, model types `bloom` and `mpt`", "ALiBi biases attention by distances in the packed row."),
    (
        "`attn_temperature_tuning`, which Llama 4 has unless its config.json says false",
        "Attention is scaled by positions in the packed row.",
    ),
    ("rope type `dynamic`", "Positions are scaled by the longest row of a batch, in vLLM by a constant."),
    (
        "rope type `longrope`, with sequences longer than `original_max_position_embeddings`",
        "vLLM then scales the positions of shorter sequences too. Shorter limits train.",
    ),
    (
        f"`attn_logit_softcapping`, and types with attention sinks ({', '.join(f'`{kind}`' for kind in SINKS)}), on CUDA with "
        "`model.attention: sdpa` or `varlen`",
        "No kernel computes their softmax on packed rows. On CPU they train; soft caps also with `flash_attention_2`.",
    ),
    (
        "attention sinks or `attention_chunk_size` (Llama 4), with `model.attention: flash_attention_2`",
        "It leaves sinks out, and does not attend in chunks. Chunks train with `sdpa` and `varlen`.",
    ),
    (f"an untied head in {', '.join(f'`{kind}`' for kind in TIED_ONLY)}", "vLLM ignores it."),
    (f"a tied head in {', '.join(f'`{kind}`' for kind in UNTIED_ONLY)}", "vLLM does not tie it."),
    ("`kv_lora_rank` with `model.dtype: float32` on CPU", "vLLM computes latent attention on CPU in bf16 only."),
    *((f"`{kind}` on CPU", f"vLLM {does}.") for kind, does in NOT_ON_CPU.items()),
    (
        "a type whose class in transformers has no `_supports_attention_backend`: Falcon, GPT-J, StableLM",
        "It computes attention past the interface that keeps packed rows apart.",
    ),
    (
        "a type whose class in transformers is `_is_stateful`, without layer types",
        "A state along the sequence would be shared by packed rows.",
    ),
    ("a type that transformers has no causal language model of", "There is nothing to train."),
    (
        "a model whose layers do not hand on what its attention is told: Nemotron, Moshi",
        "Its attention cannot be told which rows are packed. Found as the passes are planned.",
    ),
    (
        "a model whose passes depend on values: JetMoE, LongCat Flash, and OPT with `model.gradient_checkpointing`",
        "Its memory cannot be planned.",
    ),
)
NOTES = """
## To be known

- **Tensors that are no part of the model**, such as a value head, a classifier, a vision tower or layers that predict further tokens, may
  lie in a checkpoint. They are neither trained nor sent, and the export leaves them out: they belong to the weights of before. A note
  names them at the start. A copy of a tied head does not count among them, because the head follows the embeddings.
- **Cohere2** counts its window in vLLM one token longer than in transformers. Sequences that are longer than the window differ by that
  token.
- **Layers with a state or a convolution** are refused, and not run with one row a pass. Two things are missing: equal numbers of passes on
  all ranks, which ZeRO-3 needs, and a plan of the states that vLLM keeps for such layers beside its KV cache.
- **Latent attention** runs in vLLM on CPU in bf16. Its routers may choose other experts than the trainer's where two are nearly equal.
"""


def page() -> str:
    """The page's text."""
    trained = [f"| `{kind}` | {name} |" for kind, name in sorted(TRAINED.items())]
    layers = []
    for kind, differs in OTHER_LAYERS.items():
        keys = [f"`{key}`" for key, meant in KEYS_OF_LAYERS.items() if meant == kind]
        also = f"; without layer types, {', '.join(keys)}" if keys else ""
        layers.append(f"| layers of type `{kind}`{also} | They {differs}. |")
    layers.append("| layers of any type that is not known | They are not known to keep packed rows apart. |")
    reasons = [f"| {asked} | {reason} |" for asked, reason in REASONS]
    return "\n".join([HEAD + "\n".join(trained), OTHERS + "\n".join([*layers, *reasons]), NOTES])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
