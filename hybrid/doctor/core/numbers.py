"""Numbers: packed attention, long vocabularies, and bf16 against float32."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from hybrid.algorithms.logprobs import CHUNK_BYTES, chunked_logprobs, tokens_per_chunk
from hybrid.doctor.check import Check, Figures, Setting, Skipped, beside, expect
from hybrid.doctor.core.decoder import make_decoder, share_of_loss

WORDS = 151_936
"""Vocabulary of Qwen2.5."""


def packed_equals_unpacked(setting: Setting) -> Figures:
    """Groups of responses that share a prompt, packed, against each row by itself; outputs and gradients, in float32 and bf16."""
    try:
        from hybrid.roles.attention import packed_attention
        from hybrid.roles.packing import Segment
        from hybrid.roles.varlen import pieces_of
    except ImportError as error:
        raise Skipped(f"{error.name} is not here") from error

    groups = setting.size([(700, (300, 900, 50)), (60, (40, 200)), (1500, (600,))], [(30, (20, 9)), (7, (5,))])
    segments, start, options = [], 0, {}
    for prompt, responses in groups:
        segments.append(Segment(start, prompt, responses))
        start += segments[-1].length

    def packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = packed_attention(torch.nn.Module(), query, key, value, None, packed_segments=segments, **options)[0]
        return out.transpose(1, 2)

    figures = _compare(setting, packed, _row_by_row(segments), start)
    if setting.device == "cuda":
        options["packed_pieces"] = pieces_of(segments, setting.torch_device)
        by_kernel = _compare(setting, packed, _row_by_row(segments), start, dtypes=(torch.bfloat16,))
        figures |= {f"varlen_{name}": figure for name, figure in by_kernel.items()}
    return figures


def varlen_is_exact(setting: Setting) -> Figures:
    """The trainer's attention by torch's variable-length flash kernel against float64: heads, windows, and where its causal mask ends."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        from hybrid.roles.varlen import check_alignment
        from hybrid.roles.varlen_check import CASES, difference
    except ImportError as error:
        raise Skipped(f"{error.name} is not here") from error
    missing = sorted({"window_size", "enable_gqa"} - set(inspect.signature(varlen_attn).parameters))
    if missing:
        raise Skipped(f"varlen_attn of torch {torch.__version__} has no {' and no '.join(missing)}")
    figures: Figures = {}
    for name, case in CASES.items():
        found = difference(case, setting.torch_device)
        figures[f"{name} forward"], figures[f"{name} backward"] = found.forward, found.backward
        expect(found.forward < 0.02 and found.backward < 0.04, f"{name}: results or gradients differ", figures)
    check_alignment(setting.torch_device)
    return figures


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _row_by_row(segments: Sequence) -> Callable[..., torch.Tensor]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(query)
        for segment in segments:
            prompt = torch.arange(segment.start, segment.start + segment.prompt)
            start = segment.start + segment.prompt
            for index, length in enumerate(segment.responses):
                rows = torch.cat([prompt, torch.arange(start, start + length)]).to(query.device)
                own = scaled_dot_product_attention(
                    query[:, :, rows], *(_repeated(t[:, :, rows], query) for t in (key, value)), is_causal=True
                )
                # The prompt's outputs are the same in every row, and are taken from the first.
                skip = 0 if index == 0 else segment.prompt
                out = out.index_copy(2, rows[skip:], own[:, :, skip:])
                start += length
        return out

    return attend


def _compare(
    setting: Setting,
    one: Callable[..., torch.Tensor],
    other: Callable[..., torch.Tensor],
    tokens: int,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Figures:
    """Largest differences of outputs and gradients, over the largest value; in bf16 against that of `other` from float32."""
    heads, kv_heads, size = setting.size((16, 4, 128), (4, 2, 16))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, count, tokens, size, generator=generator) for count in (heads, kv_heads, kv_heads)]
    figures: Figures = {}
    for dtype in dtypes:
        inputs = [each.to(setting.torch_device, dtype) for each in drawn]
        exact = _outputs_and_gradients(other, [each.float() for each in inputs])
        ours = _outputs_and_gradients(one, inputs)
        usual = _outputs_and_gradients(other, inputs) if dtype != torch.float32 else exact
        name = str(dtype).removeprefix("torch.")
        for part, a, b, c in zip(("output", "query", "key", "value"), ours, usual, exact):
            error, unavoidable = _apart(a, c), _apart(b, c)
            figures[f"{name}_{part}_error"] = beside(error, unavoidable)
            most = 2 * unavoidable + (1e-5 if dtype == torch.float32 else 4e-3)
            if setting.device == "cuda" and dtype == torch.float32:
                most += 2e-3  # TF32, where it is allowed
            expect(error <= most, f"{name}: {part} differs by {error:.1e} of the largest value", figures)
    return figures


