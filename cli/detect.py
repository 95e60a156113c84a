"""`carpus detect`: a bundle on images, folders, patterns and videos."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
import tyro

from carpus.runtime.detections import Detections
from carpus.runtime.detector import Detector
from carpus.runtime.draw import annotate
from carpus.runtime.errors import CarpusError, DataError
from carpus.runtime.image import load_image
from carpus.runtime.media import MediaFile, find_media
from carpus.runtime.results import coco_results, detections_record, read_coco_image_ids, write_json
from carpus.runtime.video import VideoReader, VideoWriter

__all__ = ["Detect"]

_LOG = logging.getLogger(__name__)
Advance = Callable[[int, "int | None"], None]


@dataclass(frozen=True)
class Detect:
    """Run a bundle on images, folders, patterns or videos and write what it finds.

    Exit code 0 when every input was read, 1 when some were not, 2 when none was.
    """

    bundle: Annotated[Path, tyro.conf.Positional]
    """Bundle: a .carpus folder or its .zip."""
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Image or video files, folders, or patterns such as 'shots/**/*.jpg'."""
    out: Path = Path("detections")
    """Folder for the results."""
    json: bool = True
    """Write detections.json."""
    coco: bool = False
    """Write coco_results.json, with the data set's category ids and xywh boxes; not for videos."""
    coco_annotations: Path | None = None
    """COCO annotation file that gives the image ids by file name; without it images are numbered from 1."""
    annotate: bool = True
    """Write the images (under annotated/) with the boxes drawn; videos as MP4."""
    backend: Literal["auto", "openvino", "onnxruntime"] = "auto"
    """What runs the model."""
    score: float | None = None
    """Least score, 0 to 1; the bundle's own by default."""
    iou: float | None = None
    """Greatest overlap (IoU) of two detections of one class, 0 to 1, for bundles with non-maximum suppression; the
    bundle's own by default."""
    classes: tuple[str, ...] = ()
    """Names (or ids) of the classes to look for; all by default."""
    threads: int | None = None
    """Threads for the model; the backend's choice by default."""

    def run(self) -> int:
        """Do it; returns the exit code."""
        if not self.inputs:
            raise DataError("no input: name at least one image, folder, pattern or video after the bundle")
        media = find_media(self.inputs)
        if self.coco and any(item.video for item in media):
            raise DataError("--coco: COCO results are of images; leave the videos out, or --coco")
        ids = read_coco_image_ids(self.coco_annotations) if self.coco_annotations is not None else None
        with self._open() as detector:
            job = _Job(self, detector, ids)
            with _progress(len(media)) as advance:
                for number, item in enumerate(media, 1):
                    job.take(item, advance if item.video and len(media) == 1 else None)
                    if not (item.video and len(media) == 1):
                        advance(number, len(media))
            return job.finish()

    def _open(self) -> Detector:
        detector = Detector.open(
            self.bundle, self.backend, num_threads=self.threads, score_threshold=self.score, iou_threshold=self.iou
        )
        if self.classes:
            known = detector.class_names
            detector.classes = [int(name) if name.isdigit() and name not in known else name for name in self.classes]
        return detector


