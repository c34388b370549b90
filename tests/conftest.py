"""What all tests share: no network for model loading, few threads, and the data folder beside the project."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: it reads this once

import hypothesis
import pytest
import torch

torch.set_num_threads(2)
hypothesis.settings.register_profile("project", deadline=None)  # the first call compiles
hypothesis.settings.load_profile("project")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The data folder beside the project; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("the data folder ../shared is not present")
    return SHARED
