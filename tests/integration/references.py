"""What a test compares engines with."""

from __future__ import annotations

import torch


def reference_logprobs(folder, prompts, responses, temperature=1.0):
    """Log-probs of the responses under transformers' fp32 model: what the trainer would say."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        picked = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(response)[:, None])
        rows.append(picked[:, 0].tolist())
    return rows
