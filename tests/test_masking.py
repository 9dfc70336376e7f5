"""One rule says what is a secret: by its name, and by its shape."""

import os
import stat
from pathlib import Path

import pytest

from tuner import masking
from tuner.errors import BadInput
from tuner.masking import MASK

NAMES = {
    "HF_TOKEN": "abc", "HUGGING_FACE_HUB_TOKEN": "abc", "SIGNING_KEY": "abc", "LICENSE_KEY": "k-1",
    "AWS_SECRET_ACCESS_KEY": "wJalr/K7MDENG",
    "MY_API_KEY": "12345", "apiKey": "x1y", "APIKEY": "zz", "DB_PASS": "hunter2",
    "PGPASSWORD": "123456", "db.password": "pw", "VLLM_API_KEY": "q", "smtp-passwd": "p", "DB_PWD": "hunter2",
    "COOKIE": "a=b", "AUTH_TOKENS": "x,y", "GOOGLE_CREDENTIALS": "{}", "--api-key": "s", "--hf-token": "s",
    "sslpassword": "s", "AZURE_STORAGE_CONNECTION_STRING": "Endpoint=https", "connectionString": "x",
}  # fmt: skip
HARMLESS = {
    "TOKENIZERS_PARALLELISM": "false", "VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE": "163840",
    "PWD": "/srv", "HOME": "/root",
    "MONKEY": "banana", "--long-prefill-token-threshold": "2048", "VLLM_USE_TOKEN": "1", "KEYBOARD": "us",
    "SSL_KEY_FILE": "/etc/ssl/key.pem", "HF_TOKEN_PATH": "/run/secrets/hf", "--skip-tokenizer-init": "x",
    "VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "COMPASS": "north", "AUTHOR": "me",
    "--max-num-batched-tokens": "8_192", "--max-num-queued-tokens": "1T",
}  # fmt: skip
SHAPES = [
    ("postgresql://tuner:hunter2@db:5432/tuner", "hunter2", "@db:5432/tuner"),
    ("postgresql+psycopg://tuner:p@ss/w0rd@db/tuner", "w0rd", "@db/tuner"),
    ("redis://:hunter2@cache:6379/0", "hunter2", "@cache:6379/0"),
    ("https://ghp_abcdefghijklmnopqrstuvwx@github.com/a/b", "ghp_", "github.com/a/b"),
    ("https://me@example.org/x", "me@", "example.org/x"),
    ("http://proxy:3128 and http://u:pw@proxy:3128", "pw@", "http://proxy:3128 and"),
    ("postgresql://db/t?user=a&password=hunter2&sslmode=on", "hunter2", "sslmode=on"),
    ("https://s3/x?X-Amz-Signature=abcdef0123&a=1", "abcdef", "&a=1"),
    ("https://hooks.slack.com/services/T0/B0/xyz", "xyz", "hooks.slack.com"),
    ("Authorization: Bearer abc.def.ghi", "abc.def", "Authorization"),
    ("authorization='Basic dXNlcjpwYXNz'", "dXNlcjpw", "authorization"),
    ("curl with bearer abcdefghijklmnop1 sent", "abcdefghijklmnop1", "sent"),
    ("token hf_abcdefghijklmnopqrstuv end", "hf_abc", "end"),
    ("key sk-proj-abcdefghijklmnop, next", "sk-proj", ", next"),
    ("AKIAIOSFODNN7EXAMPLE is a key", "AKIA", "is a key"),
    ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_", ""),
    ("github_pat_11ABCDEFG0abcdefghijkl_mnop", "github_pat", ""),
    ("glpat-abcdefghijklmnopqrst", "glpat", ""),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF_-1", "eyJ", ""),
    ("tuner_0123456789ab_abcdefghijklmnopqrstuvwxyz", "tuner_0", ""),
    ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----", "MIIE", ""),
    ("vllm serve m --api-key sk-1 --port 8", "sk-1", "--port 8"),
    ("vllm serve m --hf-token=abc --port 8", "abc", "--port 8"),
    ("args: {'api_key': ['sk-12'], 'model': 'm'}", "sk-12", "'model': 'm'"),
    ('{"password": "hunter two"}', "hunter", "password"),
    ("password=hunter22 x", "hunter22", " x"),
    ("LICENSE_KEY=abc-def was read", "abc-def", "was read"),
    ("SIGNING_KEY: a1b2c3", "a1b2c3", "SIGNING_KEY"),
]
PLAIN = [
    "INFO 11-27 22:16:55 Avg prompt throughput: 18.0 tokens/s, api_key=None, prompt_tokens: 3",
    "webhook: give an address such as https://host/path",
    "token: is not valid here", "secret: a word is expected", "there is no key 'max_num_seqs' in a.yaml",
    "pip install a@b", "http://127.0.0.1:8642/v1 (OpenAPI: /v1/openapi.json)", "sqlite:////root/.tuner/tuner.db",
    "http://host:8000/v1/@me", "--max-num-batched-tokens 8192 --long-prefill-token-threshold 4",
    "hf://org/model", "bearer authentication is needed", "key=value pairs", "max_tokens=16",
    "tokens: [1, 2, 3]",
    "latest:chat", "Qwen/Qwen3-8B", "sk-learn",
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), NAMES.items())
def test_a_secret_is_known_by_its_name(name: str, value: str) -> None:
    assert masking.is_secret(name)
    assert masking.is_secret(name, value)
    assert masking.environment({name: value}) == {name: MASK}


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_a_number_a_switch_and_a_path_are_none(name: str, value: str) -> None:
    assert masking.environment({name: value}) == {name: value}


