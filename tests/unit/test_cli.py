"""`hybrid train` as a user meets it: what it prints, where it writes, how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

import hybrid
from hybrid.config import SECTIONS, load_run
from hybrid.errors import DataError, WorkerDied
from hybrid.preparation import read_inputs

CHECKOUT = Path(hybrid.__file__).resolve().parents[1]
PROFILE = """
cluster: {device: cpu, gpus_per_node: 2}
model: {path: some-org/some-model, dtype: float32}
reward: {function: reasoning_gym}
algorithm: {advantage: gae, kl_coef: 0.1}
train: {steps: 3}
data: {train: "reasoning_gym:chain_sum"}
"""


@pytest.fixture
def profile(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "p.yaml"
    path.write_text(PROFILE)
    return path


STAND_IN = """
import sys, types
from contextlib import contextmanager
from dataclasses import dataclass, field
from hybrid.config.resolve import in_folder

@dataclass
class Ready:
    cfg: object
    inputs: object = field(default_factory=lambda: types.SimpleNamespace(notes=[]))
    def in_folder(self, run_dir):
        return Ready(in_folder(self.cfg, run_dir))

@contextmanager
def prepared(cfg):
    yield Ready(cfg)

preparation, launcher = types.ModuleType("hybrid.preparation"), types.ModuleType("hybrid.launcher")
preparation.prepared = prepared
"""
"""A run that needs no model and no data: modules for what is read before Ray starts, and for the trainer."""


@pytest.fixture
def trainer(monkeypatch):
    """Stands in for the trainer and keeps what it was called with."""
    calls, made = [], {}
    exec(STAND_IN, made)
    module = made["launcher"]
    module.launch = lambda ready, run_dir: calls.append((ready.cfg, run_dir))
    made["preparation"].read_inputs = read_inputs
    monkeypatch.setitem(sys.modules, "hybrid.launcher", module)
    monkeypatch.setitem(sys.modules, "hybrid.preparation", made["preparation"])
    return types.SimpleNamespace(module=module, calls=calls)


@pytest.fixture
def light(tmp_path) -> list[str]:
    """Overrides after which a process of its own imports no reasoning-gym, which takes longer than all else before a run."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 1", "label": "2"}\n')
    return [f"data.train={data}", "reward.function=math_verify"]


def sitecustomize(folder: Path, launch: str) -> None:
    """Let a command that starts in `folder` call this `launch` in place of ours."""
    lines = [STAND_IN, launch, "launcher.launch = launch", 'sys.modules["hybrid.launcher"] = launcher']
    (folder / "sitecustomize.py").write_text("\n".join([*lines, 'sys.modules["hybrid.preparation"] = preparation', ""]))


