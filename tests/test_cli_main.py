"""The `carpus` command itself: overview, unknown commands, exit codes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import is_dataclass

import pytest

from carpus.cli.main import COMMANDS, main


def test_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in out
        assert command.summary in out


def test_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: carpus" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("carpus ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["detekt"], "unknown command 'detekt' (did you mean 'detect'?); known commands: detect"),
        (["sim"], "'sim' needs one of: dataset, preview"),
        (["sim", "datasets"], "'sim' needs one of: dataset, preview"),
    ],
)
def test_unknown_command(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_a_dataclass_with_run(name: str) -> None:
    command = COMMANDS[name]
    config = getattr(importlib.import_module(command.module), command.name)
    assert is_dataclass(config)
    assert callable(config.run)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert f"carpus {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [(["--score", "1.5"], "--score: expected 0 to 1, got 1.5"), (["--num-images", "0"], "--num-images: expected at")],
)
def test_export_refuses_before_it_loads_torch(option: list[str], message: str) -> None:
    code = (
        "import sys; from carpus.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; "
    )
    argv = [sys.executable, "-c", code + "sys.exit(code)", "export", "absent.pt", "--out", "x.carpus", *option]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr


def test_errors_become_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["detect", "/nowhere/model.carpus", "/nowhere/image.png", "--out", "/nowhere/out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("carpus detect: ")
    assert "/nowhere/image.png" in err
