"""Which secrets are found in a text, what is left alone, and what it costs."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nccl_doctor.system import masking
from nccl_doctor.system.masking import (
    MASK,
    command_line,
    is_plain,
    masked,
    masked_command,
    masked_data,
    masked_variable,
)
from tests.support.rows import each_row
from tests.support.secrets_planted import HIDDEN, SECRET_TEXTS

PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"


@each_row("text", SECRET_TEXTS)
def test_what_is_said_to_be_a_secret_or_looks_like_one_is_masked(text: str) -> None:
    made = masked(text)
    assert MASK in made
    assert [each for each in HIDDEN if each in made] == []


@each_row(
    ("text", "made"),
    [
        ("HF_TOKEN=abc, RANK=1", "HF_TOKEN=***, RANK=1"),
        ("{'password': 'a b', 'x': 1}", "{'password': '***', 'x': 1}"),
        ('{\\"token\\": \\"abc\\", \\"x\\": 1}', '{\\"token\\": \\"***\\", \\"x\\": 1}'),
        ("Authorization: Bearer abc", "Authorization: Bearer ***"),
        ("etcd://bob:abc@head:2379/x", "etcd://***@head:2379/x"),
        ("--hf-token abc train.py", "--hf-token *** train.py"),
        ("https://x/y?a=b&sig=abc&c=d", "https://x/y?a=b&sig=***&c=d"),
        (
            f"key:\n{PEM}\nend",
            "key:\n-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nend",
        ),
        ("MIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----", "***-----END RSA PRIVATE KEY-----"),
        ("password:\n  abc\nnext", "password:\n  ***\nnext"),
    ],
)
def test_what_stands_around_a_secret_stays(text: str, made: str) -> None:
    assert masked(text) == made


SAME = [
    "nd0 10.0.0.1 fe80::1%eth0 eth0@if5 sam@10.0.0.1 mlx5_0:1 [::1]:29500",
    "GPU-8f453264-8570-45ac-ae5e-228675ddc858 0000:3b:00.0 0x0c42a103003b2c5a",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "libnccl.so.2 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "tokenizer=gpt2 max_tokens=2048 --tokenizer-model x --moe-token-dispatcher-type alltoall",
    "key=value,store_type=tcp the key of the map, 8 tokens passed; NCCL_IB_PKEY=7",
    "nvcr.io/nvidia/pytorch:24.01-py3@sha256:9f86d081884c7d659a2feaa0c55ad015",
    "tcp://10.0.0.1:29500 https://docs.nvidia.com/nccl/x.html#y http://h:80/a@b",
    "if token == other: log in without a password: `ssh-copy-id nd1`",
    "PWD=/home/x pkey 0xffff authenticated AuthenticAMD sk-learn-something-longer hf_hub_download",
    "/etc/nccl.conf /opt/nvidia/lib/libnccl-net.so /home/bob/keys/id_rsa",
    "password=none token=$HF_TOKEN secret=${SECRET} token: null passwd=true two_pass=1",
    "NCCL WARN NET/IB : Got completion from peer 10.0.0.2<34113> with status=12 opcode=0 len=0",
    "ib0:10.0.0.1<0> commId 0x7f00deadbeef1234 comm 0x55d0 rank 0 nranks 8 cudaDev 0 busId 1b000",
    "12:30:05@nd1 pytorch:24.01-py3@sha256:9f86d081884c7d659a2feaa0c55ad015 nft @th,16,16 cpw=1",
    "/etc/passwd missing; nsswitch: passwd.files; incredible upward key-value LTS",
    "--rdzv-conf timeout=900,read_timeout=60 --rdzv-id job-2024-01 --redact-key FILE",
]


@each_row("text", SAME)
def test_what_is_needed_for_judging_stays(text: str) -> None:
    assert masked(text) == text


@each_row(
    ("key", "value", "made"),
    [
        ("api_key", "abc", MASK),
        ("clientSecret", ["a", "b"], [MASK, MASK]),
        ("credentials", {"user": "bob", "n": 1}, {"user": MASK, "n": 1}),
        ("hf_token", None, None),
        ("max_tokens", "abc", "abc"),
        ("host_key", "abc", "abc"),
        ("passed", [["10.0.0.1", "dropped"]], [["10.0.0.1", "dropped"]]),
        ("note", "token=abc", "token=***"),
        ("http://bob:abc@h", 1, 1),
    ],
)
def test_in_a_table_the_key_says_so(key: str, value: object, made: object) -> None:
    assert list(masked_data({key: value}).values()) == [made]
    assert "bob:abc" not in str(masked_data({key: value}))


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["x", "--api-key", "it's", "-v"], "x --api-key *** -v"),
        (["x", "--api-key=a b", "c d"], "x --api-key=*** 'c d'"),
        (["env", "HF_TOKEN=a b", "x"], "env HF_TOKEN=*** x"),
        (["x", "--password", "--verbose"], "x --password --verbose"),
        (["curl", "-u", "bob:abc", "x"], "curl -u bob:*** x"),
        (["x", "--redact-key", "file", "--timeout", "5"], "x --redact-key file --timeout 5"),
    ],
)
def test_command_lines(words: list[str], made: str) -> None:
    assert masked_command(words) == made


def test_of_a_command_behind_ours_only_the_program_is_told() -> None:
    argv = ["nccl-doctor", "run", "--json", "https://u:abc@h/x", "--", "HF_TOKEN=abc", "--x", "abc"]
    assert command_line(argv) == "nccl-doctor run --json https://***@h/x -- HF_TOKEN=*** …"


def test_a_variable_whose_name_says_so_is_masked_whole() -> None:
    for name in (
        "NCCL_AUTH_TOKEN",
        "TORCH_API_KEY",
        "X_SECRET",
        "RDZV_PASSWORD",
        "UCX_passphrase",
        "NCCL_PSK",
        "UCX_PW",
        "NCCL_PWD",
        "FI_TCP_CRED",
        "GLOO_COOKIE",
    ):
        assert masked_variable(name, "a, b") == MASK
    assert masked_variable("NCCL_X", "a@b") == "a@b"


def test_bytes_that_are_no_text_survive_json_and_utf8() -> None:
    value = b"\xff\xfe".decode("utf-8", "surrogateescape")
    held = masked_variable("NCCL_DEBUG_FILE", value)
    assert json.loads(json.dumps(held).encode()) == held
    held.encode("utf-8")


# --- any text ---

PIECES = st.sampled_from(
    [
        *("token", "password", "=", ":", " ", "'", '"', "\\", '\\"', "://", "@", "\n", ",", "abc"),
        *("--api-key", "key", "Authorization:", "bearer ", "-----BEGIN A-----", "-----END A-----"),
        *(
            "ghp_abc123def456ghi7",
            "eyJhbGciOiJI.eyJzdWI.x",
            "***",
            "$",
            "${X}",
            "<",
            ">",
            "-p",
            "/",
        ),
        *("curl -u ", "mysql ", "sshpass ", "a1B2c3D4e5F6g7H8i9J0", "é", "\u2028", "\r", "x-token"),
    ]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=24).map("".join))


@given(TEXTS)
@example('password="\\')
@example("token=token=token")
def test_once_is_enough_and_the_text_does_not_grow(text: str) -> None:
    made = masked(text)
    assert masked(made) == made
    assert len(made) <= 3 * len(text)


DATA = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(DATA)
@example("pa\u017f\u017fword=x")
def test_plain_data_stays_plain_data(data: object) -> None:
    made = masked_data(data)
    assert masked_data(made) == made
    json.dumps(made)
    assert made == data or not is_plain(json.dumps(data))


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_a_secret_is_nowhere_plain(text: str) -> None:
    assert not is_plain(json.dumps([{"step": text}]))
    assert not is_plain(json.dumps({text: 1}))
    assert is_plain(json.dumps({"step": "asking", "call": "nvmlDeviceGetNvLinkState", "gpu": 1}))


WORDS = st.text("abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=12)


@given(st.lists(WORDS, max_size=20))
def test_plain_words_are_left_alone(words: list[str]) -> None:
    text = " ".join(words)
    assert masked(text) == text or any(
        sign in text for sign in ("passwor", "sshpass", "mysql", "curl", "login", "bearer")
    )


@given(st.lists(st.text(min_size=1), min_size=1, max_size=8))
def test_any_command_line_can_be_told(words: list[str]) -> None:
    assert "\0" not in masked_command(words) or "\0" in "".join(words)


HOSTILE = [
    *("a.", "token", "token=", "key ", "--a-", "-", "a:", "://", "://a@", "@", '"', 'password="'),
    *("eyJ", "-----BEGIN A-----", "-----END A-----", "mysql ", "curl -u ", "sk-", "a:b@", "\\"),
    *("<token>", "token\n", "docker login ", "SG.a.", "bearer ", "sshpass -p", "a1B2", "é"),
]


@each_row("piece", HOSTILE)
def test_the_time_grows_with_a_hostile_text_and_no_faster(piece: str) -> None:
    def took_s(times: int) -> float:
        started = time.process_time()
        assert masking._until_stable(piece * times)
        return time.process_time() - started

    assert min(took_s(4000) for _ in range(2)) < 9 * min(took_s(1000) for _ in range(2)) + 0.02
