"""Installs the nodes of carpus_ros."""

from setuptools import find_packages, setup

package_name = "carpus_ros"

setup(
    name=package_name,
    version="0.1.0",
    packages=find_packages(include=[package_name, f"{package_name}.*"]),
    package_data={package_name: ["*.xml"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{package_name}"]),
        (f"share/{package_name}", ["package.xml", "README.md"]),
    ],
    install_requires=["setuptools"],
    zip_safe=False,
    maintainer="The Carpus authors",
    maintainer_email="carpus@example.com",
    description="Nodes that run Carpus bundles on ROS 2 topics: detector, simulated head camera, recorder.",
    license="Apache-2.0",
    entry_points={
        "console_scripts": [
            "detector = carpus_ros.detector_node:main",
            "sim_camera = carpus_ros.sim_camera_node:main",
            "recorder = carpus_ros.recorder_node:main",
            "run_graph = carpus_ros.run_graph:main",
        ],
    },
)
