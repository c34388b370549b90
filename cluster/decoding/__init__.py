"""The decoding core: draft sources, draft trees, sampling and verification. numpy, numba and torch only."""
