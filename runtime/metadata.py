"""The manifest as key and value strings, for the metadata of ONNX files and OpenVINO's ``rt_info/model_info``.

Other tools can then read what a lone model file is. Two sets of keys: ``carpus.*`` hold JSON, and ``names``,
``stride``, ``imgsz``, ``task``, ``batch`` are spelled as Ultralytics' exports spell them, which its loaders read.
"""

from __future__ import annotations

import json
from typing import Any

from carpus.runtime.codec import encode
from carpus.runtime.spec import Manifest

__all__ = ["manifest_metadata"]

_MIRRORED = (
    "schema_version",
    "kind",
    "name",
    "family",
    "variant",
    "licence",
    "description",
    "inputs",
    "outputs",
    "preprocess",
    "postprocess",
    "classes",
    "provenance",
)
_TASKS = {"detector": "detect"}


def manifest_metadata(manifest: Manifest, *, stride: int = 32) -> dict[str, str]:
    """Key and value strings that mirror a manifest, less what cannot be inside the file it describes (hashes, parity).

    Args:
        manifest: the manifest, or a draft of it without artefacts.
        stride: greatest stride of the model's feature maps [px], for the key of that name.

    Returns:
        ``carpus.<field>`` as JSON for every mirrored field, and for a detector Ultralytics' keys.
    """
    data: dict[str, Any] = encode(manifest)
    metadata = {f"carpus.{key}": json.dumps(data[key], ensure_ascii=False) for key in _MIRRORED}
    if manifest.kind in _TASKS and manifest.preprocess is not None:
        batch = manifest.inputs[0].shape[0]
        metadata.update(
            task=_TASKS[manifest.kind],
            names=repr(dict(enumerate(manifest.class_names))),
            stride=str(stride),
            imgsz=str(list(manifest.preprocess.size)),
            batch=str(batch if isinstance(batch, int) else 1),
        )
    return metadata
