"""What `make test` installs: said before, started never, and the machine's own policy put back."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SCRIPT = SCRIPTS / "debian_packages.sh"
# Debian's, as far as a script sees it: a package with a service asks whether it may start it.
APT = """#!/bin/sh
echo "apt-get $*" >>"$LOG"
[ "$1" = update ] && exit 0
"$POLICY_RC_D" sshd start; echo "policy $?" >>"$LOG"
echo noise
[ -z "$SLOW" ] || sleep 60
exit "${FAILS:-0}"
"""
OWN = "#!/bin/sh\nexit 104\n"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for name, text in (("apt-get", APT), ("id", '#!/bin/sh\necho "${UID_THERE:-0}"\n')):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "POLICY_RC_D": str(tmp_path / "policy-rc.d"),
        "LOG": str(tmp_path / "log"),
    }


def install(env: dict[str, str], **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["sh", str(SCRIPT), "the lab", "openssh-server", "munge"],
        env={**env, **more},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, "tests that need a tool say so themselves"
    return done


def log(env: dict[str, str]) -> list[str]:
    return Path(env["LOG"]).read_text().splitlines()


def left(env: dict[str, str]) -> list[str]:
    folder = Path(env["POLICY_RC_D"]).parent
    return sorted(path.name for path in folder.iterdir() if "policy" in path.name)


INSTALLED = [
    "apt-get update -qq",
    "apt-get install -qq -y --no-install-recommends openssh-server munge",
    "policy 101",
]


@pytest.mark.parametrize("fails", ["0", "100"])
def test_it_says_what_it_does_and_starts_nothing(env: dict[str, str], fails: str) -> None:
    done = install(env, FAILS=fails)
    assert done.stdout == (
        "installing for the lab, and starting no service of it: openssh-server munge\n"
    )
    assert ("could not install" in done.stderr) == (fails != "0")
    assert log(env) == INSTALLED
    assert left(env) == []


@pytest.mark.parametrize("link", [False, True])
def test_the_policy_of_the_machine_is_put_back(
    env: dict[str, str], tmp_path: Path, link: bool
) -> None:
    policy = Path(env["POLICY_RC_D"])
    own = tmp_path / "own" if link else policy
    own.write_text(OWN)
    own.chmod(0o755)
    if link:
        policy.symlink_to("own")
    install(env)
    assert log(env)[-1] == "policy 101"
    assert left(env) == ["policy-rc.d"]
    assert policy.is_symlink() == link
    assert policy.read_text() == OWN
    assert stat.S_IMODE(policy.stat().st_mode) == 0o755


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_is_stopped_is_put_back_now_or_by_the_next(env: dict[str, str], number: int) -> None:
    policy = Path(env["POLICY_RC_D"])
    policy.write_text(OWN)
    Path(env["LOG"]).touch()
    words = ["sh", str(SCRIPT), "the lab", "munge"]
    with subprocess.Popen(words, env={**env, "SLOW": "1"}, start_new_session=True) as process:
        end = time.monotonic() + 30
        while "policy 101" not in log(env):
            assert time.monotonic() < end
            time.sleep(0.02)
        os.killpg(process.pid, number)
    if number == signal.SIGKILL:
        assert policy.read_text() != OWN
        install(env)
    assert policy.read_text() == OWN
    assert left(env) == ["policy-rc.d"]


def test_who_is_not_root_is_told_what_is_needed(env: dict[str, str]) -> None:
    done = install(env, UID_THERE="1000")
    assert done.stderr == (
        "the lab needs: openssh-server munge (installed by itself only as root on Debian)\n"
    )
    assert not Path(env["LOG"]).exists()


@pytest.mark.parametrize("name", ["lab_tools.sh", "browser_tools.sh"])
def test_nothing_else_installs(name: str) -> None:
    text = (SCRIPTS / name).read_text()
    assert "debian_packages.sh" in text
    assert "apt-get" not in text
