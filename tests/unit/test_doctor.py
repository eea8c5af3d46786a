"""The doctor's checks in small on a CPU: they pass here, fail where something is wrong, and one that hangs or dies harms no other."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from hybrid.doctor import processes, report
from hybrid.doctor.check import Check, Setting, all_checks
from hybrid.doctor.core import memory, numbers
from hybrid.doctor.processes import Outcome, environment, run_check
from hybrid.doctor.rank import run_here
from hybrid.doctor.report import Report, closing_line, line_of
from hybrid.doctor.surroundings import look_around
from hybrid.errors import SurroundingsError
from hybrid.memory.tiers import FileTier

CHECKS = all_checks()


def in_small(name: str, folder: Path) -> dict:
    return run_here(name, Setting("cpu", folder, small=True))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_each_check_says_what_it_proves_and_what_its_failure_means(check):
    assert check.proves.endswith(".") and check.means.endswith(".")
    assert len({each.name for each in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("name", ["numbers/packed", "numbers/vocabulary", "numbers/bf16", "swap/tensors"])
def test_it_passes_here(name, tmp_path):
    answer = in_small(name, tmp_path)
    assert answer["status"] == "pass", answer
    json.dumps(answer["figures"])


def test_packed_attention_that_sees_other_rows_is_found(tmp_path, monkeypatch):
    from hybrid.roles import attention

    def leaks(module, query, key, value, mask, packed_segments):
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None

    monkeypatch.setattr(attention, "packed_attention", leaks)
    answer = in_small("numbers/packed", tmp_path)
    assert answer["status"] == "fail" and "output differs" in answer["said"]


def test_log_probs_of_another_temperature_are_found(tmp_path, monkeypatch):
    right = numbers.chunked_logprobs
    monkeypatch.setattr(numbers, "chunked_logprobs", lambda h, head, t, _, chunk: right(h, head, t, 1.01, chunk))
    assert in_small("numbers/vocabulary", tmp_path)["status"] == "fail"


def test_bytes_that_come_back_changed_are_found(tmp_path, monkeypatch):
    right = FileTier.read

    def read(self, part, storages):
        right(self, part, storages)
        storages[0].storage[5] ^= 1

    monkeypatch.setattr(FileTier, "read", read)
    answer = in_small("swap/tensors", tmp_path)
    assert (answer["status"], answer["said"]) == ("fail", "file: bytes changed") and answer["figures"]


def test_gradients_that_point_elsewhere_are_found(tmp_path, monkeypatch):
    right = numbers.make_decoder

    def make(setting, dtype):
        model = right(setting, dtype)
        if dtype == torch.bfloat16:
            model.head.weight.register_hook(torch.neg)
        return model

    monkeypatch.setattr(numbers, "make_decoder", make)
    assert "point elsewhere" in in_small("numbers/bf16", tmp_path)["said"]


def test_what_a_process_takes_beyond_the_plan_is_told():
    within, beyond = {"measured": 600e6, "planned": 500e6}, {"measured": 900e6, "planned": 500e6}
    memory.expect_planned("it takes", within, {})
    memory.expect_planned("it takes", {"measured": 900e6, "planned": None}, {})
    with pytest.raises(Exception, match="it takes 858 MiB, planned are 477"):
        memory.expect_planned("it takes", beyond, {})


# Processes

PASSES = """
import json, sys
print(json.loads(sys.argv[3]))
open(sys.argv[2], "w").write(json.dumps({"status": "pass", "said": "", "figures": {"rank": json.loads(sys.argv[3])["rank"]}}))
"""
FAILS = PASSES.replace('"pass"', '"fail"').replace('"said": ""', '"said": "it is wrong"') + "\nsys.exit(1)"
DIES = "import os, sys; print('last words', flush=True); os.abort()"
HANGS = "import time; time.sleep(60)"
SKIPS = PASSES.replace('"pass"', '"skip"').replace('"said": ""', '"said": "not here"')


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a check whose process of each rank is a program of one of the above."""

    def run_programs(*programs: str, **changes) -> Outcome:
        started = subprocess.Popen

        def popen(command, **options):
            rank = json.loads(command[5])["rank"]
            return started([sys.executable, "-c", programs[rank], *command[3:]], **options)

        monkeypatch.setattr(processes.subprocess, "Popen", popen)
        check = Check("one", "It proves.", "It means.", lambda _: {}, gpus=None, everywhere=True, **changes)
        return run_check(check, "cpu", [str(i) for i in range(len(programs))], tmp_path)

    yield run_programs
    assert not list(tmp_path.iterdir()), "its files are gone"


