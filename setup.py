"""What the package is and needs, for pip and for colcon (ament_python) alike."""

import re
from glob import glob
from pathlib import Path

from setuptools import find_packages, setup

NAME = "torchperf_ros"
VERSION = re.search(r'^__version__ = "(.+)"', Path(NAME, "__init__.py").read_text(encoding="utf-8"), re.M)[
    1
]

setup(
    name=NAME,
    version=VERSION,
    description="PyTorch perception and planning in a vehicle: an answer for every frame by its deadline",
    license="Apache-2.0",
    maintainer="torchperf_ros maintainers",
    maintainer_email="maintainers@torchperf-ros.example",
    python_requires=">=3.10",  # Humble's
    packages=find_packages(include=[f"{NAME}*"]),
    package_data={NAME: ["**/*.json", "**/*.html", "models/weights/*", "py.typed"]},
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", glob("launch/*.launch.py")),
        (f"share/{NAME}/config", glob("config/*.yaml") + glob("config/*.xml")),
        *(
            (f"share/{NAME}/config/{tool}", glob(f"config/{tool}/*"))
            for tool in ("rqt", "plotjuggler", "foxglove")
        ),
        (f"share/{NAME}/config/prometheus", glob("config/prometheus/*.yaml")),
        (f"share/{NAME}/config/grafana", glob("config/grafana/*.json")),
    ],
    zip_safe=False,
    install_requires=[
        "torch>=2.6",  # the models; from 2.6 on AOTInductor's packages load as they do today
        # statistics windows and views on message bytes, in the node process too, where torch must not be
        "numpy",
        "ruamel-yaml",  # parameter files, where no ROS reads them
        "rosbags",  # CDR to messages and back, and recorded logs, without rclpy, which no worker loads
        "lz4",  # chunks of recorded logs
        "mcap",  # the records of an MCAP file, with an index or without; writes one as the answers come
        "pillow",  # decodes sensor_msgs/CompressedImage
        "psutil",  # memory and CPU time of the worker processes
        "prometheus-client",  # the /metrics endpoint
        # temperature, clocks and throttling of an NVIDIA card; needs nothing where there is none
        "nvidia-ml-py",
        "safetensors",  # the reference models' weights: a format that runs nothing when it is read
        "rich",  # tables and the live view in a terminal
        "typer",  # the `torchperf` command
        "zstandard",  # chunks of recorded logs, and whole files
    ],
    extras_require={
        # The real rclpy, Fast DDS and messages as wheels, for machines on which no ROS 2 is installed.
        "ros": [
            "ros-rclpy[fastrtps]",
            "ros-diagnostic-msgs",
            "ros-geometry-msgs",
            "ros-lifecycle-msgs",
            "ros-nav-msgs",
            "ros-rosgraph-msgs",
            "ros-sensor-msgs",
            "ros-std-msgs",
            "ros-std-srvs",
            "ros-visualization-msgs",
        ],
        # Engines: each is used where it is installed, see the parameter `engine`; none is needed.
        "onnxruntime": [
            "onnxruntime",  # runs networks on CPUs faster than any compiler of torch's, mostly; MIT, 68 MB
            "onnx",  # for builds only: what the exporter writes
            "onnxscript",  # for builds only: torch's own exporter is written in it
        ],
        # the same on Intel's and AMD's CPUs, and bf16 where they have it; Apache-2.0, 180 MB
        "openvino": ["openvino"],
        # NVIDIA's own compiler, which users of a Jetson expect first; brings TensorRT
        "tensorrt": ["torch-tensorrt"],
        "benchmarks": ["torchvision"],  # networks for `./run bench engines` that nobody here has tuned for
        "quantization": ["torchao>=0.18"],  # the precisions int8_static, int8_dynamic and int8_weight
        # `torchperf train --prune`: which channels depend on which; MIT, 0.1 MB
        "train": ["torch-pruning"],
        # pages of the compiler's trace, for `torchperf inspect --ir`; BSD-3-Clause, 2.5 MB
        "inspect": ["tlparse"],
        "analysis": [
            "matplotlib",  # pictures of the tools
            # `torchperf compare`: each takes the place of statistics that were our own to get right.
            "arch",  # the block bootstrap of latencies, and how long its blocks have to be
            "jinja2",  # the one template of the pages of `torchperf report` and `torchperf compare`
            "plotly",  # the pictures of these pages
            # Welch's test of runs, slopes of memory, distributions; in tests, what our own are compared
            # with
            "scipy",
        ],
        "logs": [
            # TLS between Dask's processes on this machine, so that nobody else on it can join
            "cryptography",
            "dask",  # many logs side by side, on this machine or on a cluster
            "distributed",
            "pyarrow",  # a frame's record as a row of Parquet
        ],
        # new versions onto a fleet: on vehicles that follow signed plans, and for who signs them
        "rollout": [
            "cryptography",  # Ed25519: the signature of a plan
            "mmh3",  # flagd's hash of a vehicle's id, in C, without dependencies; MIT, 0.4 MB
            # flagd's targeting rules, evaluated in process; brings cbor2; Apache-2.0, 0.1 MB
            "openfeature-flagd-core",
        ],
        "test": [
            "pytest<8.4",  # from 8.4 on launch_pytest does not work
            "pytest-timeout",
            # two cores instead of one for two thirds of the tests; MIT, 0.1 MB with execnet
            "pytest-xdist",
            "hypothesis",
            "shapely",  # distances of outlines, which the guard's own are compared with; BSD-3-Clause, 9 MB
            "jsonschema",  # checks records against the schema that is published
            "ruff",
            "mypy",
        ],
    },
    entry_points={
        "console_scripts": [
            "torchperf = torchperf_ros.tools.__main__:main",
            "torchperf_node = torchperf_ros.node.main:main",
        ],
        "pytest11": ["torchperf = torchperf_ros.replay.golden.pytest_plugin"],
    },
)