def _outputs_and_gradients(attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    out = attend(*leaves)
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=torch.float32)
    (out.float() * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def _apart(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return ((ours.float() - exact.float()).abs().max() / exact.float().abs().max()).item()


def long_vocabulary(setting: Setting) -> Figures:
    """Log-probs and their gradient by chunks, against one table of all logits, and the most memory they take."""
    tokens, hidden, words = setting.size((4096, 896, WORDS), (64, 16, 2048))
    device, dtype = setting.torch_device, setting.size(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    weight = (torch.randn(words, hidden) * hidden**-0.5).to(device, dtype).requires_grad_()
    states = torch.randn(tokens, hidden).to(device, dtype).requires_grad_()
    targets = torch.randint(0, words, (tokens,)).to(device)
    chunk = tokens_per_chunk(words, weight.element_size()) if not setting.small else 17
    if setting.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    logprobs, _ = chunked_logprobs(states, lambda h: h @ weight.T, targets, 1.0, chunk)
    (logprobs.mean() * tokens**0.5).backward()
    figures: Figures = {"tokens": tokens, "vocabulary": words, "chunk_tokens": chunk}
    if setting.device == "cuda":
        torch.cuda.synchronize()
        figures["seconds"] = time.perf_counter() - started
        # Logits and two float32 tables of a chunk; the weight's gradient, and a chunk's share of it.
        planned = CHUNK_BYTES * (1 + 2 * 4 // weight.element_size()) + 2 * weight.nbytes
        figures["peak_bytes"] = beside(torch.cuda.max_memory_allocated() - before, planned)
    ours = [logprobs.detach(), states.grad, weight.grad]
    states.grad = weight.grad = None
    plain = [[], torch.zeros_like(states, dtype=torch.float32), torch.zeros_like(weight, dtype=torch.float32)]
    for rows in torch.arange(tokens).split(256):
        h, w = (t.detach().float().requires_grad_() for t in (states[rows], weight))
        own = torch.log_softmax(h @ w.T, -1).gather(-1, targets[rows, None]).squeeze(-1)
        (own.sum() / tokens**0.5).backward()
        plain[0].append(own.detach())
        plain[1][rows] = h.grad
        plain[2] += w.grad
    errors = [_apart(a, b) for a, b in zip(ours, [torch.cat(plain[0]), *plain[1:]])]
    most = 2e-2 if dtype == torch.bfloat16 else 1e-4
    for name, error in zip(("logprobs", "hidden_gradient", "weight_gradient"), errors):
        figures[f"{name}_error"] = error
        expect(error <= most, f"{name} differ by {error:.1e} of the largest value", figures)
    if setting.device == "cuda":
        peak = figures["peak_bytes"]
        expect(peak["measured"] <= 1.25 * peak["planned"], f"it takes {peak['measured']} bytes", figures)
    return figures


def bf16_follows_float32(setting: Setting) -> Figures:
    """Loss and gradients of one model in both, from the same weights; and of float32 on this device against the CPU."""
    exact, half = make_decoder(setting, torch.float32), make_decoder(setting, torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    losses = []
    for model in (exact, half):
        loss = share_of_loss(setting, 0)(model)
        loss.backward()
        losses.append(loss.item())
    flat = [torch.cat([p.grad.float().flatten() for p in model.parameters()]) for model in (exact, half)]
    cosine = torch.nn.functional.cosine_similarity(*flat, dim=0).item()
    size = (flat[1].norm() / flat[0].norm()).item()
    figures: Figures = {
        "float32_loss": losses[0],
        "bfloat16_loss": losses[1],
        "gradient_cosine": cosine,
        "gradient_norm_ratio": size,
    }
    expect(
        abs(losses[1] / losses[0] - 1) <= 0.01,
        f"the loss is {losses[1]:.4f} in bf16, {losses[0]:.4f} in float32",
        figures,
    )
    expect(cosine >= 0.99, f"gradients in bf16 point elsewhere (cosine {cosine:.3f})", figures)
    expect(abs(size - 1) <= 0.05, f"gradients in bf16 have {size:.3f} of the size", figures)
    return figures


NUMBERS = [
    Check(
        "numbers/packed",
        "Rows packed with shared prompts have the outputs and gradients of rows by themselves.",
        "Training computes other losses here than the algorithm's: set model.attention to another value, and send the report.",
        packed_equals_unpacked,
    ),
    Check(
        "numbers/varlen",
        "Attention by torch's variable-length kernel is exact to the digits of bf16, and its causal mask ends at the last query.",
        "Responses would see tokens after them, or miss some: set model.attention=sdpa.",
        varlen_is_exact,
        on_cpu=False,
    ),
    Check(
        "numbers/vocabulary",
        "Log-probs over 152 thousand words by chunks equal those of the whole table, and take the memory that is planned.",
        "Losses would be wrong, or plans too tight, for models with long vocabularies: send the report.",
        long_vocabulary,
    ),
    Check(
        "numbers/bf16",
        "Losses and gradients in bf16 follow those in float32.",
        "This GPU or its libraries compute bf16 wrongly: train with model.dtype=float32, and send the report.",
        bf16_follows_float32,
    ),
]