def start(*args: str, cwd: Path, **env: str) -> subprocess.Popen:
    """The command as its own process, which hears SIGHUP even when the tests run under nohup."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(cwd), str(CHECKOUT)])} | env
    command = [sys.executable, "-c", "from hybrid.cli import main; main()", *args]
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def test_version(hybrid_command):
    assert hybrid_command("--version").output == f"hybrid {hybrid.__version__}\n"


def test_help_shows_sections_and_examples(tmp_path):
    out, _ = start("train", "--help", cwd=tmp_path).communicate(timeout=30)
    assert all(f" {name}:" in out for name in SECTIONS)
    assert "--dry-run" in out
    assert "hybrid train profiles/quickstart.yaml" in out


@pytest.mark.parametrize("arguments", [["train", "--help"], ["train", "PROFILE", "--dry-run"]], ids=" ".join)
def test_no_command_loads_torch_or_ray_before_a_run(profile, arguments):
    words = [str(profile) if word == "PROFILE" else word for word in arguments]
    code = (
        "import sys; from typer.testing import CliRunner; from hybrid.cli import app\n"
        f"result = CliRunner().invoke(app, {words!r})\n"
        "print(result.exit_code, {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 set()\n", done.stderr


def test_dry_run_prints_the_resolved_profile_and_the_places_and_starts_nothing(
    profile, hybrid_command, trainer, tmp_path
):
    result = hybrid_command("train", profile, "rollout.tensor_parallel_size=2", "train.steps=9", "--dry-run")
    assert result.exit_code == 0
    text, _, table = result.output.partition("\n\n")
    shown = yaml.safe_load(text)
    assert list(shown) == list(SECTIONS)
    assert (shown["train"]["steps"], shown["rollout"]["engines"]) == (9, 1)
    rows = [line for line in table.splitlines() if "tp rank" in line]
    assert ["actor, critic, reference" in row and "1/4" in row for row in rows] == [True, True]
    assert "engine 0, tp rank 1 of 2" in rows[1]
    assert not trainer.calls
    assert list(tmp_path.iterdir()) == [profile]


def test_a_dry_run_for_gpus_needs_none(profile, hybrid_command):
    result = hybrid_command("train", profile, "cluster.device=cuda", "cluster.gpus_per_node=8", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "engine 7" in result.output


def test_train_gets_the_resolved_config_and_a_new_folder_that_says_where_it_comes_from(
    profile, hybrid_command, trainer
):
    assert hybrid_command("train", profile, "logging.name=first", "train.steps=2").exit_code == 0
    [(cfg, run_dir)] = trainer.calls
    assert run_dir == Path.cwd() / "runs" / "first"
    assert (cfg.train.steps, cfg.rollout.engines, cfg.memory.swap_dir) == (2, 2, None)
    assert load_run(run_dir / "profile.yaml").model_dump() == cfg.model_dump()
    versions = json.loads((run_dir / "versions.json").read_text())
    assert versions["hybrid"] == hybrid.__version__
    assert {"python", "torch", "vllm", "ray", "deepspeed", "transformers", "git", "argv"} <= versions.keys()


def test_a_run_never_writes_into_another_ones_folder(profile, hybrid_command, trainer):
    hybrid_command("train", profile, "logging.name=first")
    result = hybrid_command("train", profile, "logging.name=first")
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    for _ in range(3):  # three in a second, or nearly
        assert hybrid_command("train", profile).exit_code == 0
    names = [run_dir.name for _, run_dir in trainer.calls]
    assert len(set(names)) == 4
    assert all(name.startswith("p-20") for name in names[1:])


def test_mistakes_in_the_profile_end_with_2_and_one_message(profile, hybrid_command, trainer, tmp_path):
    result = hybrid_command("train", profile, "train.steps=0", "rollout.engines=7")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {profile}: 2 problems\n")
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_what_fails_after_a_signal_failed_for_it(profile, hybrid_command, trainer):
    def launch(ready, run_dir):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise WorkerDied("actor rank 1 on node 10.0.0.2 died")

    trainer.module.launch = launch
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        result = hybrid_command("train", profile)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (result.exit_code, result.stderr) == (143, "interrupted\n")


def test_errors_of_the_data_end_with_2(profile, hybrid_command, trainer):
    def launch(ready, run_dir):
        raise DataError("a.jsonl:3 is not JSON")

    trainer.module.launch = launch
    result = hybrid_command("train", profile)
    assert (result.exit_code, result.stderr) == (2, "error: a.jsonl:3 is not JSON\n")


def test_c47_a_home_that_cannot_be_written_is_one_error(profile, tmp_path):
    run = start("train", str(profile), cwd=tmp_path, HOME="/proc/none", MPLCONFIGDIR="", RAY_AUTH_MODE="token")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, out) == (2, "")
    assert err.startswith("error: HOME=/proc/none is invalid: ") and err.count("\n") == 1, err
    assert not (tmp_path / "runs").exists()


def test_errors_of_a_run_end_with_1_and_no_traceback(profile, hybrid_command, trainer):
    def launch(ready, run_dir):
        raise WorkerDied("actor rank 1 on node 10.0.0.2 died")

    trainer.module.launch = launch
    result = hybrid_command("train", profile)
    assert result.exit_code == 1
    assert result.stderr == "error: actor rank 1 on node 10.0.0.2 died\n"


@pytest.mark.parametrize("status", [0, None, 3, "gone"])
def test_n1_whatever_ends_the_program_is_not_a_trained_model(profile, hybrid_command, trainer, status):
    def launch(ready, run_dir):
        sys.exit(status)

    trainer.module.launch = launch
    result = hybrid_command("train", profile)
    assert result.exit_code == 1
    assert "test_cli.py:" in result.stderr and f"ended the program (SystemExit({status!r}))" in result.stderr.replace(
        "SystemExit()", "SystemExit(None)"
    )


def test_n1_a_mistake_of_ours_ends_with_1_whatever_the_teardown_says(profile, light, tmp_path):
    sitecustomize(
        tmp_path,
        """
import atexit, os
def launch(ready, run_dir):
    sys.modules["ray"] = types.ModuleType("ray")
    atexit.register(os._exit, 0)
    raise ValueError("a mistake")
""",
    )
    run = start("train", str(profile), *light, cwd=tmp_path)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1 and "ValueError: a mistake" in err


@pytest.mark.parametrize(
    ("sent", "code", "handler"),
    [
        (signal.SIGINT, 130, ""),
        (signal.SIGTERM, 143, ""),
        (signal.SIGHUP, 129, ""),
        # What ray.init does.
        (signal.SIGTERM, 143, "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))"),
    ],
)
def test_signals_end_a_run_through_its_cleanup(profile, light, tmp_path, sent, code, handler):
    sitecustomize(
        tmp_path,
        f"""
import signal, time
def launch(ready, run_dir):
    try:
        {handler or "pass"}
        print("running", flush=True)
        time.sleep(30)
    finally:
        print("cleaned up", flush=True)
""",
    )
    run = start("train", str(profile), "model.dtype=float32", cwd=tmp_path)  # no note on CPUs without bf16
    assert run.stdout.readline() == "running\n", run.stderr.read()
    run.send_signal(sent)
    out, err = run.communicate(timeout=10)
    assert out == "cleaned up\n"
    assert err == "interrupted\n"
    assert run.returncode == code
