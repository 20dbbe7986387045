import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small only lose by sharing their work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