class _Job:
    """Runs the detector over the inputs and gathers results."""

    def __init__(self, options: Detect, detector: Detector, ids: dict[str, int] | None) -> None:
        self._options = options
        self._detector = detector
        self._ids = ids
        self._records: list[dict[str, Any]] = []
        self._coco: list[dict[str, Any]] = []
        self._coco_images: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._seconds = np.zeros(3)
        self._frames = 0
        self._failed: list[CarpusError] = []
        self._done = 0

    def take(self, item: MediaFile, advance: Advance | None) -> None:
        try:
            if item.video:
                self._video(item, advance)
            else:
                self._image(item)
            self._done += 1
        except DataError as error:
            _LOG.error("%s", error)
            self._failed.append(error)

    def _image(self, item: MediaFile) -> None:
        image = load_image(item.path)
        found = self._detect(image, item.name)
        if self._options.coco:
            image_id = self._image_id(item)
            self._coco += coco_results(found, image_id, self._detector.manifest.classes)
            self._coco_images.append(
                {"id": image_id, "file_name": item.name, "width": image.shape[1], "height": image.shape[0]}
            )
        if self._options.annotate:
            suffix = ".png" if item.path.suffix.lower() in (".png", ".bmp") else ".jpg"
            target = self._options.out / "annotated" / Path(item.name).with_suffix(suffix)
            _write_image(target, annotate(image, found))

    def _image_id(self, item: MediaFile) -> int:
        if self._ids is None:
            return len(self._coco_images) + 1
        for name in (item.name, item.path.name):
            if name in self._ids:
                return self._ids[name]
        raise DataError(f"image {item.name!r}: {str(self._options.coco_annotations)!r} has no image of that file name")

    def _video(self, item: MediaFile, advance: Advance | None) -> None:
        target = self._options.out / "annotated" / Path(item.name).with_suffix(".mp4")
        with VideoReader(item.path, advance) as reader, contextlib.ExitStack() as stack:
            writer = stack.enter_context(VideoWriter(target, reader.fps)) if self._options.annotate else None
            for number, frame in enumerate(reader):
                found = self._detect(frame, item.name, frame=number, seconds=round(number / reader.fps, 4))
                if writer is not None:
                    writer.write(annotate(frame, found))

    def _detect(self, image: np.ndarray, name: str, **more: Any) -> Detections:
        detections = self._detector(image)
        self._seconds += self._detector.last_timing
        self._frames += 1
        self._counts.update(detections.names)
        if self._options.json:
            self._records.append(detections_record(detections, name, **more))
        return detections

    def finish(self) -> int:
        options = self._options
        if self._failed and not self._done:
            raise DataError(f"none of {len(self._failed)} inputs could be read; the reasons are above")
        written = []
        if options.json:
            backend = self._detector.backend
            header: dict[str, Any] = {
                "bundle": options.bundle.name,
                "model": self._detector.manifest.name,
                "backend": f"{backend.name} {backend.version}",
                "score_threshold": self._detector.score_threshold,
            }
            if self._detector.suppresses:
                header["iou_threshold"] = self._detector.iou_threshold
            write_json(options.out / "detections.json", {**header, "images": self._records})
            written.append("detections.json")
        if options.coco:
            write_json(options.out / "coco_results.json", self._coco)
            write_json(options.out / "coco_images.json", self._coco_images)
            written += ["coco_results.json", "coco_images.json"]
        if options.annotate:
            written.append("annotated/")
        each = self._seconds / max(self._frames, 1) * 1e3
        found = ", ".join(f"{count} {name}" for name, count in self._counts.most_common()) or "nothing"
        least = self._detector.score_threshold
        lines = [
            f"{self._frames} images on {self._detector.backend_name}, score >= {least:g}: {found}",
            f"mean per image: preprocess {each[0]:.2f} ms, inference {each[1]:.2f} ms, postprocess {each[2]:.2f} ms",
        ]
        if written:
            lines.append(f"wrote {', '.join(written)} in {options.out}")
        if self._failed:
            lines.append(f"{len(self._failed)} of {len(self._failed) + self._done} inputs could not be read")
        sys.stdout.write("\n".join(lines) + "\n")
        return 1 if self._failed else 0


def _write_image(path: Path, image: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    options = [cv2.IMWRITE_JPEG_QUALITY, 92] if path.suffix == ".jpg" else []
    good, data = cv2.imencode(path.suffix, cv2.cvtColor(image, cv2.COLOR_RGB2BGR), options)
    if not good:
        raise DataError(f"image {str(path)!r}: OpenCV cannot encode {path.suffix}")
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data.tobytes())
    partial.replace(path)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A progress bar where standard error is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda done, count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("detect"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("detect", total=total)
        yield lambda done, count: bar.update(task, completed=done, total=count)