@pytest.mark.parametrize(("line", "gone", "kept"), SHAPES)
def test_a_secret_is_known_by_its_shape(line: str, gone: str, kept: str) -> None:
    shown = masking.text(line)
    assert gone not in shown
    assert kept in shown
    assert MASK in shown
    assert masking.text(shown) == shown
    assert masking.redactor({})(line.encode()).decode() == shown


@pytest.mark.parametrize("line", PLAIN)
def test_what_is_no_secret_stays(line: str) -> None:
    assert masking.text(line) == line


def test_command_lines_and_trees_keep_all_else() -> None:
    words = ["vllm", "--api-key", "a", "b", "--hf-token", "--port", "8", "-e", "HF_TOKEN=x"]
    assert masking.arguments(words) == (
        "vllm", "--api-key", MASK, MASK, "--hf-token", "--port", "8", "-e", f"HF_TOKEN={MASK}",
    )  # fmt: skip
    tree = {
        "env": {"HF_TOKEN": "x", "A": "1"},
        "args": {"hf-token": "x", "seed": 7},
        "command": ["-e", "A_KEY=z"],
    }
    assert masking.tree(tree) == {
        "env": {"HF_TOKEN": MASK, "A": "1"},
        "args": {"hf-token": MASK, "seed": 7},
        "command": ["-e", f"A_KEY={MASK}"],
    }


def test_a_filter_takes_out_the_values_of_an_environment() -> None:
    redact = masking.redactor({"MY_TOKEN": "s3cr3t-value", "HOME": "/home/x", "N_TOKENS": "123456"})
    assert redact(b"s3cr3t-value /home/x 123456 \xff") == b"*** /home/x 123456 \xff"


def test_no_sentence_of_ours_has_a_secret() -> None:
    assert (
        str(BadInput("cannot open postgresql://u:hunter2@db/x")) == f"cannot open postgresql://u:{MASK}@db/x"
    )


