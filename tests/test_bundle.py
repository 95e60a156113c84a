"""Bundles: written whole or not at all, read only when every byte is the one that was written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from carpus.export.writer import BundleWriter
from carpus.runtime import bundle as bundle_module
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BundleError
from carpus.runtime.spec import Artefact, FileEntry, Manifest
from tests.tiny_detector import tiny_manifest, tiny_onnx, write_tiny_bundle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundle") / "tiny.carpus")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A bundle to damage."""
    target = tmp_path / "copy.carpus"
    for file in folder.rglob("*"):
        if file.is_file():
            (target / file.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (target / file.relative_to(folder)).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize("name", ["tiny.carpus", "tiny.carpus.zip", "größe 目.carpus"])
def test_what_was_written_is_read_back(tmp_path: Path, name: str) -> None:
    manifest = tiny_manifest()
    path = write_tiny_bundle(tmp_path / name, formats=("onnx",), manifest=manifest)
    with Bundle.open(path) as bundle:
        assert dataclasses.replace(bundle.manifest, artefacts=()) == manifest
        assert bundle.read(bundle.artefact("onnx").files[0]) == tiny_onnx(manifest)
        assert bundle.verify() == ("model.onnx",)
    assert [item.name for item in tmp_path.iterdir()] == [name]


def test_artefacts_are_found_by_format_and_precision(folder: Path) -> None:
    with Bundle.open(folder) as bundle:
        assert bundle.artefact("openvino", "fp32").path == "openvino/model.xml"
        with pytest.raises(BundleError, match="has no openvino int8 artefact, only onnx fp32, openvino fp32"):
            bundle.artefact("openvino", "int8")
        with pytest.raises(BundleError, match="has no tensorrt artefact"):
            bundle.artefact("tensorrt")


def test_missing_and_altered_files_are_named(copy: Path) -> None:
    binary = copy / "openvino" / "model.bin"
    data = binary.read_bytes()
    with Bundle.open(copy) as bundle:
        assert bundle.verify() == ("model.onnx", "openvino/model.xml", "openvino/model.bin")
    for change, message in (
        (bytes([data[0] ^ 1]) + data[1:], r"'openvino/model\.bin' was altered: the manifest states sha256"),
        (data[:-1], rf"'openvino/model\.bin' was altered: the manifest states {len(data)} bytes, the file has"),
        (data + b"x", "the file has more"),
    ):
        binary.write_bytes(change)
        with Bundle.open(copy) as bundle, pytest.raises(BundleError, match=message):
            bundle.verify()
    binary.unlink()
    with Bundle.open(copy) as bundle:
        assert bundle.read(bundle.artefact("onnx").files[0])
        with pytest.raises(BundleError, match=r"'openvino/model\.bin' is listed in the manifest but missing"):
            bundle.verify()


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    change(data)
    (path / "manifest.json").write_text(json.dumps(data), encoding="utf-8")


def _rename_file(path: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data["artefacts"][0]["files"][0].update(path=path)


MANIFEST_CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda data: data.update(schema_version=2), "schema version 2 is unknown, this Carpus reads version 1"),
    (lambda data: data.update(schema_version="1"), "schema version '1' is unknown"),
    (lambda data: data.update(schema_version=True), "schema version True is unknown"),
    (lambda data: data.pop("schema_version"), "schema version None is unknown"),
    (lambda data: data.update(kind="detctor"), "manifest.json.kind: expected one of 'detector', 'policy', 'hand_pose'"),
    (lambda data: data.update(colour=1), "unknown field 'colour'"),
    (lambda data: data.pop("licence"), "field 'licence' is missing"),
    (lambda data: data.update(family=""), "Manifest.family: expected a value"),
    (lambda data: data.update(artefacts=[]), "expected at least one, got none"),
    (lambda data: data.update(inputs={}), "manifest.json.inputs: expected a list"),
    (
        lambda data: data["preprocess"].update(size=[320.5, 320]),
        "preprocess.size[0]: expected an integer",
    ),
    (lambda data: data["preprocess"].update(resize="crop"), "manifest.json.preprocess.resize: expected one of"),
    (lambda data: data["preprocess"].update(size=[32, 64]), "axis 2 is 64 but preprocess gives 32"),
    (lambda data: data["postprocess"].update(boxes="bboxes"), "no output is named 'bboxes'"),
    (lambda data: data["postprocess"].update(score_threshold=1.5), "Postprocess.score_threshold: expected 0..1"),
    (lambda data: data["classes"].pop(), "'pred_logits' must have shape (N, Q, 2)"),
    (lambda data: data["classes"][1].update(name="red"), "'red' is there twice"),
    (lambda data: data.update(postprocess=None), "a detector needs preprocess, postprocess"),
    (lambda data: data["outputs"][0].update(shape=["N", 0, 3]), "positive size"),
    (lambda data: data["provenance"].update(created="yesterday"), "ISO 8601"),
    (lambda data: data["artefacts"][0]["files"][0].update(sha256="00"), "64 lower-case hexadecimal digits"),
    (lambda data: data["artefacts"][0].update(files=[]), "expected at least one file"),
    (_rename_file("../model.onnx"), "path '../model.onnx' leaves the bundle"),
    (_rename_file("openvino/../../model.onnx"), "leaves the bundle"),
    (_rename_file("/etc/passwd"), "path '/etc/passwd' leaves the bundle"),
    (_rename_file("C:\\model.onnx"), "leaves the bundle"),
    (_rename_file("..\\model.onnx"), "leaves the bundle"),
    (_rename_file("./model.onnx"), "expected its plain form"),
    (_rename_file(""), "leaves the bundle"),
    (_rename_file("model.onnx\x00.txt"), "leaves the bundle"),
    (_rename_file("openvino"), "'openvino' is not a regular file"),
]


