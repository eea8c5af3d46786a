"""A copy of the launch scripts whose Python, Ray and `hybrid` are stand-ins that note how they were called."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.launch_scripts import CLEAN, ROOT

STAND_IN = r"""#!/bin/sh
# Notes its call in $CALLS. Fails with $STATUS where the call matches $FAIL. Installed packages are the lines of $PACKAGES.
name="$(basename "$0")"
echo "$name $*" >>"$CALLS"
if [ -n "$FAIL" ] && echo "$name $*" | grep -qE -e "$FAIL"; then echo "$SAYS"; exit "${STATUS:-1}"; fi
if [ -n "$WAIT" ] && echo "$name $*" | grep -qE -e "$WAIT"; then echo Collecting torch; sleep 60; fi
case "$name $*" in
*" -V") echo "Python 3.11.7" ;;
*"-m venv "*) mkdir -p "$3/bin"; for each in python ray hybrid; do cp "$0" "$3/bin/$each"; done ;;
*"-m pip cache dir") echo "$HOME/.cache/pip" ;;
*"-m pip show "*) grep -qx "$5" "$PACKAGES" ;;
*" --junitxml="*)
    echo "in $HYBRID_VENV for $HYBRID_EXTRA" >>"$CALLS"
    for each; do case "$each" in --junitxml=*) file="${each#--junitxml=}" ;; esac; done
    echo '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>' >"$file" ;;
*"NODE_ENV"*) printf 'STORE=7\nRAY_usage=0\n' ;;
*"device_count"*) echo "${GPUS:-1}" ;;
*"importlib.metadata"*) echo "versions" ;;
"python - "*) shift; exec "$REAL_PYTHON" - "$@" ;;
*"get-auth-token"*) mkdir -p "$HOME/.ray"; echo token >"$HOME/.ray/auth_token" ;;
esac
"""


class Checkout:
    """A copy of the scripts with stand-ins around them."""

    def __init__(self, folder: Path):
        self.home, self.folder = folder, folder / "checkout"
        shutil.copytree(ROOT / "launch", self.folder / "launch", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / ".ci", self.folder / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        for suite in ("unit", "integration", "e2e", "gpu"):
            (self.folder / "tests" / suite).mkdir(parents=True)
            (self.folder / "tests" / suite / "test_one.py").touch()
        self.tools, self.calls_file, self.packages = folder / "tools", folder / "calls", folder / "packages"
        self.tools.mkdir()
        self.packages.write_text("")
        self.add_tool("python3")
        self.env = CLEAN | {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "CALLS": str(self.calls_file),
            "PACKAGES": str(self.packages),
            "REAL_PYTHON": sys.executable,
            "HOME": str(folder),
            "RAY_TMPDIR": str(folder),
            "SETTLE": "0",
        }

    def add_tool(self, name: str, text: str = STAND_IN) -> None:
        tool = self.tools / name
        tool.write_text(text)
        tool.chmod(0o755)

    def start(self, script: str, *arguments: str, **env: str) -> subprocess.Popen:
        command = ["env", "--default-signal=INT", "bash", self.folder / script, *arguments]
        return subprocess.Popen(
            command,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, script: str, *arguments: str, **env: str) -> tuple[int, str]:
        """Exit status and output."""
        started = self.start(script, *arguments, **env)
        output, _ = started.communicate(timeout=50)
        return started.returncode, output

    def calls(self) -> str:
        return self.calls_file.read_text() if self.calls_file.exists() else ""

    def wait_for_call(self, part: str) -> None:
        deadline = time.monotonic() + 40
        while part not in self.calls():
            assert time.monotonic() < deadline, f"no call of {part}: {self.calls()}"
            time.sleep(0.05)
