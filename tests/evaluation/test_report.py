"""The HTML report: what it says, and how it looks in a real browser."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_kvcompress.cli.recommend import cheapest, rounds
from vllm_kvcompress.tools.evaluation.report import html_report
from vllm_kvcompress.tools.evaluation.setups import AGNOSTIC, AWARE, FULL, setups_of
from vllm_kvcompress.tools.evaluation.summary import markdown_table, summarize, text_table

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PHONE = 390  # CSS pixels


def answers() -> list[dict[str, Any]]:
    """Two policies at two budgets, with scores that follow from the budget."""
    found = []
    for setup, kept in [
        (FULL, 1.0),
        ("snapkv@0.1", 0.1),
        ("snapkv@0.5", 0.5),
        ("a<b>@0.1", 0.1),
        ("a<b>@0.5", 0.5),
    ]:
        for mode in (AWARE,) if setup == FULL else (AWARE, AGNOSTIC):
            for item in range(6):
                right = kept == 1 or (kept == 0.5 and (mode == AWARE or item % 2))
                found.append(
                    {
                        "setup": setup,
                        "mode": mode,
                        "item": item,
                        "task": ("one", "two")[item // 3],
                        "length": 100,
                        "depth": item / 6,
                        "score": float(right),
                        "tokens": [1, 2] if right else [1, 3],
                        "prompt_tokens": 100,
                        "resident_tokens": 100 * kept,
                        "resident_bytes": 3 * 2**20 * kept,
                        "first_token_seconds": 0.01,
                        "token_seconds": 0.001,
                        "kept_tokens": [] if kept == 1 else [[8, 16], [4, 20]],
                    }
                )
    return found


def test_what_is_read_stands_beside_what_is_kept() -> None:
    """A setup that holds everything and reads a quarter, and one line per way of reading."""
    found = answers()
    for answer in found:
        if answer["setup"].startswith("snapkv"):
            answer["setup"] = answer["setup"].replace("snapkv@", "quest:")
            answer["read_part"] = 0.5
    rows = summarize(found)
    by_setup = {(row["setup"], row["mode"]): row for row in rows}
    assert by_setup["quest:0.5", AWARE]["read"] == 0.25
    table = markdown_table(rows).splitlines()
    assert table[0].startswith("| setup | kept | read |")
    assert "| `quest:0.5` | 50.0% | 25.0% |" in table[4]
    assert re.search(r"\bquest:0\.5 .* 50\.0% +25\.0% ", text_table(rows))
    page = html_report("a model", rows)
    assert "<th>read</th>" in page
    assert "<td>25.0%</td>" in page
    assert "<th>read</th>" not in html_report("a model", summarize(answers()))


@pytest.fixture(scope="module")
def page() -> str:
    return html_report("my <model>", summarize(answers()))


def test_rows_sum_up_what_was_answered() -> None:
    rows = {(row["setup"], row["mode"]): row for row in summarize(answers())}
    half = rows["snapkv@0.5", AGNOSTIC]
    assert half["questions"] == 6
    assert half["tasks"] == {"one@100": pytest.approx(1 / 3), "two@100": pytest.approx(2 / 3)}
    assert half["score"] == pytest.approx(0.5)
    assert half["score_error"] == pytest.approx((3 / 10) ** 0.5 / 6**0.5)
    assert half["reply_tokens"] == 2
    assert half["agreement"] == pytest.approx(0.75)
    assert half["kept"] == 0.5
    assert half["kept_tokens"] == [[8, 16], [4, 20]]
    assert half["depths"] == {"100": [0.5, 0, 1, 0, 1]}
    assert rows[FULL, AWARE]["agreement"] == 1
    line = next(line for line in text_table(list(rows.values())).splitlines() if "0.5" in line)
    table = markdown_table(list(rows.values())).splitlines()
    assert table[2] == "| `full` | 100.0% " + "| 100.0% ± 0.0 | 100.0% | 2 " * 2 + "|"
    assert table[4] == (
        "| `snapkv@0.5` | 50.0% | 100.0% ± 0.0 | 100.0% | 2 | 50.0% ± 22.4 | 75.0% | 2 |"
    )
    shares = ["100.0% ± 0.0", "100.0%", "2"]
    cells = ["snapkv@0.5", AWARE, "50.0%", "1.50 MiB", *shares, "10.0 ms", "1.0 ms"]
    assert re.split("  +", line) == cells


def test_the_page_needs_nothing_else(page: str) -> None:
    assert "<script" not in page
    outside = re.findall(r'(?:src|href)="([^"#][^"]*)"', page)
    assert [link for link in outside if not link.startswith("data:")] == []
    assert "my &lt;model&gt;" in page
    assert "a&lt;b&gt;@0.1" in page
    assert "<td>1.50 MiB</td>" in page
    assert page.count("<svg") == 2 + 9 + 8, "panels, depths, kept tokens"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_phone_shows_it_without_scrolling_sideways(page: str, tmp_path: Path) -> None:
    """In a frame as wide as a phone; tables scroll inside their own box."""
    assert CHROMIUM is not None
    frame = tmp_path / "phone.html"
    frame.write_text(
        f'<iframe id=f width={PHONE} height=800 srcdoc="{html.escape(page, quote=True)}"></iframe>'
        "<script>onload = () => { const page = f.contentDocument.documentElement;"
        "const plots = [...page.querySelectorAll('svg')].map(p => Math.round("
        "p.getBoundingClientRect().width));"
        "document.title = [page.scrollWidth <= page.clientWidth, plots].join(' '); }</script>"
    )
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None
    fits, plots = title.group(1).split(" ")
    assert fits == "true"
    widths = [int(width) for width in plots.split(",")]
    assert len(widths) == 2 + 9 + 8
    assert all(PHONE * 0.8 < width <= PHONE for width in widths[:2]), "one panel under the other"
    assert all(PHONE * 0.4 < width <= PHONE / 2 for width in widths[2:]), "two maps side by side"


@pytest.mark.parametrize(
    ("max_loss", "expected"), [(0.0, None), (0.4, None), (0.5, "snapkv@0.5"), (1.0, "snapkv@0.1")]
)
def test_the_cheapest_setting_that_is_good_enough(max_loss: float, expected: str | None) -> None:
    """Both modes have to be: query-agnostic, half the budget scores 50% of the full cache."""
    assert cheapest(summarize(answers()), max_loss) == expected


def test_budgets_are_tried_from_the_smallest_on() -> None:
    setups = setups_of(["snapkv", "keydiff"], [0.5, 256, 0.1], {})
    names = [[setup.name for setup in tried] for tried in rounds(setups)]
    assert names[0] == [FULL, "snapkv@0.1", "keydiff@0.1"]
    assert [len(tried) for tried in names] == [3, 5, 7]
    assert "snapkv@256" not in names[1]
