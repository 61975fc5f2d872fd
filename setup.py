"""Builds the package; a wheel also carries the scripts, recipes and gauntlets beside it.

In the repository these are folders of their own, which `llmfoundry/recipe/paths.py` finds; in
a wheel they lie in llmfoundry/shipped/. All else is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = ("scripts", "yamls", "eval")
NOT_SHIPPED = ("gpu_check.py",)  # it runs the repository's tests and benchmarks


class BuildWithShipped(build_py):
    """`build_py`, and the folders of `SHIPPED` as data of the package."""

    def run(self) -> None:
        """Copy them; an editable installation has the repository itself."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "llmfoundry" / "shipped"
        shutil.rmtree(target, ignore_errors=True)  # of an earlier build
        for name in SHIPPED:
            # Rows of benchmarks that were fetched have licences of their own.
            skipped = shutil.ignore_patterns("local_data", "__pycache__", *NOT_SHIPPED)
            shutil.copytree(name, target / name, ignore=skipped)


setup(cmdclass={"build_py": BuildWithShipped})
