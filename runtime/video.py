"""Videos, frame by frame: reading with OpenCV, writing H.264 MP4 with PyAV."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import cv2
import numpy as np

from carpus.runtime.errors import BackendError, DataError

__all__ = ["VideoReader", "VideoWriter"]


class VideoReader:
    """The frames of a video file, upright.

    Args:
        path: the file.
        progress: called with (frames read, frames in all or None) after each frame.

    Attributes:
        path: the file.
        fps: frames a second; 30 where the file does not say.
        count: number of frames that the file states, or None.

    Raises:
        DataError: there is no such file, or it is no video that OpenCV can read.
    """

    def __init__(self, path: str | os.PathLike[str], progress: Callable[[int, int | None], None] | None = None) -> None:
        self.path = Path(path)
        self._progress = progress
        if not self.path.is_file():
            raise DataError(f"video {str(path)!r}: {'is a directory' if self.path.is_dir() else 'no such file'}")
        self._capture = cv2.VideoCapture(str(self.path))
        if not self._capture.isOpened():
            raise DataError(f"video {str(path)!r}: OpenCV cannot read it; convert it to H.264 MP4")
        fps = self._capture.get(cv2.CAP_PROP_FPS)
        self.fps = float(fps) if np.isfinite(fps) and 0.1 <= fps <= 1000.0 else 30.0
        count = self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.count = int(count) if np.isfinite(count) and count > 0 else None

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the remaining frames, (h, w, 3) uint8 RGB; a frame is the caller's own.

        Raises:
            DataError: the file holds no frame that can be decoded.
        """
        number = 0
        while True:
            good, frame = self._capture.read()
            if not good:
                break
            number += 1
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
            if self._progress is not None:
                self._progress(number, self.count)
        if number == 0:
            raise DataError(f"video {str(self.path)!r}: no frame can be decoded; it may be cut short")

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._capture.release()


class VideoWriter:
    """Writes an MP4 that browsers play: H.264, yuv420p, index at the front.

    The file appears under its name when the writer is closed; an interrupted one leaves nothing.

    Args:
        path: target, ending in ".mp4".
        fps: frames a second.
        quality: constant rate factor of x264, 0 (lossless) to 51.

    Raises:
        BackendError: PyAV is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float, *, quality: int = 20) -> None:
        try:
            import av
        except ImportError:
            raise BackendError(
                "writing video needs PyAV, which is not installed; pip install 'carpus[video]'"
            ) from None
        self._av: Any = av
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.stem}.partial.mp4")
        self._rate = Fraction(fps).limit_denominator(1001)
        self._quality = quality
        self._container: Any = None
        self._stream: Any = None

    def write(self, frame: np.ndarray) -> None:
        """Add a frame, (h, w, 3) uint8 RGB; all frames must be of the first one's size.

        Raises:
            DataError: another size or type.
        """
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise DataError(f"video frame: expected (h, w, 3) uint8, got {frame.dtype} of shape {frame.shape}")
        if self._container is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._container = self._av.open(str(self._partial), "w", options={"movflags": "+faststart"})
            self._stream = self._container.add_stream("libx264", rate=self._rate)
            self._stream.height, self._stream.width = (
                frame.shape[0] + frame.shape[0] % 2,
                frame.shape[1] + frame.shape[1] % 2,
            )
            self._stream.pix_fmt = "yuv420p"
            self._stream.options = {"crf": str(self._quality), "preset": "fast"}
            self._size = frame.shape
        if frame.shape != self._size:
            raise DataError(f"video frame: expected shape {self._size} as the first frame has, got {frame.shape}")
        height, width = self._stream.height, self._stream.width
        if (height, width) != frame.shape[:2]:  # H.264 with yuv420p needs even sizes
            frame = cv2.copyMakeBorder(
                frame, 0, height - frame.shape[0], 0, width - frame.shape[1], cv2.BORDER_REPLICATE
            )
        picture = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        for packet in self._stream.encode(picture):
            self._container.mux(packet)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def close(self) -> None:
        """Finish the file and put it under its name.

        Raises:
            DataError: no frame was written.
        """
        if self._container is None:
            raise DataError(f"video {str(self.path)!r}: no frame was written")
        for packet in self._stream.encode():
            self._container.mux(packet)
        self._container.close()
        self._container = None
        os.replace(self._partial, self.path)

    def _discard(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None
        self._partial.unlink(missing_ok=True)
