"""`carpus verify`: whole bundles pass, broken and straying ones are named, and it needs no torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from carpus.cli.main import main
from carpus.export.writer import BundleWriter
from carpus.runtime import verify as verify_module
from carpus.runtime.backends import BACKENDS, BackendInfo
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BackendError, BundleError
from carpus.runtime.verify import load_reference, verify_bundle
from tests.tiny_deimv2 import tiny_bundle


def rewrite(target: Path, reference: dict[str, np.ndarray] | None, *, keep_reference: bool = True) -> Path:
    """A valid bundle like the tiny one, with other stored arrays, or none."""
    with Bundle.open(tiny_bundle()) as bundle, BundleWriter(target) as writer:
        manifest = bundle.manifest
        for artefact in manifest.artefacts:
            for entry in artefact.files:
                writer.add(entry.path, bundle.read(entry))
        stored = None
        if keep_reference and manifest.reference is not None:
            buffer = target.with_suffix(".npz")
            np.savez(buffer, **(reference or {}))  # type: ignore[arg-type]
            stored = replace(manifest.reference, file=writer.add("reference.npz", buffer.read_bytes()))
            buffer.unlink()
        writer.finish(replace(manifest, reference=stored))
    return target


def arrays() -> dict[str, np.ndarray]:
    with np.load(tiny_bundle() / "reference.npz") as stored:
        return dict(stored)


def test_exported_bundle_passes_on_every_backend() -> None:
    lines: list[str] = []
    report = verify_bundle(tiny_bundle(), progress=lines.append)
    assert report.passed
    assert [(row.backend, row.precision, row.status) for row in report.rows] == [
        ("openvino", "fp32", "passed"),
        ("openvino", "fp16", "passed"),
        ("onnxruntime", "fp32", "passed"),
    ]
    assert set(report.files) == {
        "model.onnx",
        "openvino/model.xml",
        "openvino/model.bin",
        "openvino-fp16/model.xml",
        "openvino-fp16/model.bin",
        "reference.npz",
    }
    assert len(lines) == 3
    for row in report.rows:
        assert row.record is not None
        assert row.record.images == 3
        assert row.record.metrics["detections"] > 10


def test_runs_without_torch() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'onnx', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "from carpus.runtime.verify import verify_bundle\n"
        f"report = verify_bundle({str(tiny_bundle())!r}, ['onnxruntime'])\n"
        "sys.exit(0 if report.passed else 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("file", ["model.onnx", "openvino/model.bin", "reference.npz"])
def test_altered_file_is_refused_by_name(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.carpus"
    shutil.copytree(tiny_bundle(), copy)
    content = bytearray((copy / file).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / file).write_bytes(content)
    with pytest.raises(BundleError, match=f"'{file}' was altered"):
        verify_bundle(copy)
    assert main(["verify", str(copy)]) == 2
    assert f"'{file}' was altered" in capsys.readouterr().err


def test_graph_that_strays_fails_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = arrays()
    stored["pred_boxes_1"][:, 0] += 0.01
    path = rewrite(tmp_path / "strayed.carpus", stored)
    report = verify_bundle(path, ["onnxruntime"])
    assert not report.passed
    (row,) = report.failures
    assert "onnxruntime" in row.reason
    assert "parity not met: pred_boxes differ by" in row.reason
    assert "of reference image 1" in row.reason
    assert main(["verify", str(path), "--backend", "onnxruntime"]) == 1
    assert "failed" in capsys.readouterr().out


def test_absent_backend_is_told_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = BackendInfo("openvino", "no_such_package", "pip install 'carpus[openvino]'", ("openvino", "onnx"), "a:b")
    monkeypatch.setitem(BACKENDS, "openvino", absent)
    report = verify_bundle(tiny_bundle())
    assert report.passed
    assert [row.status for row in report.rows] == ["absent", "absent", "passed"]
    assert report.rows[0].reason == "the package 'no_such_package' is not installed; pip install 'carpus[openvino]'"
    monkeypatch.setitem(BACKENDS, "onnxruntime", replace(BACKENDS["onnxruntime"], package="no_such_package"))
    assert not verify_bundle(tiny_bundle()).passed
    assert main(["verify", str(tiny_bundle())]) == 1
    assert "no installed backend can load this bundle, so nothing was verified" in capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tiny_bundle()), "--backend", "onnxruntime", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is True
    assert report["rows"][0]["record"]["thresholds"]["max_box_px"] == 0.05


def test_unknown_backend() -> None:
    with pytest.raises(BackendError, match="backends: expected some of openvino, onnxruntime, got 'tensorrt'"):
        verify_bundle(tiny_bundle(), ["tensorrt"])


def test_missing_reference(tmp_path: Path) -> None:
    path = rewrite(tmp_path / "bare.carpus", None, keep_reference=False)
    with pytest.raises(BundleError, match="has no stored reference to verify against"):
        verify_bundle(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_1": None}, "lacks the array .*image_1"),
        ({"pred_boxes_2": None}, "lacks the array .*pred_boxes_2"),
        ({"image_0": np.zeros((4, 5, 3), np.float32)}, r"image_0 must be uint8 \(H, W, 3\), it is float32 \(4, 5, 3\)"),
        ({"pred_logits_0": np.zeros((75, 4), np.float32)}, r"case 0 has logits \(75, 4\)"),
    ],
)
def test_wrong_reference(change: dict[str, np.ndarray | None], message: str, tmp_path: Path) -> None:
    stored = {name: values for name, values in arrays().items() if name not in change}
    stored.update({name: values for name, values in change.items() if values is not None})
    path = rewrite(tmp_path / "wrong.carpus", stored)
    with Bundle.open(path) as bundle, pytest.raises(BundleError, match=message):
        load_reference(bundle)


def test_public_names() -> None:
    assert all(hasattr(verify_module, name) for name in verify_module.__all__)