def test_figures_are_kept_by_rank(run):
    done = run(PASSES, PASSES)
    assert (done.status, done.figures, done.log) == ("pass", [{"rank": 0}, {"rank": 1}], "")


def test_a_rank_that_fails_ends_those_that_wait_for_it(run):
    done = run(HANGS, FAILS)
    assert (done.status, done.said) == ("fail", "it is wrong")


def test_a_process_that_dies_leaves_its_last_words(run):
    done = run(DIES)
    assert (done.status, done.said) == ("fail", "its process ended with -6") and "last words" in done.log


def test_a_check_that_hangs_is_ended(run):
    done = run(PASSES, HANGS, deadline_s=0.6)
    assert (done.status, done.said) == ("fail", "no answer within 1 s")


def test_one_that_says_nothing_here_is_skipped(run, tmp_path):
    assert run(SKIPS).said == "not here" and run(SKIPS).status == "skip"
    assert run(PASSES, on_cpu=False).said == "it needs a GPU"
    assert run(PASSES, least_gpus=2).said == "it needs 2 GPUs"


def test_processes_get_the_environment_of_their_role():
    check = next(each for each in CHECKS if each.name == "memory/exports")
    env = environment(check, "cuda", "3")
    assert env["CUDA_VISIBLE_DEVICES"] == "3" and env["PYTORCH_CUDA_ALLOC_CONF"].endswith("expandable_segments:False")
    other = environment(replace(check, process_role="critic"), "cuda", "0,1")
    assert other["PYTORCH_CUDA_ALLOC_CONF"].endswith("expandable_segments:True")
    assert environment(check, "cpu", "0")["CUDA_VISIBLE_DEVICES"] == ""


# The report and the command


def test_the_report_is_whole_after_each_check(tmp_path):
    file = tmp_path / "doctor.json"
    written = Report(file, "cuda", {"cuda": "13.0", "gpus": [{"name": "H100", "bytes": 8, "capability": "9.0"}]})
    written.add(Outcome("groups", "fail", "it is wrong", "It proves.", "It means.", 1.5, [{"a": 1}], "log"))
    content = json.loads(file.read_text())
    assert content["finished"] is False and content["machine"]["gpus"][0]["name"] == "H100"
    assert content["checks"][0]["said"] == "it is wrong" and content["checks"][0]["figures"] == [{"a": 1}]
    assert content["plan"]["CUDA_CONTEXT"] > 0 and content["machine"]["packages"]["torch"] == torch.__version__
    written.write(finished=True)
    assert json.loads(file.read_text())["finished"] is True
    assert line_of(written.outcomes[0]) == "FAIL  groups                  1.5 s  it is wrong. It means."
    assert closing_line(written.outcomes, file) == f"0 passed, 1 failed, 0 skipped. All figures: {file}"


def test_without_a_gpu_one_sentence_says_so(hybrid_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = hybrid_command("doctor", "--gpu")
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert "this machine has no CUDA driver" in done.stderr and not list(tmp_path.iterdir())
    done = hybrid_command("doctor", "--gpu", "--out", tmp_path)
    assert done.exit_code == 2 and "Name a file" in done.stderr


def test_the_doctor_looks_around(hybrid_command, monkeypatch):
    found = {name: word for word, name, _ in look_around()}
    assert set(found) >= {"packages", "Ray", "vLLM", "GPUs", "disk"}

    def refuse(*_):
        raise SurroundingsError("TMPDIR=x is invalid: why. Fix.")

    monkeypatch.setattr("hybrid.doctor.surroundings.check_surroundings", refuse)
    done = hybrid_command("doctor")
    assert done.exit_code == 1 and "FAIL  Ray            TMPDIR=x is invalid" in done.stdout


def test_packages_of_other_versions_are_named(monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch<2", "no-such-package", "ray; extra == 'x'"])
    [(word, _, said)] = [line for line in look_around() if line[1] == "packages"]
    assert word == "FAIL" and said.startswith(f"torch is {torch.__version__}, not <2; no-such-package is missing. Call")


def test_gpus_are_listed_in_another_process(monkeypatch):
    monkeypatch.setattr(report, "LISTS_GPUS", """print('noise'); print('{"cuda": "13.0", "gpus": [1]}')""")
    assert report.list_gpus() == {"cuda": "13.0", "gpus": [1]}
    monkeypatch.setattr(report, "LISTS_GPUS", "import sys; sys.exit(1)")
    assert report.list_gpus() == {"cuda": None, "gpus": []}
