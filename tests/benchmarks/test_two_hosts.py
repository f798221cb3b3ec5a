"""benchmarks/two_hosts.py: every split runs and is priced; what goes over the cable is counted."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
import torch
import two_hosts
import two_hosts_rank

from hf_cp.planning.devices import Device

SETTINGS = {"tokens": 256, "rounds": 1}


def measured() -> tuple[Device, list[dict]]:
    torch.set_num_threads(1)
    shape = two_hosts_rank.shape_of("4/2", 16)
    device = two_hosts_rank.measured_device(SETTINGS["tokens"], shape)
    return device, two_hosts_rank.measure(shape, SETTINGS, device)


@pytest.mark.distributed
def test_all_splits_run(world4):
    device, rows = world4.run(measured)[0]
    assert device.is_measured and min(device.attention_tflops, device.intra_gbs, device.inter_gbs) > 0
    assert [row["split"] for row in rows] == list(two_hosts_rank.SPLITS)
    for row in rows:
        assert row["estimate"] > 0 and min(row["seconds"]) > 0
        # here all ranks share one loopback, whose counter both "hosts" read: at least q, k, v of one all-to-all
        assert row["link_bytes"] > 256 * 8 * 16 * 4 / 4


def estimate(split: str, device: Device, monkeypatch) -> float:
    monkeypatch.setattr(two_hosts_rank.dist, "get_world_size", lambda: 4)
    shape = two_hosts_rank.shape_of("8/2", 64)
    return two_hosts_rank.estimate(two_hosts_rank.SPLITS[split], 4096, shape, device)


def test_the_slow_link_is_where_the_hosts_are(monkeypatch):
    """With few K/V heads the ring sends less over a slow cable than Ulysses does."""
    slow = Device("slow", 1.0, 1.0, 1.0, attention_tflops=0.1, intra_gbs=10.0, inter_gbs=0.001)
    across = estimate("Ulysses 2 across, ring 2 inside, p2p", slow, monkeypatch)
    inside = estimate("ring 2 across, Ulysses 2 inside, p2p", slow, monkeypatch)
    # bytes of a rank over the cable. Ulysses: 1,024 tokens x 64 x (2 x 8 + 2 x 2 heads) / 2 x 4 B, twice.
    assert across == pytest.approx(2 * 1024 * 64 * 20 / 2 * 4 / 1e6, rel=0.05)
    # Ring: K/V of 2,048 tokens x 64 x 2 x 1 head x 4 B, forward, backward, and their gradients.
    assert inside == pytest.approx(3 * 2048 * 64 * 2 * 4 / 1e6, rel=0.05)


def test_the_report_follows_from_the_numbers(tmp_path):
    rows = [
        {"heads": "8/2", "split": "ring 4, p2p", "seconds": [2.0], "link_bytes": 2**21, "estimate": 1.0},
        {"heads": "8/2", "split": "Ulysses 4", "seconds": [1.0], "link_bytes": 2**20, "estimate": 1.5},
    ]
    assert two_hosts.table(rows).splitlines()[2:] == [
        "| 8/2 | Ulysses 4 | 1.00 | 1.0 | 1.50 | 2 |",
        "| 8/2 | ring 4, p2p | 2.00 | 2.0 | 1.00 | 1 |",
    ]
    assert two_hosts.price_of_choice(rows) == {"8/2": 2.0}
    output = tmp_path / "two_hosts"
    two_hosts.save({"50mbit": {"rows": rows}}, Namespace(output=output, heads=["8/2"], rates=["50mbit"]))
    assert json.loads(output.with_suffix(".json").read_text())["rates"]["50mbit"]["rows"] == rows
    assert output.with_suffix(".png").stat().st_size > 1000


def test_without_hosts_the_status_is_2(monkeypatch, capsys):
    monkeypatch.setattr(two_hosts, "missing", lambda: "network namespaces need root")
    monkeypatch.setattr("sys.argv", ["two_hosts.py"])
    assert two_hosts.main() == 2
    assert "need root" in capsys.readouterr().err
