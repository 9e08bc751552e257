"""Secrets become `***`, in everything that is recorded or printed. Pure.

A secret is known by what says so (`--password X`, `api_key=X`, `Authorization: X`, the user part
of a URL, the key of a table) or by its own shape (a GitHub token, a JWT, a PEM block). What has
neither stays: settings, paths, addresses, versions, hashes and UUIDs are what the rules judge by.
Which variables of the environment are recorded at all: `nccl_doctor.toolkit.variables.recorded`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from nccl_doctor.model.codec import Node, decode, encode
from nccl_doctor.model.job import Job

MASK = "***"

# Every repetition has a bound or stops at a character that no start can follow: the time grows with
# the length of the text, whatever it holds.
_WORD = r"""(?:token|secret|passw(?:or)?d|passphrase|pwd|credentials?|jwt|bearer|cookie
    |(?<![a-z0-9])(?:pw|psk|creds?)
    |(?:api|access|secret|private|account|auth|signing|encryption|shared|service|storage|license)
    [_-]?key(?:[_-]?id)?)"""
"""How the name of a secret ends. `tokens`, `tokenizer` and `token_file` name none."""
_VALUE = r"""(?:\\"(?:(?!\\")[^\n])*(?:\\")?|"(?:[^"\\\n]|\\[^\n])*"?|'(?:[^'\\\n]|\\[^\n])*'?
    |\$\{\w{1,64}\}|(?:[^\s'",;&()\[\]{}<>|\\]|\\(?!"))+)"""
_NAME_IS = re.compile(rf"(?:^|.*[_\W]|.*(?<=[a-z])(?=[A-Z]))(?i:{_WORD})", re.VERBOSE | re.DOTALL)
_ENV_NAME_IS = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PSK|PWD|CREDENTIAL|JWT|BEARER|COOKIE|(?:AUTH|CREDS?|PW)(?:_|$)",
    re.IGNORECASE,
)
_PEM = re.compile(
    r"(-----BEGIN[ ][A-Z0-9 ]{1,40}-----)(?:[^-]+|-(?!----END[ ]))*"
    r"(-----END[ ][A-Z0-9 ]{1,40}-----)?"
)
_PEM_END = re.compile(r"\A[A-Za-z0-9+/=\s\\]+(-----END[ ][A-Z0-9 ]{1,40}-----)")
_IN_URL = re.compile(
    r"(?<=://)(?:[^\s/?#'\"<>]+(?=@)|[^\s/:@'\"<>]{0,64}:(?!\d{1,5}/)[^\s:@'\"<>]{1,256}(?=@))"
)
_BEFORE_HOST = re.compile(
    r"(?<![\w./:@-])(?!\d{1,64}:)[\w.-]{1,64}:[^\s:@/,;'\"]{1,256}(?=@(?!sha\d)[\w.-]{1,253})"
)
"""`user:password@host`, with a port or without, and without a scheme."""
_AFTER_WORD = re.compile(
    rf"""
    (?P<header>\b(?:(?:proxy-)?authorization|x-[a-z-]{{0,30}}(?:token|key)|(?:set-)?cookie)
        ["']?[ ]{{0,3}}[:=][ ]{{0,3}}["']?(?:(?:basic|bearer|digest|token|negotiate)[ ]{{1,3}})?)
        (?P<header_is>[^\s"'][^\r\n"']*)
    |(?P<named>{_WORD}(?:\\?["'])?\s{{0,4}}(?:=>|:=|=(?!=)|:)\s{{0,4}}(?:bearer\s{{1,4}})?)
        (?P<named_is>(?!`){_VALUE})
    |(?P<flag>(?<![\w-])--?(?:[a-z0-9]{{1,24}}[_-]){{0,6}}(?:{_WORD}|pass|auth)(?:\s{{1,4}}|=))
        (?P<flag_is>(?!-){_VALUE})
    |(?P<short>[_-](?:pass|auth|pw|pat)=)(?P<short_is>{_VALUE})
    |(?P<tool>(?<![\w/.-])passwd\s{{1,4}})(?P<tool_is>{_VALUE})
    |(?P<bearer>\bbearer\s{{1,4}})(?P<bearer_is>[\w.~+/=-]{{8,}})
    |(?P<query>[?&](?:sig|signature|x-amz-(?:signature|credential)|code|key|auth)=)
        (?P<query_is>[^\s&'"<>]+)
    |(?P<element><[\w:-]{{0,40}}{_WORD}>)(?P<element_is>[^<\s][^<]*)
    |(?P<option>\bsshpass\s{{1,4}}-p\s{{0,4}}
        |\b(?:docker|podman|helm|oc|registry|nerdctl)\s{{1,4}}login\b[^\n|;&]{{0,200}}?\s-p\s{{1,4}}
        |\bmysql\w{{0,12}}\s(?:[^\n|;&]{{0,200}}?\s)?-p(?=[^\s-])
        |\bcurl\s(?:[^\n|;&]{{0,200}}?\s)?(?:-u|--user)[\s=]{{1,4}}["']?[^\s:]{{1,64}}:)
        (?P<option_is>[^\s"']+)
    |(?P<near>\b(?:token|secret|key|password|passphrase|credential|auth|session|signature)s?
        (?:["']?\s{{0,3}}[=:]\s{{0,3}}|\s{{1,3}}(?:is\s{{1,3}}|was\s{{1,3}})?)["'`]?)
        (?P<near_is>[A-Za-z0-9+/_=~-]{{20,}})
    """,
    re.IGNORECASE | re.VERBOSE,
)
_WORD_SIGNS = (
    *("token", "secret", "pass", "pwd", "credential", "jwt", "key", "auth", "bearer", "cookie"),
    *("pw", "psk", "cred", "pat=", "sig", "code=", "login", "mysql", "curl", "session"),
)
"""One of them is in every line that `_AFTER_WORD` finds something in, in lower case."""
_SHAPES = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    gh[pousr]_[A-Za-z0-9]{12,}|github_pat_\w{12,}
    |gl(?:pat|dt|rt|ptt|ft|soat|cbt|agent)-[\w-]{12,}
    |hf_[A-Za-z0-9]{12,}|nvapi-[\w-]{12,}|gsk_[A-Za-z0-9]{16,}|r8_[A-Za-z0-9]{30,}
    |sk-(?=[\w-]{0,40}\d)[\w-]{12,}|[rsp]k_(?:live|test)_\w{12,}|whsec_\w{12,}
    |(?:AKIA|ASIA|AROA|AIDA|AGPA|ANPA|ABIA|ACCA)[A-Z0-9]{12,}
    |xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,}|npm_[A-Za-z0-9]{12,}|pypi-[\w-]{24,}
    |AIza[\w-]{30,}|ya29\.[\w-]{12,}|GOCSPX-[\w-]{12,}|SG\.[\w-]{12,}\.[\w-]{12,}
    |dckr_(?:pat|oat)_[\w-]{12,}|do[oprt]_v1_[0-9a-f]{32,}|dapi[0-9a-f]{32}|hv[sbr]\.[\w-]{12,}
    |xai-[A-Za-z0-9]{12,}|pplx-[A-Za-z0-9]{12,}|fw_[A-Za-z0-9]{16,}|tgp_v1_[\w-]{12,}
    |rpa_[A-Z0-9]{24,}|sntry[su]_[\w-]{12,}|gls[ac]_\w{12,}|glc_[A-Za-z0-9+/=]{12,}
    |lin_(?:api|oauth)_\w{12,}|ntn_\w{24,}|PMAK-[\w-]{12,}|NRAK-[A-Z0-9]{12,}|pul-[0-9a-f]{24,}
    |dp\.(?:pt|st|ct|sa)\.[\w.-]{12,}|pscale_(?:tkn|pw|oauth)_[\w-]{12,}|sbp_[0-9a-f]{24,}
    |shp(?:at|ca|pa|ss)_[0-9a-f]{24,}|AT(?:ATT3|BB|CTT3)[\w=-]{20,}|LTAI[A-Za-z0-9]{12,}
    |AGE-SECRET-KEY-1[A-Z0-9]{12,}|\d{8,10}:AA[\w-]{30,}|key-[0-9a-f]{32}
    |wandb_v\d_\w{12,}|lsv2_\w{12,}|tskey-[\w-]{12,}|MUNGE:[A-Za-z0-9+/=]{16,}:?
    |eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*){0,3}
    )
    |(?<=hooks\.slack\.com/services/)[\w/]+""",
    re.VERBOSE,
)
_SHAPE_SIGNS = (
    *("gh", "github_pat_", "gl", "hf_", "nvapi-", "gsk_", "r8_", "sk-", "k_live_", "k_test_"),
    *("whsec_", "hooks.slack"),
    *("AKIA", "ASIA", "AROA", "AIDA", "AGPA", "ANPA", "ABIA", "ACCA", "xox", "xapp-", "npm_"),
    *("pypi-", "AIza", "ya29.", "GOCSPX-", "SG.", "dckr_", "_v1_", "dapi", "hvs.", "hvb.", "hvr."),
    *("xai-", "pplx-", "fw_", "tgp_v1_", "rpa_", "sntry", "gls", "glc_", "lin_", "ntn_", "PMAK-"),
    *("NRAK-", "pul-", "dp.", "pscale_", "sbp_", "shp", "ATATT3", "ATBB", "ATCTT3", "LTAI"),
    *("AGE-SECRET-KEY-1", ":AA", "key-"),
    *("wandb_v", "lsv2_", "tskey-", "MUNGE:", "eyJ"),
)
_NOTHING = frozenset(("none", "null", "true", "false", "unset", "n/a", "(set)", "-", MASK))
"""Values that are no secret; whether one is set is worth knowing."""
_PLACE_HOLDER = re.compile(r"\$[A-Z_]+|\$\{[A-Z_]+\}|%[a-z]|\.{2,}|…")
_MOST_PASSES = 8


def masked(text: str) -> str:
    """A text with every secret in it masked; one without any is returned as it is.

    What was masked once stays the same when it is masked again.
    """
    return _masked(text) if len(text) <= _MOST_KEPT else _until_stable(text)


def masked_data(value: Any, key: str = "") -> Any:
    """The same for plain data (tables, lists, texts, numbers): its texts, keys too, are masked, and
    what stands behind a key that names a secret.
    """
    if isinstance(value, str):
        return _hidden(value) if key and names_secret(key) else masked(value)
    if isinstance(value, Mapping):
        hides = bool(key) and names_secret(key)
        return {
            masked(name) if isinstance(name, str) else name: masked_data(
                item, key if hides else str(name)
            )
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [masked_data(item, key) for item in value]
    return value


def masked_job(job: Job) -> Job:
    """The description of a job as a report may have it: its paths and URLs are the user's."""
    return decode(Job, Node("job", masked_data(encode(job))))


