"""One Ray cluster for all tests of the package that ask for it."""

from collections.abc import Iterator

import pytest

from tests.corpora import local_ray


@pytest.fixture(scope="package")
def ray_cluster() -> Iterator[None]:
    """Ray, connected."""
    with local_ray():
        yield
