"""Installs the launch files and configuration of carpus_bringup."""

from glob import glob

from setuptools import setup

package_name = "carpus_bringup"

setup(
    name=package_name,
    version="0.1.0",
    packages=[],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{package_name}"]),
        (f"share/{package_name}", ["package.xml", "README.md"]),
        (f"share/{package_name}/launch", glob("launch/*.py")),
        (f"share/{package_name}/config", glob("config/*.yaml")),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    maintainer="The Carpus authors",
    maintainer_email="carpus@example.com",
    description="Launch files and configuration that start Carpus nodes on a robot or in simulation.",
    license="Apache-2.0",
)
