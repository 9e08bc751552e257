"""Secrets as they stand in variables, command lines, logs and files: each in the words around it.

Every one holds a part of `HIDDEN`, by which it is looked for in what is written.
"""

from __future__ import annotations

HIDDEN = ("xq7Zsecret", "XQ7ZKEY", "correct horse", "opensesame")
"""Parts of secrets: none of them may be read in a report."""

_S = "xq7Zsecret0aB1cD2eF3gH4iJ5kL6"
SECRET_TEXTS = (
    f"ghp_{_S}",
    f"github_pat_{_S}",
    f"hf_{_S}",
    f"sk-proj-{_S}",
    f"sk-ant-api03-{_S}",
    "AKIAXQ7ZKEYIOSFODNN7",
    f"xoxb-123456789012-{_S}",
    f"glpat-{_S}",
    f"npm_{_S}{_S}",
    f"nvapi-{_S}",
    f"dckr_pat_{_S}",
    f"hvs.{_S}",
    f"MUNGE:{_S}:",
    f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx{_S}.{_S}",
    f"https://hooks.slack.com/services/T000/B000/{_S}",
    "--password opensesame",
    "--password=opensesame",
    "--api-key=opensesame train.py",
    "--hf-token 'correct horse'",
    'password="correct horse"',
    "{'secret': 'correct horse', 'b': 1}",
    '{\\"client_secret\\": \\"correct horse\\"}',
    "A=1,HF_TOKEN=opensesame,B=2",
    "HOME=/root,WANDB_API_KEY=opensesame",
    "AccountName=x;AccountKey=opensesame==;EndpointSuffix=y",
    "etcd://bob:opensesame@head:2379/x",
    "bob:opensesame@head:2379",
    "https://opensesame@github.com/x.git",
    "postgres://bob:open/opensesame@head/x",
    "https://s3/x?X-Amz-Signature=opensesame&y=z",
    "Authorization: Bearer opensesame",
    "Authorization: Basic opensesame=",
    "proxy-authorization: opensesame",
    "X-Auth-Token: opensesame",
    "Set-Cookie: session=opensesame; Path=/",
    "sshpass -p opensesame ssh nd1",
    "mysql -uroot -popensesame db",
    "docker login -u bob -p opensesame host",
    "curl -u bob:opensesame https://x",
    f"the API key is {_S}",
    f"token {_S}",
    "<password>opensesame</password>",
    "passphrase: opensesame",
    "-----BEGIN EC PRIVATE KEY-----\nopensesame\nopensesame\n-----END EC PRIVATE KEY-----",
    "-----BEGIN CERTIFICATE-----\\nopensesame\\nopensesame",
)
