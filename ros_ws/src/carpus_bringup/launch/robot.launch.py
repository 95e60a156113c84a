"""The detector on a robot whose camera driver runs already.

ros2 launch carpus_bringup robot.launch.py bundle:=/path/to/tabletop.carpus image:=/camera/image_raw
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "bundle": (None, "Path of the detector's bundle, a folder or a .zip."),
    "backend": ("auto", "Inference backend: auto, openvino or onnxruntime."),
    "image": ("/camera/image_raw", "Topic of the camera's images; camera_info is looked for beside it."),
    "image_transport": ("raw", "raw, or compressed for <image>/compressed (a camera across a network)."),
    "detections": ("detections", "Topic for the detections."),
    "namespace": ("", "Namespace of the detector and of its relative topics."),
    "autostart": ("true", "Configure and activate at start; false leaves it to a lifecycle manager."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments and pass them on."""
    launch_folder = PathJoinSubstitution([FindPackageShare("carpus_bringup"), "launch"])
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in ARGUMENTS.items()
            ),
            IncludeLaunchDescription(
                PythonLaunchDescriptionSource(PathJoinSubstitution([launch_folder, "detector.launch.py"])),
                launch_arguments={name: LaunchConfiguration(name) for name in ARGUMENTS}.items(),
            ),
        ]
    )
