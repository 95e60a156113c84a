"""Draw docs/images/heldout.jpg, detections in nine held-out scenes: python docs/heldout_picture.py BUNDLE HELDOUT."""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np

from carpus.runtime import Detector
from carpus.runtime.draw import annotate
from carpus.runtime.image import load_image

TILE = (480, 360)  # width, height [px]


def main(arguments: list[str]) -> int:
    """Write the picture; returns the exit code."""
    if len(arguments) != 2:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    paths = sorted(Path(arguments[1], "images").iterdir())
    tiles = []
    with Detector.open(arguments[0]) as detector:
        for path in paths[:: len(paths) // 9][:9]:
            image = load_image(path)
            tiles.append(cv2.resize(annotate(image, detector(image)), TILE, interpolation=cv2.INTER_AREA))
    sheet = np.vstack([np.hstack(tiles[row : row + 3]) for row in (0, 3, 6)])
    out = Path(__file__).parent / "images" / "heldout.jpg"
    cv2.imwrite(str(out), cv2.cvtColor(sheet, cv2.COLOR_RGB2BGR), [cv2.IMWRITE_JPEG_QUALITY, 85])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
