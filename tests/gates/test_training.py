import pytest
import torch

from vllm_kvplug.errors import PolicyError
from vllm_kvplug.gates.training import Checkpoint, plot_history, run_steps, samples


def test_every_pass_sees_every_sample_once_in_another_order():
    turns = [torch.cat([samples(step, 12, 3, seed=7) for step in range(4 * turn, 4 * turn + 4)]) for turn in range(3)]
    assert all(sorted(turn.tolist()) == list(range(12)) for turn in turns)
    assert len({tuple(turn.tolist()) for turn in turns}) == 3
    assert torch.equal(samples(5, 12, 3, seed=7), turns[1][3:6])
    assert not torch.equal(samples(0, 12, 12, seed=8), turns[0])


def test_an_incomplete_batch_is_left_out():
    assert [len(samples(step, 11, 4, seed=0)) for step in range(6)] == [4] * 6


def least_squares(folder, target: float, learning_rate: float = 0.1):
    gate = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(gate.parameters(), lr=1.0)

    def step(number):
        loss = (gate(torch.ones(2)) - target).square().sum()
        loss.backward()
        return {"loss": loss.item()}

    return run_steps(gate, optimizer, lambda _: learning_rate, step, 30, Checkpoint(folder / "progress", "x"), "test")


def test_the_rate_of_each_step_is_used(tmp_path):
    history = least_squares(tmp_path / "a", 3.0)
    assert history["loss"][-1] < 1e-3 * history["loss"][0]
    assert len(set(least_squares(tmp_path / "b", 3.0, learning_rate=0.0)["loss"])) == 1


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    with pytest.raises(PolicyError, match="step 0 gives .*nan.*lower --learning-rate"):
        least_squares(tmp_path, float("nan"))


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot_history({"loss": [2.0, 1.0], "admitted": [1.0, 0.5]}, tmp_path / "curves.png", "title")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_no_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr("vllm_kvplug.gates.training.find_spec", lambda name: None)
    assert not plot_history({"loss": [1.0]}, tmp_path / "curves.png", "title")
    assert not list(tmp_path.iterdir())
