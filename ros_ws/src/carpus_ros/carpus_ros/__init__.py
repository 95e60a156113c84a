"""ROS 2 nodes around carpus.runtime: each module one concern, the nodes thin shells around them."""

__all__: list[str] = []
