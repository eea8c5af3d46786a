"""The one way in which a tokenizer is loaded: by driver, reward model, plan and export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hybrid.errors import UnusableModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUSTOM_CODE = "custom code"
"""Words in transformers' refusal to run a model's own code."""
LONGEST_REASON = 300
"""Characters of another library's message that are shown."""
NO_FILES = "it has no tokenizer files"
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model*",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*",
    "*.spm",
)
"""Files that tokens are in, as patterns."""
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files that say how tokens are used."""


def load_tokenizer(
    path: str, trust_remote_code: bool, key: str = "model.path", local: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder or hub name. It never asks a question: code of its own runs where `trust_remote_code` says so.

    `key` names `path` in messages. `local`: look on this machine only. Raises `UnusableModel`: no tokenizer, a broken one, or one
    whose code may not run.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=bool(trust_remote_code), local_files_only=local
        )
        known = len(tokenizer.get_vocab()) - len(tokenizer.get_added_vocab())
    except (
        Exception
    ) as error:  # a tokenizer may run code of its own, and libraries raise what they like for broken files
        if CUSTOM_CODE in str(error):
            raise UnusableModel(
                key,
                path,
                "its tokenizer has code of its own, and model.trust_remote_code is false",
                "Read that code, then set model.trust_remote_code=true, or name another model.",
            ) from error
        said = (
            f"its tokenizer cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:LONGEST_REASON]})"
        )
        raise _incomplete(key, path, said if _has_files(path) else NO_FILES) from error
    if not known or not _has_files(path, tokenizer):
        raise _incomplete(key, path, "its tokenizer files hold no tokens" if _has_files(path) else NO_FILES)
    return tokenizer


def _has_files(path: str, tokenizer: PreTrainedTokenizerBase | None = None) -> bool:
    """False for a folder without tokenizer files, of which transformers may make an empty tokenizer."""
    return not Path(path).is_dir() or bool(tokenizer_files(Path(path), tokenizer))


def _incomplete(key: str, path: str, why: str) -> UnusableModel:
    fix = "Complete the folder with the model's tokenizer files, such as tokenizer.json and tokenizer_config.json."
    return UnusableModel(key, path, why, fix)


def tokenizer_files(folder: Path, tokenizer: PreTrainedTokenizerBase | None) -> list[Path]:
    """The files of `folder` that `tokenizer` is made from, code of its own included."""
    own = [name for name in (getattr(tokenizer, "vocab_files_names", None) or {}).values() if isinstance(name, str)]
    code = ("*.py",) if tokenizer is not None else ()
    patterns = (*VOCABULARIES, *SETTINGS, *own, *code)
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
