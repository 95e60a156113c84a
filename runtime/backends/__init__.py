"""Inference backends: a table of what exists, and the choice among what is installed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
from dataclasses import dataclass
from typing import Literal

from carpus.runtime.backends.base import Backend, GraphTensor
from carpus.runtime.bundle import Bundle
from carpus.runtime.errors import BackendError
from carpus.runtime.spec import Artefact

__all__ = ["BACKENDS", "Backend", "BackendInfo", "GraphTensor", "available_backends", "open_backend"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackendInfo:
    """One row of the table of backends.

    Attributes:
        name: what users call it.
        package: the import that must be there.
        install: how to get it.
        formats: artefact formats that it loads, best first.
        location: "module:class" of the implementation, imported only when it is used.
    """

    name: str
    package: str
    install: str
    formats: tuple[Literal["onnx", "openvino", "tensorrt"], ...]
    location: str

    @property
    def installed(self) -> bool:
        """Whether its package can be imported here."""
        return importlib.util.find_spec(self.package) is not None


BACKENDS: dict[str, BackendInfo] = {
    info.name: info
    for info in (
        BackendInfo(
            name="openvino",
            package="openvino",
            install="pip install 'carpus[openvino]'",
            formats=("openvino", "onnx"),
            location="carpus.runtime.backends.openvino:OpenVinoBackend",
        ),
        BackendInfo(
            name="onnxruntime",
            package="onnxruntime",
            install="pip install 'carpus[onnxruntime]'",
            formats=("onnx",),
            location="carpus.runtime.backends.onnxruntime:OnnxRuntimeBackend",
        ),
    )
}
"""Every backend that Carpus knows, by name."""

_X86 = ("openvino", "onnxruntime")
_OTHER = ("onnxruntime", "openvino")


def available_backends(bundle: Bundle, precision: str | None = None) -> tuple[str, ...]:
    """Backends that are installed here and can load the bundle, the one that "auto" takes first.

    Those whose artefact passed the export's parity gate go before those that nobody measured, and those
    that failed it last; among equals OpenVINO goes first on x86 processors, ONNX Runtime elsewhere.

    Args:
        bundle: the open bundle.
        precision: precision of the artefact, or None for any.
    """
    order = _X86 if platform.machine().lower() in ("x86_64", "amd64") else _OTHER
    verdicts = {(record.backend, record.precision): record.passed for record in bundle.manifest.parity}
    rank = {True: 0, None: 1, False: 2}
    usable = []
    for name in order:
        artefact = _artefact(bundle, BACKENDS[name], precision) if BACKENDS[name].installed else None
        if artefact is not None:
            usable.append((rank[verdicts.get((name, artefact.precision))], name))
    return tuple(name for _, name in sorted(usable, key=lambda item: item[0]))


def open_backend(
    bundle: Bundle,
    backend: str = "auto",
    *,
    num_threads: int | None = None,
    precision: Literal["fp32", "fp16", "int8"] | None = None,
) -> Backend:
    """Load a bundle's model.

    Args:
        bundle: the open bundle.
        backend: a name in :data:`BACKENDS`, or "auto".
        num_threads: threads for one inference, at most one a core, or None for the backend's choice.
        precision: precision of the artefact, or None for the first listed of the backend's best format.

    Raises:
        BackendError: unknown or not installed backend, or it cannot load the model.
        BundleError: the bundle has nothing for this backend, or its file is altered or contradicts the manifest.
    """
    if num_threads is not None and num_threads < 1:
        raise BackendError(f"num_threads: expected at least 1, or None for the backend's choice, got {num_threads}")
    cores = os.cpu_count() or 1
    if num_threads is not None and num_threads > cores:
        _LOG.warning("num_threads: %d is more than this machine's %d cores, %d are used", num_threads, cores, cores)
        num_threads = cores
    has = ", ".join(f"{item.format} {item.precision}" for item in bundle.manifest.artefacts)
    if backend == "auto":
        usable = available_backends(bundle, precision)
        if not usable:
            missing = [info.install for info in BACKENDS.values() if not info.installed]
            wanted = f"{precision} artefacts" if precision else "artefacts"
            advice = "try " + " or ".join(missing) if missing else "export it again with an ONNX artefact"
            raise BackendError(
                f"bundle {str(bundle.path)!r}: no installed backend can load its {wanted} ({has}); {advice}"
            )
        backend = usable[0]
        _LOG.info("backend %s: first choice on %s for %s", backend, platform.machine(), has)
    if backend not in BACKENDS:
        raise BackendError(f"backend: expected 'auto', {', '.join(repr(name) for name in BACKENDS)}, got {backend!r}")
    info = BACKENDS[backend]
    if not info.installed:
        raise BackendError(f"backend {backend!r}: the package {info.package!r} is not installed; {info.install}")
    artefact = _artefact(bundle, info, precision)
    if artefact is None:
        wanted = " or ".join(info.formats)
        raise BackendError(
            f"bundle {str(bundle.path)!r}: backend {backend!r} loads {wanted}"
            f"{f' of {precision}' if precision else ''}, the bundle has {has}; export it again with that format"
        )
    module, _, name = info.location.partition(":")
    return getattr(importlib.import_module(module), name)(bundle, artefact, num_threads)


def _artefact(bundle: Bundle, info: BackendInfo, precision: str | None) -> Artefact | None:
    for wanted in info.formats:
        for artefact in bundle.manifest.artefacts:
            if artefact.format == wanted and precision in (None, artefact.precision):
                return artefact
    return None
