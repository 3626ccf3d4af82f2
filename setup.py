"""Packaging of deepspeed_amsp. Tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

REQUIRED = [
    "torch>=2.7",
    "deepspeed>=0.19.5,<0.20",
    "pydantic>=2",
    "pyyaml>=6",
    "typer>=0.12",
    "rich>=13",
    "isal>=1.6; platform_machine == 'x86_64' or platform_machine == 'aarch64'",  # CRC-32; without it zlib's is taken
]
DEMO = ["matplotlib>=3.7"]
INTEGRATIONS = ["transformers>=5.24", "accelerate>=1.15", "lightning>=2.6", "peft>=0.21", "safetensors"]
TEST = [*DEMO, *INTEGRATIONS, "pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6", "tensorboard", "ruff", "mypy"]

setup(
    name="deepspeed_amsp",
    version="0.1.0",
    description="Shard parameters, gradients and optimizer states independently in DeepSpeed (AMSP)",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["deepspeed_amsp", "deepspeed_amsp.*"]),
    package_data={"deepspeed_amsp": ["py.typed"]},
    install_requires=REQUIRED,
    entry_points={"console_scripts": ["amsp = deepspeed_amsp.cli.app:main"]},
    extras_require={"demo": DEMO, "test": TEST, "integrations": INTEGRATIONS},
)