@pytest.mark.parametrize(("change", "message"), MANIFEST_CHANGES)
def test_wrong_manifests_are_refused(copy: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    _edit(copy, change)
    with pytest.raises(BundleError) as caught, Bundle.open(copy) as bundle:
        bundle.verify()
    assert message in str(caught.value)
    assert str(copy) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}', "[" * 200_000, "\xff"])
def test_manifests_that_are_no_manifest_are_refused(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Bundle.open(copy)


def test_absent_bundles_say_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.zip").write_text("no zip")
    for path, message in (
        ("none.carpus", "no such file or folder"),
        ("empty", r"has no manifest\.json, so it is no bundle; `carpus export"),
        ("text.zip", "not a folder and not a .zip"),
    ):
        with pytest.raises(BundleError, match=message):
            Bundle.open(tmp_path / path)


@pytest.mark.parametrize("linked", ["model.onnx", "openvino", "manifest.json"])
def test_links_out_of_the_bundle_are_refused(copy: Path, tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    (copy / linked).rename(outside)
    (copy / linked).symlink_to(outside)
    with pytest.raises(BundleError, match=f"leaves the bundle: '{linked}' is a symbolic link"), Bundle.open(copy) as it:
        it.verify()


def test_a_bundle_reached_through_a_link_is_fine(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "latest.carpus").symlink_to(copy)
    with Bundle.open(tmp_path / "latest.carpus") as bundle:
        assert len(bundle.verify()) == 3


Entry = tuple[str | zipfile.ZipInfo, bytes]


def _zip(path: Path, entries: list[Entry]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def _manifest_bytes(folder: Path) -> bytes:
    return (folder / "manifest.json").read_bytes()


def test_a_zipped_folder_is_read_too(folder: Path, tmp_path: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file()]
    path = _zip(tmp_path / "t.zip", [(f"tiny.carpus/{file.relative_to(folder)}", file.read_bytes()) for file in files])
    with Bundle.open(path) as bundle:
        assert len(bundle.verify()) == 3


def test_unsafe_zips_are_refused(folder: Path, tmp_path: Path) -> None:
    manifest = ("manifest.json", _manifest_bytes(folder))
    link = zipfile.ZipInfo("model.onnx")
    link.external_attr = 0o120777 << 16
    cases: list[tuple[list[Entry], str]] = [
        ([manifest, ("../evil", b"")], "path '../evil' leaves the bundle"),
        ([manifest, ("/evil", b"")], "path '/evil' leaves the bundle"),
        ([manifest, (link, b"/etc/passwd")], "'model.onnx' leaves the bundle: it is a symbolic link"),
        ([manifest, ("bomb", bytes(64 << 20))], "refused as a zip bomb"),
        (
            [manifest, *((f"f{index}", b"") for index in range(5000))],
            "has 5001 entries, more than 4096: refused as a zip bomb",
        ),
        ([("a", b""), ("b", b"")], "has no manifest.json"),
        ([manifest], "'model.onnx' is listed in the manifest but missing"),
    ]
    for entries, message in cases:
        path = _zip(tmp_path / "t.zip", entries)
        with pytest.raises(BundleError) as caught, Bundle.open(path) as bundle:
            bundle.verify()
        assert message in str(caught.value)
        path.unlink()


def test_a_zip_with_one_name_twice_is_refused(folder: Path, tmp_path: Path) -> None:
    entries: list[Entry] = [("manifest.json", _manifest_bytes(folder)), ("a", b"1"), ("a", b"2")]
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = _zip(tmp_path / "t.zip", entries)
    with pytest.raises(BundleError, match=r"'a' is in the \.zip twice"):
        Bundle.open(path)


def test_total_size_of_a_zip_is_limited(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _zip(tmp_path / "t.zip", [("manifest.json", _manifest_bytes(folder)), ("a", os.urandom(4000))])
    monkeypatch.setattr(bundle_module, "MAX_BYTES", 3000 + len(_manifest_bytes(folder)))
    with pytest.raises(BundleError, match="refused as a zip bomb"):
        Bundle.open(path)


def test_a_zip_entry_that_lies_about_its_size_is_refused(tmp_path: Path) -> None:
    path = write_tiny_bundle(tmp_path / "t.zip", formats=("onnx",))
    with Bundle.open(path) as bundle:
        entry = bundle.artefact("onnx").files[0]
    data = bytearray(path.read_bytes())
    central = data.rindex(b"PK\x01\x02")  # model.onnx comes last
    assert struct.unpack_from("<I", data, central + 24)[0] == entry.bytes
    struct.pack_into("<I", data, central + 24, entry.bytes - 8)
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"'model\.onnx'"), Bundle.open(path) as bundle:
        bundle.verify()


@pytest.mark.parametrize("member", ["model.onnx", "manifest.json"])
@pytest.mark.parametrize("offset", [1, 7, 60, 200])
def test_a_damaged_zip_names_the_file(tmp_path: Path, member: str, offset: int) -> None:
    path = write_tiny_bundle(tmp_path / "t.zip", formats=("onnx",))
    data = bytearray(path.read_bytes())
    data[data.index(member.encode()) + len(member) + offset] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(BundleError, match=re.escape(member)), Bundle.open(path) as bundle:
        bundle.verify()


def test_a_zip_of_another_method_is_refused(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "t.zip", "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("manifest.json", _manifest_bytes(folder))
    with pytest.raises(BundleError, match=r"'manifest\.json' is packed by method 14; a bundle is stored or deflated"):
        Bundle.open(tmp_path / "t.zip")


def test_a_zip_with_an_undecodable_name_is_refused(folder: Path, tmp_path: Path) -> None:
    path = _zip(tmp_path / "t.zip", [("manifest.json", _manifest_bytes(folder)), ("ä", b"x")])
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xff\xfe"))
    with pytest.raises(BundleError, match=r"not a \.zip that can be read"):
        Bundle.open(path)


def test_zips_of_the_same_content_are_the_same_bytes(tmp_path: Path) -> None:
    first = write_tiny_bundle(tmp_path / "a.zip", formats=("onnx",)).read_bytes()
    os.utime(tmp_path / "a.zip", (0, 0))
    assert write_tiny_bundle(tmp_path / "b.zip", formats=("onnx",)).read_bytes() == first


@pytest.mark.parametrize("name", ["tiny.carpus", "tiny.zip"])
def test_a_failed_write_leaves_the_old_bundle(tmp_path: Path, name: str) -> None:
    path = write_tiny_bundle(tmp_path / name, formats=("onnx",))

    def write_half(error: type[BaseException] | None) -> None:
        with BundleWriter(path) as writer:
            writer.add("model.onnx", b"half")
            if error is not None:
                raise error

    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error):
            write_half(error)
    with pytest.raises(BundleError, match=r"finish\(manifest\) was not called"):
        write_half(None)
    with Bundle.open(path) as bundle:
        assert bundle.verify() == ("model.onnx",)
    assert [item.name for item in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["tiny.carpus", "tiny.zip"])
@pytest.mark.parametrize("atomic", [True, False])
def test_replacing_a_bundle_leaves_only_the_new(
    copy: Path, name: str, atomic: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not atomic:
        monkeypatch.setattr("carpus.export.writer._exchange", lambda first, second: False)
    path = tmp_path / name
    if path.suffix == ".zip":
        shutil.rmtree(copy)
        write_tiny_bundle(path, formats=("onnx",))
    else:
        copy.rename(path)
    new = dataclasses.replace(tiny_manifest(), name="second")
    write_tiny_bundle(tmp_path / name, formats=("onnx",), manifest=new)
    with Bundle.open(tmp_path / name) as bundle:
        assert bundle.manifest.name == "second"
        assert bundle.verify() == ("model.onnx",)
    assert [item.name for item in tmp_path.iterdir()] == [name]
    if name == "tiny.carpus":
        assert {item.name for item in (tmp_path / name).iterdir()} == {"manifest.json", "model.onnx"}


def test_the_writer_never_replaces_what_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    (tmp_path / "notes").write_text("more")
    for name, message in (("thesis", "a folder that is not a bundle is there"), ("notes", "a file is there")):
        with pytest.raises(BundleError, match=message):
            BundleWriter(tmp_path / name)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_the_manifest_must_list_what_was_added(tmp_path: Path) -> None:
    artefact = Artefact("onnx", "fp32", (FileEntry("model.onnx", hashlib.sha256(b"x").hexdigest(), 1),))

    def write(files: dict[str, bytes], artefacts: tuple[Artefact, ...]) -> None:
        with BundleWriter(tmp_path / "a.carpus") as writer:
            for path, data in files.items():
                writer.add(path, data)
            writer.finish(dataclasses.replace(tiny_manifest(), artefacts=artefacts))

    cases: list[tuple[dict[str, bytes], tuple[Artefact, ...], str]] = [
        ({}, (), "lists no artefact"),
        ({"model.onnx": b"x", "extra": b"y"}, (artefact,), "'extra' was added but the manifest does not list it"),
        ({"model.onnx": b"z"}, (artefact,), "'model.onnx' was added but the manifest does not list it as it is"),
        ({}, (artefact,), "lists 'model.onnx', which was not added"),
    ]
    for files, artefacts, message in cases:
        with pytest.raises(BundleError, match=re.escape(message)):
            write(files, artefacts)
    for path, message in (("manifest.json", "in the bundle already"), ("../x", "leaves the bundle")):
        with pytest.raises(BundleError, match=message), BundleWriter(tmp_path / "a.carpus") as writer:
            writer.add(path, b"")
    assert list(tmp_path.iterdir()) == []


def test_drafts_have_no_artefacts_and_are_not_bundles(copy: Path) -> None:
    assert tiny_manifest().artefacts == ()
    (copy / "manifest.json").write_text(tiny_manifest().dumps(), encoding="utf-8")
    with pytest.raises(BundleError, match="artefacts: expected at least one"):
        Bundle.open(copy)


@pytest.mark.parametrize("kind", ["policy", "hand_pose"])
def test_other_kinds_of_bundle_have_room(kind: str) -> None:
    manifest = dataclasses.replace(tiny_manifest(), kind=kind, preprocess=None, postprocess=None, classes=())
    assert Manifest.loads(manifest.dumps()) == manifest
