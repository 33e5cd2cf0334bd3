"""What the package is, for pip and for colcon (ament_python) alike."""

from setuptools import setup

setup(
    name="guarded_drive",
    version="0.1.0",
    description="A model of your own, a recorded drive, and a test that guards it",
    license="Apache-2.0",
    maintainer="torchperf_ros maintainers",
    maintainer_email="maintainers@torchperf-ros.example",
    packages=["guarded_drive"],
    data_files=[
        ("share/ament_index/resource_index/packages", ["resource/guarded_drive"]),
        ("share/guarded_drive", ["package.xml"]),
        ("share/guarded_drive/config", ["config/lead_vehicle.yaml"]),
    ],
    install_requires=["torchperf_ros", "torch"],
    extras_require={"test": ["pytest>=7", "scipy"]},
    zip_safe=False,
)
