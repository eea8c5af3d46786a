"""The doctor's core checks, all of them in small on a CPU, on a machine that has torch, DeepSpeed and PyYAML only."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.integration.launch_scripts import ROOT

ABSENT = ("ray", "vllm", "typer", "transformers", "pynvml", "datasets", "safetensors", "rich")
HIDES = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named '{{name}}'", name=name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(HIDES)
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"}
    command = [sys.executable, "-m", "hybrid.doctor", "core", "--cpu", "--out", str(folder / "doctor.json")]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=500)
    assert sorted(path.name for path in folder.iterdir() if path.suffix) == ["doctor.json", "sitecustomize.py"]
    return done, json.loads((folder / "doctor.json").read_text())


def test_core_passes_without_ray_vllm_and_transformers(checked):
    done, content = checked
    assert done.returncode == 0, done.stdout + done.stderr
    words = {check["name"]: check["status"] for check in content["checks"]}
    assert set(words.values()) == {"pass", "skip"} and content["finished"]
    assert {name for name, word in words.items() if word == "pass"} >= {
        "memory/residue", "groups", "numbers/packed", "numbers/vocabulary", "numbers/bf16", "swap/tensors",
        *(f"swap/zero-{i}" for i in range(4)),
    }  # fmt: skip


def test_the_output_is_a_line_for_each_check(checked):
    done, content = checked
    lines = done.stdout.splitlines()
    assert len(lines) == len(content["checks"]) + 1 and lines[-1].endswith("doctor.json")
    assert [line.split()[1] for line in lines[:-1]] == [check["name"] for check in content["checks"]]


def test_figures_of_each_rank_are_in_the_file(checked):
    _, content = checked
    figures = {check["name"]: check["figures"] for check in content["checks"]}
    assert len(figures["swap/zero-2"]) == 2 and len(figures["groups"]) == 4
    for rank in figures["swap/zero-2"]:
        assert rank["optimizer_fell_bytes"]["planned"] > 500_000
