"""How long a 640x480 rgb8 image travels between two processes, with Fast DDS as it comes and with Carpus's profile.

    scripts/with_ros.sh .venv/bin/python benchmarks/image_latency.py

Publisher and subscriber are plain rclpy. The rounds of the two settings take turns, so that whatever else the machine
does meets both. Latency runs from just before ``publish`` to the start of the callback, on the machine's steady clock.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

PROFILE = Path(__file__).resolve().parents[1] / "ros_ws" / "src" / "carpus_ros" / "carpus_ros" / "fastdds_images.xml"


def publish(count: int, rate: float, reliable: bool) -> None:
    """The child: publishes ``count`` images whose frame id holds the steady time [ns]."""
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image

    rclpy.init()
    node = rclpy.create_node("image_source")
    publisher = node.create_publisher(Image, "image", _profile(QoSProfile, ReliabilityPolicy, reliable))
    message = Image(height=480, width=640, step=1920, encoding="rgb8", data=array.array("B", bytes(640 * 480 * 3)))
    end = time.monotonic() + 20.0
    while publisher.get_subscription_count() == 0 and time.monotonic() < end:
        rclpy.spin_once(node, timeout_sec=0.05)
    time.sleep(0.5)
    for _ in range(count):
        message.header.frame_id = str(time.monotonic_ns())
        publisher.publish(message)
        time.sleep(1.0 / rate)
    rclpy.shutdown()


def listen(count: int, rate: float, reliable: bool) -> None:
    """The other child: prints the latencies [ms] of what arrived, as JSON."""
    import rclpy
    from rclpy.qos import QoSProfile, ReliabilityPolicy
    from sensor_msgs.msg import Image

    rclpy.init()
    node = rclpy.create_node("image_sink")
    latencies: list[float] = []

    def received(message: Image) -> None:
        latencies.append((time.monotonic_ns() - int(message.header.frame_id)) / 1e6)

    node.create_subscription(Image, "image", received, _profile(QoSProfile, ReliabilityPolicy, reliable))
    seen, end = False, time.monotonic() + 30.0 + count / rate
    while len(latencies) < count and time.monotonic() < end:
        there = node.count_publishers("image") > 0
        if seen and not there:
            break
        seen = seen or there
        rclpy.spin_once(node, timeout_sec=0.1)
    sys.stdout.write(json.dumps(latencies))
    rclpy.shutdown()


def _profile(profile: type, reliability: type, reliable: bool) -> object:
    return profile(depth=5, reliability=reliability.RELIABLE if reliable else reliability.BEST_EFFORT)  # type: ignore[attr-defined]


def measure(count: int, rate: float, *, profile: bool, reliable: bool, domain: int) -> list[float]:
    """One round: latencies [ms] of the images that arrived."""
    environment = {**os.environ, "ROS_DOMAIN_ID": str(domain), "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST"}
    old = environment.get("ROS_DISTRO") in ("humble", "iron", "jazzy")
    for name in ("FASTRTPS_DEFAULT_PROFILES_FILE", "FASTDDS_DEFAULT_PROFILES_FILE"):
        environment.pop(name, None)
    if profile:
        environment["FASTRTPS_DEFAULT_PROFILES_FILE" if old else "FASTDDS_DEFAULT_PROFILES_FILE"] = str(PROFILE)
    arguments = [str(count), str(rate), str(int(reliable))]
    sink = subprocess.Popen([sys.executable, __file__, "--child", "listen", *arguments], env=environment, stdout=-1)
    source = subprocess.Popen([sys.executable, __file__, "--child", "publish", *arguments], env=environment)
    output, _ = sink.communicate(timeout=120)
    source.wait(timeout=60)
    return list(json.loads(output))


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=60, help="images a round (default 60)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds a setting (default 3)")
    parser.add_argument("--rate", type=float, default=15.0, help="images a second (default 15)")
    parser.add_argument("--domain", type=int, default=77, help="ROS domain (default 77)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        role, count, rate, reliable = given.child
        (publish if role == "publish" else listen)(int(count), float(rate), reliable == "1")
        return 0
    results: dict[tuple[bool, bool], list[float]] = {}
    for _ in range(given.rounds):
        for reliable in (False, True):
            for profile in (False, True):
                latencies = measure(given.images, given.rate, profile=profile, reliable=reliable, domain=given.domain)
                results.setdefault((reliable, profile), []).extend(latencies)
    sent = given.images * given.rounds
    print(f"640x480 rgb8 between two processes, {given.rate:g} Hz, {sent} images a setting")
    print(f"{'reliability':<12} {'Fast DDS':<16} {'arrived':>8} {'p50 [ms]':>9} {'p95 [ms]':>9}")
    for (reliable, profile), latencies in results.items():
        p50, p95 = np.percentile(latencies, (50, 95)) if latencies else (float("nan"), float("nan"))
        name, setting = "reliable" if reliable else "best effort", "Carpus's profile" if profile else "default"
        print(f"{name:<12} {setting:<16} {len(latencies) / sent:>8.1%} {p50:>9.2f} {p95:>9.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
