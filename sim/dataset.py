"""COCO datasets of the simulated tabletop: deterministic, resumable, written atomically.

On disk::

    <root>/<split>/images/000000.jpg ...
    <root>/<split>/annotations.json      COCO; written last, when every image is there
    <root>/<split>/generator.json        what the split was made with
    <root>/<split>/records.jsonl         one line a finished image; what a later run resumes from

Picture ``i`` of a split is decided by ``SeedSequence((seed, split, i))`` alone, so it is the same whether one process
made all of them, several shared the work, or an interrupted run was taken up again.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from carpus.runtime.errors import BackendError, DataError
from carpus.sim.coco import annotation_rows, coco_document, image_name
from carpus.sim.domains import DOMAINS, domain_by_name
from carpus.sim.robot import ROBOTS
from carpus.sim.tabletop import Tabletop

__all__ = ["GENERATOR_VERSION", "GeneratorConfig", "generate_dataset", "image_generator"]

#: Raised whenever a change of the scene makes other pictures from the same seed.
GENERATOR_VERSION = 1

_CHUNK = 8
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class GeneratorConfig:
    """All that decides the pictures of a split, apart from their number.

    Attributes:
        split: domain name.
        seed: non-negative seed.
        height, width: picture size [px].
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        quality: JPEG quality 1..100.
        version: :data:`GENERATOR_VERSION`.
    """

    split: str
    seed: int
    height: int
    width: int
    robot: str
    quality: int
    version: int = GENERATOR_VERSION

    def __post_init__(self) -> None:
        domain_by_name(self.split)
        if self.robot not in ROBOTS:
            raise DataError(f"unknown robot '{self.robot}'; expected one of {', '.join(ROBOTS)}")
        if self.seed < 0:
            raise DataError(f"seed is {self.seed}; expected 0 or more")
        if not 1 <= self.quality <= 100:
            raise DataError(f"JPEG quality is {self.quality}; expected 1..100")
        if not (16 <= self.height <= 4096 and 16 <= self.width <= 4096):
            raise DataError(f"picture size {self.height}x{self.width} (height x width): each side must be 16..4096 px")


def image_generator(seed: int, split: str, index: int) -> np.random.Generator:
    """The generator that decides picture ``index`` of a split."""
    return np.random.default_rng(np.random.SeedSequence((seed, list(DOMAINS).index(split), index)))


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


class _Worker:
    """Makes pictures of one split; one per process, since a renderer cannot be shared."""

    def __init__(self, folder: Path, config: GeneratorConfig) -> None:
        self._folder, self._config = folder, config
        self._tabletop = Tabletop(config.split, config.robot, (config.height, config.width))

    def make(self, index: int) -> dict[str, Any]:
        """Write one image and return its record."""
        config = self._config
        sample = self._tabletop.sample(image_generator(config.seed, config.split, index))
        options = [cv2.IMWRITE_JPEG_QUALITY, config.quality]
        done, data = cv2.imencode(".jpg", cv2.cvtColor(sample.image, cv2.COLOR_RGB2BGR), options)
        if not done:
            raise DataError(f"{self._folder / image_name(index)}: OpenCV could not encode the image as JPEG")
        _write_atomically(self._folder / image_name(index), data.tobytes())
        matrix = [[round(float(v), 6) for v in row] for row in sample.camera_matrix]
        return {"index": index, "bytes": len(data), "camera_matrix": matrix, "annotations": annotation_rows(sample)}

    def close(self) -> None:
        self._tabletop.close()


_process_worker: _Worker | None = None


def _start_process(folder: Path, config: GeneratorConfig) -> None:
    global _process_worker
    _process_worker = _Worker(folder, config)


def _make_chunk(indices: list[int]) -> list[dict[str, Any]]:
    if _process_worker is None:
        raise DataError("a worker process was used before it was set up")
    return [_process_worker.make(index) for index in indices]


def _make_here(folder: Path, config: GeneratorConfig, indices: list[int]) -> Iterator[dict[str, Any]]:
    worker = _Worker(folder, config)
    try:
        for index in indices:
            yield worker.make(index)
    finally:
        worker.close()


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started within never see Ctrl-C: it is for the parent, which lets them finish what they are at."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _make_in_processes(
    folder: Path, config: GeneratorConfig, indices: list[int], workers: int
) -> Iterator[dict[str, Any]]:
    chunks = [indices[start : start + _CHUNK] for start in range(0, len(indices), _CHUNK)]
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_process, (folder, config))
    try:
        with _interrupts_ignored():
            futures = [pool.submit(_make_chunk, chunk) for chunk in chunks]
        for done in as_completed(futures):
            yield from done.result()
    except BrokenProcessPool as error:
        raise BackendError(
            "a worker process ended before its work was done; finished images are kept, "
            "run again with workers=1 to see why"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _check_config(folder: Path, config: GeneratorConfig) -> None:
    """Write the configuration of a new split; refuse to go on with a split that was made with another one."""
    path = folder / "generator.json"
    wanted = asdict(config)
    if not path.exists():
        if (folder / "annotations.json").exists():
            raise DataError(f"{folder}: holds annotations.json but no generator.json; choose another output folder")
        _write_atomically(path, (json.dumps(wanted, indent=2) + "\n").encode())
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON ({error}); delete the folder or choose another") from error
    for name, value in wanted.items():
        if not isinstance(found, dict) or found.get(name) != value:
            had = found.get(name) if isinstance(found, dict) else found
            raise DataError(
                f"{path}: {name} is {had!r} in this folder, but {value!r} was asked for; "
                "choose another output folder, or delete this one to make it anew"
            )


def _read_records(folder: Path) -> dict[int, dict[str, Any]]:
    """Records of finished images whose file is whole; a line torn by an interruption is dropped."""
    path = folder / "records.jsonl"
    records: dict[int, dict[str, Any]] = {}
    if not path.exists():
        return records
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
            index, size = int(record["index"]), int(record["bytes"])
        except (ValueError, KeyError, TypeError):
            continue
        image = folder / "images" / image_name(index)
        if image.is_file() and image.stat().st_size == size:
            records[index] = record
    return records


def generate_dataset(
    root: str | Path,
    split: str,
    num_images: int,
    seed: int = 0,
    size: tuple[int, int] = (480, 640),
    robot: str = "gr1t2",
    *,
    workers: int = 1,
    quality: int = 92,
    progress: Progress | None = None,
) -> Path:
    """Make a split, or what is missing of it.

    Args:
        root: dataset folder; the split becomes a folder in it.
        split: domain name: ``train``, ``heldout`` or ``site``.
        num_images: number of pictures; may be raised later, and the first ones stay as they are.
        seed: decides every picture.
        size: height and width [px].
        robot: name in :data:`carpus.sim.robot.ROBOTS`.
        workers: processes; the result does not depend on it.
        quality: JPEG quality 1..100.
        progress: called with (pictures done, pictures wanted).

    Returns:
        path of the split's ``annotations.json``.

    Raises:
        DataError: an argument is out of range, or the folder holds a split made with another configuration.
        BackendError: no offscreen OpenGL context can be made.
    """
    if num_images < 1:
        raise DataError(f"num_images is {num_images}; expected 1 or more")
    if workers < 1:
        raise DataError(f"workers is {workers}; expected 1 or more")
    config = GeneratorConfig(split, seed, *size, robot=robot, quality=quality)
    folder = Path(root) / split
    images = folder / "images"
    try:
        images.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{images}: cannot make the folder ({error.strerror}); choose another output folder") from error
    _check_config(folder, config)
    records = _read_records(folder)
    extra = [index for index in records if index >= num_images]
    if extra:
        raise DataError(
            f"{folder}: holds {max(extra) + 1} images already, but num_images is {num_images}; ask for at least as "
            "many, choose another output folder, or delete this one"
        )
    missing = [index for index in range(num_images) if index not in records]
    annotations = folder / "annotations.json"
    if progress:
        progress(len(records), num_images)
    if missing:
        for torn in images.glob(".*.tmp"):  # What an interrupted run was writing.
            torn.unlink(missing_ok=True)
        annotations.unlink(missing_ok=True)
        _write_atomically(folder / "records.jsonl", b"".join(_line(records[index]) for index in sorted(records)))
        make = (
            _make_here(images, config, missing)
            if workers == 1
            else _make_in_processes(images, config, missing, workers)
        )
        with (folder / "records.jsonl").open("ab", buffering=0) as stream:
            for record in make:
                stream.write(_line(record))
                records[record["index"]] = record
                if progress:
                    progress(len(records), num_images)
    if missing or not annotations.exists():
        text = json.dumps(
            coco_document(asdict(config), (records[index] for index in range(num_images))), separators=(",", ":")
        )
        _write_atomically(annotations, text.encode())
    return annotations


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
