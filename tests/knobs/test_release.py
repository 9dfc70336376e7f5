"""A new release is data: read from a wheel that is neither installed nor run."""

import zipfile
from pathlib import Path

import pytest

from benchmarks.knobs import release
from tuner.errors import BadInput
from tuner.knobs.catalogue import CATALOGUE, FlagTable, read_table, table
from tuner.knobs.discover import facts_of_version
from tuner.settings import shipped

DATA = FlagTable(
    versions=("1.0", "1.1"),
    flags={"--old": (("1.0", "1.0"),), "--kept": (("1.0", None),), "--going": (("1.1", None),)},
    paired=frozenset(),
    bare=frozenset(),
)
ENGINE = """
raise SystemExit("never run")
class EngineArgs:
    kept: int = 1
    fresh: bool | None = None
    either: bool | str = False
    def add_cli_args(parser):
        group.add_argument("--kept", **kwargs)
        group.add_argument("-f", "--fresh", **kwargs)
        group.add_argument("--either", **kwargs)
class AsyncEngineArgs(EngineArgs):
    def add_cli_args(parser):
        group.add_argument("--switch", action="store_true")
"""
FRONTEND = """
class BaseFrontendArgs:
    log_it: bool = False
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
def make_arg_parser(parser):
    parser.add_argument("model_tag")
    parser.add_argument("--old")
"""


def wheel(path: Path, *, version: str = "1.2+cu1", leave_out: str = "") -> Path:
    with zipfile.ZipFile(path, "w") as made:
        for name, text in {
            release.ENGINE_ARGS: ENGINE,
            release.FRONTEND_ARGS[0]: FRONTEND,
            release.VERSION_FILE: f"__version__ = version = '{version}'",
        }.items():
            if name != leave_out:
                made.writestr(name, text)
    return path


def test_a_wheel_is_read_without_running_it(tmp_path: Path) -> None:
    found = release.read(wheel(tmp_path / "v.whl"))
    assert found.version == "1.2"
    assert found.flags == {"--kept", "--fresh", "--either", "--switch", "--log-it", "--port", "--old"}
    assert found.paired == {"--fresh", "--log-it"}
    assert found.bare == {"--switch"}


def test_an_unpacked_source_is_read_too(tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel(tmp_path / "v.whl")) as packed:
        packed.extractall(tmp_path / "source")
    assert release.read(tmp_path / "source") == release.read(tmp_path / "v.whl")


def test_a_release_closes_what_it_lacks_and_opens_what_is_new(tmp_path: Path) -> None:
    grown = release.added(DATA, release.read(wheel(tmp_path / "v.whl")))
    assert grown.versions == ("1.0", "1.1", "1.2")
    assert grown.flags["--kept"] == (("1.0", None),)
    assert grown.flags["--going"] == (("1.1", "1.1"),)
    assert grown.flags["--old"] == (("1.0", "1.0"), ("1.2", None))
    assert grown.flags["--fresh"] == (("1.2", None),)
    assert grown.flags_of("1.1") == {"--kept", "--going"}
    assert "--no-fresh" in grown.flags_of("1.2")


def test_the_file_form_is_read_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "flags.json"
    path.write_text(release.text(DATA))
    assert read_table(path) == DATA
    assert release.text(table()) == shipped("data", "vllm_flags.json").read_text()


def test_what_cannot_be_added_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"already reaches vLLM 1\.1; 1\.1 is not newer"):
        release.added(DATA, release.read(wheel(tmp_path / "a.whl", version="1.1")))
    with pytest.raises(BadInput, match=r"arg_utils\.py is missing"):
        release.read(wheel(tmp_path / "b.whl", leave_out=release.ENGINE_ARGS))
    (tmp_path / "c.txt").write_text("no zip")
    with pytest.raises(BadInput, match="neither a wheel nor a folder"):
        release.read(tmp_path / "c.txt")


def test_the_command_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main([str(wheel(tmp_path / "old.whl", version="0.1"))]) == 2
    assert "0.1 is not newer" in capsys.readouterr().err


def test_0_33_is_in_the_data() -> None:
    new = {"--watchdog-config", "--sleep-mode-backend", "--monokernel"}
    assert new <= facts_of_version("0.33.0").flags
    assert not new & facts_of_version("0.32.0").flags
    here, before = (
        {name for name, entry in CATALOGUE.items() if entry.flag_in(facts_of_version(version))}
        for version in ("0.33.0", "0.32.0")
    )
    assert here == before
