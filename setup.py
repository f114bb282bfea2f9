"""Packaging: the core install stays small; tests, linters and the report are extras. Pins are in constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "cos598d" / "__init__.py").read_text(encoding="utf-8")).group(1)

# Outside the repository a relative link leads nowhere and a picture is none: the link's target is told as text instead.
README = re.sub(r"<img src=\"([^\"]+)[^>]*>", r"The picture is \1.", (ROOT / "README.md").read_text(encoding="utf-8"))
README = re.sub(
    r"\[([^\]]+)\]\((?!\w+:|#)([^)#]+)[^)]*\)",
    lambda link: link[2] if link[1] == link[2] else f"{link[1]} ({link[2]})",
    README,
)

setup(
    name="cos598d",
    version=VERSION,
    description="Learn, teach and measure data-parallel training by fine-tuning BERT",
    long_description=README,
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=("cos598d", "cos598d.*")),
    package_data={
        "cos598d.tools.audit": ["site/sitecustomize.py"],
        "cos598d.tools.grade": ["*.sh.txt"],
        "cos598d.tools.course": [
            "given/*.json",
            "lessons/*/*.toml",
            "lessons/*/*.txt",
            "lessons/*/*/*.txt",
            "lessons/*/*.json",
        ],
        "cos598d.sync": ["template.py.txt"],
        "cos598d.data.samples": ["*.tsv", "*.json", "*.txt"],
        "cos598d.tools.report": ["templates/*.jinja"],
        "cos598d.tools.sweeps": ["presets.toml"],
    },
    py_modules=["download_glue_data", "utils_glue"],
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.4",
        "pytorch-transformers==1.2.0",
        "numpy>=1.26",
        "scikit-learn>=1.4",
        "scipy>=1.11",
        "tqdm>=4.66",
        "tokenizers>=0.19",
        "msgspec>=0.19",
        "safetensors>=0.4",
        "huggingface_hub>=0.23",
        "filelock>=3.13",
        "psutil>=5.9",
        "requests>=2.31",
        "pooch>=1.8",
        "pytest>=8",  # which runs the lessons' tests, and check's
        "tomli>=2; python_version < '3.11'",
    ],
    extras_require={
        "test": ["pytest-timeout>=2.3", "pytest-xdist>=3.6"],
        "lint": ["ruff>=0.6", "import-linter>=2.6", "mypy>=1.11"],
        "tensorboard": ["tensorboard>=2.17"],
        # Horovod cannot be compiled beside a recent torch without help: `make engines` builds it; these four it needs.
        "engines": ["deepspeed>=0.19.8", "lightning>=2.6", "cffi>=1.4", "cloudpickle", "packaging", "PyYAML"],
        # What examples/ train in beside Lightning, for tests/test_engines_libraries.py.
        "libraries": ["accelerate>=1.0", "transformers>=5"],
        "book": ["mkdocs-material>=9.5", "mkdocs<2"],
        "images": ["pillow>=10"],
        "notebook": ["ipykernel>=6.29", "nbclient>=0.10"],
        "report": ["jinja2>=3.1", "matplotlib>=3.8", "pandas>=2.2"],
    },
    entry_points={
        "console_scripts": ["cos598d=cos598d.__main__:main"],
    },
)
