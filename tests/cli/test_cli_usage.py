"""Bad input is one clear line and exit 2, before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import click
import pytest

import nccl_doctor
from nccl_doctor import __version__
from nccl_doctor.cli import cli
from nccl_doctor.cli.line import stand_alone
from nccl_doctor.cli.pages import commit_at
from nccl_doctor.report.formats import formats
from tests.cli.program import calls_in_one, error_of, program
from tests.support.rows import each_row

TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "nd0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}

BAD = {
    "run --timeout x": "Invalid value for '--timeout': 'x' is not a positive number of seconds",
    "run --timeout 0": "'0' is not a positive number",
    "run --timeout -3": "'-3' is not a positive number",
    "run --timeout inf": "'inf' is not a positive number",
    "run --timeout nan": "'nan' is not a positive number",
    "run --join-timeout 1e999": "'1e999' is not a positive number",
    "run --pause=1e999": "'1e999' is not a positive number",
    "run --collective-timeout x": "Invalid value for '--collective-timeout'",
    "run --timeout 5e9": "Invalid value for '--timeout': '5e9' is more than 1000000 seconds",
    "run --timeout 30 --join-timeout 31": "--join-timeout 31 is longer than --timeout 30",
    "run --timeout 5 --collective-timeout 9": "--collective-timeout 9 is longer than --timeout 5",
    "run --nnodes 0": "'0' is not a whole number, at least 1",
    "run --nnodes 1:4": "'1:4' is not a whole number, at least 1 (a range of nodes is not "
    "supported; run -- torchrun … reads one)",
    "run --nnodes 2": "--nnodes 2 needs --master-addr, the name or address of node 0",
    "run --nnodes 200000": "'200000' is more than 131072",
    "run --nnodes 131072 --master-addr a --nproc-per-node 2": "--nnodes 131072 with 2 ranks each: "
    "more than 131072 ranks",
    "run --node-rank 999999999": "'999999999' is more than 131072",
    "run --node-rank 1": "--node-rank 1 is out of range for --nnodes 1",
    "run --node-rank -1": "'-1' is not a whole number, at least 0",
    "run --nproc-per-node 0": "'0' is not auto, gpu, cpu or a whole number from 1",
    "run --nproc-per-node 4097": "'4097' is not auto, gpu, cpu or a whole number from 1 to 4096",
    "run --nproc-per-node tpu": "'tpu' is not auto, gpu, cpu or a whole number from 1",
    "run --master-port 0": "'0' is not a whole number, 1 to 65535",
    "run --master-port 65536": "'65536' is not a whole number, 1 to 65535",
    "run --master-port 1_000": "'1_000' is not a whole number",
    "run --master-addr=": "'' is not a host name or address",
    "run --backend mpi": "'mpi' is not one of 'auto', 'nccl', 'gloo'",
    "run --level deep": "'deep' is not one of 'quick', 'standard', 'full'",
    "run --select rank": 'no check or finding code is named "rank"; did you mean "ranks"?',
    "run --select ranks,": "'ranks,' contains an empty name",
    "run --ignore host-absnt": 'did you mean "host-absent"?',
    "run --select ranks --ignore ranks": "--select and --ignore leave no check to run",
    "run --quiet -v": "--quiet and --verbose exclude each other",
    "run --json no/such/folder.json": "--json no/such/folder.json: the folder no/such does not",
    "run --json .": "--json .: a file name is needed, not a folder",
    "run --json=": "a file name is needed",
    "run --json --strict": "--json --strict: a file name is needed before --strict",
    "run --config no.toml": "cannot read no.toml: No such file or directory",
    "run --mesh dp": "'--mesh': 'dp' is not name=size, as in dp=2,tp=4",
    "run --mesh=": "'' is not name=size, as in dp=2,tp=4",
    "run --mesh dp=2,": "'' is not name=size",
    "run --mesh =2": "'=2' is not name=size",
    "run --mesh 2x2=4": "'2x2=4' is not name=size",
    "run --mesh dp:2": "'dp:2' is not name=size",
    "run --mesh dp=": "dp=: the size is not a whole number from 1",
    "run --mesh dp=0": "dp=0: the size is not a whole number from 1",
    "run --mesh dp=-1": "dp=-1: the size is not a whole number from 1",
    "run --mesh dp=2.0": "dp=2.0: the size is not a whole number from 1",
    "run --mesh dp=2=2": "dp=2=2: the size is not a whole number from 1",
    "run --mesh dp=99999999": "dp=99999999: the size is not a whole number from 1",
    "run --mesh dp=2,dp=2": "'dp=2,dp=2' names the dimension dp twice",
    "run --mesh dp=2 --select device_msh": 'did you mean "device_mesh"?',
    "run --frobnicate": "No such option '--frobnicate'",
    "run train.py": "Got unexpected extra argument (train.py); the line of the job stands behind "
    "--: nccl-doctor run -- torchrun train.py",
    "run torchrun --nproc_per_node 2 train.py": "nccl-doctor run -- torchrun --nproc_per_node 2 ",
    "run --strict train.py": "stands behind --: nccl-doctor run --strict -- torchrun train.py",
    "run --nproc-per-node 2 torchrun train.py": "--: nccl-doctor run -- torchrun "
    "--nproc-per-node 2 train.py",
    "run --nproc-per-node=2 python train.py": "run --nproc-per-node=2 -- python train.py",
    "run --backend gloo torchrun --nnodes 1 t.py": "run --backend gloo -- torchrun --nnodes 1 t.py",
    "run --strict --nnodes 1 torchrun t.py": "nccl-doctor run [OPTIONS] -- torchrun …",
    "torchrun --nproc-per-node 2 train.py": "nccl-doctor run -- torchrun --nproc-per-node 2 "
    "train.py",
    "train.py": "nccl-doctor run -- torchrun train.py",
    "python -m x": "nccl-doctor run -- python -m x",
    "run --nproc_per_node=0": "Invalid value for '--nproc-per-node': '0' is not auto",
    "run --master_port 0": "Invalid value for '--master-port': '0' is not a whole number",
    "run --node_rank 1": "--node-rank 1 is out of range for --nnodes 1",
    "run --nnodes 2 --node_rank 2 --master_addr a": "--node-rank 2 is out of range for --nnodes 2",
    "run --rdzv-endpoint a:1 --nnodes 2 train.py": "--rdzv-endpoint is an option of torchrun; the "
    "line of the job stands behind --: nccl-doctor run -- torchrun --rdzv-endpoint a:1 --nnodes 2",
    "run --rdzv_backend=c10d": "nccl-doctor run -- torchrun --rdzv_backend=c10d",
    "run --strict --rdzv_id 3 -- torchrun train.py": "--rdzv_id is an option of torchrun; the line "
    "of the job stands behind --: nccl-doctor run [OPTIONS] -- torchrun …",
    "run --frob_nicate": "No such option '--frob_nicate'",
    "run --standalone --nnodes 2": "--standalone is for one host, and --nnodes 2 for others too",
    "run --standalone --hostfile h": "--standalone is for one host, and --hostfile h for others",
    "run --standalone --node-rank 1": "--node-rank 1 is out of range for --nnodes 1",
    "run --": "no command after --",
    "run -- nosuch --nnodes 2": "-- nosuch: no such program in PATH",
    "run --nnodes 3 -- python3 -m torch.distributed.run --nnodes 2 train.py": "--nnodes 3: the "
    "command has 2 (--nnodes); leave the option out",
    "run -- python3 -m torch.distributed.run --nnodes x train.py": "torchrun: --nnodes",
    "run --exit-profile zabbix": "'zabbix' is not one of 'native', 'slurm', 'npd', 'nagios'",
    "run --key no/key": "--key: cannot read no/key: No such file or directory",
    "run --key=": "--key '': a file name is needed",
    "run --key /dev/zero": "cannot use /dev/zero for --key, it is not a file",
    "run --key k --hostfile h": "--key and --hostfile: the hosts get a key over ssh; leave it out",
    "run --redact-key k": "--redact-key needs --redact",
    "run --redact --redact-key no/key": "--redact-key: cannot read no/key: No such file",
    "run --redact --redact-key /dev/null": "--redact-key /dev/null: a key needs at least 8",
    "report issue nccl no.json": "cannot read no.json: No such file or directory",
    "report issue linux x": "for which project: deepspeed, nccl or pytorch? Type: nccl-doctor "
    "report issue PROJECT x",
    "report issue x.json": "nccl-doctor report issue PROJECT x.json",
    "report issue nccl": "nccl-doctor report issue PROJECT FILE",
    "report issue nccl x --no-redact --redact-key k": "cannot read x: No such file",
    "report bundle no.json": "cannot read no.json: No such file or directory",
    "report bundle no.json --log no.log": "--log no.log: no such file",
    "report show x --redact-key k": "--redact-key needs --redact",
    "run --output-dir no/folder": "--output-dir no/folder: no such folder; create it",
    "run --nnodes 2 --node-rank 2 --master-addr a": "--node-rank 2 is out of range for --nnodes 2",
    "completion tcsh": "'tcsh' is not one of 'bash', 'zsh', 'fish'",
    "explain": "Missing argument 'CODE'",
    "explain port-bloked": 'code is named "port-bloked"; did you mean "port-blocked"?',
    "explain colectives": 'no check or finding code is named "colectives"; did you mean "collectiv',
    "report show no.json": "cannot read no.json: No such file or directory",
    "report judge no.json": "cannot read no.json: No such file or directory",
    "run --baseline no/past": "--baseline: cannot read no/past: No such file or directory",
    "run --baseline /dev/zero": "--baseline: /dev/zero is not a report: it is a device",
    "run --baseline=": "--baseline '': a file or a folder is needed",
    "report judge x --baseline no/past": "cannot read x: No such file or directory",
    "report diff": "Missing argument 'OLD'",
    "report diff old.json": "Missing argument 'NEW'",
    "report diff no.json no.json": "cannot read no.json: No such file or directory",
    "report diff - -": "OLD and NEW are both -: only one of them can be stdin",
    "report diff --format html a b": "'html' is not one of 'text', 'json'",
    "report merge": "Missing argument 'FILE...'",
    "report merge no.json": "cannot read no.json: No such file or directory",
    "report merge x --json no/such.json": "--json no/such.json: the folder no does not exist",
    "report show --format xml x": "'xml' is not one of 'text', 'html', 'json'",
    "report show --format html --html p x": "--format html and --html p: leave one of them out",
    "report show --format html --json - x": "--html - and --json -: only one of them can use",
    "report show --html no/such.html x": "--html no/such.html: the folder no does not exist",
    "frobnicate": "No such command 'frobnicate'",
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> dict[str, tuple[CompletedProcess[str], Path]]:
    """Arguments → how the call ended, and the folder where it was made: all in one process."""
    top = tmp_path_factory.mktemp("calls")
    folders = [top / str(number) for number in range(len(BAD))]
    for folder in folders:
        folder.mkdir()
    done = calls_in_one([arguments.split(" ") for arguments in BAD], folders)
    return dict(zip(BAD, zip(done, folders, strict=True), strict=True))


@pytest.mark.xdist_group("usage")
@each_row("arguments", BAD)
def test_one_clear_line(arguments, calls):
    done, folder = calls[arguments]
    assert BAD[arguments] in error_of(done)
    assert not list(folder.iterdir())


@pytest.mark.xdist_group("usage")
@each_row("arguments", BAD)
def test_the_usage_line_of_the_command_follows(arguments, calls):
    words = arguments.split(" ")
    command, path = cli, "nccl-doctor"
    while isinstance(command, click.Group) and words and words[0] in command.commands:
        command, path = command.commands[words[0]], f"{path} {words.pop(0)}"
    _, usage = calls[arguments][0].stderr.splitlines()
    assert usage.startswith(f"nccl-doctor: usage: {path} [OPTIONS] ")
    assert usage.endswith(f"; see {path} --help")


def test_a_folder_that_cannot_be_written(tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o555)
    assert "is not writable" in error_of(program("run", "--json", str(tmp_path / "r.json")))


def test_only_the_participant_that_writes_the_report_needs_its_folder():
    words = error_of(program("run", "--json", "no/such.json", "--select", "zzz", env=TORCHRUN))
    assert 'no check or finding code is named "zzz"' in words
    words = error_of(
        program("run", "--json", "no/such.json", env={**TORCHRUN, "RANK": "0", "GROUP_RANK": "0"})
    )
    assert "the folder no does not exist" in words


def test_flags_under_a_launcher_must_agree_with_it():
    words = error_of(program("run", "--nnodes", "3", "--master-port", "1", env=TORCHRUN))
    assert "--nnodes 3: torchrun has 2" in words
    assert "--master-port 1: torchrun has 29500" in words


def test_without_a_command_there_is_help_and_no_success():
    for arguments in ((), ("report",)):
        done = program(*arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "Commands:" in done.stderr


# --- the configuration file ---


def test_the_file_of_the_working_directory_gives_defaults(tmp_path):
    file = tmp_path / "nccl-doctor.toml"
    file.write_text("timeout = 30\njoin-timeout = 40\n")
    words = error_of(program("run", cwd=tmp_path))
    assert words.startswith("--join-timeout 40 is longer than --timeout 30")
    words = error_of(program("run", "--join-timeout", "50", cwd=tmp_path))
    assert words.startswith("--join-timeout 50 is longer")


@pytest.mark.parametrize("command", ["run", "env"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timout = 3", 'nccl-doctor.toml: unknown key "timout"; did you mean "timeout"?'),
        ("strict = 'yes'", "strict is 'yes', not true or false"),
        ("backend = 'mpi'", "Invalid value for '--backend'"),
        ("select = ['zzz']", 'no check or finding code is named "zzz"'),
        ("json = 'no/such.json'", "the folder no does not exist"),
    ],
)
def test_bad_values_in_it(tmp_path, command, text, words):
    (tmp_path / "nccl-doctor.toml").write_text(text)
    assert words in error_of(program(command, cwd=tmp_path))


# --- frozen: additions are made here on purpose, removals never ---

COMMANDS = {"run", "autopsy", "checks", "explain", "report", "env", "schema", "completion"}
REPORT_COMMANDS = {"show", "judge", "merge", "diff", "fixes", "bundle", "issue"}
RUN_FLAGS = {
    "--retry",
    "--pause",
    "--standalone",
    "--html",
    "--github",
    "--no-github",
    "--junit",
    "--markdown",
    "--prometheus",
    "--nnodes",
    "--node-rank",
    "--nproc-per-node",
    "--master-addr",
    "--master-port",
    "--hostfile",
    "--topology",
    "--output-dir",
    "--baseline",
    "--relay",
    "--again",
    "--agents-from",
    "--autopsy",
    "--hang-after",
    "--mesh",
    "--groups",
    "--deepspeed-config",
    "--expect-load-seconds",
    "--backend",
    "--level",
    "--with-dcgm",
    "--hold-idle",
    "--path",
    "--endpoint",
    "--reach",
    "--init-method",
    "--select",
    "--ignore",
    "--timeout",
    "--join-timeout",
    "--collective-timeout",
    "--json",
    "--termination",
    "--exit-profile",
    "--redact",
    "--redact-key",
    "--key",
    "--strict",
    "--config",
    "--quiet",
    "-q",
    "--verbose",
    "-v",
}
ENV_FLAGS = {
    "--retry",
    "--pause",
    "--html",
    "--github",
    "--no-github",
    "--junit",
    "--markdown",
    "--prometheus",
    "--backend",
    "--select",
    "--ignore",
    "--json",
    "--termination",
    "--exit-profile",
    "--redact",
    "--redact-key",
    "--strict",
    "--config",
    "--quiet",
    "-q",
    "--verbose",
    "-v",
}
DEFAULTS = {
    "backend": "auto",
    "level": "standard",
    "timeout": 120.0,
    "join_timeout": 60.0,
    "collective_timeout": 20.0,
}


def flags_of(command) -> set[str]:
    return {
        flag
        for param in command.params
        if param.param_type_name == "option"
        for flag in (*param.opts, *param.secondary_opts)
    }


def test_frozen_commands_and_flags():
    assert set(cli.commands) == COMMANDS
    assert set(cli.commands["report"].commands) == REPORT_COMMANDS
    assert flags_of(cli.commands["run"]) == RUN_FLAGS
    assert flags_of(cli.commands["env"]) == ENV_FLAGS


def test_report_show_takes_the_outputs_of_run():
    outputs = {*formats(), "github"}
    for name, command in cli.commands["report"].commands.items():
        if name in ("show", "judge", "merge"):
            assert outputs <= {param.name for param in command.params}, name
    assert "--format" in flags_of(cli.commands["report"].commands["show"])


def test_frozen_defaults():
    given = {param.name: param.default for param in cli.commands["run"].params}
    assert {name: given[name] for name in DEFAULTS} == DEFAULTS


def test_torchruns_spellings_of_the_options_of_run_mean_the_same():
    line = "--nnodes=1 --nproc_per_node 2 --node_rank 0 --master_addr nd0 --master_port=29501"
    run = cli.commands["run"]
    for words in (line, line.replace("_", "-")):
        given = run.make_context("run", words.split()).params
        assert (given["nproc_per_node"], given["master_addr"]) == ("2", "nd0")
        assert (given["nnodes"], given["node_rank"], given["master_port"]) == (1, 0, 29501)


def test_standalone_is_one_host_that_meets_on_itself(capsys):
    given = {"standalone": True, "hostfile": None, "nnodes": None}
    given |= {"master_addr": "nd7", "master_port": None}
    stand_alone(None, given)
    assert (given["nnodes"], given["master_addr"]) == (1, None)
    assert "--master-addr is not used with --standalone" in capsys.readouterr().err


# --- light ---


def test_help_imports_neither_torch_nor_a_check():
    code = (
        "import sys\n"
        "from nccl_doctor.__main__ import program\n"
        "for words in (['--help'], ['--version'], ['run', '--help'], ['schema']):\n"
        "    sys.argv = ['nccl-doctor', *words]\n"
        "    assert not program(), words\n"
        "    print(f'{words} are shown')\n"
        "    heavy = {'torch', 'numpy', 'psutil', 'tabulate', 'nccl_doctor.checks',\n"
        "             'nccl_doctor.registry', 'nccl_doctor.gather.run'} & set(sys.modules)\n"
        "    assert not heavy, (words, heavy)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split(" are shown\n")
    assert len(parts) == 5
    assert all(len(part.splitlines()) > 1 for part in parts[:4])


def test_help_costs_little_more_than_click():
    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ours, clicks = [], []
    for _ in range(5):  # side by side: a machine may run at another speed a second later
        ours.append(cpu_s("-m", "nccl_doctor", "--help"))
        clicks.append(cpu_s("-c", "import click"))
    assert min(ours) <= 5 * min(clicks), (ours, clicks)


def test_version():
    assert program("--version").stdout == f"nccl-doctor {__version__}\n"


def test_the_version_in_full_is_that_of_what_it_runs_with():
    own, python, torch, deepspeed = program("--version", "-v").stdout.splitlines()
    assert own.startswith(f"nccl-doctor {__version__}")
    assert own.endswith(f"(source tree: {Path(nccl_doctor.__file__).parents[1]})")
    assert python == f"python {platform.python_version()} ({sys.executable})"
    where = Path(importlib.util.find_spec("torch").origin).parent
    assert torch == f"torch {importlib.metadata.version('torch')} ({where})"
    assert deepspeed.startswith("deepspeed ")
    assert "No such option '-v'" in error_of(program("-v", "checks"))


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({}, ""),
        ({"HEAD": "0123456789abcdef0123\n"}, "0123456789ab"),
        ({"HEAD": "ref: refs/heads/x\n", "refs/heads/x": "abcdef0123456789\n"}, "abcdef012345"),
        (
            {"HEAD": "ref: refs/heads/x", "packed-refs": "# pack\nfedc0123 refs/heads/x\n"},
            "fedc0123",
        ),
        ({"HEAD": "ref: refs/heads/x\n"}, ""),
        ({"HEAD": "\udcff"}, ""),
    ],
)
def test_the_commit_of_a_checkout(files, commit, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, errors="surrogateescape")
    assert commit_at(tmp_path) == commit


def test_output_that_cannot_show_every_character():
    done = program("run", "--help", env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert done.returncode == 0


def test_a_reader_that_has_enough(tmp_path: Path):
    done = subprocess.run(
        ["/bin/sh", "-c", f"'{sys.executable}' -m nccl_doctor schema | head -c 1 > /dev/null"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.stderr == ""


def test_what_deepspeed_puts_in_front_of_a_module_is_taken():
    done = program("--local_rank=1", "run", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "local_rank" not in program("--help").stdout


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (
            "s" * 32,
            0o644,
            "cannot use secret for --key, others can read it (mode 0644); chmod 600 secret",
        ),
        ("s" * 32, 0o620, "cannot use secret for --key, others can read it (mode 0620)"),
        (
            " short \n",
            0o600,
            "cannot use secret for --key, a key has 16 to 4096 bytes; make one: openssl rand",
        ),
        ("", 0o600, "cannot use secret for --key, a key has 16 to 4096 bytes"),
        ("s" * 5000, 0o600, "cannot use secret for --key, a key has 16 to 4096 bytes"),
    ],
)
def test_a_key_that_is_not_private_or_no_key_is_refused(tmp_path, content, mode, words):
    (tmp_path / "secret").write_text(content)
    (tmp_path / "secret").chmod(mode)
    assert words in error_of(program("run", "--key", "secret", cwd=tmp_path))
