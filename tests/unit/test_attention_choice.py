"""`model.attention`: which of its values a run takes, and which are refused before anything starts."""

from __future__ import annotations

import json
import sys

import pytest

from hybrid.config import check_start, load_run, machine, resolve
from hybrid.errors import ConfigError
from tests.unit.config_profile import refusal

CUDA = ["cluster.device=cuda", "model.dtype=bfloat16"]


@pytest.fixture(autouse=True)
def nothing_cached():
    machine.has_flash_attention.cache_clear()
    yield
    machine.has_flash_attention.cache_clear()


def chosen(profile, *overrides):
    return resolve(load_run(profile, list(overrides))).model.attention


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("caps", [False, True])
def test_auto_is_varlen_on_cuda_but_for_soft_caps(profile, monkeypatch, installed, caps):
    monkeypatch.setattr(machine, "gpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine, "has_flash_attention", lambda: installed)
    if caps:
        config = profile.parent.parent / "models/tiny/config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_logit_softcapping": 50.0}))
    if caps and not installed:
        assert "Set model.attention=flash_attention_2" in refusal(profile, *CUDA)
        return
    assert chosen(profile, *CUDA) == ("flash_attention_2" if caps else "varlen")
    assert resolve(load_run(profile, CUDA)).model.shares_prompts == (not caps)


@pytest.mark.parametrize(("dtype", "has_bf16"), [("float32", True), ("bfloat16", False), ("auto", False)])
def test_auto_is_sdpa_where_the_kernel_cannot_run(profile, monkeypatch, dtype, has_bf16):
    monkeypatch.setattr(machine, "gpu_has_bf16", lambda: has_bf16)
    cfg = resolve(load_run(profile, ["cluster.device=cuda", f"model.dtype={dtype}"]))
    assert cfg.model.attention == "sdpa" and cfg.model.shares_prompts
    assert any("take bf16 only" in note for note in cfg.notes)


def test_auto_is_sdpa_on_cpu_without_a_word(profile):
    cfg = resolve(load_run(profile, ["cluster.device=cpu", "model.dtype=bfloat16"]))
    assert cfg.model.attention == "sdpa" and not any("attention" in note for note in cfg.notes)


@pytest.mark.parametrize("name", ["varlen", "flash_attention_2"])
def test_a_gpu_without_bf16_is_refused(profile, monkeypatch, name):
    monkeypatch.setattr(machine, "gpu_has_bf16", lambda: False)
    assert f"{name} is invalid: its kernel needs a GPU of compute capability 8.0" in refusal(
        profile, *CUDA, f"model.attention={name}"
    )


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("", True),
        ("raise ImportError('undefined symbol: _ZN3c10')", False),
        ("raise OSError('libcudart.so.12')", False),
    ],
)
def test_flash_attn_is_there_when_it_can_be_imported(tmp_path, monkeypatch, module, found):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn/__init__.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert machine.has_flash_attention() == found
    sys.modules.pop("flash_attn", None)


def test_flash_attn_is_not_there_where_nothing_is_installed():
    assert not machine.has_flash_attention()


@pytest.mark.parametrize("installed", [False, True])
def test_a_start_needs_what_it_names(profile, monkeypatch, installed):
    monkeypatch.setattr(machine, "gpu_has_bf16", lambda: True)
    monkeypatch.setattr(machine, "has_flash_attention", lambda: installed)
    wanted = [*CUDA, "model.attention=flash_attention_2"]
    cfg = load_run(profile, wanted)  # a plan for another machine needs no package here
    try:
        check_start(cfg)
        said = ""
    except ConfigError as error:
        said = str(error)
    assert ("flash_attention_2 is invalid: flash-attn cannot be imported here" in said) == (not installed)