def is_plain(text: str) -> bool:
    """True if `masked_data` surely leaves what this JSON says as it is: no sign of a secret is in
    it, and no escape, behind which one could be.
    """
    signs = ("\\u", "-----", "@")
    return not (any(sign in text for sign in signs) or _has_shape(text) or _has_sign(text))


def masked_variable(name: str, value: str) -> str:
    """The value of an environment variable, as it may be recorded.

    All of it is masked where the name speaks of a token, key, secret or password. Bytes that are
    not UTF-8 become escapes.
    """
    if _ENV_NAME_IS.search(name):
        return MASK
    return masked(value.encode("utf-8", "backslashreplace").decode())


def names_secret(name: str) -> bool:
    """True if a name ends like that of a secret: `api_key`, `--hf-token`, `clientSecret`."""
    return _names_secret(name[-_LONGEST_NAME:])


def masked_command(words: Sequence[str]) -> str:
    """A command line as one would type it, with the secrets in its words masked."""
    made, hidden = [], False
    for word in words:
        name, equals, value = word.partition("=")
        if hidden and not word.startswith("--"):
            made.append(_hidden(word))
            hidden = False
        elif equals and value and names_secret(name):
            made.append(f"{name}={_hidden(value)}")
            hidden = False
        else:
            made.append(masked(word))
            hidden = not equals and word.startswith("-") and names_secret(word)
    return masked(" ".join(map(_quoted, made)))


