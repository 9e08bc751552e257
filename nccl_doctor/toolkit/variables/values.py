"""Meaning of a variable's text to a library, and texts that it reads in another way than meant.

NCCL reads numbers by strtoll with base 0: what does not begin with a number is 0, what follows one
is ignored, a leading 0 makes it octal. torch reads them by std::stoi and raises if there is no
number, or if a yes-or-no value is neither. Source: `ncclLoadParam` in NCCL's src/misc/param.cc;
`getCvarInt` and `getCvarBool` in torch's c10d/Utils.hpp.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nccl_doctor.toolkit.variables.table import AUTO, Variable

_NUMBER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_DECIMAL = re.compile(r"\s*([+-]?[0-9]+)")
_YES = ("y", "yes", "1", "t", "true")
_NO = ("n", "no", "0", "f", "false")
_ON, _OFF = (*_YES, "on", "enable", "enabled"), (*_NO, "off", "disable", "disabled")
_LONGEST = 80
"""Characters; no number is longer, and Python refuses thousands of digits."""
_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce", "alltoall")


@dataclass(frozen=True)
class Misread:
    """A value that the library reads in another way than intended.

    Attributes:
        says: what is wrong, or how it is read, as the end of a sentence.
        raises: version of the library since which it is an error, `0` for always, empty for never.
        meant: what to type instead; empty if not known.
    """

    says: str
    raises: str = ""
    meant: str = ""


def as_strtoll(text: str) -> int:
    """A number as NCCL reads it."""
    found = _NUMBER.match(text)
    if found is None:
        return 0
    digits = found[2]
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits[0] == "0" else 10
    return int(found[1] + digits, base)


def number_of(variable: Variable, text: str) -> int | None:
    """The number that the library reads; None if it refuses the text or expects no number."""
    if variable.kind not in ("int", "bool") or len(text) > _LONGEST:
        return None
    if variable.as_nccl:
        return as_strtoll(text) if text else None
    if variable.kind == "bool":
        word = text.lower()
        return 1 if word in _YES else 0 if word in _NO else None
    found = (_DECIMAL.fullmatch if variable.whole else _DECIMAL.match)(
        text.rstrip() if variable.whole else text
    )
    return int(found[1]) if found else None


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def canonical(variable: Variable, text: str | None) -> str | None:
    """A form that is equal for texts of equal meaning; None if not set and without a default.

    A variable that is not set has the meaning of its default.
    """
    if text is None or (text == "" and variable.as_nccl):
        if variable.default in (None, AUTO):
            return None
        return canonical(variable, variable.default)
    number = number_of(variable, text)
    if number is not None:
        return str(number)
    if variable.kind == "float" and (seconds := _float(text)) is not None:
        return str(seconds)
    if variable.kind == "flag":
        return "1" if text.lower() in _ON else "0"
    if variable.kind in ("enum", "words") and not variable.cased:
        return text.casefold()
    return text


def misread(variable: Variable, text: str) -> Misread | None:
    """The problem of a value, or None."""
    if variable.kind == "url" or text == variable.default:
        return None
    if text == "" and not variable.raises:
        return None  # as good as not set
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        inner = text[1:-1]
        worse = misread(variable, inner)
        meant = worse.meant if worse else inner
        return Misread("has quotes that are part of the value", variable.raises, meant)
    if variable.kind in ("int", "bool"):
        return _bad_number(variable, text)
    if variable.kind == "float" and _float(text) is None:
        return Misread("is not a number", variable.raises)
    if variable.kind == "enum":
        return _bad_word(variable, text)
    if variable.kind == "words":
        return _bad_words(variable, text)
    if variable.name == "GLOO_SOCKET_IFNAME":
        return _bad_gloo_names(text)
    return None


def reads_otherwise(variable: Variable, text: str, value: str, *, taken: bool) -> bool:
    """True if a library reads a text in another way than it does by these rules.

    Args:
        variable: whose text it is.
        text: as it was typed.
        value: as the library itself prints it.
        taken: False where that is its default, because it could not read the text.
    """
    if (took := _as_number(variable, value)) is not None:
        return took != canonical(variable, text)
    return taken != (misread(variable, text) is None)


def refused(variable: Variable, text: str, value: str, *, taken: bool) -> Misread | None:
    """The problem of a value that the library itself says how it reads, or None.

    Args: as for `reads_otherwise`.
    """
    wrong, took = misread(variable, text), _as_number(variable, value)
    if took is not None and took == canonical(variable, text):
        return wrong
    if taken and (took is None or took == _meant(variable, text)):
        return None
    meant = wrong.meant if wrong else ""
    if taken:
        return Misread(f"is read as {value}", meant=meant)
    default = "" if value.startswith("<") else f", {value}"  # <unknown>
    return Misread(f"is not accepted: NCCL itself takes its default{default}", meant=meant)


def _as_number(variable: Variable, value: str) -> str | None:
    """A number as a library prints it; None for anything else."""
    if variable.kind not in ("int", "bool"):
        return None
    number = {"TRUE": "1", "FALSE": "0"}.get(value, value)
    return number if re.fullmatch(r"-?[0-9]+", number) else None


def _bad_number(variable: Variable, text: str) -> Misread | None:
    if len(text) > _LONGEST:
        return Misread("is longer than any number", variable.raises)
    seen = number_of(variable, text)
    meant = _meant(variable, text)
    if seen is None:
        what = "a yes-or-no value" if variable.kind == "bool" else "a whole number"
        return Misread(f"is not {what}", variable.raises or "", meant)
    if variable.values and str(seen) not in variable.values and not _is_junk(variable, text):
        return Misread(f"is not one of {', '.join(variable.values)}")
    if not _is_junk(variable, text) or meant == str(seen):
        return None
    return Misread(f"is read as {seen}", meant=meant)


def _is_junk(variable: Variable, text: str) -> bool:
    """True if the library ignores a part of the text, or reads it as octal."""
    if not variable.as_nccl:
        return variable.kind == "int" and not _DECIMAL.fullmatch(text.rstrip())
    found = _NUMBER.fullmatch(text.rstrip())
    return found is None or (found[2][0] == "0" and found[2].isdigit() and len(found[2]) > 1)


def _meant(variable: Variable, text: str) -> str:
    """The number that a person meant by a word, a size or a number with leading zeros."""
    word = text.strip().lower()
    if word in _ON or word in _OFF:
        return "1" if word in _ON else "0"
    sized = re.fullmatch(r"([0-9]+)\s*([kmg])(?:i?b)?", word)
    if sized and variable.as_nccl:
        return str(int(sized[1]) * _UNITS[sized[2]])
    is_number = variable.kind == "int" and word.isdecimal()
    return str(int(word)) if is_number else ""


def _bad_word(variable: Variable, text: str) -> Misread | None:
    if _allows(variable, text) or (variable.name.endswith("_LEVEL") and text.isdigit()):
        return None  # digits are the old spelling of topology levels
    near = [word for word in variable.values if word.lower() == text.strip().lower()]
    why = " (upper case matters)" if variable.cased and near else ""
    listed = f"is not one of {', '.join(variable.values)}{why}"
    return Misread(listed, variable.raises, near[0] if near else "")


def _allows(variable: Variable, word: str) -> bool:
    if variable.cased:
        return word in variable.values
    return word.lower() in (value.lower() for value in variable.values)


def _bad_words(variable: Variable, text: str) -> Misread | None:
    """NCCL's `LIST`, or `LIST;FUNCTION:LIST;...`, where a `^` before a list excludes."""
    for part in text.split(";"):
        function, colon, words = part.rpartition(":")
        if colon and function.strip().lower() not in _FUNCTIONS:
            return Misread(f"names an unknown function {function.strip()!r}", variable.raises)
        for word in filter(None, words.removeprefix("^").split(",")):
            if not _allows(variable, word):
                listed = ", ".join(variable.values)
                return Misread(f"has {word!r}, which is not one of {listed}", variable.raises)
    return None


def _bad_gloo_names(text: str) -> Misread | None:
    sign = next((sign for sign in "^=" if sign in text), "")
    if not sign:
        return None
    return Misread(
        f"has a {sign}: gloo accepts only whole interface names (^, = and prefixes work only in "
        "NCCL_SOCKET_IFNAME)",
        "0",
        text.lstrip("=") if sign == "=" else "",
    )
