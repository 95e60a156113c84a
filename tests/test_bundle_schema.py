"""The published schema is the dataclasses' own, and agrees with them on examples; metadata mirrors the manifest."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import onnx
import pytest

from carpus.runtime import spec as spec_module
from carpus.runtime.errors import BundleError
from carpus.runtime.metadata import manifest_metadata
from carpus.runtime.spec import (
    Artefact,
    BenchmarkRecord,
    FileEntry,
    Manifest,
    ParityRecord,
    Preprocess,
    Reference,
    TensorSpec,
    manifest_schema,
)
from tests.tiny_detector import tiny_manifest, tiny_onnx

PUBLISHED = Path(spec_module.__file__).parent / "schema" / "manifest-1.json"


def full_manifest() -> Manifest:
    """A manifest with every optional part present."""
    entry = FileEntry("model.onnx", "0" * 64, 10)
    return dataclasses.replace(
        tiny_manifest(),
        artefacts=(
            Artefact("onnx", "fp32", (entry,), opset=17),
            Artefact("tensorrt", "fp16", (entry,), target="sm_87"),
        ),
        reference=Reference(FileEntry("reference.npz", "1" * 64, 5), 2, "torch 2.9.0 cpu float32"),
        parity=(ParityRecord("onnxruntime", "1.20", "fp32", 100, {"max_box_px": 0.01}, {"max_box_px": 0.05}, True),),
        benchmarks=(BenchmarkRecord("openvino", "2025.0", "fp32", "CPU", 1, {"inference_p50_ms": 2}),),
        description="Größe 目",
    )


def test_published_schema_is_current() -> None:
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    assert published == manifest_schema(), "write it again: python -m carpus.runtime.schema"
    jsonschema.Draft202012Validator.check_schema(published)


def test_manifests_validate_and_survive_a_round_trip() -> None:
    validator = jsonschema.Draft202012Validator(manifest_schema())
    for manifest in (tiny_manifest(), full_manifest()):
        data = json.loads(manifest.dumps())
        validator.validate(data)
        assert next(iter(data)) == "schema_version"
        again = Manifest.from_json(data)
        assert again == manifest
        assert again.dumps() == manifest.dumps()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("schema_version",), 2),
        (("kind",), "car"),
        (("extra",), 1),
        (("preprocess", "size"), [320]),
        (("preprocess", "mean"), [0.0, 0.0, "0"]),
        (("classes",), "red"),
        (("inputs", 0, "dtype"), "float8"),
        (("inputs", 0, "shape", 0), None),
        (("parity", 0, "metrics", "ap"), "high"),
        (("provenance", "packages", "onnx"), 1),
        (("reference", "cases"), "two"),
    ],
)
def test_schema_and_dataclasses_refuse_the_same(path: tuple[Any, ...], value: Any) -> None:
    data = json.loads(full_manifest().dumps())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert not jsonschema.Draft202012Validator(manifest_schema()).is_valid(data)
    with pytest.raises(BundleError):
        Manifest.from_json(data)


def test_one_path_with_two_hashes_is_refused() -> None:
    files = (FileEntry("model.onnx", "0" * 64, 10), FileEntry("model.onnx", "1" * 64, 10))
    with pytest.raises(BundleError, match=r"'model\.onnx' is listed twice with different hashes"):
        dataclasses.replace(tiny_manifest(), artefacts=tuple(Artefact("onnx", "fp32", (file,)) for file in files))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("images", ("N", 3, 64, 64), None),
        ("images", (None, 3, 64, 64), None),
        ("images", (-1, 3, None, "H"), None),
        ("x", (None, 3, 64, 64), "named 'x' in the graph and 'images' in the manifest"),
        ("images", (3, 64, 64), "has 3 dimensions in the graph and 4"),
        ("images", (None, 1, 64, 64), "has size 1 on axis 1 in the graph and 3"),
        ("images", (1, 3, 64, 64), "has size 1 on axis 0 in the graph and N"),
    ],
)
def test_graph_tensors_are_held_against_the_manifest(name: str, shape: tuple[Any, ...], message: str | None) -> None:
    found = TensorSpec("images", "float32", ("N", 3, 64, 64)).mismatch(name, shape)
    assert (found is None) if message is None else (found is not None and message in found)


def test_metadata_mirrors_the_manifest_as_json() -> None:
    manifest = full_manifest()
    metadata = manifest_metadata(manifest)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in metadata.items())
    data = manifest.to_json()
    mirrored = {key.removeprefix("carpus."): json.loads(value) for key, value in metadata.items() if "." in key}
    assert mirrored == {key: data[key] for key in mirrored}
    assert Manifest.from_json({**mirrored, "artefacts": []}) == dataclasses.replace(
        manifest, artefacts=(), reference=None, parity=(), benchmarks=()
    )


def test_metadata_has_the_keys_of_ultralytics_exports() -> None:
    metadata = manifest_metadata(tiny_manifest())
    assert ast.literal_eval(metadata["names"]) == {0: "red", 1: "grün", 2: "blue"}
    assert ast.literal_eval(metadata["imgsz"]) == [64, 64]
    assert (metadata["task"], metadata["batch"], metadata["stride"]) == ("detect", "1", "32")
    policy = dataclasses.replace(tiny_manifest(), kind="policy", preprocess=None, postprocess=None)
    assert "names" not in manifest_metadata(policy)


def test_metadata_goes_through_an_onnx_file() -> None:
    manifest = tiny_manifest()
    model = onnx.load_from_string(tiny_onnx(manifest))
    stored = {item.key: item.value for item in model.metadata_props}
    assert stored == manifest_metadata(manifest)
    assert Preprocess(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(stored["carpus.preprocess"]).items()}
    ) == (manifest.preprocess)
