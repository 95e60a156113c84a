"""What goes into a model and what comes out: tensors, preprocessing, postprocessing, classes.

Training evaluation, export, runtime, ROS nodes and simulation share these objects, so nobody re-types a mean or a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from carpus.runtime.codec import check_fields
from carpus.runtime.errors import BundleError

if TYPE_CHECKING:
    import numpy as np

    from carpus.runtime.transform import ImageTransform

__all__ = ["DETECTION_OUTPUTS", "THRESHOLD_INPUTS", "ClassInfo", "Postprocess", "Preprocess", "TensorSpec"]

THRESHOLD_INPUTS = ("score_threshold", "iou_threshold")
"""Inputs of a graph that suppresses its detections itself, each (1,) float32 in 0..1."""

DETECTION_OUTPUTS = ("num_detections", "detection_boxes", "detection_scores", "detection_classes")
"""Outputs of such a graph: (N,) int64; (N, K, 4) float32 xyxy in pixels of the model's input; (N, K) float32; (N, K)
int64. The first ``num_detections`` of an image count, best first; the rest is 0, with class -1."""


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of the graph.

    Attributes:
        name: the graph's own name for it.
        dtype: element type as numpy spells it.
        shape: one entry a dimension; an integer is fixed, a string names a dynamic dimension ("N").
    """

    name: str
    dtype: Literal["float32", "float16", "int64", "int32", "uint8", "bool"]
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name:
            raise BundleError("TensorSpec.name: expected a name, got an empty string")
        for index, size in enumerate(self.shape):
            if (isinstance(size, int) and size < 1) or size == "":
                raise BundleError(
                    f"TensorSpec.shape[{index}] of {self.name!r}: expected a positive size or the name of a dynamic "
                    f"dimension, got {size!r}"
                )

    def mismatch(self, name: str, shape: Sequence[int | str | None]) -> str | None:
        """Say how a graph's tensor contradicts this spec, or None when it fits.

        A size that the graph leaves open (a string, None or a negative number) fits anything; a size fixed in the
        graph must be the same here.
        """
        if name != self.name:
            return f"named {name!r} in the graph and {self.name!r} in the manifest"
        if len(shape) != len(self.shape):
            return f"{name!r} has {len(shape)} dimensions in the graph and {len(self.shape)} in the manifest"
        for axis, (found, stated) in enumerate(zip(shape, self.shape, strict=True)):
            if isinstance(found, int) and found >= 0 and found != stated:
                return f"{name!r} has size {found} on axis {axis} in the graph and {stated} in the manifest"
        return None


@dataclass(frozen=True)
class Preprocess:
    """How a source image becomes the model's input, and (derived from it) how boxes go back.

    ``x = (pixel * scale - mean) / std`` a channel, after the resize. Calling it preprocesses one image or a list.

    Attributes:
        size: (height, width) of the model's input [px].
        resize: "stretch" fills the size and ignores the aspect ratio; "letterbox" keeps it and pads evenly.
        interpolation: "bilinear" (two taps), "bilinear_antialias" (Pillow's: the triangle widens with the
            reduction) or "area" (mean of the covered pixels).
        scale: factor from 0..255 to the model's range.
        mean: subtracted from each channel, in the model's range and channel order.
        std: divides each channel.
        pad_value: grey level 0..255 of the letterbox border, before scaling.
        color: channel order that the model wants.
        layout: axes of the model's input.
    """

    size: tuple[int, int]
    resize: Literal["stretch", "letterbox"] = "stretch"
    interpolation: Literal["bilinear", "bilinear_antialias", "area"] = "bilinear_antialias"
    scale: float = 1.0 / 255.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    pad_value: int = 114
    color: Literal["rgb", "bgr"] = "rgb"
    layout: Literal["nchw"] = "nchw"

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.size) < 1 or max(self.size) > 16384:
            raise BundleError(f"Preprocess.size: expected (height, width) between 1 and 16384, got {self.size}")
        if self.scale <= 0:
            raise BundleError(f"Preprocess.scale: expected a positive factor such as 1/255, got {self.scale}")
        if min(self.std) <= 0:
            raise BundleError(f"Preprocess.std: expected three positive numbers, got {self.std}")
        if not 0 <= self.pad_value <= 255:
            raise BundleError(f"Preprocess.pad_value: expected 0..255, got {self.pad_value}")

    def __call__(
        self, images: Any, out: np.ndarray | None = None, *, color: Literal["rgb", "bgr"] = "rgb"
    ) -> tuple[np.ndarray, list[ImageTransform]]:
        """Preprocess one image or a list of images.

        Keep a :class:`carpus.runtime.preprocess.Preprocessor` instead where the same buffers should be used again.

        Args:
            images: whatever :func:`carpus.runtime.image.load_image` takes, or a list or tuple of it.
            out: (N, 3, H, W) float32, C-contiguous, to write into; allocated when None.
            color: channel order of the arrays given.

        Returns:
            The tensor (N, 3, H, W) float32 and one transform an image, which maps boxes to and from source pixels.
        """
        from carpus.runtime.preprocess import Preprocessor

        return Preprocessor(self)(images, out, color=color)

    def transform(self, image_size: tuple[int, int]) -> ImageTransform:
        """The map between source pixels and model pixels for an image of (height, width)."""
        from carpus.runtime.transform import ImageTransform

        return ImageTransform.fit(self, image_size)


