"""Check with transformers the models of a run: whether each loads whole, reads its tokenizer's tokens, and can be exported.

Done on the driver before anything starts, without reading weights: a mistake found here would otherwise end the run after minutes, or at
its very end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid.config import RunConfig
from hybrid.config.checkpoint import weight_files
from hybrid.config.kind_rules import USES, config_problem, role_models
from hybrid.config.load import check_report
from hybrid.config.paths import local_model
from hybrid.config.resolve import json_object
from hybrid.config.violations import Violation
from hybrid.errors import UnusableModel
from hybrid.tokenizer import load_tokenizer, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAKE_AGAIN = "Copy or download the model again, or name another one."


@dataclass
class Checked:
    """What a check of the models found and a run goes on with."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """The policy's; None where no tokenizer is on this machine."""
    notes: list[str] = field(default_factory=list)
    """What of the models is not used, and what an export changes."""


def check_models(cfg: RunConfig) -> Checked:
    """Check the models of the resolved `cfg`. Raises `ConfigError` with all that keeps them from being trained.

    Models that are hub names, and not in the hub's cache, are left to the run. A folder without weights and tokenizer, which only a plan
    can do with, is checked as far as its config.json goes.
    """
    here = {key: (folder, kind) for key, (path, kind) in role_models(cfg).items() if (folder := _here(path))}
    checked = Checked()
    if not here:
        return checked
    import transformers

    shown = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # what it warns about is an error here, in one sentence
    transformers.utils.logging.disable_progress_bar()
    try:
        violations = [v for key, (folder, kind) in here.items() for v in _model(cfg, key, folder, kind, checked)]
        check_report(cfg, violations)
        if checked.tokenizer is not None and cfg.checkpoint.export:
            checked.notes += _export(cfg, here["model.path"][0], checked.tokenizer)
        return checked
    finally:
        transformers.logging.set_verbosity(shown)


@contextmanager
def told_with_profile(cfg: RunConfig) -> Iterator[None]:
    """Raise an `UnusableModel` of the body as other mistakes in the profile of `cfg` are told."""
    try:
        yield
    except UnusableModel as error:
        check_report(cfg, [Violation((error.key,), error.rule, error.fix)])


def check_passes(cfg: RunConfig) -> None:
    """Trace a short packed pass of the models of the resolved `cfg` that are on this machine, without their weights. Raises `ConfigError`
    where rows would not be kept apart, or memory could not be planned: what a plan, which a dry run has not, would say."""
    packed = [(path, kind) for path, kind in role_models(cfg).values() if kind != "reward" and _here(path)]
    if not packed:
        return
    import torch

    from hybrid.data.batches import Lengths
    from hybrid.planning.passes import packed_pass

    for path, kind in packed:
        packed_pass(
            path,
            kind,
            (Lengths(0, 8, 8),),
            dtype=getattr(torch, cfg.model.dtype),
            implementation=cfg.model.attention,
            checkpointing=cfg.model.gradient_checkpointing,
            backward=True,
            device=cfg.cluster.device,
            trust_remote_code=cfg.model.trust_remote_code,
        )


def _here(path: str) -> Path | None:
    try:
        folder = local_model(path)
    except Exception:  # the hub's client has many classes for a model that is not in its cache
        return None
    return folder if (folder / "config.json").is_file() else None


def _model(cfg: RunConfig, key: str, folder: Path, kind: str, checked: Checked) -> Iterator[Violation]:
    config = json_object(folder / "config.json") or {}
    try:
        found = (
            config_problem(config, kind)
            or _load_problem(cfg, key, folder, kind, checked)
            or _adapter_problem(folder)
            or _tokenizer_problem(cfg, key, folder, kind, checked)
        )
    except UnusableModel as error:
        yield Violation((key,), error.rule, error.fix)
    else:
        if found is not None:
            yield Violation((key,), f"{key}: {folder} is invalid: {found[0]}", found[1])


