"""`tuner token` as it is typed."""

from pathlib import Path

from tests.tuning.studies import answer, tuner


def test_a_token_is_made_shown_once_and_revoked(tmp_path: Path) -> None:
    words = ("token", "create", "--name", "ci", "--scope", "run", "--scope", "promote", "--expires", "90d")
    made = answer(tmp_path, *words, "--json")
    text, token = made["text"], made["token"]
    assert isinstance(token, dict)
    assert isinstance(text, str)
    listed = tuner(tmp_path, "token", "list")
    assert str(token["id"]) in listed.stdout
    assert text.rpartition("_")[2] not in listed.stdout
    assert tuner(tmp_path, "token", "revoke", token["id"], "--reason", "left").returncode == 0
    again = tuner(tmp_path, "token", "revoke", token["id"])
    assert again.returncode == 4
    assert text.rpartition("_")[2].encode() not in (tmp_path / "tuner.db").read_bytes()


def test_a_wrong_scope_or_age_is_one_sentence(tmp_path: Path) -> None:
    wrong = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "raed")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "did you mean 'read'" in wrong.stderr
    aged = tuner(tmp_path, "token", "create", "--name", "ci", "--scope", "read", "--expires", "soon")
    assert aged.returncode == 2
    assert "90d" in aged.stderr