@dataclass(frozen=True)
class Postprocess:
    """How the graph's outputs become detections.

    The graph gives logits (or scores) (N, Q, C) and boxes (N, Q, 4) as cxcywh in 0..1 of the model's input.

    "top_k", as the DETR family does: the ``top_k`` best of the Q * C (query, class) pairs are kept, then the score
    threshold applies (at least it). "nms", as the YOLO family does: the best class of each query, or every class with
    ``multi_label``, is a candidate when its score is above the threshold; of the ``max_candidates`` best, one whose
    box has an IoU above ``iou_threshold`` with a better one of the same class is dropped; the ``top_k`` best remain.

    With ``in_graph`` the graph does this itself: it takes ``THRESHOLD_INPUTS`` besides the images and gives
    ``DETECTION_OUTPUTS`` besides the outputs above, which remain for verification and for a choice of classes.

    Attributes:
        logits: name of the output with the class logits, or the scores when ``activation`` is "none".
        boxes: name of the output with the boxes.
        activation: from logit to score.
        box_format: meaning of the four numbers.
        top_k: most detections an image.
        score_threshold: default threshold in 0..1; a user may set another.
        kind: how detections are chosen.
        iou_threshold: default threshold of "nms" in 0..1; a user may set another.
        multi_label: whether "nms" takes every class of a query as a candidate of its own.
        max_candidates: most candidates of an image that enter "nms".
        in_graph: whether the graph applies "nms".
    """

    logits: str = "pred_logits"
    boxes: str = "pred_boxes"
    activation: Literal["sigmoid", "none"] = "sigmoid"
    box_format: Literal["cxcywh_normalized"] = "cxcywh_normalized"
    top_k: int = 300
    score_threshold: float = 0.5
    kind: Literal["top_k", "nms"] = "top_k"
    iou_threshold: float = 0.7
    multi_label: bool = False
    max_candidates: int = 30000
    in_graph: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("top_k", "max_candidates"):
            if getattr(self, name) < 1:
                raise BundleError(f"Postprocess.{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("score_threshold", "iou_threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise BundleError(f"Postprocess.{name}: expected 0..1, got {getattr(self, name)}")
        if self.in_graph and self.kind != "nms":
            raise BundleError(f"Postprocess.in_graph: a graph suppresses with kind 'nms' only, got {self.kind!r}")


@dataclass(frozen=True)
class ClassInfo:
    """One class of a detector; its position in the manifest's list is the model's class id.

    Attributes:
        name: name to show, any Unicode.
        dataset_id: category id in the data set's own files (COCO ids may start anywhere and have gaps).
    """

    name: str
    dataset_id: int

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.name.strip():
            raise BundleError("ClassInfo.name: expected a name, got an empty string")
