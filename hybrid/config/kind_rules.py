"""Rules about a model's config.json: what kind of model it describes, for which role. `model_rules` says which kinds train exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybrid.config.checkpoint import UNQUANTISED
from hybrid.config.resolve import config_json
from hybrid.config.rules import Finding, rule
from hybrid.config.run import RunConfig

OTHER_SENSES = ("vision_config", "audio_config", "speech_config", "image_config", "video_config")
CAUSAL = ("ForCausalLM", "LMHeadModel", "ModelWithLMHead")
CLASSIFIER = "ForSequenceClassification"
USES = {
    "policy": "a causal language model",
    "critic": "a causal language model or a reward model",
    "reward": "a reward model",
}
"""Kind of role -> what it starts from."""


def role_models(cfg: RunConfig) -> dict[str, tuple[str, str]]:
    """Key -> (path, kind) of every model folder that a run loads, each kind of use of a folder once."""
    found = {"model.path": (cfg.model.path, "policy")}
    if cfg.uses_critic and cfg.critic and cfg.critic.path not in (None, cfg.model.path):
        found["critic.path"] = (cfg.critic.path, "critic")
    if cfg.uses_reference and cfg.reference and cfg.reference.path not in (None, cfg.model.path):
        found["reference.path"] = (cfg.reference.path, "policy")
    if cfg.reward.model:
        found["reward.model"] = (cfg.reward.model, "reward")
    return found


@rule("model.path", "critic", "reference", "reward.model", "algorithm.advantage", "algorithm.kl_coef")
def models_are_of_the_right_kind(cfg: RunConfig) -> Iterator[Finding]:
    for key, (path, kind) in role_models(cfg).items():
        if (config := config_json(path)) and (found := config_problem(config, kind)):
            yield f"{key}: {path} is invalid: {found[0]}", found[1]


def config_problem(config: dict[str, Any], kind: str) -> Finding | None:
    """Why the model of a config.json has no use as `kind` ("policy", "critic" or "reward"), and the fix."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for part in (config, text):
        for key in ("quantization_config", "compression_config"):
            if part.get(key):
                return (
                    f"it is quantised ({_method(part[key])}), and all parameters are trained and moved unquantised",
                    UNQUANTISED,
                )
    if kind == "reward" and (senses := [key for key in OTHER_SENSES if config.get(key)]):
        return f"it reads more than text ({senses[0]}), and only text models are supported", "Name a text-only model."
    if kind == "reward" and config.get("is_encoder_decoder"):
        return "it is an encoder-decoder model, and only models of one stack are supported", f"Name {USES[kind]}."
    custom = isinstance(config.get("auto_map"), dict)  # class names of its own
    names = config.get("architectures")
    if custom or not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return _class_problem(config, names[0], kind)


def _class_problem(config: dict[str, Any], name: str, kind: str) -> Finding | None:
    """`name`: the class whose weights were saved."""
    if kind == "reward":
        if not name.endswith(CLASSIFIER):
            return (
                f"it is a {name}, whose score head would be random numbers",
                "Name a sequence classifier with one label.",
            )
        labels = label_count(config)
        if labels not in (None, 1):
            return f"it has {labels} labels; a reward model has one", "Name a sequence classifier with one label."
        return None
    if name.endswith(CAUSAL) or (kind == "critic" and name.endswith((CLASSIFIER, "Model"))):
        return None
    if name.endswith("ForMaskedLM"):
        why = f"it is a {name}, an encoder, which cannot generate"
    elif name.endswith("ForConditionalGeneration"):
        why = f"it is a {name}, and only text models of one stack are supported"
    else:
        why = f"it is a {name}, without the head of a language model"
    return why, f"Name {USES[kind]}."


def label_count(config: dict[str, Any]) -> int | None:
    """Labels of a sequence classifier; None where config.json does not say."""
    labels = config.get("id2label")
    return len(labels) if isinstance(labels, dict) else config.get("num_labels")


def _method(found: Any) -> str:
    method = found.get("quant_method") or found.get("format") if isinstance(found, dict) else None
    return str(method or "quantization_config in config.json")
