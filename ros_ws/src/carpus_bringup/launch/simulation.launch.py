"""The simulated robot's head camera and the detector, and on request the recorder.

ros2 launch carpus_bringup simulation.launch.py bundle:=/path/to/tabletop.carpus record_to:=recording
"""

from carpus_ros.dds import profile_environment
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription, SetEnvironmentVariable
from launch.conditions import IfCondition
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution, PythonExpression
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.substitutions import FindPackageShare

ARGUMENTS = {
    "bundle": (None, "Path of the detector's bundle, a folder or a .zip."),
    "backend": ("auto", "Inference backend: auto, openvino or onnxruntime."),
    "robot": ("gr1t2", "Simulated robot: gr1t2 or primitive."),
    "domain": ("heldout", "Look of the scene: train, heldout or site."),
    "seed": ("0", "Decides scene and film."),
    "rate": ("10.0", "Images a second."),
    "autostart": ("true", "Configure and activate the detector at start."),
    "record_to": ("", "Folder for a recording (detections, annotated video, summary); empty for none."),
    "duration": ("0.0", "Seconds to record; 0 until the launch is stopped."),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; start camera, detector and recorder."""
    value = {name: LaunchConfiguration(name) for name in ARGUMENTS}
    share = FindPackageShare("carpus_bringup")
    camera = Node(
        package="carpus_ros",
        executable="sim_camera",
        name="sim_camera",
        output="screen",
        parameters=[
            PathJoinSubstitution([share, "config", "sim_camera.yaml"]),
            {
                "robot": ParameterValue(value["robot"], value_type=str),
                "domain": ParameterValue(value["domain"], value_type=str),
                "seed": ParameterValue(value["seed"], value_type=int),
                "rate": ParameterValue(value["rate"], value_type=float),
            },
        ],
    )
    detector = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(PathJoinSubstitution([share, "launch", "detector.launch.py"])),
        launch_arguments={name: value[name] for name in ("bundle", "backend", "autostart")}.items(),
    )
    recorder = Node(
        package="carpus_ros",
        executable="recorder",
        name="recorder",
        output="screen",
        parameters=[
            {
                "output": ParameterValue(value["record_to"], value_type=str),
                "fps": ParameterValue(value["rate"], value_type=float),
                "duration": ParameterValue(value["duration"], value_type=float),
            }
        ],
        remappings=[("image", "image_raw")],
        condition=IfCondition(PythonExpression(["'", value["record_to"], "' != ''"])),
    )
    return LaunchDescription(
        [
            *(
                DeclareLaunchArgument(name, default_value=default, description=text)
                for name, (default, text) in ARGUMENTS.items()
            ),
            *(SetEnvironmentVariable(name, text) for name, text in profile_environment().items()),
            camera,
            detector,
            recorder,
        ]
    )
