"""The configuration file of `accelerate`: which one is read, what is in it, and what is refused.

accelerate reads YAML 1.1 with PyYAML: 010 is 8, 8:20 is 500, and `no` without quotes is false. So
does this module where PyYAML is installed. Elsewhere it reads `key: value` lines with one level of
tables, as `accelerate config` writes them; a line beyond that is reported, not guessed.

What is refused ends accelerate too (0.20 to 1.15: commands/config/config_args.py,
commands/launch.py and utils/launch.py); a test tries every key against the installed one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nccl_doctor.launch.command_line.job_line import JobLineError, LineValue
from nccl_doctor.system import files
from nccl_doctor.system.programs import installed
from nccl_doctor.toolkit.suggest import suggest
from nccl_doctor.toolkit.versions import release

_MAX_BYTES = 1 << 16
"""A real file has sixty lines at most; PyYAML takes a second for this much."""
_NEWEST = (1, 15)
"""Newest accelerate whose words are known: a newer one may have more."""
KEYS = (
    *("compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug"),
    *("num_processes", "machine_rank", "num_machines", "gpu_ids", "main_process_ip"),
    *("main_process_port", "rdzv_backend", "same_network", "main_training_function"),
    *("enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config"),
    *("parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name"),
    *("tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm"),
    *("tpu_env", "dynamo_config", "fp16", "dynamo_backend"),
)
_GONE = {"ipex_config": (1, 15), "tp_config": (1, 10)}
"""Keys of older releases, and one that refuses them."""
_TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA"),
    *("MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "TP", "XLA", "TPU"),
    *("MEGATRON_LM",),
)
ENVIRONMENTS = ("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
PRECISIONS = ("no", "fp8", "fp16", "bf16")
_DYNAMO = (
    *("NO", "EAGER", "AOT_EAGER", "INDUCTOR", "NVFUSER", "AOT_NVFUSER", "AOT_TS_NVFUSER"),
    *("NVPRIMS_NVFUSER", "AOT_CUDAGRAPHS", "CUDAGRAPHS", "OFI", "FX2TRT", "ONNXRT", "TENSORRT"),
    *("AOT_TORCHXLA_TRACE_ONCE", "TORCHXLA_TRACE_ONCE", "IPEX", "TVM", "HPU_BACKEND", "NEURON"),
)
_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_", "dynamo_config": "dynamo_"}
"""Tables whose keys accelerate takes with and without the prefix of their flags."""

_LINE = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_][\w-]*):(?:\s+(?P<value>.*))?")


def _cases(word: str) -> tuple[str, ...]:
    return word, word.title(), word.upper()


_WORDS: Mapping[str, Any] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{form: True for word in ("yes", "true", "on") for form in _cases(word)},
    **{form: False for word in ("no", "false", "off") for form in _cases(word)},
    "{}": {},
    "[]": [],
}
_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?:0b(?P<b>[01_]+)|0x(?P<x>[0-9a-fA-F_]+)|(?P<o>0[0-7_]*)"
    r"|(?P<d>[1-9][0-9_]*(?::[0-5]?[0-9])*))|(?P<float>[-+]?[0-9][0-9_]*\.[0-9_]*)"
)


@dataclass(frozen=True)
class AccelerateFile:
    """Keys of the file with their values, those of its tables too."""

    path: Path
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    def said(self, name: str) -> LineValue | None:
        """The value of a key, and where it stands; None for one that is absent or empty."""
        value = self.values.get(name)
        return None if value is None else LineValue(str(value), f"{name} in {self.path}")

    def whole(self, name: str, *, empty: bool = True) -> LineValue | None:
        """The same for a number, with which accelerate calculates; whether it may be `empty`.

        Raises:
            JobLineError: it is none, or stands in quotes.
        """
        value = self.values.get(name)
        if type(value) is int or (value is None and (name not in self.values or empty)):
            return self.said(name)
        hint = f"; write {name}: {value}" if isinstance(value, str) and value.isdecimal() else ""
        raise self._bad(name, "is not a number to accelerate" + hint)

    def check(self, *, several: bool, fsdp: bool) -> None:
        """Refuse what ends accelerate where no flag says otherwise.

        Args:
            several: it is to start several ranks on this machine alone, with --multi_gpu.
            fsdp: the job uses FSDP.

        Raises:
            JobLineError: says which key, and what to write.
        """
        gpus = self.values.get("gpu_ids")
        if gpus is not None and not isinstance(gpus, str):
            text = "0,1" if gpus == () else str(gpus)
            raise self._bad("gpu_ids", f"is not text to accelerate; write gpu_ids: '{text}'")
        if several and gpus not in (None, "all") and "," not in gpus:
            raise self._bad("gpu_ids", "is one GPU, and distributed_type asks for several")
        ram = self.values.get("fsdp_cpu_ram_efficient_loading", True)
        if fsdp and ram and not self.values.get("fsdp_sync_module_states", True):
            raise self._bad(
                "fsdp_sync_module_states",
                "does not go with fsdp_cpu_ram_efficient_loading: true; make both the same",
            )

    def check_word(self, name: str, known: Collection[str], *, any_case: bool = False) -> None:
        """Refuse a word that accelerate does not know; without the key there is none.

        Raises:
            JobLineError: it is one; what YAML 1.1 makes of `no` is no word.
        """
        value = self.values.get(name)
        if value is False:
            raise self._bad(name, f"is not text to accelerate; write {name}: 'no'")
        words = {word.lower() for word in known} if any_case else known
        text = str(value).lower() if any_case else value
        if text not in words and not (isinstance(text, str) and _is_newer()):
            same = [word for word in known if word.lower() == str(value).lower()]
            hint = suggest(str(value), known) or f"; it is one of {', '.join(known)}"
            hint = f"; write {same[0]}" if same else hint
            raise self._bad(name, f"is not known to accelerate{hint}")

    def _bad(self, name: str, words: str) -> JobLineError:
        return JobLineError(f"{name} in {self.path}: {_plain(self.values.get(name))} {words}")


def _plain(value: Any) -> str:
    if value in (None, ()):
        return "nothing" if value is None else "a list or table"
    words = {True: "true", False: "false"}.get(value) if isinstance(value, bool) else None
    return words or (f"{value[:40]!r}" if isinstance(value, str) else str(value)[:40])


def default_path(environ: Mapping[str, str]) -> Path:
    """Path that accelerate reads if no file is given."""
    home = Path(environ.get("HOME") or "/")
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    text = environ.get("HF_HOME", f"{cache}/huggingface")
    folder = home / text.removeprefix("~/") if text.startswith("~/") else Path(text)
    return folder / "accelerate" / "default_config.yaml"


def load(path: Path, *, found: bool = False) -> AccelerateFile:
    """Read a file; if it was `found`, and not named, no other user may have written it.

    Raises:
        JobLineError: it cannot be read, or accelerate refuses it.
    """
    try:
        data = files.read_found(path, _MAX_BYTES) if found else files.read(path, _MAX_BYTES)
        text = data.decode()
    except OSError as error:
        raise JobLineError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JobLineError(f"{path}: not text (byte {error.start})") from error
    return _read_json(path, text) if path.suffix == ".json" else _read_yaml(path, text)


def _read_json(path: Path, text: str) -> AccelerateFile:
    try:
        return _config(path, json.loads(text))
    except JobLineError:
        raise
    except (ValueError, RecursionError) as error:
        raise JobLineError(f"{path}: not JSON: {error}") from error


def _read_yaml(path: Path, text: str) -> AccelerateFile:
    try:
        import yaml
    except ImportError:
        return _read_lines(path, text.removeprefix("\ufeff"))
    try:
        table = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise JobLineError(f"{path}{where}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        words = str(error).splitlines()[0]
        raise JobLineError(f"{path}: not YAML: {words}") from error
    return _config(path, table)


def _read_lines(path: Path, text: str) -> AccelerateFile:
    """The same without PyYAML, for files as `accelerate config` writes them."""
    table: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    odd = []
    for line_number, line in enumerate(text.splitlines(), start=1):
        bare = _without_comment(line).rstrip()
        if not bare or bare == "---" or bare.lstrip().startswith("- "):
            continue
        match = _LINE.fullmatch(bare)
        if match is None:
            odd.append(line_number)
        elif match["indent"]:
            inner[match["key"]] = resolved(match["value"] or "")
        else:
            inner = {}
            table[match["key"]] = inner if match["value"] is None else resolved(match["value"])
    lines = ", ".join(map(str, odd[:5])) + (" …" if len(odd) > 5 else "")
    note = f"{path}: not read, for not being `key: value`: line {lines}"
    filled = {key: None if value == {} else value for key, value in table.items()}
    config = _config(path, filled or None)
    return replace(config, notes=(note,) if odd else ())


def resolved(text: str) -> Any:
    """A scalar as PyYAML resolves it (YAML 1.1)."""
    text = text.strip()
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return text[1:-1]
    if text in _WORDS:
        return _WORDS[text]
    number = _NUMBER.fullmatch(text)
    if number is None:
        return text
    if number["float"]:
        return float(number["float"].replace("_", ""))
    sign = -1 if number["sign"] == "-" else 1
    for name, base in (("b", 2), ("x", 16), ("o", 8)):
        if number[name]:
            return sign * int(number[name].replace("_", ""), base)
    value = 0
    for part in number["d"].replace("_", "").split(":"):
        value = 60 * value + int(part)
    return sign * value


def _without_comment(line: str) -> str:
    """A line up to a `#` that begins it or follows white space, outside quotes."""
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and line[:index].rstrip().endswith(":"):
            quote = char
        elif char == "#" and (index == 0 or line[index - 1].isspace()):
            return line[:index]
    return line


def _config(path: Path, table: object) -> AccelerateFile:
    """The record of what a reader found.

    Raises:
        JobLineError: accelerate refuses it.
    """
    if not isinstance(table, dict):
        what = "is empty" if table is None else "not a table of keys and values"
        raise JobLineError(f"{path}: {what}; `accelerate config` writes one")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if not isinstance(value, dict):
            values[str(key)] = _scalar(value)
            continue
        prefix = _PREFIXES.get(key, "")
        for name, inner in value.items():
            known = str(name) if str(name).startswith(prefix) else prefix + str(name)
            values[known] = _scalar(inner)
    config = AccelerateFile(path, values)
    here = "compute_environment" not in values or values["compute_environment"] == ENVIRONMENTS[0]
    if not here:
        config.check_word("compute_environment", ENVIRONMENTS)
        return config
    _refuse_keys(path, [str(key) for key in table])
    if isinstance(values["distributed_type"], str):
        config.check_word("distributed_type", _TYPES)
    if values.get("dynamo_backend") is not None:
        config.check_word("dynamo_backend", _DYNAMO, any_case=True)
    return config


def _refuse_keys(path: Path, keys: Collection[str]) -> None:
    if "distributed_type" not in keys:
        raise JobLineError(f"{path}: distributed_type is missing; accelerate ends without it")
    here = release(installed("accelerate"))
    for key in keys:
        gone = key in _GONE and here >= _GONE[key]
        if gone or not (key in KEYS or key in _GONE or _is_newer()):
            hint = "; take it out" if gone else suggest(key, KEYS) or "; take it out"
            raise JobLineError(f"{path}: accelerate knows no key {key[:40]}{hint}")


def _scalar(value: Any) -> Any:
    """A value that is no list or table; an empty tuple stands for one."""
    return value if value is None or isinstance(value, (str, int, float)) else ()


def _is_newer() -> bool:
    return release(installed("accelerate")) >= (_NEWEST[0], _NEWEST[1] + 1)
