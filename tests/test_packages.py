"""The packages import on their own, and lower layers do not pull in upper ones."""

import subprocess
import sys

import pytest

PACKAGES = ["cluster", "serve_app", "eval_jobs", "corpus_builder", "ray_configs"]


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_alone(package):
    subprocess.run([sys.executable, "-c", f"import {package}"], check=True)


def test_cluster_needs_no_upper_layer():
    code = (
        "import cluster.models, sys;"
        "upper = {'ray', 'serve_app', 'eval_jobs', 'corpus_builder'} & set(sys.modules);"
        "assert not upper, upper"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
