"""`torch.nn.attention.varlen.varlen_attn` in plain torch, for any device and type: what its kernel asks for is checked, and each sequence
computed by itself with a table of scores."""

from __future__ import annotations

import torch


def varlen_reference(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    lower_right=True,
):
    """As the installed function; `lower_right`: the mask ends at the last query and the last key, else it begins at the first of both."""
    _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa)
    before, after = window_size
    repeats = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for q, k, v in zip(
        *(t.split(ends.diff().tolist()) for t, ends in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k)))
    ):
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        own = torch.arange(len(q))[:, None] + (len(k) - len(q) if lower_right else 0)
        other = torch.arange(len(k))[None, :]
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        seen &= (other >= own - before) if before >= 0 else seen
        seen &= (other <= own + after) if after >= 0 else seen
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def _check(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, enable_gqa):
    """The conditions of `mha_varlen_fwd` (flash_api.cpp) and of the function itself."""
    assert key.shape == value.shape and query.shape[2] == key.shape[2]
    assert query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert query.dtype == key.dtype == value.dtype
    assert all(t.stride(-1) == 1 for t in (query, key, value))
    assert query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    for ends, tokens, longest in ((cu_seq_q, len(query), max_q), (cu_seq_k, len(key), max_k)):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends[0] == 0 and ends[-1] == tokens
        assert int(ends.diff().max()) == longest and int(ends.diff().min()) > 0
    assert len(cu_seq_q) == len(cu_seq_k) and type(max_q) is type(max_k) is int
