"""Which columns the data has, as far as that can be told before it is tokenised."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from hybrid.config import RunConfig, model_source
from hybrid.data.sources import read_records
from hybrid.data.tasks import eval_task, train_task

OF_TASKS = ("entry",)
"""Columns of a reasoning_gym problem."""


def columns_of(cfg: RunConfig, data: str, wanted: Collection[str]) -> list[str] | None:
    """The columns of the data `train` or `eval`: of its first records, until all of `wanted` were seen, else of all records.

    None where only a run can tell: data of the hub, and recorded rollouts. Raises `DataError` for data that cannot be read.
    """
    if cfg.rollout.replay is not None:
        return None
    if train_task(cfg) if data == "train" else eval_task(cfg):
        return list(OF_TASKS)
    source = model_source(cfg, cfg.data.train if data == "train" else cfg.data.eval)
    if not Path(source).exists():
        return None
    left, columns = set(wanted), {}
    for _, record in read_records(str(source), cfg.data.split, data == "eval"):
        names = [name for name in record if name not in (cfg.data.prompt_field, cfg.data.label_field)]
        columns |= dict.fromkeys(names)
        left -= set(names)
        if not left:
            break
    return list(columns)
