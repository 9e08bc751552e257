"""`accelerate launch`: its flags and its configuration file, and which launcher it hands over to.

It runs torchrun's code for several GPUs, the `deepspeed` command for DeepSpeed on several machines,
and otherwise one process. The rules are those of accelerate 1.15 (commands/launch.py and
utils/launch.py); a test holds the flags against an installed accelerate, where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from nccl_doctor.launch.command_line import accelerate_config, deepspeed, torchrun
from nccl_doctor.launch.command_line.accelerate_config import AccelerateFile
from nccl_doctor.launch.command_line.job_line import (
    DEFAULT,
    MAX_PORT,
    Draft,
    FlagTable,
    JobLine,
    JobLineError,
    LineValue,
    is_file,
    number,
    read_flags,
)
from nccl_doctor.launch.identity import num_gpus
from nccl_doctor.toolkit.suggest import suggest

FLAGS = FlagTable(
    values="""
        --config_file --mixed_precision --num_processes --num_machines --gpu_ids --machine_rank
        --num_cpu_threads_per_process --main_process_ip --main_process_port -t/--tee --log_dir
        --role --rdzv_backend --rdzv_conf --max_restarts --monitor_interval --vm --env
        --main_training_function --zero_stage --gradient_accumulation_steps --gradient_clipping
        --zero3_init_flag --zero3_save_16bit_model --aws_access_key_id --aws_secret_access_key
    """,
    switches="""
        -q/--quiet --cpu --multi_gpu --tpu --ipex --use_xpu --use_mps_device --enable_cpu_affinity
        --use_deepspeed --use_fsdp --use_megatron_lm --use_parallelism_config --same_network
        -m/--module --no_python --tpu_cluster --no_tpu_cluster --tpu_use_sudo --downcast_bf16
        --debug --dynamo_use_fullgraph --dynamo_use_dynamic --dynamo_use_regional_compilation
        --fp8_use_autocast_during_eval
    """,
    parser="accelerate.commands.launch:launch_command_parser",
    families=(
        *("deepspeed_", "dynamo_", "fp8_", "fsdp_", "megatron_lm_", "mpirun_", "offload_"),
        "parallelism_config_",
    ),
    abbreviations=False,
)

_KINDS = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")
"""Switches of which accelerate takes one."""
_CHOSEN_BY_FILE = {"DEEPSPEED": "deepspeed", "FSDP": "torchrun", "MEGATRON_LM": "torchrun"}
_HERE = "standard"  # DeepSpeed's ranks are started by torchrun's code, on each machine its own
_NO_NUMBER = (
    "the number of processes is missing: give --num_processes, or set num_processes in the "
    "configuration file"
)
_LAUNCHERS = (*deepspeed.LAUNCHERS, _HERE, "nossh")


def read(
    words: Sequence[str], environ: Mapping[str, str], cwd: Path, *, gpus: int | None = None
) -> JobLine:
    """Read the words behind `accelerate launch`, and the configuration file.

    Args:
        words: those.
        environ: variables with which it would start.
        cwd: folder in which it would start.
        gpus: GPUs that it would see; None: those of this host.

    Raises:
        JobLineError: accelerate would refuse the line, or every machine would train alone.
    """
    given = read_flags(FLAGS, words)
    flags = given.flags
    kinds = [flags[name].source for name in _KINDS if name in flags]
    if len(kinds) > 1:
        raise JobLineError(f"{kinds[0]} and {kinds[1]} exclude each other")
    config = _config(flags.get("config_file"), "cpu" in flags, environ, cwd)
    notes = given.notes + (config.notes if config else ())
    seen = num_gpus(environ) if gpus is None else gpus
    return _FlagsThenFile(flags, config, cwd, notes, seen).line()


def _config(
    named: LineValue | None, cpu: bool, environ: Mapping[str, str], cwd: Path
) -> AccelerateFile | None:
    if named is None:
        path = accelerate_config.default_path(environ)
        there = not cpu and is_file(path)
        return accelerate_config.load(path, found=True) if there else None
    path = cwd / named.text
    if not is_file(path):
        raise JobLineError(f"{named.source} {named.text}: no such file")
    return accelerate_config.load(path)


def _is_multi(distributed_type: object) -> bool:
    return str(distributed_type).startswith("MULTI_") and distributed_type != "MULTI_CPU"


class _FlagsThenFile:
    """The values of one line: flags first, then the file."""

    def __init__(
        self,
        flags: dict[str, LineValue],
        config: AccelerateFile | None,
        cwd: Path,
        notes: tuple[str, ...],
        gpus: int,
    ) -> None:
        self._flags = flags
        self._config = config
        self._cwd = cwd
        self._notes = notes
        self._gpus = gpus
        self._machines = self._say_whole("num_machines", empty=False) or LineValue("1", DEFAULT)
        self._nnodes = number(self._machines, 1)

    def _say(self, name: str) -> LineValue | None:
        return self._flags.get(name) or (self._config.said(name) if self._config else None)

    def _say_whole(self, name: str, *, empty: bool = True) -> LineValue | None:
        whole = self._config.whole if self._config else None
        return self._flags.get(name) or (whole(name, empty=empty) if whole else None)

    def line(self) -> JobLine:
        """Record of the job as accelerate reads its command."""
        kind = self._kind()
        if kind == "elsewhere":
            return JobLine(notes=self._notes)
        self._check(kind)
        line = {"deepspeed": self._deepspeed, "torchrun": self._torchrun, "one": self._one}[kind]()
        gpus, environ = self._say("gpu_ids"), dict(line.environ)
        if gpus and gpus.text != "all":
            environ["CUDA_VISIBLE_DEVICES"] = gpus.text
        return replace(line, environ=environ, notes=tuple(dict.fromkeys(self._notes + line.notes)))

    def _note(self, line: str) -> None:
        self._notes += (line,)

    def _check(self, kind: str) -> None:
        """Refuse values of the file that no flag replaces, and that end accelerate."""
        if self._config is None:
            return
        by_type = self._config.values.get("distributed_type")
        multi = "multi_gpu" in self._flags or (kind == "torchrun" and _is_multi(by_type))
        self._config.check(
            several=multi and self._nnodes == 1, fsdp="use_fsdp" in self._flags or by_type == "FSDP"
        )
        precision = self._config.values.get("mixed_precision")
        if "mixed_precision" not in self._flags and precision is not None:
            words = accelerate_config.PRECISIONS
            self._config.check_word("mixed_precision", words, any_case=True)
        if "num_processes" not in self._flags:
            self._check_processes(kind)

    def _check_processes(self, kind: str) -> None:
        """num_processes of the file; alone, torchrun's code takes it as text."""
        values = self._config.values if self._config else {}
        total = values.get("num_processes")
        none = "num_processes" not in values and values.get("distributed_type") != "NO"
        if none or total == -1:
            raise JobLineError(_NO_NUMBER)
        if self._nnodes > 1 or (kind == "one" and isinstance(total, str)):
            self._say_whole("num_processes", empty=kind == "one")

    def _kind(self) -> str:
        """Program that starts the ranks."""
        chosen = self._config.values if self._config else {}
        if chosen.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
            self._note(f"accelerate starts this job on {chosen['compute_environment']}, not here")
            return "elsewhere"
        if "cpu" in self._flags:
            return "one"
        if "use_deepspeed" in self._flags:
            return "deepspeed"
        if any(name in self._flags for name in ("multi_gpu", "use_fsdp", "use_megatron_lm")):
            return "torchrun"
        by_file = chosen.get("distributed_type") or ""
        if "tpu" in self._flags or by_file in ("TPU", "XLA"):
            self._note("accelerate starts this job on TPUs, which are not examined here")
            return "elsewhere"
        if self._config:
            return _CHOSEN_BY_FILE.get(by_file, "torchrun" if _is_multi(by_file) else "one")
        if self._nnodes > 1:
            self._note(
                "without --multi_gpu, accelerate starts several ranks only on a machine with "
                "several GPUs; any other machine trains alone: add --multi_gpu"
            )
        said = self._flags.get("num_processes")
        if self._gpus > 1 and (said is None or number(said, -1) > 1):
            return "torchrun"
        if self._nnodes == 1 and said and number(said, -1) > 1:
            seen = f"{self._gpus or 'no'} GPU{'s' * (not self._gpus)} here"
            self._note(
                f"{said.source} {said.text}: accelerate sees {seen} and starts one process, "
                "without RANK; add --multi_gpu for ranks"
            )
        return "one"

    def _nproc(self) -> LineValue | None:
        """--num_processes counts over all machines; None: as many as there are GPUs."""
        said = self._say("num_processes")
        if said is None and self._config is None:
            return None
        if said is None or said.text.strip() == "-1":
            raise JobLineError(_NO_NUMBER)
        total = number(said, 1)
        multi = self._flags.get("multi_gpu")
        if multi and total < 2:
            raise JobLineError(f"{multi.source} needs {said.source} of 2 or more, not {total}")
        if total < self._nnodes:
            raise JobLineError(
                f"{said.source} {total} is the number over all machines, and less than "
                f"{self._machines.source} {self._nnodes}"
            )
        if total % self._nnodes:
            self._note(
                f"{said.source} {total} is not a multiple of {self._machines.source} "
                f"{self._nnodes}: "
                f"accelerate starts {total // self._nnodes} on each machine"
            )
        return LineValue(str(total // self._nnodes), said.source)

    def _meeting(self) -> tuple[LineValue | None, LineValue]:
        """Address and port of the main process."""
        addr = self._say("main_process_ip")
        if self._nnodes > 1 and (addr is None or not addr.text.strip()):
            raise JobLineError(
                f"{self._machines.source} {self._nnodes} needs --main_process_ip, the address of "
                "the machine of rank 0"
            )
        return addr, self._say_whole("main_process_port") or LineValue(str(torchrun.PORT), DEFAULT)

    def _torchrun(self) -> JobLine:
        nproc = self._nproc()
        addr, port = self._meeting()
        passed = {"nnodes": self._machines, "nproc_per_node": nproc or LineValue("gpu", DEFAULT)}
        for name in ("rdzv_backend", "rdzv_conf", "max_restarts"):
            if name in self._flags:
                passed[name] = self._flags[name]
        if self._nnodes == 1:
            if port.source != DEFAULT and number(port, 0, MAX_PORT):
                passed["master_port"] = port
            passed.pop("rdzv_backend", None)
        else:
            passed["node_rank"] = self._rank()
            self._pass_meeting(passed, addr or LineValue("", DEFAULT), port)
        by_file = self._config.said("rdzv_backend") if self._config else None
        if by_file and "rdzv_backend" not in passed and by_file.text != "static":
            self._note(f"{by_file.source} is not read by accelerate: give --rdzv_backend")
        line = torchrun.resolve("accelerate", passed)
        if nproc is None and self._nnodes > 1:
            self._note(
                "--num_processes is not given: accelerate divides the GPUs of this machine by "
                f"{self._machines.source}"
            )
            line = replace(line, nproc_per_node=None)
        if line.master_port == number(port, 0, MAX_PORT):
            line = replace(line, sources={**line.sources, "master_port": port.source})
        return line

    def _pass_meeting(self, passed: dict[str, LineValue], addr: LineValue, port: LineValue) -> None:
        """Pass on address and port as accelerate does: c10d gets an endpoint only without
        --same_network.
        """
        c10d = passed.get("rdzv_backend", LineValue("static", DEFAULT)).text != "static"
        if c10d and "same_network" not in self._flags:
            at = number(port, 1, MAX_PORT)
            passed["rdzv_endpoint"] = LineValue(f"{addr.text}:{at}", addr.source)
        else:
            passed["master_addr"], passed["master_port"] = addr, port

    def _rank(self) -> LineValue:
        said = self._say("machine_rank")
        empty = self._config is None or "machine_rank" in self._config.values
        if said is None and empty:
            raise JobLineError(f"{self._machines.source} {self._nnodes} needs --machine_rank")
        return said or LineValue("0", DEFAULT)

    def _deepspeed(self) -> JobLine:
        chosen = self._say("deepspeed_multinode_launcher") or LineValue("pdsh", DEFAULT)
        if chosen.text not in _LAUNCHERS:
            hint = suggest(chosen.text, _LAUNCHERS) or f"; it is one of {', '.join(_LAUNCHERS)}"
            raise JobLineError(f"{chosen.source} {chosen.text!r} is not known{hint}")
        if self._nnodes == 1 or chosen.text == _HERE:
            return self._torchrun()
        hosts = self._say("deepspeed_hostfile")
        if hosts is None:
            raise JobLineError(
                f"{self._machines.source} {self._nnodes} with DeepSpeed's launcher {chosen.text} "
                "needs --deepspeed_hostfile; without it every machine trains alone. To run this "
                f"command on each machine, add --deepspeed_multinode_launcher {_HERE}"
            )
        passed = {"hostfile": hosts, "master_port": self._meeting()[1]}
        if addr := self._say("main_process_ip"):
            passed["master_addr"] = addr
        if chosen.text == "nossh":
            passed |= {"no_ssh": chosen, "node_rank": self._rank()}
        else:
            passed["launcher"] = chosen
        exclude, include = map(
            self._say, ("deepspeed_exclusion_filter", "deepspeed_inclusion_filter")
        )
        if exclude:
            passed["exclude"] = exclude
        elif include:
            passed["include"] = include
        elif nproc := self._nproc():
            passed["num_gpus"] = nproc
        return deepspeed.resolve("accelerate", passed, self._cwd)

    def _asked_for_one(self) -> bool:
        return self._config is not None or "cpu" in self._flags

    def _one(self) -> JobLine:
        """One process on this machine; its rank comes from outside, if it has one."""
        draft = Draft("accelerate")
        draft.put("nnodes", self._nnodes, self._machines.source)
        draft.put("max_nnodes", self._nnodes, self._machines.source)
        hosts, processes = self._say("mpirun_hostfile"), LineValue("1", DEFAULT)
        if hosts:
            draft.put("hostfile", hosts.text, hosts.source)
            draft.put("starts_remote", True, hosts.source)
            processes = self._nproc() or processes
        elif (
            self._asked_for_one() and (said := self._say("num_processes")) and number(said, -1) > 1
        ):
            self._note(
                f"{said.source} {said.text}: without several GPUs accelerate starts one process "
                "here, and needs mpirun or variables that give its rank"
            )
        draft.put("nproc_per_node", processes.text, processes.source)
        addr, port = self._meeting()
        if self._nnodes == 1:
            draft.put("node_rank", 0, DEFAULT)
        elif port.source == DEFAULT:
            raise JobLineError(
                f"{self._machines.source} {self._nnodes} needs --main_process_port: without it "
                "accelerate ends before its one process starts"
            )
        else:
            draft.put("master_port", number(port, 1, MAX_PORT), port.source)
            if said := self._say("machine_rank"):
                draft.put("node_rank", number(said, 0, self._nnodes - 1), said.source)
        if addr:
            draft.put("master_addr", addr.text, addr.source)
        return draft.done()