def command_line(argv: Sequence[str]) -> str:
    """Command line for the report: of a command after `--` only its first word, because its
    arguments may hold what nobody can tell for a secret.
    """
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    more = " …" if command[1:] else ""
    return masked_command(own) + (f" -- {masked_command(command[:1])}{more}" if command else "")


# --- one text ---

_MOST_KEPT = 4096
"""Longest text that is remembered; longer ones are log tails and stacks, and seldom come twice."""
_LONGEST_NAME = 256


def _until_stable(text: str) -> str:
    for _ in range(_MOST_PASSES):
        made = _once(text)
        if made == text:
            break
        text = made
    return text


_masked = lru_cache(maxsize=4096)(_until_stable)


@lru_cache(maxsize=4096)
def _names_secret(name: str) -> bool:
    return bool(_NAME_IS.fullmatch(name))


def _once(text: str) -> str:
    if "-----" in text:
        text = _PEM_END.sub(rf"{MASK}\1", _PEM.sub(_in_pem, text))
    if "@" in text:
        text = _BEFORE_HOST.sub(MASK, _IN_URL.sub(MASK, text))
    if _has_sign(text):
        text = "".join(
            _AFTER_WORD.sub(_behind_word, part) if signed else part for signed, part in _parts(text)
        )
    if _has_shape(text):
        text = _SHAPES.sub(MASK, text)
    return text


