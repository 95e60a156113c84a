"""A detector: a bundle opened on a backend, images in, detections out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np

from carpus.runtime.backends import Backend, open_backend
from carpus.runtime.bundle import Bundle
from carpus.runtime.detections import Detections, class_ids
from carpus.runtime.errors import BackendError, BundleError, DataError
from carpus.runtime.image import ImageLike, load_image
from carpus.runtime.iospec import THRESHOLD_INPUTS
from carpus.runtime.postprocess import postprocess_outputs
from carpus.runtime.preprocess import Preprocessor
from carpus.runtime.spec import Manifest
from carpus.runtime.transform import ImageTransform

__all__ = ["Detector", "Timing"]


class Timing(NamedTuple):
    """Seconds that the parts of one call took.

    Attributes:
        preprocess: images to the model's input [s].
        inference: the model alone [s].
        postprocess: the model's outputs to detections [s].
    """

    preprocess: float
    inference: float
    postprocess: float

    @property
    def total(self) -> float:
        """Sum of the parts [s]."""
        return self.preprocess + self.inference + self.postprocess


class Detector:
    """Finds objects in images with the model of a bundle.

    ::

        with Detector.open("cups.carpus") as detector:
            for box, score, class_id, name in detector("table.jpg"):
                ...

    Calls from several threads are safe and run one after another. Buffers are kept between calls.

    Use :meth:`open`.
    """

    def __init__(
        self,
        manifest: Manifest,
        backend: Backend,
        *,
        score_threshold: float | None = None,
        iou_threshold: float | None = None,
        classes: Iterable[int | str] | None = None,
        evaluation: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if manifest.kind != "detector" or manifest.preprocess is None or manifest.postprocess is None:
            raise BundleError(f"bundle of {manifest.name!r}: holds a {manifest.kind}, not a detector")
        self._manifest = manifest
        self._backend: Backend | None = backend
        self._backend_name = backend.name
        self._clock = clock
        self._lock = threading.Lock()
        self._preprocessor = Preprocessor(manifest.preprocess)
        self._postprocess = manifest.postprocess
        if evaluation and manifest.postprocess.kind == "nms":
            self._postprocess = replace(manifest.postprocess, multi_label=True, in_graph=False)
        self._class_names = manifest.class_names
        self._class_ids: np.ndarray | None = None
        self._score_threshold = manifest.postprocess.score_threshold
        self._iou_threshold = manifest.postprocess.iou_threshold
        self._last_timing = Timing(0.0, 0.0, 0.0)
        batch = manifest.inputs[0].shape[0]
        self._fixed_batch = batch if isinstance(batch, int) else None
        if score_threshold is not None:
            self.score_threshold = score_threshold
        if iou_threshold is not None:
            self.iou_threshold = iou_threshold
        self.classes = classes

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        backend: str = "auto",
        *,
        num_threads: int | None = None,
        score_threshold: float | None = None,
        iou_threshold: float | None = None,
        classes: Iterable[int | str] | None = None,
        evaluation: bool = False,
        precision: Literal["fp32", "fp16", "int8"] | None = None,
    ) -> Detector:
        """Open a bundle.

        Args:
            path: the bundle's folder or .zip.
            backend: "auto", "openvino" or "onnxruntime".
            num_threads: threads for one inference, or None for the backend's choice.
            score_threshold: least score in 0..1, or None for the bundle's own.
            iou_threshold: greatest IoU of two detections of one class in 0..1, or None for the bundle's own; only for
                a bundle with non-maximum suppression.
            classes: class names or ids to look for, or None for all.
            evaluation: as average precision is measured: where the bundle suppresses, every class of a position is a
                candidate of its own. The runtime suppresses then, and not the graph.
            precision: which artefact, or None for the first listed of the backend's best format.

        Raises:
            BundleError: the bundle is missing, altered or not a detector.
            BackendError: the backend is not installed or cannot load the model.
            DataError: a threshold or a class is out of range, or the bundle does not suppress.
        """
        with Bundle.open(path) as bundle:
            loaded = open_backend(bundle, backend, num_threads=num_threads, precision=precision)
            try:
                return cls(
                    bundle.manifest,
                    loaded,
                    score_threshold=score_threshold,
                    iou_threshold=iou_threshold,
                    classes=classes,
                    evaluation=evaluation,
                )
            except BaseException:
                loaded.close()
                raise

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; further calls are refused."""
        with self._lock:
            if self._backend is not None:
                self._backend.close()
                self._backend = None

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest."""
        return self._manifest

    @property
    def backend(self) -> Backend:
        """The loaded backend."""
        if self._backend is None:
            raise BackendError("detector: it was closed; open the bundle again")
        return self._backend

    @property
    def backend_name(self) -> str:
        """Name of the backend that runs the model."""
        return self._backend_name

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of all classes of the model, by class id."""
        return self._class_names

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes looked for; set names or ids, or None for all."""
        if self._class_ids is None:
            return self._class_names
        return tuple(self._class_names[index] for index in self._class_ids)

    @classes.setter
    def classes(self, classes: Iterable[int | str] | None) -> None:
        self._class_ids = None if classes is None else class_ids(classes, self._class_names)

    @property
    def score_threshold(self) -> float:
        """Least score of a detection, 0..1."""
        return self._score_threshold

    @score_threshold.setter
    def score_threshold(self, value: float) -> None:
        if not 0.0 <= value <= 1.0:
            raise DataError(f"score_threshold: expected 0..1, got {value}")
        self._score_threshold = float(value)

    @property
    def suppresses(self) -> bool:
        """Whether the bundle has non-maximum suppression, and with it an IoU threshold."""
        return self._postprocess.kind == "nms"

    @property
    def iou_threshold(self) -> float:
        """Greatest IoU of two detections of one class, 0..1; without effect where nothing is suppressed."""
        return self._iou_threshold

    @iou_threshold.setter
    def iou_threshold(self, value: float) -> None:
        if not self.suppresses:
            raise DataError(
                f"iou_threshold: {self._manifest.family} {self._manifest.variant} has no non-maximum suppression, so "
                "there is no such threshold; leave it out"
            )
        if not 0.0 <= value <= 1.0:
            raise DataError(f"iou_threshold: expected 0..1, got {value}")
        self._iou_threshold = float(value)

    @property
    def last_timing(self) -> Timing:
        """What the parts of the last call took; a batch counts as one call."""
        return self._last_timing

    def __call__(self, image: ImageLike, *, color: Literal["rgb", "bgr"] = "rgb") -> Detections:
        """Detect in one image.

        Args:
            image: path, uint8 array (H, W, 3), (H, W, 4), (H, W, 1), (H, W), or PIL image.
            color: channel order of an array.

        Raises:
            DataError: the image cannot be used.
            BackendError: the model failed, or answered NaN.
        """
        return self.detect_batch([image], color=color)[0]

    def detect_batch(
        self, images: Sequence[ImageLike], *, color: Literal["rgb", "bgr"] = "rgb", batch_size: int = 16
    ) -> list[Detections]:
        """Detect in several images, which may differ in size.

        Args:
            images: see :meth:`__call__`; an empty list gives an empty list.
            color: channel order of the arrays.
            batch_size: most images in one inference.

        Returns:
            The detections of each image, in order.

        Raises:
            DataError: an image cannot be used; the message gives its index.
            BackendError: the model failed, or answered NaN.
        """
        if isinstance(images, (str, os.PathLike, np.ndarray)):
            raise DataError(f"images: expected a list of images, got one {type(images).__name__}; write [image]")
        if batch_size < 1:
            raise DataError(f"batch_size: expected at least 1, got {batch_size}")
        step = self._fixed_batch or batch_size
        found: list[Detections] = []
        timing = [0.0, 0.0, 0.0]
        with self._lock:
            for start in range(0, len(images), step):
                part = images[start : start + step]
                detections, seconds = self._detect(part, start, len(images), color)
                found += detections
                timing = [before + now for before, now in zip(timing, seconds, strict=True)]
            self._last_timing = Timing(*timing)
        return found

    def raw(
        self, images: Sequence[ImageLike], *, color: Literal["rgb", "bgr"] = "rgb"
    ) -> tuple[dict[str, np.ndarray], list[ImageTransform]]:
        """The graph's own outputs for some images, preprocessed as always; for parity checks.

        Returns:
            Outputs by name, each with the images as its first axis, and one transform an image. A graph that
            suppresses does so with the detector's thresholds.
        """
        outputs: list[dict[str, np.ndarray]] = []
        transforms: list[ImageTransform] = []
        with self._lock:
            self._set_thresholds(self.backend)
            for image in images:
                tensor, made = self._preprocessor([image] * (self._fixed_batch or 1), color=color)
                outputs.append({name: values[:1] for name, values in self.backend.run(tensor).items()})
                transforms.append(made[0])
        names = [spec.name for spec in self._manifest.outputs]
        return {name: np.concatenate([item[name] for item in outputs]) for name in names}, transforms

    def warm_up(self, runs: int = 3, *, batch: int = 1) -> None:
        """Run on blank images, so that the first real call takes no longer than the next."""
        height, width = self._preprocessor.spec.size
        blank = np.full((height + 1, width + 1, 3), 128, np.uint8)
        for _ in range(runs):
            self.detect_batch([blank] * batch, batch_size=batch)

    def _detect(
        self, images: Sequence[ImageLike], start: int, total: int, color: Literal["rgb", "bgr"]
    ) -> tuple[list[Detections], tuple[float, float, float]]:
        backend = self.backend
        batch = self._fixed_batch or len(images)
        began = self._clock()
        buffer = backend.input_buffer(batch)
        transforms = []
        for index, image in enumerate(images):
            try:
                transforms.append(self._preprocessor.run(load_image(image, color=color), buffer[index]))
            except DataError as error:
                raise DataError(f"images[{start + index}]: {error}" if total > 1 else str(error)) from None
        score, iou = self._set_thresholds(backend)
        chosen = self._class_ids
        ready = self._clock()
        outputs = backend.infer(batch)
        answered = self._clock()
        found = [
            postprocess_outputs(
                outputs,
                index,
                transform,
                self._postprocess,
                self._class_names,
                score_threshold=score,
                iou_threshold=iou,
                classes=chosen,
            )
            for index, transform in enumerate(transforms)
        ]
        return found, (ready - began, answered - ready, self._clock() - answered)

    def _set_thresholds(self, backend: Backend) -> tuple[float, float]:
        """The thresholds of now, which the graph gets too where it suppresses."""
        thresholds = self._score_threshold, self._iou_threshold
        # A graph whose detections nobody reads has the least work when no score counts.
        for name, value in zip(THRESHOLD_INPUTS, thresholds if self._postprocess.in_graph else (1.0, 1.0), strict=True):
            if name in backend.scalars:
                backend.scalars[name][0] = value
        return thresholds