def _load_problem(cfg: RunConfig, key: str, folder: Path, kind: str, checked: Checked) -> tuple[str, str] | None:
    """Loads the model on torch's meta device, as its role will: names and shapes are compared, no weights are read."""
    import transformers

    trust = cfg.model.trust_remote_code
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
        if getattr(config, "is_encoder_decoder", False):
            return "it is an encoder-decoder model, and only models of one stack are supported", f"Name {USES[kind]}."
        classifier = kind == "reward" or (kind == "critic" and _is_classifier(config))
        if classifier and config.num_labels != 1:
            return (
                f"it has {config.num_labels} labels; {USES['reward']} has one",
                "Name a sequence classifier with one label.",
            )
        if said := _unreadable_generation_config(folder):
            return said
        if not weight_files(folder):
            return None  # of a hub name, not yet downloaded
        auto = transformers.AutoModelForCausalLM if kind == "policy" else transformers.AutoModel
        auto = transformers.AutoModelForSequenceClassification if classifier else auto
        model, told = auto.from_pretrained(
            folder,
            config=config,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told by name below; the error that it saves names none
            trust_remote_code=trust,
            local_files_only=True,
        )
    except Exception as error:  # what broken or unknown files lead to in transformers has no bounded list of classes
        return _refusal(error)
    if other := sorted(told["mismatched_keys"]):
        name, saved, wanted = other[0]
        more = f", one of {len(other)} such tensors" if len(other) > 1 else ""
        return (
            f"its tensor {name} is {_shape(saved)} in the weights and {_shape(wanted)} by its config.json{more}",
            "Put the config.json that belongs to the weights into the folder, or name another model.",
        )
    if missing := sorted(told["missing_keys"]):
        return f"its weights lack {_some(missing)}, which would be random numbers", f"Name {USES[kind]} that is whole."
    if key == "model.path" and (unused := sorted(told["unexpected_keys"])):
        checked.notes.append(
            f"{key}: a {type(model).__name__} has no {_some(unused)}, which the weights of {folder} hold: left out of training and export."
        )
    return None


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shape(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


def _unreadable_generation_config(folder: Path) -> tuple[str, str] | None:
    from transformers import GenerationConfig

    try:
        GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return None  # there is none, or one that is not JSON: transformers and vLLM go on without
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return f"its generation_config.json cannot be read ({said})", "Correct the file, or remove it."
    return None


def _is_classifier(config: Any) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def _refusal(error: Exception) -> tuple[str, str]:
    said = " ".join(str(error).split())
    if "custom code" in said:
        return (
            "it has code of its own, and model.trust_remote_code is false",
            "Read that code, then set model.trust_remote_code=true, or name another model.",
        )
    return f"transformers cannot load it ({type(error).__name__}: {said[:300]})", MAKE_AGAIN


def _adapter_problem(folder: Path) -> tuple[str, str] | None:
    """Where peft is installed, transformers puts an adapter that lies beside the weights on them, and vLLM does not."""
    from transformers.utils import is_peft_available

    if (folder / "adapter_config.json").is_file() and is_peft_available():
        return (
            "it holds a LoRA adapter beside the weights, and with peft installed transformers loads both",
            "Move adapter_config.json and adapter_model.safetensors to another folder.",
        )
    return None


def _tokenizer_problem(cfg: RunConfig, key: str, folder: Path, kind: str, checked: Checked) -> tuple[str, str] | None:
    """Loads the tokenizer of a role that reads texts. Raises `UnusableModel`."""
    reads_texts = key == "model.path" or kind == "reward"
    if not reads_texts or not (weight_files(folder) or tokenizer_files(folder, None)):
        return None
    tokenizer = load_tokenizer(str(folder), cfg.model.trust_remote_code, key, local=True)
    if key == "model.path":
        checked.tokenizer = tokenizer
    return _token_problem(cfg, folder, tokenizer)


def _token_problem(cfg: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Token ids that the embedding lacks; a larger embedding is usual, for rows are padded to a multiple."""
    from transformers import AutoConfig

    trust = cfg.model.trust_remote_code
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True).get_text_config()
    rows = config.vocab_size
    beyond = sorted((i, token) for token, i in tokenizer.get_vocab().items() if i >= rows)
    if beyond:
        some = ", ".join(f"{token} ({i})" for i, token in beyond[:3]) + (" ..." if len(beyond) > 3 else "")
        return (
            f"its tokenizer has {len(beyond)} tokens beyond the {rows} rows of the embedding: {some}",
            f"Take the tokenizer that belongs to the model, or enlarge the model once: resize_token_embeddings({beyond[-1][0] + 1}).",
        )
    for file in ("config.json", "generation_config.json"):
        ends = (json_object(folder / file) or {}).get("eos_token_id")
        for end in ends if isinstance(ends, list) else [ends]:
            if end is not None and (type(end) is not int or not 0 <= end < rows):
                return (
                    f"eos_token_id {end!r} in its {file} is not a token of the {rows} that it has",
                    "Correct the file.",
                )
    return None


def _export(cfg: RunConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    from hybrid.roles.export_files import try_export

    with told_with_profile(cfg):
        return try_export(str(folder), tokenizer, cfg.model.dtype, cfg.model.trust_remote_code)