def _has_sign(text: str) -> bool:
    lower = text.lower()
    return any(sign in lower for sign in _WORD_SIGNS)


def _has_shape(text: str) -> bool:
    return any(sign in text for sign in _SHAPE_SIGNS)


def _parts(text: str) -> Iterator[tuple[bool, str]]:
    """Lines that may tell a secret, each with those behind it that may hold it; and the others."""
    part, goes_on = "", False
    for line in text.splitlines(keepends=True):
        signed = _has_sign(line)
        if part and not goes_on:
            yield True, part
            part = ""
        if signed or goes_on:
            part += line
        else:
            yield False, line
        goes_on = signed or (goes_on and not line.strip())
    if part:
        yield True, part


def _in_pem(match: re.Match[str]) -> str:
    return f"{match[1]}{MASK}{match[2] or ''}"


def _behind_word(match: re.Match[str]) -> str:
    kind = (match.lastgroup or "").removesuffix("_is")
    word, value = match[kind], match[f"{kind}_is"]
    if kind == "near":
        return word + (MASK if _is_random(value) else value)
    if kind in ("flag", "short") and value.isdecimal() and len(value) < 4:
        return match.group()  # --auth 0, two_pass=1
    if kind == "named" and "pwd" in word.lower() and value[:1] in "/~.$":
        return match.group()  # the working directory
    return word + _hidden(value)


def _hidden(value: str) -> str:
    """The mask of a value that is said to be a secret, in the quotes that it stands in."""
    quote = next((each for each in ('\\"', '"', "'") if value.startswith(each)), "")
    closed = quote if quote and len(value) >= 2 * len(quote) and value.endswith(quote) else ""
    bare = value[len(quote) : len(value) - len(closed)]
    if not bare or bare.lower() in _NOTHING or _PLACE_HOLDER.fullmatch(bare):
        return value
    return quote + MASK + closed


def _is_random(text: str) -> bool:
    """True if a long word looks like drawn by chance: letters and digits that change often."""
    if text[:1] in "/~.-" or text.count("/") > 2:
        return False
    kinds = ["digit" if c.isdigit() else "upper" if c.isupper() else "lower" for c in text]
    changes = sum(one != other for one, other in pairwise(kinds))
    return kinds.count("digit") >= 2 and len(set(kinds)) > 1 and changes >= len(kinds) // 5


def _quoted(word: str) -> str:
    """A word as a shell wants it; the mask needs no quotes."""
    return shlex.quote(word.replace(MASK, "@MASK@")).replace("@MASK@", MASK)
