"""The detector as a lifecycle node, with the DDS profile that images need; the other launch files include it."""

from carpus_ros.dds import profile_environment
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "bundle": (None, "Path of the detector's bundle, a folder or a .zip."),
    "backend": ("auto", "Inference backend: auto, openvino or onnxruntime."),
    "image": ("image_raw", "Topic of the images; camera_info is looked for beside it."),
    "image_transport": ("raw", "raw, or compressed for <image>/compressed."),
    "detections": ("detections", "Topic for the detections."),
    "namespace": ("", "Namespace of the node and of its relative topics."),
    "autostart": ("true", "Configure and activate at start; false leaves it to a lifecycle manager."),
    "use_sim_time": ("false", "Take the time from /clock."),
    "params_file": (
        PathJoinSubstitution([FindPackageShare("carpus_bringup"), "config", "detector.yaml"]),
        "YAML file with the node's other parameters.",
    ),
    "log_level": ("info", "Least severity that is logged: debug, info, warn, error."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments, set the profile, start the node."""
    value = {name: LaunchConfiguration(name) for name in ARGUMENTS}
    node = LifecycleNode(
        package="carpus_ros",
        executable="detector",
        name="detector",
        namespace=value["namespace"],
        output="screen",
        parameters=[
            value["params_file"],
            {
                "bundle": ParameterValue(value["bundle"], value_type=str),
                "backend": ParameterValue(value["backend"], value_type=str),
                "image_transport": ParameterValue(value["image_transport"], value_type=str),
                "autostart": ParameterValue(value["autostart"], value_type=bool),
                "use_sim_time": ParameterValue(value["use_sim_time"], value_type=bool),
            },
        ],
        remappings=[("image", value["image"]), ("detections", value["detections"])],
        arguments=["--ros-args", "--log-level", value["log_level"]],
    )
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in ARGUMENTS.items()
            ),
            *(SetEnvironmentVariable(name, text) for name, text in profile_environment().items()),
            node,
        ]
    )