def test_only_files_and_folders_are_closed_to_others(tmp_path: Path) -> None:
    """A home such as /dev/null would be closed for every program of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    masking.tighten(pipe)
    masking.tighten_files([pipe])
    assert stat.S_IMODE(pipe.stat().st_mode) == 0o666
    plain = tmp_path / "plain"
    plain.touch(0o644)
    masking.tighten_files([plain, tmp_path])
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in (plain, tmp_path)] == [0, 0]


@pytest.mark.parametrize(
    "line",
    [
        "x-api-key: abcdefgh",
        "> X-Auth-Token: abcdefgh",
        "api-key: abcdefgh",
        "api_key: abcdefgh",
        "apiKey: abcdefgh",
        "Ocp-Apim-Subscription-Key: abcdefgh",
        "proxy-authorization: abcdefgh",
        "headers: x-api-key: abcdefgh, a: b",
        'curl -H "x-api-key: abcdefgh" http://h',
        "curl --header=x-api-key:abcdefgh http://h",
        "-H 'X-Token:abcdefgh'",
        "Cookie: theme=dark; session=abcdefgh",
        "Set-Cookie: a=b; sid=abcdefgh; Path=/",
        'curl -b "a=b; c=abcdefgh" h',
        "curl -s -u me:abcdefgh http://h",
        "curl \\\n  --user 'me:abcdefgh' h",
        "curl --oauth2-bearer abcdefgh h",
        "Authorization: Basic abcdefgh",
        '{"Authorization": "Bearer abcdefgh"}',
        '{"api_key": "two abcdefgh"}',
        '{\\"api_key\\": \\"abcdefgh\\"}',
        "[(b'host', b'h'), (b'x-api-key', b'abcdefgh')]",
        '["vllm", "--api-key", "abcdefgh"]',
        "api_key=['one', 'abcdefgh'], port=8",
        "HF_TOKEN: abcdefgh",
        '{"name": "HF_TOKEN", "value": "abcdefgh"}',
        "- name: HF_TOKEN\n  value: abcdefgh",
        "api_key=abcdefgh",
        'export HF_TOKEN="two abcdefgh"',
        "  password: abcdefgh",
        "token: abcdefgh\nport: 8",
        "client_secret: abcdefgh",
        "docker run -e HF_TOKEN=abcdefgh image",
        "Environment=VLLM_API_KEY=abcdefgh",
        'ENV HF_TOKEN="abcdefgh"',
    ],
)
def test_I29_4_a_secret_without_a_digit_is_masked_in_every_form(line: str) -> None:
    shown = masking.text(line)
    assert "abcdefgh" not in shown
    assert MASK in shown
    assert masking.text(shown) == shown


@pytest.mark.parametrize(
    "line",
    [
        "api key: see docs",
        "api_key: see docs",
        "x-api-key: is missing",
        "the api-key: must be given",
        "HF_TOKEN: not set",
        "password: required",
        "wrong password: try again",
        "there is no token: laptop",
        "sort-key: name",
        "secretName: my-secret",
        "secretKeyRef: {name: hf, key: token}",
        "imagePullSecrets: [regcred]",
        "curl -b cookies.txt http://h",
        "curl -u me http://h",
        "missing keys: [model.layers, lm_head]",
        "Cookie: is not valid here",
        '{"name": "max_num_seqs", "value": "many"}',
        "KeyError: 'rope_scaling'",
        "--max-num-batched-tokens: '1e4' is no number",
    ],
)
def test_I29_4_words_in_sentences_stay_readable(line: str) -> None:
    assert masking.text(line) == line


def test_I29_4_an_item_of_a_kubernetes_environment_is_masked_by_its_name() -> None:
    env = [{"name": "HF_TOKEN", "value": "abcdefgh"}, {"name": "PORT", "value": "eight"}]
    assert masking.tree({"env": env})["env"] == [{"name": "HF_TOKEN", "value": MASK}, env[1]]


@pytest.mark.parametrize("part", ["a=[", "a='", "a=", "key=[", "token: ", "('a', ", "tokens: [1, "])
def test_a_line_of_many_names_is_read_once(part: str) -> None:
    """A line of a log may have 64 KiB, and hold whatever a client sent."""
    shown = masking.text(part * 5000 + " api_key=abcdefgh")
    assert "abcdefgh" not in shown
    assert shown.endswith(MASK)
