"""The page in a real browser, without a network; skips where there is none."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from view_tools import PIECES, made_up

from vllm_kvplug.view.page import render
from vllm_kvplug.view.record import Record

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --enable-logging=stderr --dump-dom""".split()

Opened = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    """The page of a record as the browser has made it, and the console's lines. script: runs after the page's own."""

    def run(record: Record, fragment: str = "", script: str = "") -> tuple[str, list[str]]:
        page = tmp_path / "page.html"
        page.write_text(render(record).replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"{page.as_uri()}{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


def text_of(dom: str, name: str) -> str:
    """Text of the element with this id, whose closing tag is the next of its kind."""
    tag, inner = re.findall(rf'<(\w+)[^>]* ?id="{name}"[^>]*>(.*)', dom, re.S)[0]
    return unescape(re.sub(r"<[^>]*>", " ", inner.partition(f"</{tag}>")[0]))


def test_numbers_and_no_errors(opened: Opened):
    dom, console = opened(made_up())
    assert console == []
    tiles = text_of(dom, "tiles").split()
    assert " ".join(tiles) == (
        "Prompt tokens 10 Kept of the prompt 50.0% Blocks, peak → end 94 → 49 Answer tokens 6 Drift triggers 2"
    )
    labels = re.findall(r'role="gridcell"[^>]*aria-label="([^"]*)"', dom)
    assert len(labels) == 6
    assert labels[0] == "Layer 0, head 0 (pivot): keeps 10 of 10 tokens, 100.0%"
    assert labels[4] == "Layer 1, head 1 (anchor): keeps 1 of 10 tokens, 10.0%"
    assert "All heads together keep 50.0%" in text_of(dom, "selection")
    assert "2 checks of 1 pivot, 2 triggers" in text_of(dom, "drift-note")
    assert "1,000 blocks in the pool" in text_of(dom, "pool-note")
    assert "L0 H0: drift found after 2 answer tokens; 3 tokens for 1 satellite seen from token 4 on" in dom
    assert "L0 H0: drift found after 5 answer tokens; 3 tokens for 1 satellite never seen" in dom
    assert "Step 3: 1,503 tokens, 49 blocks (24.5 MiB)" in dom


def test_a_prompt_is_text(opened: Opened):
    """Scripts in tokens stay words of the prompt."""
    dom, console = opened(made_up())
    assert console == []
    shown = re.findall(r'<span title="Token (\d+): kept by (\d+) of 6 heads"[^>]*>(.*?)</span>', dom, re.S)
    assert [unescape(text) for _, _, text in shown] == PIECES
    assert [int(votes) for _, votes, _ in shown] == made_up().votes()
    assert dom.count("<script") == 3  # the record, the page's, and this test's


def test_a_linked_head(opened: Opened):
    dom, console = opened(made_up(), "#layer=2&head=1")
    assert console == []
    told = "Layer 2, head 1 (anchor): keeps 3 of 10 tokens, 30.0%. What it dropped is pale."
    assert told in text_of(dom, "selection")
    words = re.findall(r'<span title="Token[^>]*>', dom)
    assert ['class="gone"' in word for word in words] == [t not in (3, 5, 9) for t in range(10)]


KEYS = """
const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const said = [];
const say = () => said.push(byId("selection").textContent.split(/[.:]/)[0]);
cells[0][0].focus();
press("ArrowRight"); press("ArrowRight"); press("ArrowRight"); press("ArrowDown"); press("ArrowLeft");
document.activeElement.click(); say();
press("Escape"); say();
document.activeElement.click(); say();
document.activeElement.click(); say();
cells[0][1].click(); byId("all").click(); say();
said.push(cells.flat().filter(cell => cell.tabIndex === 0).map(cell => cell === document.activeElement).join());
document.title = JSON.stringify(said);
"""


def test_keys_and_clicks(opened: Opened):
    """Arrows stay in the grid; Enter is a click; Escape, a second click and the button go back."""
    dom, console = opened(made_up(), script=KEYS)
    assert console == []
    head, everything = "Layer 1, head 1 (anchor)", "All heads together keep 50"
    title = unescape(re.findall(r"<title>(.*?)</title>", dom)[0])
    assert title == f'["{head}","{everything}","{head}","{everything}","{everything}","true"]'


def test_without_roles_drift_or_steps(opened: Opened):
    """A policy without a profile, and an answer that ended with the prompt."""
    kept = [[[(0, 5)], [(0, 5)]]] * 3
    record = made_up(policy="snapkv", roles=None, clusters=[], drifts=[], checks=0, steps=[], kept=kept, answer=[])
    dom, console = opened(record)
    assert console == []
    assert "Drift" not in text_of(dom, "tiles") and re.search(r'id="drift"[^>]* hidden', dom)
    assert "Layer 0, head 0: keeps 5 of 10 tokens, 50.0%" in dom


def test_errors_would_be_seen(opened: Opened):
    _, console = opened(made_up(), script="nobody.knows()")
    assert len(console) == 1 and "nobody is not defined" in console[0]
