"""One thread, as for the kernels' tests."""

from tests.engine.cpu.conftest import one_thread as one_thread
