"""What the ROS 2 tests share: the built workspace, node processes and a client node."""
