"""What every test shares: golden numbers, no network, and skips for what a machine does not have."""

import importlib.util
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

NEEDS = {"needs_torch": "torch", "needs_mlx_lm": "mlx_lm"}
LOOPBACK = ("127.", "::1", "localhost")

settings.register_profile("openelm", deadline=None, max_examples=50)  # a busy laptop must not fail a law
settings.load_profile("openelm")


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, module in NEEDS.items():
        if item.get_closest_marker(marker) and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if item.get_closest_marker("needs_metal"):
        import mlx.core as mx

        if not mx.metal.is_available():
            pytest.skip("no Metal device")


@pytest.fixture(autouse=True, scope="session")
def _no_network():
    """Tests are offline: a connection to anything but this machine is an error, not a wait."""
    connect = socket.socket.connect

    def connect_here(self, address):
        if self.family != getattr(socket, "AF_UNIX", None) and not str(address[0]).startswith(LOOPBACK):
            raise AssertionError(f"a test tried to reach {address[0]}")
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_here)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    """What a run remembers of this machine stays out of the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def golden() -> dict[str, np.ndarray]:
    """Ids, logits and greedy continuations of the bundled checkpoint, by Apple's PyTorch code in float32."""
    with np.load(Path(__file__).parent / "data" / "golden.npz") as stored:
        return dict(stored)
